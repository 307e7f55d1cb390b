"""The laws of quotas, checked by an oracle that counts for itself: it hears each block that becomes cached or is no
longer cached, and asks the ledger for nothing but its index, its jobs and its eviction orders."""

from __future__ import annotations

from collections import Counter

from aoffload._common.prefix import Root
from aoffload._common.tiers import Tier
from aoffload._extensions.assembly import AnyLedger
from aoffload._kernel.records import Part, Run
from aoffload.testing.violations import Violation

from .program import EPOCHS, TENANTS, Call, QuotaShape

__all__ = ["QuotaLaws"]


class QuotaLaws:
    """Checks after each call that no account is above its ceiling, and that no block of an account at or below its
    floor was evicted for others while another account above its floor had an evictable block."""

    def __init__(self, ledger: AnyLedger, shapes: tuple[QuotaShape, ...]) -> None:
        self._ledger = ledger
        self._numbers = {
            Root("programs", salt).under_weights(epoch).digest: number
            for number, salt in enumerate(TENANTS)
            for epoch in EPOCHS
        }
        sizes = {tier.tier: tier.pool.num_blocks for tier in ledger.cache.tiers}
        self._floors: dict[Tier, list[int]] = {
            tier: [shape.floor(tier) or 0 for shape in shapes] for tier in (Tier.HOST, Tier.DISK) if tier in sizes
        }
        self._ceilings = {
            tier: [sizes[tier] if (most := shape.ceiling(tier)) is None else min(most, sizes[tier]) for shape in shapes]
            for tier in self._floors
        }
        self._pinned = [shape.pinned for shape in shapes]
        self._held: Counter[tuple[Tier, int]] = Counter()
        self._below: Counter[tuple[Tier, int]] = Counter()
        """Blocks of each account that were evicted below its floor in this call, although another account was above
        its floor."""
        self._replaced = self._num_replaced()
        ledger.watch(self)

    def _number_of(self, run: Run) -> int:
        return self._numbers[run.root.digest]

    @property
    def _has_unknown_roots(self) -> bool:
        """Whether the disk has restored runs: their accounts are not known at first."""
        return any(run.root.namespace != "programs" for run in self._ledger.cache.index.runs.values())

    # -- what the ledger reports ----------------------------------------------------------------------------------

    def part_changed(self, part: Part, first: int, stop: int) -> None:
        if part.tier not in self._floors:
            return
        key, change = (part.tier, self._number_of(part.run)), (part.stop - part.first - stop + first) * part.width
        self._held[key] += change
        if change < 0 and any(part is other for other in self._ledger.cache.tiers[part.tier].order):  # an eviction
            lost = self._floors[part.tier][key[1]] - self._held[key]
            if lost > 0 and self._others_above(part.tier, part):
                self._below[key] += min(lost, -change)

    def _others_above(self, tier: Tier, evicted: Part) -> bool:
        """Whether the account of another evictable part could lose it, and keep its floor."""
        mine, floors = self._number_of(evicted.run), self._floors[tier]
        first: dict[int, Part] = {}
        for part in self._ledger.cache.tiers[tier].order:
            first.setdefault(self._number_of(part.run), part)
        return any(
            number != mine and self._held[tier, number] - floors[number] >= part.width for number, part in first.items()
        )

    def all_cleared(self, epoch: int) -> None:
        self._held.clear()

    def _num_replaced(self) -> dict[tuple[Tier, int], int]:
        return {
            (each.tier, number): each.num_replaced
            for number, account in enumerate(self._ledger.quotas.statistics())
            for each in account.tiers
        }

    # -- laws -----------------------------------------------------------------------------------------------------

    def after(self, call: Call) -> None:
        below, self._below = self._below, Counter()
        before, self._replaced = self._replaced, self._num_replaced()
        if self._has_unknown_roots:
            return
        for key, num_blocks in below.items():
            tier, number = key
            if num_blocks > self._replaced[key] - before[key]:  # at its ceiling, it replaces its own blocks
                about = f"{num_blocks} blocks of account {number} below its floor in {tier.name}"
                raise Violation("a floor", f"{call} has evicted {about}, and another account was above its floor")
        pending = Counter(
            {
                (tier, number): sum(
                    len(job.plan.destination_ids)
                    for job in self._ledger.jobs.unsettled.values()
                    if job.plan.destination is tier and self._number_of(job.run) == number
                )
                for tier, floors in self._floors.items()
                for number in range(len(floors))
            }
        )
        for (tier, number), num_pending in pending.items():
            held, ceiling = self._held[tier, number], self._ceilings[tier][number]
            if held + num_pending > ceiling:
                about = f"{held} blocks of {tier.name} and {num_pending} on their way, above its ceiling {ceiling}"
                raise Violation("a ceiling", f"after {call} account {number} has {about}")
        for number, (account, most) in enumerate(zip(self._ledger.quotas.statistics(), self._pinned, strict=True)):
            if most is not None and account.num_pinned > most and call.name in ("pin", "unpin"):
                raise Violation("a pin", f"after {call} pins of account {number} hold {account.num_pinned} > {most}")
