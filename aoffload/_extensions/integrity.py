"""Checks all invariants by a full scan: every block has one owner, and every reference belongs to a lease."""

from __future__ import annotations

from collections import Counter
from itertools import chain, islice

from .._common.tiers import Tier
from .._kernel.base import CacheBase
from .._kernel.cache import PrefixCache
from .._kernel.index import covered, jobs_into
from .._kernel.layout import Component
from .._kernel.records import BlockTable, Lease, LedgerRequest, Run
from .._kernel.states import NoEpoch
from .._kernel.waiting import WaitQueue
from ..errors import IntegrityError


def check_integrity(ledger: CacheBase, queue: WaitQueue | None = None) -> None:
    """Raise `IntegrityError` naming the first invariant that does not hold. Scans every block."""
    cache, jobs, hooks = ledger.cache, ledger.jobs, ledger.hooks
    held = (
        *ledger.live_requests.values(),
        *ledger.closing,
        *chain.from_iterable([ask() for ask in hooks.report_requests]),
    )
    leases = [lease for request in held for lease in request.all_leases()]
    leases += [lease for job in jobs.unsettled.values() for lease in job.leases()]
    leases += chain.from_iterable([ask() for ask in hooks.report_leases])
    runs = _runs(cache, leases)
    num_after = Counter(run.before for run in runs if run.before is not None and run.epoch == run.before.epoch)
    for run in runs:
        _check_run(cache, run, num_after[run])
    for job in jobs.unsettled.values():
        for check in hooks.report_job:
            check(job)
    for tier in cache.tiers:
        of_tier = [lease for lease in leases if lease.tier is tier.tier]
        for component in cache.layout.components:
            _check_references(tier.tier, component, runs, of_tier)
        _check_order(cache, tier.tier, runs)
        _check_blocks(ledger, tier.tier, runs, held)
    for request in held:
        _check_tables(request)
    if queue is not None:
        _check_queue(queue)
    if (error := hooks.take_error()) is not None:  # of an eviction order that has yielded its parts here
        raise error


def demand(law: bool, message: str, *about: object) -> None:
    if not law:
        raise IntegrityError(f"{message}: {', '.join(map(repr, about))}")


def _runs(cache: PrefixCache, leases: list[Lease]) -> set[Run]:
    """All runs: those in the index, and leased runs that a reset has removed from the index."""
    runs = set(cache.index.runs.values())
    for lease in leases:
        demand(not lease.released, "a released lease is still held", lease)
        runs.update(lease.run.path())
    return runs


def _check_run(cache: PrefixCache, run: Run, num_after: int) -> None:
    demand(run.start < run.stop, "an empty run", run)
    if run.epoch == cache.epoch:
        demand(cache.index.runs.get(run.key) is run, "a run of this epoch that is not findable", run)
        demand(not run.holds_nothing(), "a run without blocks, references or children is in the index", run)
        demand(run.num_after == num_after, "child runs are miscounted", run, run.num_after, num_after)
    is_short = not any(cache.is_cut(position) for position in range(run.start + 1, run.stop))
    demand(is_short, "a run crosses a maximum boundary", run)
    if run.before is not None:
        demand(run.before.stop == run.start, "a gap in a path", run.before, run)
    for part in run.parts:
        is_inside = run.start <= part.first <= part.stop <= run.stop
        demand(part.run is run and is_inside, "a part outside of its run", run, part.run)
        demand(len(part.blocks) == (part.stop - part.first) * part.width, "a part of the wrong length", run)
        begins_there = part.first == run.start or (part.component > 0 and bool(part.blocks))
        demand(begins_there, "a part that does not begin where its run does", run, part.first)
        if part.incoming is not None:
            demand(not part.incoming.is_settled, "a settled job is still `incoming`", run, part.incoming)
            furthest = max((min(job.stop, run.stop) for job in jobs_into(part)), default=run.start)
            demand(covered(part)[1] >= furthest, "an earlier job brings more than the last one", run, part.incoming)


def _check_references(tier: Tier, component: Component, runs: set[Run], leases: list[Lease]) -> None:
    expected: Counter[Run] = Counter()
    for lease in leases:
        start = lease.starts[component.number]
        pinned = [run for run in lease.run.path() if run.stop > start]
        demand(all(run.start >= start for run in pinned), "a lease begins inside of a run", lease, start)
        expected.update(pinned)
    for run in runs:
        number = run.part(tier, component.number).num_references
        demand(number == expected[run], f"{tier.name} references are not its leases", run, number, expected[run])


def _check_order(cache: PrefixCache, tier: Tier, runs: set[Run]) -> None:
    blocks = cache.tiers[tier]
    parts = [part for run in runs for part in run.parts_in(tier)]
    ordered = list(islice(blocks.order, len(parts) + 1))  # a broken list may never end
    unpinned = {part for part in parts if part.blocks and not part.num_references}
    is_whole = len(set(ordered)) == len(ordered) and set(ordered) == unpinned
    demand(is_whole, f"{tier.name} eviction order differs from the set of unpinned parts")
    total = sum(len(part.blocks) for part in ordered)
    demand(blocks.num_cached == total, f"{tier.name} evictable blocks are miscounted", blocks.num_cached, total)


