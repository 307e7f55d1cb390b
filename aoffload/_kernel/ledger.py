"""The ledger: the verbs of the kernel. A step-based engine calls them directly; an async engine calls the runtime,
which calls them.

One request calls them in this order (`README.md` has the theory):

Verb | state afterwards | what it does
--- | --- | ---
`admit` | PINNED | match the prompt and pin the hit, in one call
`allocate_nowait`, or `queue_allocation` and `accept` | ALLOCATED | take device blocks for the rest of the prompt
`plan_load` | LOADING, or RUNNING | plan the copies of the host hit; returns plans
`step` | | hold the blocks of a batch during a forward
`commit` | RUNNING | publish computed units; returns plans of stores
`extend_nowait`, or `queue_extension` and `accept` | | take more device blocks
`release` | DONE, ABORTED | give everything back; returns plans of stores

The caller makes the planned copies. It calls `launch` before a copy begins and `settle` when the copy is over.

A verb that may change the free blocks or the wait queue ends with `end_call`, which grants blocks to waiters, and calls
the `wake` of each waiter and of each load that is over. A `wake` may call the ledger.

`CoreLedger` has no features. `aoffload.Ledger` adds the features as extensions, each with its verbs on a handle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Unpack

from .._common.arguments import as_tuple, check_callable, check_has, check_int, check_text, check_type, shown
from .._common.prefix import Prefix, TokenIds
from .._common.tiers import DEVICE
from .._config.config import OffloadConfig
from ..errors import CommitError, ConfigError, ExtensionError, InvalidArgument, WrongState
from .base import CacheBase
from .commits import Commits
from .events import Observer
from .extension import LedgerExtension
from .index import find_hit, lower_path
from .leases import slide_windows
from .loads import Loads, require_no_holes
from .moves import Moves
from .plans import Checkpoint, Extension, PrefixMatch, RequestOptions, TransferPlan
from .pools import FreeList, TierBlocks
from .protocols import DevicePool, EvictionOrder
from .records import LedgerRequest, Step, Waiter, do_nothing
from .states import (
    ABORTED,
    ALLOCATED,
    COMPUTES_ITS_BLOCKS,
    DONE,
    DRAINING,
    LOADING,
    MATCHED,
    PINNED,
    REQUEUED,
    RUNNING,
    STRANDED,
    require,
)
from .waiting import Admission

_WITH_A_LOAD = (LOADING, DRAINING, REQUEUED, STRANDED)


class CoreLedger(CacheBase):
    """The kernel alone: decides which block holds which KV and which requests may use it. See `Ledger`."""

    def __init__(
        self,
        config: OffloadConfig,
        num_device_blocks: int,
        *,
        block_bytes: int = 1,
        device_pool: DevicePool | None = None,
        clock: Callable[[], float] | None = None,
        observer: Observer | None = None,
        built_in: Iterable[LedgerExtension] = (),
        extensions: Iterable[LedgerExtension] = (),
    ) -> None:
        if clock is not None:
            check_callable("clock", clock)

        def make_device(order: EvictionOrder, _: Moves) -> TierBlocks:
            return _device_tier(num_device_blocks, device_pool, order)

        super().__init__(
            config, num_device_blocks, make_device, num_tracked_blocks=num_device_blocks, block_bytes=block_bytes,
            clock=clock, observer=observer, built_in=built_in, extensions=extensions,
        )  # fmt: skip
        self.steps: dict[int, Step] = {}
        """The steps under way, the oldest first."""
        self._num_steps = 0
        leases, moves, hooks = self.request_leases, self.moves, self.hooks
        self.admission = Admission(self.cache, leases, moves, self._others_hold_blocks, hooks)
        self.loads = Loads(self.cache, leases, moves, self.jobs, self.admission, hooks)
        self._commits = Commits(self.cache, leases, self.stores, moves, hooks)
        self.end_call = self.admission.serve_queue
        self._attach()

    # -- about its requests -----------------------------------------------------------------------------------------

    def own(self, request: object) -> LedgerRequest:
        """Return `request`, if it is one of this ledger. Refuses any other object, and a call from inside a hook."""
        if not isinstance(request, LedgerRequest) or request.ledger is not self:
            raise self._foreign(request)
        if self.hooks.calling:
            self.hooks.refuse_verb()
        return request

    def rematch(self, request: LedgerRequest) -> None:
        """Match `request`, which is PINNED, again."""
        self.request_leases.match_again(request)

    def match_all_again(self) -> None:
        """Match again the live requests whose match has lost blocks."""
        self.admission.match_again(self.live_requests.values())

    def possible_publishers(self) -> Iterable[LedgerRequest]:
        """The requests that may still publish or store KV. Some of them may be over."""
        return (*self.live_requests.values(), *self.closing)

    def has_begun(self, request: LedgerRequest) -> bool:
        """Whether `request` may have computed KV, or may have tokens that were sampled from KV that it has read."""
        return not request.may_match_again or request.has_committed or request.has_parent

    def _others_hold_blocks(self) -> bool:
        if self.jobs.unsettled or self.closing:
            return True
        outside = (r for r in self.live_requests.values() if r.waiter is None or r.waiter.is_over)
        return any(request.holds_device_blocks for request in outside)

    def _no_tables(self) -> list[list[int]]:
        return [[] for _ in self.layout.groups]

    # -- admission ------------------------------------------------------------------------------------------------

    def lookup(self, prefix: Prefix) -> PrefixMatch:
        """The hit of a request for `prefix`. Changes nothing, not even the eviction order."""
        unit, sequence = self.layout.unit_tokens, self.sequence_of(prefix)
        limit = (sequence.num_tokens - 1) // unit
        hit = find_hit(self.cache.index, sequence, self.layout, limit)
        lower = 0
        if self.cache.has_lower_tiers:
            lower = max(0, lower_path(self.cache.index, sequence, self.layout, limit)[1] - hit.stop) * unit
        return PrefixMatch(hit.device_stop * unit, (hit.stop - hit.device_stop) * unit, num_lower_tokens=lower)

    def admit(
        self, prefix: Prefix, *, request_id: str | None = None, **options: Unpack[RequestOptions]
    ) -> LedgerRequest:
        """Match `prefix` and pin the hit, in one call. `RequestOptions` documents the options.

        `reads_cache=False`: use no hit. `store` (all, the prompt only, nothing) and `max_store_tokens` (leading tokens)
        limit the tokens that may be stored. A request always computes at least one token, so the hit of a fully cached
        prompt of whole units is at least one unit shorter than the prompt."""
        request = self._checked(prefix, request_id, options)
        for ask in reversed(self.hooks.ask_admit):  # the program's own first: a store policy counts what it is asked
            ask(request)
        self.enrol(request)
        self.request_leases.pin(request)
        self.moves.request(request, MATCHED)
        self.moves.request(request, PINNED)
        self.moves.report()
        if self.hooks.error is not None:
            self.release(request, "error: ExtensionError")  # nobody gets the request
        return request

    def allocate_nowait(self, request: LedgerRequest, num_tokens: int | None = None) -> None:
        """Take blocks for `num_tokens` (None: the prompt), all or nothing. If `OutOfBlocks` is raised, nothing has
        changed."""
        self.admission.allocate_nowait(self.own(request), num_tokens)
        self.moves.report()
        if self.hooks.error is not None:
            self._fail()

    def queue_allocation(
        self, request: LedgerRequest, num_tokens: int | None = None, wake: Callable[[], object] = do_nothing
    ) -> Waiter:
        """Join the wait queue. `wake` is called once the waiter is granted or has failed; then call `accept` or
        `withdraw`.

        `wake` may call the ledger, but must not raise.
        """
        check_callable("wake", wake)
        return self._queued(self.admission.queue_allocation(self.own(request), num_tokens, wake))

    def _queued(self, waiter: Waiter) -> Waiter:
        try:
            self.end_call()
        except ExtensionError:  # the caller does not get the waiter
            self.admission.withdraw(waiter)
            raise
        return waiter

    def extend_nowait(self, request: LedgerRequest, num_tokens: int) -> Extension:
        """Extend the block table to `num_tokens` in all. If `OutOfBlocks` is raised, nothing has changed."""
        try:
            added = self.admission.extend_nowait(self.own(request), num_tokens)
        finally:
            self.moves.report()
        if self.hooks.error is not None:  # of an eviction order
            self.hooks.fail()
        return added

    def queue_extension(
        self, request: LedgerRequest, num_tokens: int, wake: Callable[[], object] = do_nothing
    ) -> Waiter:
        """Join the wait queue for more blocks, ahead of all allocations."""
        check_callable("wake", wake)
        return self._queued(self.admission.queue_extension(self.own(request), num_tokens, wake))

    def accept(self, waiter: Waiter) -> Extension:
        """Give the request of `waiter` the blocks that were granted, or raise the error of a failed waiter."""
        self.own(check_type("waiter", waiter, Waiter).request)
        try:
            return self.admission.accept(waiter)
        finally:
            self.moves.report()
            if self.hooks.error is not None:
                self._fail()

    def withdraw(self, waiter: Waiter) -> None:
        """Stop waiting: give back an unused grant and serve the wait queue."""
        self.own(check_type("waiter", waiter, Waiter).request)
        self.admission.withdraw(waiter)
        self.end_call()

    # -- loading --------------------------------------------------------------------------------------------------

    def plan_load(
        self,
        request: LedgerRequest,
        max_tokens: int | None = None,
        wake: Callable[[], object] = do_nothing,
        *,
        max_job_bytes: int | None = None,
    ) -> tuple[TransferPlan, ...]:
        """Start loading the host hit onto the device; returns the plans to launch.

        The state of the request afterwards says what to do:

        - RUNNING: compute, because there is nothing to wait for.
        - LOADING: wait until `wake` is called, because the load is over then.
        - REQUEUED, now or during the load: the request has given up all its blocks. Either the load fell short and
          there were no free blocks for the missing units, or a reset has made the device hit useless. `wake` is called
          when the wait for blocks ends; accept `request.waiter` and call `plan_load` again.

        For a RUNNING request nothing is planned. If the load of such a request is lost to a reset (`lost_to_reset`),
        the request becomes REQUEUED.

        `max_tokens`: load the hit up to this number of prompt tokens, those of the device hit included; 0 loads
        nothing. `max_job_bytes` replaces the configured limit; a large value splits an overlapped load into few jobs.
        """
        if wake is not do_nothing:
            check_callable("wake", wake)
        units_per_job: Sequence[int] = ()
        if max_job_bytes is not None:
            units_per_job = self._units_per_job(check_int("max_job_bytes", max_job_bytes, 1) // self.block_bytes)
        plans = self.loads.plan(self.own(request), max_tokens, wake, units_per_job)
        self.end_call()
        return plans

    def lost_to_reset(self, request: LedgerRequest) -> bool:
        """Whether a reset came after the load was over and before the request's first step or commit, so that the
        loaded KV is from before the reset. If so, call `plan_load`, which gives up the load. Do not call it if your
        caller learned before the reset that the load was over."""
        return self.loads.lost_to_reset(self.own(request))

    def abandon_load(self, request: LedgerRequest) -> None:
        """Stop waiting for a load. The request uses the blocks that have landed, and computes the rest. Launched copies
        go on."""
        require(self.own(request), "abandon_load", *_WITH_A_LOAD)
        load = request.load
        if load is not None:
            wakes = self.jobs.end_claims(self.jobs.abandon(load))
            self.end_call(wakes + load.conclude())

    # -- computing ------------------------------------------------------------------------------------------------

    def commit(
        self,
        request: LedgerRequest,
        num_computed_tokens: int,
        new_token_ids: TokenIds = (),
        checkpoints: Iterable[int] = (),
    ) -> tuple[TransferPlan, ...]:
        """Append `new_token_ids`, then publish up to `num_computed_tokens` (an absolute number); returns the stores to
        launch.

        `checkpoints`: the positions, in tokens, at which the forward has copied the recurrent state into the blocks of
        `planned_checkpoints`. Other checkpoints that it has passed are given up. `CommitError` if a position is not
        planned, or not among the tokens that this commit adds.
        """
        plans = self._commits.commit(self.own(request), num_computed_tokens, new_token_ids, checkpoints)
        self.end_call()
        return plans

    def commit_all(
        self,
        commits: Iterable[tuple[LedgerRequest, int, TokenIds] | tuple[LedgerRequest, int, TokenIds, Iterable[int]]],
    ) -> tuple[tuple[TransferPlan, ...], ...]:
        """Commit several requests of one forward, all or nothing. Each commit is a tuple of the arguments of `commit`,
        with or without `checkpoints`. Returns the stores to launch, one tuple for each commit."""
        if self.hooks.calling:
            self.hooks.refuse_verb()
        checked: list[tuple[LedgerRequest, object, TokenIds, Iterable[int]]] = []
        for one in as_tuple("commits", commits, "tuple"):
            if type(one) is not tuple or len(one) not in (3, 4):
                raise InvalidArgument(
                    "commits", f"must hold tuples (request, tokens computed, new ids), got {shown(one)}"
                )
            request = self.own(one[0])
            if any(request is other for other, *_ in checked):
                raise InvalidArgument("commits", f"names {request} twice")
            written = as_tuple("checkpoints", one[3], "int", CommitError) if len(one) == 4 else ()
            checked.append((request, one[1], one[2], written))
        plans = self._commits.commit_all(checked)
        self.end_call()
        return tuple(plans)

    def check_commit(
        self,
        request: LedgerRequest,
        num_computed_tokens: int,
        new_token_ids: TokenIds = (),
        checkpoints: Iterable[int] = (),
    ) -> None:
        """Raise the error that `commit` would raise. Changes nothing."""
        self._commits.check(self.own(request), num_computed_tokens, new_token_ids, checkpoints)

    @property
    def num_steps_ended(self) -> int:
        """Number of steps that have ended. Steps are numbered in the order of their ends, see `last_step`."""
        return self.cache.last_uses.num_ended

    def last_step(self, plans: Iterable[TransferPlan]) -> int:
        """The number of the last step that may have touched the device blocks that `plans` write to. The copies have to
        wait for the fences of all steps up to that number, and for nothing else.

        0 means that the number is unknown or that the step has not ended; then the copies have to wait for all compute
        so far. The ledger knows the numbers as long as every forward runs in a `step`. After a commit of tokens that no
        step has computed, the result is always 0.
        """
        number, last_uses = 0, self.cache.last_uses
        for plan in plans if type(plans) is tuple else as_tuple("plans", plans, "TransferPlan"):
            if type(plan) is not TransferPlan:
                check_type("plans", plan, TransferPlan)
            if plan.destination is not DEVICE:
                continue
            latest = last_uses.latest(plan.destination_ids) if last_uses.are_covered else 0
            if not latest:
                return 0
            number = max(number, latest)
        return number

    @contextmanager
    def step(self, requests: Iterable[LedgerRequest]) -> Iterator[None]:
        """Hold the blocks of `requests` while a forward touches them, even if the requests end meanwhile."""
        held = as_tuple("requests", requests, "LedgerRequest")
        for request in held:
            if self.own(request).state is not RUNNING:
                require(request, "step", ALLOCATED, RUNNING)
                require_no_holes(request, "step")
        with self.hold(held):
            yield

    @contextmanager
    def hold(self, held: tuple[LedgerRequest, ...]) -> Iterator[None]:
        """The step itself, without checks. The caller has checked that a forward may use the blocks of the requests."""
        if self.hooks.calling:
            self.hooks.refuse_verb()
        for request in held:
            for hook in self.hooks.on_step:
                hook(request)
            request.num_steps += 1
            request.computing = COMPUTES_ITS_BLOCKS
        self._num_steps += 1
        self.steps[self._num_steps] = step = Step(self._num_steps, held)
        self.moves.step_begun(step)
        try:
            self.moves.report()
            if self.hooks.error is not None:
                self._fail()
            yield
        finally:
            wakes: list[Callable[[], object]] = []
            number = self.cache.last_uses.step_ended()
            for request in held:
                request.last_step = number
                request.num_steps -= 1
                if request.num_steps:  # another step still touches its blocks
                    continue
                request.when_idle()
                if request in self.closing:
                    self.closing.discard(request)
                    self._give_back(request)
                elif request.state is DRAINING and request.load is not None:
                    wakes += request.load.conclude()
                else:
                    slide_windows(self.cache, request)
            del self.steps[step.step_id]
            self.moves.step_ended(step)
            self.end_call(wakes)

    def release(self, request: LedgerRequest, reason: str = "closed_early") -> tuple[TransferPlan, ...]:
        """End the request: DONE if it has committed and no other `reason` is given, else ABORTED.

        Releases all its pins and blocks in this call, except blocks that a step or a job still touches. Returns the
        stores to launch. If the store policy raises, the call raises the same error, and the request has ended without
        stores.
        """
        reason = check_text("reason", reason)
        self.own(request)
        if self.live_requests.get(request.request_id) is not request:
            raise WrongState(f"release: {request} is {request.state.name} already")
        done = request.state is RUNNING and request.has_committed and reason == "closed_early"
        try:
            return self._commits.offer_last(request) if done and request.epoch == self.cache.epoch else ()
        finally:
            if request.waiter is not None:
                self.admission.leave(request.waiter)
            settled = self.jobs.abandon(request.load) if request.load is not None else []
            for hook in self.hooks.on_leaving:
                hook(request, True)
            if request.num_steps:
                self.closing.add(request)
            else:
                self.request_leases.release_all(request)
            del self.live_requests[request.request_id]
            if not done:
                request.reason = reason
            self.moves.request(request, DONE if done else ABORTED)
            if not request.num_steps:
                for released in self.hooks.on_released:
                    released(request)
            self.end_call(self.jobs.end_claims(settled) if settled else ())

    def _give_back(self, request: LedgerRequest) -> None:
        """Release the blocks of `request`, which is over, after its last step has ended."""
        self.request_leases.release_all(request)
        for hook in self.hooks.on_released:
            hook(request)

    def block_ids(self, request: LedgerRequest) -> list[list[int]]:
        """The block table, one list per group. Empty for groups with a recurrent state: see `planned_checkpoints`."""
        tables = self.own(request).tables
        return self.layout.by_group([table.ids for table in tables]) if tables else self._no_tables()

    def planned_checkpoints(self, request: LedgerRequest) -> tuple[Checkpoint, ...]:
        """The checkpoints of the recurrent state that `request` should write, in prefix order. The engine ends a
        forward at each position, copies the state into the blocks, and names the position to `commit`. It may leave out
        any of them. Empty if the model has no recurrent state, or no blocks were left for checkpoints."""
        found = self.own(request).checkpoints
        planned = {} if found is None else found.planned
        return tuple([Checkpoint(at * self.layout.unit_tokens, [*planned[at]]) for at in sorted(planned)])

    def resume_checkpoint(self, request: LedgerRequest) -> Checkpoint | None:
        """The checkpoint of the recurrent state from which `request` continues. The engine copies it into the running
        state before the first forward, or inside of a `step` with that forward. None: `request` begins with the initial
        state, or has computed since then."""
        found = self.own(request).checkpoints
        if found is None or not found.resume:
            return None
        return Checkpoint(request.ready_stop * self.layout.unit_tokens, [*found.resume])


def _device_tier(num_device_blocks: int, device_pool: DevicePool | None, order: EvictionOrder) -> TierBlocks:
    if device_pool is None:
        device_pool = FreeList(num_device_blocks)
    check_has("device_pool", device_pool, "DevicePool", "num_blocks num_free take give free_ids", ConfigError)
    for name in ("num_blocks", "num_free"):  # a numpy integer, for example, would make every sum one
        check_int(f"device_pool.{name}", getattr(device_pool, name), 0, error=ConfigError)
    return TierBlocks(DEVICE, device_pool, order)
