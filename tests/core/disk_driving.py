"""A ledger with a disk, driven by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from driving import BLOCK, Driven

from aoffload import KVCacheGroup
from aoffload._common.tiers import Tier
from aoffload._config.tiers import ROUNDING_BYTES, SUPERBLOCK_BYTES, DiskTier, record_bytes
from aoffload._kernel.plans import TransferPlan
from aoffload._tiers.disk.plans import BlockLabel, DiskPayload

HUGE = 10**6


def disk_of(num_slots: int, unit_tokens: int = BLOCK, block_bytes: int = 1) -> DiskTier:
    """A disk that holds exactly `num_slots` blocks."""
    size = SUPERBLOCK_BYTES + ROUNDING_BYTES + num_slots * (block_bytes + record_bytes(unit_tokens))
    return DiskTier("nowhere", size)


def labels_of(plans: Iterable[TransferPlan]) -> list[BlockLabel | None]:
    """The labels of stores to the disk, in order."""
    return [label for plan in plans for label in DiskPayload.of(plan).labels]


class Disk(Driven):
    """By default a host of 16 blocks, of which 2 are stored before they are evicted, over a disk of 64."""

    def __init__(self, num_device: int = 16, num_host: int = 16, num_slots: int = 64, **config: Any) -> None:
        groups = config.setdefault("groups", [KVCacheGroup("full", block_size=BLOCK)])
        unit = max(group.block_size for group in groups)
        config.setdefault("max_fetch_share", 1.0)
        super().__init__(num_device, num_host, disk=disk_of(num_slots, unit), namespace="test", **config)

    def write_behind(self, max_blocks: int = HUGE, **options: Any) -> list[TransferPlan]:
        plans = list(self.ledger.disk.plan_stores(max_blocks, **options))
        self.ledger.check_integrity()
        return plans

    def flush(self) -> list[TransferPlan]:
        plans = list(self.ledger.disk.plan_flush(HUGE))
        self.ledger.check_integrity()
        self.land(plans)
        return plans

    def on_disk_only(self, *prompts: list[int], **options: Any) -> None:
        """Computed, stored down to the disk, and gone from the tiers above."""
        for tokens in prompts:
            self.on_host_only(tokens, **options)
        self.flush()
        self.forget_host()

    def forget_host(self) -> None:
        self.evict_device()
        self.ledger.reset(Tier.HOST)
        self.ledger.check_integrity()

    def fetched(self, tokens: list[int]) -> int:
        """Fetches all that a request would want; returns the tokens that hit then."""
        fetch = self.ledger.fetches.fetch(self.prefix(tokens))
        self.land(fetch.plans)
        assert fetch.is_over
        return fetch.num_tokens

    def on_disk(self, tokens: list[int]) -> int:
        return self.ledger.lookup(self.prefix(tokens)).num_lower_tokens