def _check_blocks(ledger: CacheBase, tier: Tier, runs: set[Run], requests: tuple[LedgerRequest, ...]) -> None:
    cache, jobs = ledger.cache, ledger.jobs
    hands: list[int] = list(cache.tiers[tier].pool.free_ids())
    for run in runs:
        for part in run.parts_in(tier):
            hands += part.blocks
            hands += part.tombstone_ids()
    quarantined = [job for job in jobs.quarantined.values() if job.plan.destination is tier]
    for job in (*jobs.unsettled.values(), *quarantined):
        if job.plan.destination is tier:
            hands += job.plan.destination_ids
    number = sum(len(job.plan.destination_ids) for job in quarantined)
    demand(cache.tiers[tier].num_quarantined == number, f"{tier.name} quarantine is miscounted", number)
    plans = [job.plan for job in jobs.unsettled.values() if job.plan.source is tier]
    known = {there.tier for there in cache.tiers if not there.is_outside}
    stored = sum(plan.num_blocks for plan in plans if tier < plan.destination and plan.destination in known)
    demand(jobs.num_stored_now(tier) == stored, f"{tier.name} blocks being stored are miscounted", stored)
    if cache.tiers[tier].is_outside:
        # Only jobs hold engine-owned blocks, and no two jobs write to the same block.
        demand(len(set(hands)) == len(hands), "two copies write to a block of the engine's", hands)
        number, total = len(hands) + sum(map(len, jobs.ids_being_read(tier))), cache.tiers[tier].pool.num_blocks
        demand(total == number, "an engine's blocks are held by no job", total, number)
        return
    if tier is Tier.DEVICE:
        for request in requests:
            hands += request.private_blocks()
            if request.waiter is not None and request.waiter.granted is not None:
                hands += request.waiter.granted
    for ask in ledger.hooks.report_blocks:
        hands += chain.from_iterable(ask(tier))
    held = set(hands)
    if len(held) != len(hands):
        twice = [block_id for block_id, number in Counter(hands).items() if number > 1][:8]
        raise IntegrityError(f"{tier.name} blocks have two owners: {twice}")
    total = cache.tiers[tier].pool.num_blocks
    demand(len(held) == total, f"{tier.name} blocks without an owner", total - len(held))
    demand(tier is not Tier.DEVICE or 0 not in held, "the null block is in use")


def _check_tables(request: LedgerRequest) -> None:
    if request.epoch is NoEpoch.INVALIDATED:
        return  # its tables may name withdrawn blocks, which a running forward only reads
    if request.epoch is NoEpoch.ORPHANED:
        for number, table in enumerate(request.tables):
            _check_kept(request, number, table)
        return
    _check_checkpoints(request)
    for number, table in enumerate(request.tables):
        demand(len(table.ids) == request.num_units * table.width, "a table of the wrong length", request, number)
        demand(not any(table.at(0, table.start)), "a table names blocks before its window", request, number)
        if request.load is None and table.start <= request.published:
            lease = request.leases.get(Tier.DEVICE)
            is_let_go = lease is None or lease.starts[number] >= table.start
            demand(is_let_go, "blocks before a window are pinned", request, number)
        _check_table(request, number, table)


def _check_checkpoints(request: LedgerRequest) -> None:
    """The checkpoints that a step of `request` may read or write are cached blocks that its device lease pins."""
    checkpoints, lease = request.checkpoints, request.leases.get(Tier.DEVICE)
    if checkpoints is None or not (checkpoints.resume or checkpoints.written):
        return
    pinned: set[int] = set()
    for run in lease.run.path() if lease is not None else ():
        if run.start >= lease.starts[-1]:  # type: ignore[union-attr]
            part = run.parts_in(Tier.DEVICE)[-1]
            pinned.update(part.blocks, part.tombstone_ids())
    is_kept = pinned.issuperset(checkpoints.resume + checkpoints.written)
    demand(is_kept, "a checkpoint that a step may use is not pinned", request)


def _check_kept(request: LedgerRequest, component: int, table: BlockTable) -> None:
    """After a device reset, the tables of a request name only blocks that it still owns or leases."""
    private = {unit for units in table.duplicates for unit in units}
    kept = {0}  # null: units that a load has not brought
    run = request.device_run
    for current in run.path() if run is not None else ():
        part = current.part(Tier.DEVICE, component)
        kept.update(part.blocks)
        kept.update(part.tombstone_ids())
    for unit in range(table.start, min(request.published, request.num_units)):
        is_kept = unit in private or kept.issuperset(table.at(unit, unit + 1))
        demand(is_kept, "a table names blocks that its request does not own", request, unit)


def _check_table(request: LedgerRequest, component: int, table: BlockTable) -> None:
    private = {unit for units in table.duplicates for unit in units}
    run = request.device_run
    for current in run.path() if run is not None and table.width else ():
        part = current.part(Tier.DEVICE, component)
        for unit in range(max(current.start, table.start), min(current.stop, request.published)):
            if not part.first <= unit < part.stop:
                continue  # found corrupt and forgotten
            same = table.at(unit, unit + 1) == part.ids(unit, unit + 1)
            demand(same != (unit in private), "a table does not name its leased blocks", request, unit)


def _check_queue(queue: WaitQueue) -> None:
    for waiter in queue.allocating[1:]:
        demand(not waiter.request.all_leases(), "a waiter after the head keeps pins", waiter)
    for waiter in (*queue.extending, *queue.allocating):
        demand(waiter.request.waiter is waiter and not waiter.is_over, "a waiter out of place", waiter)
