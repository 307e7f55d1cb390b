"""An extension that makes random permitted calls at every hook."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable
from typing import Any

from aoffload._common.tiers import Tier
from aoffload._kernel.extension import LedgerExtension
from aoffload._kernel.layout import Component
from aoffload._kernel.records import Job, Lease, LedgerRequest, Run
from aoffload._kernel.tokens import TokenSequence

__all__ = ["RandomExtension"]

MOST = 6
"""Leases and stretches of blocks that it holds at most."""


class RandomExtension(LedgerExtension):
    """Leases, releases, cuts, splits, takes and gives. It holds nothing that another owner waits for: `ask_blocks`
    makes it give everything back."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"meddler {seed}")
        self._leases: list[Lease] = []
        self._blocks: list[tuple[Tier, array[int]]] = []
        self.num_acts = 0
        self.is_over = False
        """It does nothing any more."""

    def on_attach(self, ledger: Any) -> None:
        self._cache = ledger.cache

    def act(self) -> None:
        """One act, or none."""
        rng, cache = self._rng, self._cache
        if self.is_over or rng.random() < 0.6:
            return
        self.num_acts += 1
        tiers = [tier for tier in cache.tiers if not tier.is_outside]
        tier = rng.choice(tiers)
        runs = list(cache.index.runs.values())
        act = rng.choice(("lease", "release", "cut", "split", "take", "give"))
        if act == "lease" and runs and len(self._leases) < MOST:
            self._leases.append(cache.lease(tier.tier, rng.choice(runs), is_use=rng.random() < 0.5))
        elif act == "release" and self._leases:
            cache.release(self._leases.pop(rng.randrange(len(self._leases))))
        elif act in ("cut", "split") and self._leases:
            run = rng.choice(rng.choice(self._leases).run.whole_path())
            if run.stop - run.start > 1:
                at = rng.randrange(run.start + 1, run.stop)
                if act == "split":
                    cache.split(run, at)
                else:
                    cache.cut(run, at)
        elif act == "take" and tier.tier in (Tier.DEVICE, Tier.HOST) and len(self._blocks) < MOST:
            num_blocks = rng.randint(1, 3)
            if num_blocks <= tier.num_available:
                self._blocks.append((tier.tier, cache.take(tier.tier, num_blocks)))
        elif act == "give" and self._blocks:
            cache.give(*self._blocks.pop(rng.randrange(len(self._blocks))))

    def return_all(self) -> bool:
        """Give everything back. Returns whether there was something."""
        held = bool(self._leases or self._blocks)
        while self._leases:
            self._cache.release(self._leases.pop())
        while self._blocks:
            self._cache.give(*self._blocks.pop())
        return held

    # -- the hooks ------------------------------------------------------------------------------------------------

    def on_admitted(self, request: LedgerRequest, parent: LedgerRequest | None) -> None:
        self.act()

    def on_matched(self, request: LedgerRequest) -> None:
        self.act()

    def on_allocated(self, request: LedgerRequest) -> None:
        self.act()

    def on_load_over(self, request: LedgerRequest) -> None:
        self.act()

    def on_published(self, request: LedgerRequest, first: int) -> None:
        self.act()

    def on_finishing(self, request: LedgerRequest) -> None:
        self.act()

    def on_leaving(self, request: LedgerRequest, is_last: bool) -> None:
        self.act()

    def on_released(self, request: LedgerRequest) -> None:
        self.act()

    def on_step(self, request: LedgerRequest) -> None:
        self.act()

    def on_job_settled(self, job: Job) -> None:
        self.act()

    def on_withdrawn(self) -> None:
        self.act()

    def on_invalidated(self, sequence: TokenSequence, first: int, stop: int) -> list[Job]:
        self.act()
        return []

    def on_resetting(self, tier: Tier | None) -> None:
        self.act()

    def on_reset(self, tier: Tier | None) -> None:
        self.act()

    def on_lapse(self, now: float) -> None:
        self.act()

    def ask_store_stop(self, request: LedgerRequest) -> int:
        return self._rng.choice((0, 1, 3, 99))

    def ask_load_stop(self, request: LedgerRequest, stop: int) -> int:
        return self._rng.choice((0, stop, stop, 99))

    def ask_take(self, tier: Tier, run: Run, component: Component, num_units: int) -> int:
        return num_units if self._rng.random() < 0.9 else self._rng.choice((0, 1, 99))

    def ask_deferred(self, run: Run, stop: int) -> bool:
        return self._rng.random() < 0.1

    def ask_blocks(self) -> bool:
        return self.return_all()

    def ask_next_lapse(self) -> float:
        return self._rng.random()

    def report_leases(self) -> Iterable[Lease]:
        return self._leases

    def report_blocks(self, tier: Tier) -> Iterable[array[int]]:
        return [ids for owner, ids in self._blocks if owner is tier]
