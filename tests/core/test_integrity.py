"""`check_integrity`: each law is broken by hand in a busy ledger, and the error names it."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest
from driving import Driven, prompt

from aoffload._common.prefix import Prefix, Root
from aoffload._common.tiers import Tier
from aoffload._kernel.records import Job, Run
from aoffload._kernel.states import Outcome
from aoffload.errors import IntegrityError


class Busy(Driven):
    """Runs of two prompts with one head, a store in flight, one in quarantine, a line of three, a running request."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        head = [9] * 8
        for name in (1, 2):
            request = self.running([*head, *prompt(name, 5)])
            self.land(self.commit(request, 12))
            self.release(request)
        doubtful = self.running(prompt(3, 9))
        (plan,) = self.launch(self.commit(doubtful, 8))
        self.end(plan, Outcome.UNPROVEN)
        self.release(doubtful)
        self.running_one = self.running([*head, *prompt(1, 5), 1, 1, 1])
        (self.store,) = self.launch(self.commit(self.running_one, 16))
        self.waiters = [self.ledger.queue_allocation(self.admit(prompt(10 + n, 60))) for n in range(3)]
        self.ledger.check_integrity()

    def run_with(self, tier: Tier, *, pinned: bool) -> Run:
        runs = self.ledger.cache.index.runs.values()
        return next(run for run in runs if run.parts[tier].blocks and bool(run.parts[tier].num_references) == pinned)


def tier(busy: Busy, which: Tier) -> Any:
    return busy.ledger.cache.tiers[which]


def empty_run(busy: Busy) -> None:
    run = busy.run_with(Tier.DEVICE, pinned=True)
    run.start = run.stop


def run_inside_out(busy: Busy) -> None:
    run = busy.run_with(Tier.DEVICE, pinned=True)
    run.start = run.stop + 1


def unfindable(busy: Busy) -> None:
    run = busy.run_with(Tier.DEVICE, pinned=True)
    del busy.ledger.cache.index.runs[run.key]


def run_for_nothing(busy: Busy) -> None:
    busy.ledger.cache.index.insert(busy.waiters[0].request.sequence, None, 0, 1)


def miscounted_after(busy: Busy) -> None:
    busy.run_with(Tier.DEVICE, pinned=True).num_after += 1


def followed(busy: Busy) -> Run:
    found = (run.before for run in busy.ledger.cache.index.runs.values() if run.before is not None)
    return next(run for run in found if run.stop - run.start > 1)


def gap(busy: Busy) -> None:
    head = followed(busy)
    head.stop -= 1
    for part in head.parts:
        part.stop = min(part.stop, head.stop)
        del part.blocks[part.stop - head.start :]


def overlap(busy: Busy) -> None:
    followed(busy).stop += 1


def part_too_long(busy: Busy) -> None:
    busy.run_with(Tier.HOST, pinned=False).parts[Tier.HOST].stop += 1


def part_of_another_run(busy: Busy) -> None:
    busy.run_with(Tier.DEVICE, pinned=True).parts[Tier.DEVICE].run = busy.run_with(Tier.HOST, pinned=False)


def one_block_too_many(busy: Busy) -> None:
    busy.run_with(Tier.DEVICE, pinned=True).parts[Tier.DEVICE].blocks.append(99)


def one_block_too_few(busy: Busy) -> None:
    busy.run_with(Tier.DEVICE, pinned=True).parts[Tier.DEVICE].blocks.pop()


def reference_too_many(busy: Busy) -> None:
    busy.run_with(Tier.DEVICE, pinned=True).parts[Tier.DEVICE].num_references += 1


def not_in_the_order(busy: Busy) -> None:
    blocks = tier(busy, Tier.HOST)
    part = blocks.order.oldest()
    blocks.order.remove(part)


def pinned_but_in_the_order(busy: Busy) -> None:
    tier(busy, Tier.HOST).order.add(busy.run_with(Tier.HOST, pinned=True).parts[Tier.HOST])


def evictable_miscounted(busy: Busy) -> None:
    tier(busy, Tier.HOST).num_cached += 1


def two_hands(busy: Busy) -> None:
    tier(busy, Tier.DEVICE).pool.give(array("i", [busy.running_one.table[0]]))


