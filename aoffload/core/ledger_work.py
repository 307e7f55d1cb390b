"""The ledger's calls about requests that have blocks: loads, jobs, commits, steps, the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from ..arguments import as_tuple, check_callable
from ..errors import InvalidArgument, WrongState
from ..prefix import TokenIds
from .arguments import check_bool, check_completion, check_int, check_text
from .ledger_rooms import LedgerRooms
from .lifecycle import RequestState, require
from .loads import require_no_holes
from .overlap import begin_step, can_start, expected_ids, first_invalid_token, tell
from .owners import Holding, nobody
from .plan import Completion, TransferPlan
from .preemption import Preemption
from .windows import slide

__all__ = ["WorkingRequests"]


_S = RequestState
_LOADING = (_S.LOADING, _S.DRAINING, _S.REQUEUED, _S.STRANDED)


class WorkingRequests(LedgerRooms):
    """From the first load until a request is over."""

    # -- loading --------------------------------------------------------------------------------------------------

    def plan_load(
        self,
        holding: Holding,
        max_tokens: int | None = None,
        wake: Callable[[], object] = nobody,
        *,
        max_job_bytes: int | None = None,
        into: Sequence[Sequence[int]] | None = None,
    ) -> tuple[TransferPlan, ...]:
        """Start bringing the host hit onto the device; the plans that have to be launched for it.

        RUNNING afterwards: nothing has to be waited for. LOADING: `wake` is called when the load is over, or, REQUEUED,
        when room was granted after it had to let go of everything (`holding.waiter`: accept it and plan again).
        `max_job_bytes` replaces that of the configuration: an overlapped load is split into as few jobs as possible.

        With `engine_blocks`, `into` are the request's block tables from the first token on, one for each group, at
        least up to the end of the hit: the copies go into exactly these blocks. Nothing else in them is touched.
        """
        check_callable("wake", wake)
        units_per_job: Sequence[int] = ()
        if max_job_bytes is not None:
            units_per_job = self._units_per_job(check_int("max_job_bytes", max_job_bytes, 1) // self._block_bytes)
        if self._engine is not None:
            jobs = self._engine.plan_load(self._own(holding), into, max_tokens, wake, units_per_job)
            return tuple([job.plan for job in jobs])
        if into is not None:
            raise InvalidArgument("into", "is for `engine_blocks`: this ledger has device blocks itself")
        plans = self._loads.plan(self._own(holding), max_tokens, wake, units_per_job)
        self.admission.serve_line()
        return plans

    def abandon_load(self, holding: Holding) -> None:
        """Stop waiting for a load: what has landed counts, the rest is computed. Launched copies go on."""
        require(self._on_own_device(holding, "abandon_load"), "abandon_load", *_LOADING)
        if holding.load is not None:
            self._settled(self._loads.abandon(holding), also=holding)

    # -- jobs -----------------------------------------------------------------------------------------------------

    def launch(self, job_id: int) -> bool:
        """Whether the job is still wanted. From here on it cannot be recalled."""
        job = self.jobs.unsettled.get(check_int("job_id", job_id, 0))
        return job is not None and self.jobs.launch(job)

    def settle(self, completion: Completion) -> None:
        """Take in what became of a launched job: publish, drop its leases, serve the line, wake. In this order."""
        check_completion(completion)
        self._settled(self.jobs.settle(completion))

    def discard(self, job_id: int) -> None:
        """Give up a job that was never launched; who waits for it computes instead."""
        job = self.jobs.unsettled.get(check_int("job_id", job_id, 0))
        if job is not None:
            self._settled(self.jobs.discard(job))

    # -- computing ------------------------------------------------------------------------------------------------

    def commit(
        self, holding: Holding, num_computed_tokens: int, new_token_ids: TokenIds = ()
    ) -> tuple[TransferPlan, ...]:
        """Append `new_token_ids`, then publish up to `num_computed_tokens` (absolute); returns the stores to launch."""
        plans = self._commits.commit(self._on_own_device(holding, "commit"), num_computed_tokens, new_token_ids)
        self.admission.serve_line()
        return plans

    def check_commit(self, holding: Holding, num_computed_tokens: int, new_token_ids: TokenIds = ()) -> None:
        """Raise what `commit` would, and change nothing."""
        self._commits.check(self._on_own_device(holding, "commit"), num_computed_tokens, new_token_ids)

    def offer(
        self,
        holding: Holding,
        num_computed_tokens: int,
        block_ids: Sequence[Sequence[int]],
        new_token_ids: TokenIds = (),
        *,
        is_last: bool = False,
    ) -> tuple[TransferPlan, ...]:
        """With `engine_blocks`, in place of `commit`: append `new_token_ids`, and store what the host lacks of the
        first `num_computed_tokens` (absolute) as far as the policy wants it; returns the stores to launch.

        `block_ids` are the request's block tables from the first token on, one for each group: lists, ranges or arrays,
        read only where something is stored. The null block is skipped. Copies read these blocks until they are over:
        they are held until then, whatever becomes of the request. What is refused (no room, too much in flight) is told
        to the observer, and made good by the next offer. `is_last`: nothing comes after it, so what a later prompt
        needs of windows is stored as well.
        """
        engine = self._engine_of(holding, "offer")
        check_bool("is_last", is_last)
        jobs = engine.offer(holding, num_computed_tokens, block_ids, new_token_ids, is_last=is_last)
        return tuple([job.plan for job in jobs])

    def plan_write_back(self) -> tuple[TransferPlan, ...]:
        """Stores of what the next allocations would evict, for a policy that waits for that (`LazyStore`), else none.

        Call it after `commit` and `release`: where nothing has changed it costs nothing. What it stores was computed
        at any time: the copies have to wait for all compute given to the device so far.
        """
        return self._commits.plan_write_back()

    def invalidate(self, holding: Holding, from_token: int) -> tuple[Holding, ...]:
        """Take back what a failed forward committed: nothing from `from_token` on was ever right.

        Generated tokens behind `from_token` are forgotten: that forward, or one after it, has sampled them.
        Returns the other holdings that may have read it; they have to be aborted. So has `holding` itself where it
        comes first: it would have to go back behind its window, or others still read blocks that it would compute into
        and there is no room for others.

        With `engine_blocks`: what was offered from `from_token` on, and what hangs on it, cannot be found any more, and
        who may have read it, in the engine's own cache or from the host, is returned. What its cache holds is the
        engine's to forget.
        """
        self._own(holding)
        if self._engine is not None:
            told, settled = self._engine.invalidate(holding, from_token, tuple(self.holdings.values()))
            self._settled(settled)
            return tuple(told)
        # Who is over but still computes in a step has read them, too; it is only no longer there to be aborted.
        readers = dict.fromkeys((*self.holdings.values(), *self._closing, *self._forks.over))
        tainted = self._commits.invalidate(holding, from_token, readers)
        self.admission.serve_line()
        return tuple(reader for reader in tainted if not reader.is_over)

    @contextmanager
    def step(self, holdings: Iterable[Holding], arriving: Iterable[Holding] = ()) -> Iterator[None]:
        """Hold the blocks of `holdings` while a forward touches them, whatever becomes of their requests.

        Of `arriving`, the forward starts on what a load still brings: see `expected_block_ids`. Should the load end
        otherwise, what it has computed cannot be committed. Whose load is over by now is held like the others.
        """
        self._require_own_device("step")
        held, arrived = as_tuple("holdings", holdings, "Holding"), as_tuple("arriving", arriving, "Holding")
        self._check_step(held, arrived)
        held += arrived
        for holding in held:
            begin_step(self.cache, self._moves, holding)
            holding.began_step()
        try:
            yield
        finally:
            wakes: list[Callable[[], object]] = []
            for holding in held:
                if holding.ended_step():
                    wakes += self._end_steps(holding)
            self.admission.serve_line(wakes)

    def _check_step(self, holdings: Iterable[Holding], arriving: Iterable[Holding]) -> None:
        for holding in holdings:
            require(self._own(holding), "step", _S.ALLOCATED, _S.RUNNING)
            require_no_holes(holding, "step")
        for holding in arriving:
            require(self._own(holding), "step", _S.LOADING, _S.DRAINING, _S.RUNNING)
            if holding.state is not _S.RUNNING and not can_start(self.cache, holding):
                raise WrongState(f"step: the load of {holding} is not under way: wait until it is over")

    def _end_steps(self, holding: Holding) -> list[Callable[[], object]]:
        """The last forward that touched its blocks is over. Whom to wake once the line was served."""
        holding.when_idle()
        if holding in self._closing:
            self._closing.discard(holding)
            self._request_leases.let_go(holding)
        elif holding.state is _S.DRAINING:
            return self._loads.conclude_all([holding])
        else:
            slide(self.cache, holding)
        return []

    def can_start_early(self, holding: Holding) -> bool:
        """Whether `step` takes it as `arriving` while it is LOADING."""
        return can_start(self.cache, self._on_own_device(holding, "can_start_early"))

    def num_expected_tokens(self, holding: Holding) -> int:
        """Tokens whose KV is on the device when its load has landed: where an early step starts to compute."""
        load = self._on_own_device(holding, "num_expected_tokens").load
        return holding.num_computed_tokens if load is None else load.stop * self.layout.unit_tokens

    def expected_block_ids(self, holding: Holding) -> list[list[int]]:
        """Its block table when its load has landed, one list per group, for a step that has it as `arriving`. Until
        then nothing is there but what the jobs' own fences have passed for. `WrongState` where no step holds them."""
        ids = expected_ids(self._on_own_device(holding, "expected_block_ids"))
        return self.layout.by_group(ids) if ids else self._no_tables()

    def begin_again(self, holding: Holding) -> int | None:
        """From which token on an early step's work has to be done again, in a new step, since the load fell short of
        what it took for loaded. None: nothing that was computed is in doubt. Only who has asked may commit again."""
        require(self._on_own_device(holding, "begin_again"), "begin_again", _S.RUNNING)
        tell(self._moves, holding)
        return first_invalid_token(holding)

    def first_invalid_token(self, holding: Holding) -> int | None:
        """The same for who only looks: nothing can be committed for that."""
        return first_invalid_token(self._on_own_device(holding, "first_invalid_token"))

    def release(self, holding: Holding, reason: str = "closed_early") -> tuple[TransferPlan, ...]:
        """End the request: DONE if it has committed and no other `reason` is given, else ABORTED. Every pin goes.

        Synchronous and complete. Only blocks that a step or a job still touches stay theirs. Returns stores to launch.
        """
        reason = check_text("reason", reason)
        if self._own(holding).is_over:
            raise WrongState(f"release: {holding} is {holding.state.name} already")
        plans: tuple[TransferPlan, ...] = ()
        done = holding.state is _S.RUNNING and holding.has_committed and reason == "closed_early"
        if done and holding.epoch == self.cache.epoch:
            plans = self._commits.offer_stores(holding, holding.published, is_last=True)
        if holding.waiter is not None:
            self.admission.leave(holding.waiter)
        settled = self._loads.abandon(holding) if holding.load is not None else []
        if holding.origins:
            self._forks.leaving(holding)
        if holding.num_steps:
            self._closing.add(holding)
        else:
            self._request_leases.let_go(holding)
        del self.holdings[holding.request_id]
        if not done:
            holding.aborted(reason)
        self._moves.request(holding, _S.DONE if done else _S.ABORTED)
        if self._forks.over:
            self._forks.left(holding)
        if self._engine is not None:
            self._engine.left(holding)
        if settled:
            self._settled(settled)
        else:
            self.admission.serve_line()
        return plans

    # -- preemption -----------------------------------------------------------------------------------------------

    def preempt_nowait(self, holding: Holding) -> Preemption:
        """Give up every device block of `holding`, and keep what it has computed in host memory as far as there is
        room: pinned until it is resumed or over. Not while a step touches its blocks, nor while it waits for room."""
        self._preemptions.check(self._on_own_device(holding, "preempt"))
        if holding.load is not None:
            self.abandon_load(holding)
        waiter = holding.waiter  # of a load that has lost its place: it ends here, too
        found = self._preemptions.preempt(holding)
        self.admission.serve_line([] if waiter is None else [waiter.wake])
        return found

    def resume(self, holding: Holding, num_tokens: int | None = None) -> None:
        """Match again what a preempted request had computed: PINNED afterwards, as after `admit`. What was lost in
        between is computed again, from the first token that a load does not bring back.

        `num_tokens`: how many it will ask room for; refused here, with nothing changed, if they can never fit.
        """
        self._preemptions.resume(self._on_own_device(holding, "resume"), num_tokens)
        self.admission.serve_line()
