"""Load overlaps: a step that begins before the load of its request is over.

The step assumes that the load succeeds: it reads blocks that jobs still own, and writes after them, into the
request's own blocks. The assumption may turn out wrong: a copy may fail, or another request may publish the same tokens
first, and then the table of the request names other blocks than the step has read. So the block tables that the step
assumes are kept in a `LoadOverlap`. They are compared with each job of the load that is settled (`Load.job_settled`),
and with the tables of the request once the load is over.

    SPECULATIVE --> CONFIRMED       all blocks that the step reads were brought: what it computes counts
         `-------> INVALID          some were not: commits beyond the loaded tokens are refused
                      `---> ACKNOWLEDGED    the engine has asked for the first invalid token, and begins another step
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial

from .._kernel.cache import PrefixCache
from .._kernel.index import jobs_into, stretches
from .._kernel.layout import Component
from .._kernel.moves import Moves
from .._kernel.records import BlockTable, Job, Load
from .._kernel.requests import LedgerRequest, LoadOverlap
from .._kernel.states import OverlapState, Tier
from .._kernel.states import RequestState as State
from ..errors import CommitError, WrongState


def can_start(cache: PrefixCache, request: LedgerRequest) -> bool:
    """Whether a step may overlap the load: the device holds, or jobs of the load bring, all units that the step would
    read, and the units after them have blocks. False after a reset, because then jobs publish nothing."""
    load, overlap = request.load, request.overlap
    if load is None or not load.jobs:
        return False  # DRAINING: the results of its steps cannot be committed
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
        for component in cache.layout.components
    )


def begin_step(cache: PrefixCache, moves: Moves, request: LedgerRequest) -> None:
    """Record the block tables that the first step that overlaps a load assumes. Later steps build on that step."""
    if request.overlap is not None and request.overlap.state is OverlapState.ACKNOWLEDGED:
        request.overlap = None
    if request.overlap is None and request.load is not None:
        tables = tuple(_once_landed(cache, request, request.load, component) for component in cache.layout.components)
        stop = request.load.stop
        request.overlap = LoadOverlap(request, stop, stop * cache.layout.unit_tokens, tables)
        request.load.job_settled = partial(_compare_job, cache, moves, request)
        moves.overlap(request.overlap, OverlapState.SPECULATIVE)


def expected_ids(request: LedgerRequest) -> list[array[int]]:
    """The block tables, one per component, that an overlapping step assumes: those once the load has landed."""
    overlap = request.overlap
    if request.load is None or not request.load.jobs:
        return [table.ids for table in request.tables]
    # Without a step under way, the overlap may be that of an earlier load.
    if overlap is None or (overlap.state is not OverlapState.SPECULATIVE and not request.num_steps):
        raise WrongState(f"block_ids: no step of {request} has begun: a load may end otherwise until one has")
    return [
        ids + table.ids[table.width * overlap.stop :] for ids, table in zip(overlap.tables, request.tables, strict=True)
    ]


def compare(moves: Moves, request: LedgerRequest, components: Sequence[Component]) -> None:
    """The load is over, and units that it did not bring are null: CONFIRMED if the tables are as the step assumed, else
    INVALID. Another copy of the same tokens counts as different, because the block that the step assumed, and may still
    read, is free by then."""
    overlap = request.overlap
    if overlap is None or overlap.state is not OverlapState.SPECULATIVE:
        return
    for component in components:
        first, table = component.first_unit(overlap.stop), request.tables[component.number]
        if table.at(first, overlap.stop) != overlap.tables[component.number][first * component.width :]:
            moves.overlap(overlap, OverlapState.INVALID)
            return
    moves.overlap(overlap, OverlapState.CONFIRMED)
    request.overlap = None


def _compare_job(cache: PrefixCache, moves: Moves, request: LedgerRequest, job: Job) -> None:
    """A job of the load is settled: INVALID unless its blocks that the step reads are published. They are compared
    while the load goes on, because a block that was not brought is free: it may return to the same position with other
    bytes before the load ends."""
    overlap, component = request.overlap, cache.layout.components[job.component]
    if overlap is None or overlap.state is not OverlapState.SPECULATIVE:
        return
    first = component.first_unit(overlap.stop)
    lacking = set(overlap.tables[component.number][first * component.width :]) & set(job.plan.destination_ids)
    for run, _, _ in stretches(request.device_run, first, overlap.stop) if lacking else ():
        lacking.difference_update(run.part(Tier.DEVICE, component.number).blocks)
    if lacking:
        moves.overlap(overlap, OverlapState.INVALID)


def check_valid(request: LedgerRequest, num_computed_tokens: int) -> None:
    """Refuse to commit what was computed on a load that fell short."""
    ready = request.num_computed_tokens
    if request.overlap is not None and num_computed_tokens > ready:
        problem = f"is {num_computed_tokens}, but the load of {request} brought fewer tokens than its step assumed"
        raise CommitError("num_computed_tokens", f"{problem}: compute again from token {ready} on, in a new step")


def first_invalid_token(request: LedgerRequest) -> int | None:
    """The first token to compute again, now that the load is over; None: nothing to compute again."""
    overlap = request.overlap
    is_wrong = overlap is not None and overlap.state is not OverlapState.SPECULATIVE and request.state is State.RUNNING
    return request.num_computed_tokens if is_wrong else None


def acknowledge(moves: Moves, request: LedgerRequest) -> None:
    """Mark an invalid overlap as ACKNOWLEDGED: the engine knows of it, or has preempted the request."""
    if request.overlap is not None and request.overlap.state is OverlapState.INVALID:
        moves.overlap(request.overlap, OverlapState.ACKNOWLEDGED)


def _once_landed(cache: PrefixCache, request: LedgerRequest, load: Load, component: Component) -> array[int]:
    """The table of `component` up to the end of the load, as it will be once the load has landed: the blocks that the
    device holds, and for the rest the destinations of the jobs of the load."""
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
        # The last job first, and only where the table is null: a predecessor may go on in another branch, at units that
        # a later job brings here.
        for job in jobs_into(part):
            start, stop = max(job.start, first), min(job.stop, last)
            if job in load.jobs and start < stop:
                there = expected.at(start, stop)
                brought = job.plan.destination_ids[(start - job.start) * width : (stop - job.start) * width]
                ids = array("i", [held or block_id for held, block_id in zip(there, brought, strict=True)])
                expected.put(start, ids)
    return expected.ids
