"""Load overlaps: a step that begins before the load of its request is over.

The step assumes that the load succeeds: it reads blocks that jobs still own, and writes to the request's own blocks
after them. The assumption may be wrong. A copy may fail, or another request may publish the same tokens first; then the
request's table names other blocks than the step has read. So a `LoadOverlap` keeps the block tables that the step
assumes. They are compared with each settled job of the load (`Load.job_settled`), and with the request's tables once
the load is over.

    SPECULATIVE --> CONFIRMED       the load brought all blocks that the step reads: its results are valid
         `-------> INVALID          the load fell short: commits beyond the loaded tokens are refused
                      `---> ACKNOWLEDGED    the engine has read the first invalid token, and begins another step
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import attrs

from .._common.arguments import as_tuple
from .._common.tiers import Tier
from .._kernel.cache import PrefixCache
from .._kernel.events import Event
from .._kernel.extension import LedgerExtension
from .._kernel.index import jobs_into, stretches
from .._kernel.layout import Component
from .._kernel.ledger import CoreLedger
from .._kernel.loads import require_no_holes
from .._kernel.records import BlockTable, Job, LedgerRequest, Load
from .._kernel.states import Plain, RequestState, State, require
from ..errors import CommitError, WrongState


class OverlapState(Plain):
    """The states of a step that began before the load of its request was over (docs/lifecycle.md)."""

    NEW = "new"
    SPECULATIVE = "speculative"
    CONFIRMED = "confirmed"
    INVALID = "invalid"
    ACKNOWLEDGED = "acknowledged"


OVERLAP_MOVES: Mapping[State, frozenset[State]] = {
    OverlapState.NEW: frozenset({OverlapState.SPECULATIVE}),
    OverlapState.SPECULATIVE: frozenset({OverlapState.CONFIRMED, OverlapState.INVALID}),
    OverlapState.CONFIRMED: frozenset(),
    OverlapState.INVALID: frozenset({OverlapState.ACKNOWLEDGED}),
    OverlapState.ACKNOWLEDGED: frozenset(),
}


@dataclass(slots=True, eq=False, repr=False)
class LoadOverlap:
    """A step that began before the load of its request was over, and the block tables that the step assumes."""

    request: LedgerRequest
    stop: int
    """The step assumes that the load succeeds up to this unit."""
    num_tokens: int
    """The number of tokens up to unit `stop`."""
    tables: tuple[array[int], ...]
    """The block tables up to unit `stop` that the step assumes, one per component."""
    state: OverlapState = OverlapState.NEW

    def __str__(self) -> str:
        return f"load overlap of {self.request}"


@attrs.frozen
class OverlapMoved(Event):
    """An overlap has begun, or was confirmed, found invalid, or acknowledged."""

    overlap: LoadOverlap
    old: OverlapState
    new: OverlapState


class Overlap(LedgerExtension):
    """`Ledger.overlap`: steps that begin before the loads of their requests are over."""

    def __init__(self) -> None:
        self._overlaps: dict[LedgerRequest, LoadOverlap] = {}

    def on_attach(self, ledger: CoreLedger) -> None:
        self._ledger, self._cache, self._moves = ledger, ledger.cache, ledger.moves

    def __contains__(self, request: LedgerRequest) -> bool:
        """Whether a step of `request` has overlapped a load and the overlap is not confirmed or replaced yet."""
        return request in self._overlaps

    # -- the verbs ------------------------------------------------------------------------------------------------

    def can_start(self, request: LedgerRequest) -> bool:
        """Whether `step` accepts the request as `arriving` while its load is under way."""
        return self._can_start(self._ledger.own(request))

    @contextmanager
    def step(self, requests: Iterable[LedgerRequest], arriving: Iterable[LedgerRequest]) -> Iterator[None]:
        """Like `Ledger.step`, for `requests` and `arriving`. For a request in `arriving`, the forward may run before
        its load is over: see `block_ids`. If the load falls short, the tokens that the forward computed cannot be
        committed. If the load is over already, the request is handled like one in `requests`."""
        held, arrived = as_tuple("requests", requests, "LedgerRequest"), as_tuple("arriving", arriving, "LedgerRequest")
        for request in held:
            require(self._ledger.own(request), "step", RequestState.ALLOCATED, RequestState.RUNNING)
            require_no_holes(request, "step")
        for request in arrived:
            require(self._ledger.own(request), "step", RequestState.LOADING, RequestState.RUNNING)
            if request.state is not RequestState.RUNNING and not self._can_start(request):
                raise WrongState(f"step: no step can overlap the load of {request} now: wait until the load is over")
        with self._ledger.hold(held + arrived):
            yield

    def num_expected_tokens(self, request: LedgerRequest) -> int:
        """Number of tokens whose KV is on the device once the load has landed. An overlapping step starts to compute
        there."""
        load = self._ledger.own(request).load
        return request.num_computed_tokens if load is None else load.stop * self._cache.layout.unit_tokens

    def block_ids(self, request: LedgerRequest) -> list[list[int]]:
        """The block table that the request will have once the load has landed, one list per group. Call it inside a
        step with the request in `arriving`. A loaded block is valid once the fence of its job has passed. Raises
        `WrongState` before such a step."""
        ids, layout = self._expected_ids(self._ledger.own(request)), self._cache.layout
        return layout.by_group(ids) if ids else [[] for _ in layout.groups]

    def begin_again(self, request: LedgerRequest) -> int | None:
        """The first token to compute again in a new step, because the load has not brought all blocks that an
        overlapping step assumed. None if nothing has to be computed again. After an invalid overlap, commits are
        refused until you call this method and begin a new step."""
        require(self._ledger.own(request), "begin_again", RequestState.RUNNING)
        self._acknowledge(request)
        self._ledger.moves.report()
        return self._first_invalid_token(request)

    def first_invalid_token(self, request: LedgerRequest) -> int | None:
        """The same token as `begin_again` returns. This property changes nothing: commits stay refused."""
        return self._first_invalid_token(self._ledger.own(request))

    # -- hooks ----------------------------------------------------------------------------------------------------

    def on_step(self, request: LedgerRequest) -> None:
        if request.load is not None or request in self._overlaps:
            self._begin_step(request)

    def on_load_over(self, request: LedgerRequest) -> None:
        if request in self._overlaps:
            self._compare(request)

    def ask_commit(self, request: LedgerRequest, num_computed_tokens: int) -> None:
        if request in self._overlaps:
            self._check_valid(request, num_computed_tokens)

    def on_leaving(self, request: LedgerRequest, is_last: bool) -> None:
        if not is_last:
            self._acknowledge(request)

    def on_released(self, request: LedgerRequest) -> None:
        self._overlaps.pop(request, None)

    # -- the rules ------------------------------------------------------------------------------------------------

    def _can_start(self, request: LedgerRequest) -> bool:
        """Whether a step may overlap the load. The device must hold all units that the step would read, or jobs of the
        load must bring them, and the units after them must have blocks. False after a reset, because then jobs publish
        nothing."""
        cache, load, overlap = self._cache, request.load, self._overlaps.get(request)
        if load is None or not load.jobs:
            return False  # DRAINING: the results of its steps cannot be committed
        if request.checkpoints is not None:
            return False  # the checkpoint must be in the running state before the first layer computes
        if request.num_steps:
            return True  # another step of it is under way, on the same assumption
        if request.epoch != cache.epoch:
            return False
        if overlap is not None and overlap.state is OverlapState.INVALID:
            return False  # an overlap of an earlier load is invalid, and the engine does not know that yet
        if any(table.num_null(load.stop, request.num_units) for table in request.tables):
            return False
        return all(
            0 not in _once_landed(cache, request, load, component)[component.first_unit(load.stop) * component.width :]
            for component in cache.layout.paged
        )

    def _begin_step(self, request: LedgerRequest) -> None:
        """Record the block tables that the first step that overlaps a load assumes. Later steps build on that step."""
        cache, overlap = self._cache, self._overlaps.get(request)
        if overlap is not None and overlap.state is OverlapState.ACKNOWLEDGED:
            del self._overlaps[request]
            overlap = None
        if overlap is None and request.load is not None:
            tables = tuple(_once_landed(cache, request, request.load, component) for component in cache.layout.paged)
            stop = request.load.stop
            self._overlaps[request] = overlap = LoadOverlap(request, stop, stop * cache.layout.unit_tokens, tables)
            request.load.job_settled = partial(self._compare_job, request)
            self._move(overlap, OverlapState.SPECULATIVE)

    def _expected_ids(self, request: LedgerRequest) -> list[array[int]]:
        """The block tables, one per component, that an overlapping step assumes, as they will be once the load has
        landed."""
        overlap = self._overlaps.get(request)
        if request.load is None or not request.load.jobs:
            return [table.ids for table in request.tables]
        # Without a step under way, the overlap may belong to an earlier load.
        if overlap is None or (overlap.state is not OverlapState.SPECULATIVE and not request.num_steps):
            raise WrongState(f"block_ids: no step of {request} overlaps its load yet, so the load may change them")
        return [
            ids + table.ids[table.width * overlap.stop :]
            for ids, table in zip(overlap.tables, request.tables, strict=True)
        ]

    def _compare(self, request: LedgerRequest) -> None:
        """The load is over, and units that it did not bring are null. Mark the overlap as CONFIRMED if the tables are
        as the step assumed, else as INVALID. Another block with the same tokens counts as different, because the block
        that the step assumed, and may still read, is already free."""
        overlap = self._overlaps.get(request)
        if overlap is None or overlap.state is not OverlapState.SPECULATIVE:
            return
        for component in self._cache.layout.paged:
            first, table = component.first_unit(overlap.stop), request.tables[component.number]
            if table.at(first, overlap.stop) != overlap.tables[component.number][first * component.width :]:
                self._move(overlap, OverlapState.INVALID)
                return
        self._move(overlap, OverlapState.CONFIRMED)
        del self._overlaps[request]

    def _compare_job(self, request: LedgerRequest, job: Job) -> None:
        """A job of the load is settled. Mark the overlap as INVALID unless all of the job's blocks that the step reads
        are published. This cannot wait until the load ends, because a block that was not brought is free, and may be in
        the same position of the table again, with other bytes, before the load ends."""
        overlap, component = self._overlaps.get(request), self._cache.layout.components[job.component]
        if overlap is None or overlap.state is not OverlapState.SPECULATIVE:
            return
        first = component.first_unit(overlap.stop)
        lacking = set(overlap.tables[component.number][first * component.width :]) & set(job.plan.destination_ids)
        for run, _, _ in stretches(request.device_run, first, overlap.stop) if lacking else ():
            lacking.difference_update(run.part(Tier.DEVICE, component.number).blocks)
        if lacking:
            self._move(overlap, OverlapState.INVALID)

    def _check_valid(self, request: LedgerRequest, num_computed_tokens: int) -> None:
        """Refuse to commit tokens that a step computed from a load that fell short."""
        ready = request.num_computed_tokens
        if num_computed_tokens > ready:
            problem = f"is {num_computed_tokens}, but the load of {request} brought fewer tokens than its step assumed"
            raise CommitError("num_computed_tokens", f"{problem}: compute again from token {ready} on, in a new step")

    def _first_invalid_token(self, request: LedgerRequest) -> int | None:
        """The first token to compute again, now that the load is over; None: nothing to compute again."""
        overlap = self._overlaps.get(request)
        is_wrong = (
            overlap is not None
            and overlap.state is not OverlapState.SPECULATIVE
            and request.state is RequestState.RUNNING
        )
        return request.num_computed_tokens if is_wrong else None

    def _acknowledge(self, request: LedgerRequest) -> None:
        """Mark an invalid overlap as ACKNOWLEDGED: the engine knows of it, or has preempted the request."""
        overlap = self._overlaps.get(request)
        if overlap is not None and overlap.state is OverlapState.INVALID:
            self._move(overlap, OverlapState.ACKNOWLEDGED)

    def _move(self, overlap: LoadOverlap, state: OverlapState) -> None:
        old = self._moves.other(overlap, state, OVERLAP_MOVES)
        self._moves.note(OverlapMoved(overlap, old, state))


def _once_landed(cache: PrefixCache, request: LedgerRequest, load: Load, component: Component) -> array[int]:
    """The table of `component` up to the end of the load, as it will be once the load has landed. It has the blocks
    that the device holds, and for the other units the destinations of the jobs of the load."""
    expected, width = BlockTable(component.width, request.tables[component.number].at(0, load.stop)), component.width
    if not width:
        return expected.ids
    needed = component.first_unit(load.stop)
    expected.null(0, needed)
    for run, first, last in stretches(request.device_run, max(needed, request.published), load.stop):
        part = run.part(Tier.DEVICE, component.number)
        start, stop = max(part.first, first), min(part.stop, last)
        if start < stop:
            expected.put(start, part.ids(start, stop))
        # The last job first, and only into null entries, because an earlier job may continue in another branch, at
        # units that a later job brings in this branch.
        for job in jobs_into(part):
            start, stop = max(job.start, first), min(job.stop, last)
            if job in load.jobs and start < stop:
                there = expected.at(start, stop)
                brought = job.plan.destination_ids[(start - job.start) * width : (stop - job.start) * width]
                ids = array("i", [held or block_id for held, block_id in zip(there, brought, strict=True)])
                expected.put(start, ids)
    return expected.ids