def no_hand(busy: Busy) -> None:
    tier(busy, Tier.HOST).pool.take(1)


def null_block(busy: Busy) -> None:
    tier(busy, Tier.DEVICE).pool._free[0] = 0


def quarantine_miscounted(busy: Busy) -> None:
    tier(busy, Tier.HOST).num_quarantined += 1


def wrong_table(busy: Busy) -> None:
    table = busy.running_one.table
    table[0], table[1] = table[1], table[0]


def released_lease(busy: Busy) -> None:
    busy.running_one.leases[Tier.DEVICE].released = True


def settled_job_awaited(busy: Busy) -> None:
    busy.ledger.jobs.unsettled[busy.store.job_id].completion = object()  # type: ignore[assignment]


def earlier_job_reaches_further(busy: Busy) -> None:
    job = busy.ledger.jobs.unsettled[busy.store.job_id]
    leases = job.source_lease, job.destination_lease
    shorter = Job(job.plan, job.run, job.start, job.stop - 1, job.epoch, job.component, *leases, job.request_id)
    shorter.predecessor = job
    job.run.parts[Tier.HOST].incoming = shorter


def pins_behind_the_head(busy: Busy) -> None:
    last = busy.waiters[-1].request
    last.leases[Tier.HOST] = busy.ledger.cache.lease(Tier.HOST, busy.run_with(Tier.HOST, pinned=False))


def waiter_out_of_place(busy: Busy) -> None:
    busy.waiters[-1].request.waiter = None


LAWS: list[tuple[Callable[[Busy], None], str]] = [
    (empty_run, "an empty run"),
    (run_inside_out, "an empty run"),
    (unfindable, "not findable"),
    (run_for_nothing, "a run without blocks, references or children is in the index"),
    (miscounted_after, "child runs are miscounted"),
    (gap, "a gap in a path"),
    (overlap, "a gap in a path"),
    (part_too_long, "outside of its run|wrong length"),
    (part_of_another_run, "outside of its run"),
    (one_block_too_many, "wrong length"),
    (one_block_too_few, "wrong length"),
    (reference_too_many, "references are not its leases"),
    (not_in_the_order, "eviction order differs from the set of unpinned parts"),
    (pinned_but_in_the_order, "eviction order differs from the set of unpinned parts"),
    (evictable_miscounted, "evictable blocks are miscounted"),
    (two_hands, r"blocks have two owners: \[\d+\]$"),
    (no_hand, "blocks without an owner"),
    (null_block, "the null block is in use"),
    (quarantine_miscounted, "quarantine is miscounted"),
    (wrong_table, "a table does not name its leased blocks"),
    (released_lease, "a released lease is still held"),
    (settled_job_awaited, "a settled job is still `incoming`"),
    (earlier_job_reaches_further, "an earlier job brings more than the last one"),
    (pins_behind_the_head, "a waiter after the head keeps pins"),
    (waiter_out_of_place, "a waiter out of place"),
]


@pytest.mark.parametrize(("damage", "law"), LAWS, ids=lambda value: getattr(value, "__name__", ""))
def test_each_law_is_named_when_it_is_broken(damage: Callable[[Busy], None], law: str) -> None:
    """Every conservation law is looked at, not only the ones that most defects break first."""
    busy = Busy()
    damage(busy)
    with pytest.raises(IntegrityError, match=law):
        busy.ledger.check_integrity()


def test_a_table_is_looked_at_beside_private_copies() -> None:
    """In a run of which a request has computed its own copy in part, the rest of its table still has to be right."""
    driven = Driven(8)
    driven.serve(prompt(1, 17))
    driven.release(driven.allocated(prompt(9, 24)), "filler")  # of four blocks, two stay on the device
    driven.ledger.pins.hold(Prefix.of(Root("test"), prompt(1, 17)))  # else its copy would take their place
    request = driven.running(prompt(1, 17), max_hit_tokens=0)
    driven.commit(request)
    assert request.tables[0].duplicates == [range(2)]
    table = request.table
    table[2], table[3] = table[3], table[2]
    with pytest.raises(IntegrityError, match="a table does not name its leased blocks"):
        driven.ledger.check_integrity()
