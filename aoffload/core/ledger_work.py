"""The ledger's calls about requests that have blocks: loads, jobs, commits, steps, the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from ..arguments import as_tuple, check_callable, check_type
from ..errors import InvalidArgument, WrongState
from ..prefix import TokenIds
from .answer import PrefixMatch
from .arguments import check_bool, check_completion, check_int, check_text
from .choice import Loadable
from .hops import Tier
from .kept import Step
from .ledger_requests import BeginningRequests
from .lifecycle import RequestState as State
from .lifecycle import require
from .loads import require_no_holes
from .overlap import begin_step, can_start, expected_ids, first_invalid_token, tell
from .owners import Holding, nobody
from .plan import Completion, TransferPlan
from .results import Preemption
from .tokens import TokenSequence
from .windows import slide

__all__ = ["WorkingRequests"]

_LOADING = (State.LOADING, State.DRAINING, State.REQUEUED, State.STRANDED)


class WorkingRequests(BeginningRequests):
    """Calls from the first load until the request is over."""

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
        """Start loading the host hit onto the device; returns the plans to launch.

        RUNNING afterwards: nothing to wait for. LOADING: `wake` is called when the load is over. REQUEUED: the load
        fell short and there was no room for the missing blocks, or a reset has made the device hit useless, so the
        request gave up all its blocks. `wake` is called when its wait for blocks ends. Then accept `holding.waiter` and
        plan again. Of a request that is RUNNING already, nothing is planned; it is REQUEUED if its load is lost to a
        reset (`lost_to_reset`). `max_job_bytes` replaces the configured limit, to split an overlapped load into as few
        jobs as possible.

        With `engine_blocks`, `into` holds the request's block tables: one per group, from the first token at least to
        the end of the hit. The copies write only to the blocks named there for the units that are loaded.
        """
        if wake is not nobody:
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

    @property
    def is_engine_owned(self) -> bool:
        """Whether an engine owns the device blocks."""
        return self._engine is not None

    def lost_to_reset(self, holding: Holding) -> bool:
        """Whether a reset has come since the load was over, and the request has not begun to compute behind it: no
        step, no commit, no offer. What it has loaded is KV from before the reset. `plan_load` takes it back: call that
        unless the caller was told before the reset that the load is over."""
        if self._engine is None:
            return self._loads.lost_to_reset(self._own(holding))
        return self._engine.lost_to_reset(self._own(holding))

    def loadable(self, holding: Holding, max_tokens: int | None = None) -> Loadable | None:
        """What `plan_load` would load now; with `engine_blocks`, all that the match has said. None: nothing, or it was
        planned before."""
        if self._engine is None:
            return self._loads.loadable(self._own(holding), max_tokens)
        if max_tokens is not None:
            raise InvalidArgument("max_tokens", "is for a ledger that has device blocks itself: decline the rest")
        return self._engine.matches.loadable(self._own(holding))

    def decline(self, holding: Holding, from_token: int) -> PrefixMatch:
        """With `engine_blocks`: match again, before the load, up to `from_token`, rounded down to a block. What the
        host has behind it is computed, and no later match of this request has it."""
        engine = self._engine_of(holding, "decline")
        require(holding, "decline", State.PINNED)
        engine.matches.decline(holding, check_int("from_token", from_token, 0) // self.layout.unit_tokens)
        return holding.match

    def abandon_load(self, holding: Holding) -> None:
        """Stop waiting for a load: landed blocks count, the rest is computed. Launched copies go on.

        With `engine_blocks`, these copies go on writing to the blocks that `into` named, and their jobs hold them until
        they are over: behind `holding.num_computed_tokens`, compute into other blocks.
        """
        require(self._own(holding), "abandon_load", *_LOADING)
        if holding.load is not None:
            self._settled(self._loads.abandon(holding), also=holding)

    # -- jobs -----------------------------------------------------------------------------------------------------

    def launch(self, job_id: int) -> bool:
        """Mark a queued job as launched: it cannot be recalled. False: the job is no longer wanted."""
        if self._moves.is_telling:
            raise self._in_report("launch")
        job = self.jobs.unsettled.get(check_int("job_id", job_id, 0))
        return job is not None and self.jobs.launch(job)

    def settle(self, completion: Completion) -> None:
        """Settle a launched job: publish, release its leases, serve the line, wake; in this order."""
        if self._moves.is_telling:
            raise self._in_report("settle")
        check_completion(completion)
        self.admission.serve_line(self._concluded(self.jobs.settle(completion)))

    def discard(self, job_id: int) -> None:
        """Give up a job that was never launched; the requests that wait for it compute instead."""
        if self._moves.is_telling:
            raise self._in_report("discard")
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
        """With `engine_blocks`, in place of `commit`: append `new_token_ids`, then store what the host lacks of the
        first `num_computed_tokens` (absolute), as far as the policy wants it; returns the stores to launch.

        `block_ids` holds the request's block tables, one per group, from the first token on: lists, ranges or arrays.
        Ids are read only where something is stored; with `is_last`, all are checked. Null blocks are skipped. Jobs hold
        the blocks that they copy until the copies are over, whatever becomes of the request. If host memory has no free
        blocks, blocks are skipped, and the next offer tries them again. Blocks above the bound of stores in flight are
        deferred: call `offer_deferred` once a step. `is_last`: the last offer of the request, so what a later prompt
        needs of windows is stored too.
        """
        engine = self._engine_of(holding, "offer")
        check_bool("is_last", is_last)
        jobs = engine.offer(holding, num_computed_tokens, block_ids, new_token_ids, is_last=is_last)
        return tuple([job.plan for job in jobs])

    def offer_deferred(self) -> tuple[TransferPlan, ...]:
        """With `engine_blocks`, at the beginning of each step: store blocks that offers have deferred, up to the bound
        of stores in flight, those of the oldest request first. This includes blocks of requests that are over. The call
        is cheap if no blocks are deferred.

        `FindsBlocks.find` says which block of the engine holds the KV now. If the engine no longer has it, the ledger
        gives the block up and reports that to the observer (`store_skipped`, `in_flight`). Without `find`, no block is
        deferred: the next offer of the request tries the skipped blocks again. The copies have to wait for all compute
        submitted to the device so far.
        """
        if self._moves.is_telling:
            raise self._in_report("offer_deferred")
        if self._engine is None:
            raise WrongState("offer_deferred: this ledger has device blocks itself: it takes no others")
        return tuple([job.plan for job in self._engine.offers.offer_deferred()])

    @property
    def deferred_requests(self) -> tuple[str, ...]:
        """Ids of the requests with deferred blocks, the oldest first. They may be over. `find` is called for them."""
        return () if self._engine is None else tuple(self._engine.offers.deferred)

    def plan_write_back(self) -> tuple[TransferPlan, ...]:
        """Stores of what the next allocations would evict; none unless the policy stores that late (`LazyStore`).

        Call it after `commit` and `release`; it is cheap if nothing has changed. The blocks may have been computed at
        any time, so the copies have to wait for all compute submitted to the device so far.
        """
        if self._moves.is_telling:
            raise self._in_report("plan_write_back")
        return self._commits.plan_write_back()

    def invalidate(self, holding: Holding, from_token: int) -> tuple[Holding, ...]:
        """Take back what a failed forward committed: all KV from `from_token` on is wrong.

        Drops the generated tokens behind `from_token`: that forward, or a later one, sampled them. Returns the other
        requests that may have read the wrong KV; abort them. Abort `holding` too if it comes first in the result: it
        would have to go back behind its window, or other requests still read blocks that it would write to and it
        cannot get others.

        With `engine_blocks`: what was offered from `from_token` on, and all cached behind it, is no longer found. The
        requests returned may have read it in the engine's cache or from the host. The engine itself has to forget what
        its cache holds.
        """
        sequence, published = self._own(holding).sequence, holding.published
        if self._remote_stores is not None:
            sequence = sequence.copy()
        if self._engine is not None:
            told, settled = self._engine.invalidate(holding, from_token, tuple(self.holdings.values()))
            self._settled(settled)
            self._take_back_cells(sequence, from_token // self.layout.unit_tokens, published)
            return tuple(reader for reader in told if not reader.is_over)
        # Requests that are over may have read it too, in a step or as forks, but need not be aborted.
        readers = dict.fromkeys((*self.holdings.values(), *self._closing, *self._forks.over))
        tainted = self._commits.invalidate(holding, from_token, readers)
        self._take_back_cells(sequence, from_token // self.layout.unit_tokens, published)
        for reader, first in tainted.items() if self._remote_stores is not None else ():
            if reader is not holding:  # a fork may have published units that `holding` has only begun
                self._take_back_cells(reader.sequence, first, max(reader.published, reader.read_before))
        self.admission.serve_line()
        return tuple(reader for reader in tainted if not reader.is_over)

    def _take_back_cells(self, sequence: TokenSequence, first: int, stop: int) -> None:
        """A remote store's cells with units `[first, stop)` of `sequence`, and cells that follow them, are wrong."""
        if self._remote_stores is not None:
            for job in self._remote_stores.take_back(sequence, first, stop):
                self._settled(self.jobs.discard(job))

    @property
    def num_steps_ended(self) -> int:
        """Steps that have ended. The next one to end has the next number, see `last_step`."""
        return self.cache.last_uses.num_ended

    def last_step(self, plans: Iterable[TransferPlan]) -> int:
        """The number of the last step that may have touched the device blocks that `plans` write to. These loads have
        to wait for the fences of the steps up to that number, and for nothing else.

        0: unknown, or the step has not ended; then the loads have to wait for all compute so far. Numbers are known as
        long as every forward runs in a step. After one commit of tokens that no step has computed, all answers are 0.
        """
        number = 0
        for plan in as_tuple("plans", plans, "TransferPlan"):
            if check_type("plans", plan, TransferPlan).destination is not Tier.DEVICE:
                continue
            latest = self.cache.last_uses.latest(plan.destination_ids)
            if not latest:
                return 0
            number = max(number, latest)
        return number

    @contextmanager
    def step(self, holdings: Iterable[Holding], arriving: Iterable[Holding] = ()) -> Iterator[None]:
        """Hold the blocks of `holdings` while a forward touches them, whatever becomes of the requests.

        For the requests in `arriving`, the forward overlaps a load: see `expected_block_ids`. If the load falls short,
        what the forward computed cannot be committed. A request whose load is over already is held like the others.
        """
        self._require_own_device("step")
        held, arrived = as_tuple("holdings", holdings, "Holding"), as_tuple("arriving", arriving, "Holding")
        self._check_step(held, arrived)
        held += arrived
        for holding in held:
            begin_step(self.cache, self._moves, holding)
            holding.began_step()
        step = self._begun(held)
        try:
            yield
        finally:
            wakes: list[Callable[[], object]] = []
            number = self.cache.last_uses.step_ended()
            for holding in held:
                if holding.ended_step(number):
                    wakes += self._end_steps(holding)
            del self.steps[step.step_id]
            self._moves.step_ended(step)
            self.admission.serve_line(wakes)

    def _begun(self, holdings: tuple[Holding, ...]) -> Step:
        self._num_steps += 1
        self.steps[self._num_steps] = step = Step(self._num_steps, holdings)
        self._moves.step_begun(step)
        return step

    def _check_step(self, holdings: Iterable[Holding], arriving: Iterable[Holding]) -> None:
        for holding in holdings:
            require(self._own(holding), "step", State.ALLOCATED, State.RUNNING)
            require_no_holes(holding, "step")
        for holding in arriving:
            require(self._own(holding), "step", State.LOADING, State.RUNNING)
            if holding.state is not State.RUNNING and not can_start(self.cache, holding):
                raise WrongState(f"step: the load of {holding} is not under way: wait until it is over")

    def _end_steps(self, holding: Holding) -> list[Callable[[], object]]:
        """The last step of `holding` is over. Returns the callbacks to call after the line is served."""
        holding.when_idle()
        if holding in self._closing:
            self._closing.discard(holding)
            self._request_leases.let_go(holding)
        elif holding.state is State.DRAINING:
            return self._loads.conclude_all([holding])
        else:
            slide(self.cache, holding)
        return []

    def can_start_early(self, holding: Holding) -> bool:
        """Whether `step` accepts the request as `arriving` while its load is under way."""
        return can_start(self.cache, self._on_own_device(holding, "can_start_early"))

    def num_expected_tokens(self, holding: Holding) -> int:
        """Tokens whose KV is on the device once the load has landed: where an overlapping step starts to compute."""
        load = self._on_own_device(holding, "num_expected_tokens").load
        return holding.num_computed_tokens if load is None else load.stop * self.layout.unit_tokens

    def expected_block_ids(self, holding: Holding) -> list[list[int]]:
        """The block table as it will be once the load has landed, one list per group, for a step with the request in
        `arriving`. A loaded block is valid only once its job's fence has passed. `WrongState` before such a step."""
        ids = expected_ids(self._on_own_device(holding, "expected_block_ids"))
        return self.layout.by_group(ids) if ids else self._no_tables()

    def begin_again(self, holding: Holding) -> int | None:
        """The first token to compute again, in a new step, since the load fell short of what an overlapping step
        assumed; None: nothing to compute again. After an invalid overlap, commits need this call and a new step."""
        require(self._on_own_device(holding, "begin_again"), "begin_again", State.RUNNING)
        tell(self._moves, holding)
        return first_invalid_token(holding)

    def first_invalid_token(self, holding: Holding) -> int | None:
        """The same without acknowledging it: commits stay refused."""
        return first_invalid_token(self._on_own_device(holding, "first_invalid_token"))

    def release(self, holding: Holding, reason: str = "closed_early") -> tuple[TransferPlan, ...]:
        """End the request: DONE if it has committed and no other `reason` is given, else ABORTED.

        Releases all its pins and blocks in this call, except blocks that a step or a job still touches. Returns the
        stores to launch. If the store policy raises, that is raised, and the request has ended without stores.
        """
        reason = check_text("reason", reason)
        request = self._own(holding)
        if self.holdings.get(request.request_id) is not request:
            raise WrongState(f"release: {request} is {request.state.name} already")
        done = request.state is State.RUNNING and request.has_committed and reason == "closed_early"
        try:
            return self._commits.offer_last(request) if done and request.epoch == self.cache.epoch else ()
        finally:
            if request.waiter is not None:
                self.admission.leave(request.waiter)
            settled = self._loads.abandon(request) if request.load is not None else []
            if request.origins:
                self._forks.leaving(request)
            if request.num_steps:
                self._closing.add(request)
            else:
                self._request_leases.let_go(request)
            del self.holdings[request.request_id]
            if not done:
                request.ends_for(reason)
            self._moves.request(request, State.DONE if done else State.ABORTED)
            if self._forks.over:
                self._forks.left(request)
            if self._engine is not None:
                self._engine.left(request)
            if settled:
                self._settled(settled)
            else:
                self.admission.serve_line()

    # -- preemption -----------------------------------------------------------------------------------------------

    def preempt_nowait(self, holding: Holding) -> Preemption:
        """Give up every device block of `holding`. What it has computed is kept in host memory as far as there is room,
        pinned until it is resumed or over. Refused in a step, and in the line for room unless REQUEUED."""
        self._preemptions.check(self._on_own_device(holding, "preempt"))
        wakes: list[Callable[[], object]] = []
        if holding.load is not None:
            wakes += self._concluded(self._loads.abandon(holding), also=holding)
        if holding.waiter is not None:  # REQUEUED: its wait ends here, too
            wakes.append(holding.waiter.wake)
        found = self._preemptions.preempt(holding)
        self.admission.serve_line(wakes)  # last: a wake may call the ledger
        return found

    def resume(self, holding: Holding, num_tokens: int | None = None) -> None:
        """Match a preempted request again, with what it had computed: PINNED afterwards, as after `admit`. It computes
        again from the first token that no load brings back.

        `num_tokens`: the room that it will ask for; `OutOfBlocks`, with nothing changed, if that can never fit.
        """
        self._preemptions.resume(self._on_own_device(holding, "resume"), num_tokens)
        self.admission.serve_line()
