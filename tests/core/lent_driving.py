"""A ledger with blocks that an engine lends, driven by hand."""

from __future__ import annotations

from typing import Any

from driving import BLOCK, Driven

from aoffload import Holding, KVCacheGroup, Ledger, LentBlocks, OffloadConfig

__all__ = ["BLOCK", "LentDriven"]


class LentDriven(Driven):
    """The engine's free blocks are `free`, handed out from the lowest; `given` holds what came back, in order."""

    def __init__(self, num_device: int, num_host: int = 16, **config: Any) -> None:
        config.setdefault("groups", [KVCacheGroup("full", block_size=BLOCK)])
        self.free = list(range(1, num_device + 1))
        self.given: list[int] = []
        pool = LentBlocks(self.take_back)
        self.ledger = Ledger(OffloadConfig(num_host_blocks=num_host, **config), num_device + 1, device_pool=pool)

    def take_back(self, block_ids: list[int]) -> None:
        self.given += block_ids
        self.free = sorted([*self.free, *block_ids])
        assert len(set(self.free)) == len(self.free)

    def fresh(self, num_blocks: int) -> list[int]:
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        return taken

    def lent(self, tokens: list[int], *device_ids: int, **options: Any) -> Holding:
        """Admitted, with the engine's `device_ids` at its front, computed already, and fresh ones behind."""
        holding = self.admit(tokens, num_device_tokens=len(device_ids) * BLOCK, **options)
        self.lend(holding, *device_ids)
        return holding

    def lend(self, holding: Holding, *device_ids: int, **options: Any) -> None:
        self.free = [block_id for block_id in self.free if block_id not in device_ids]
        wanted = -(-holding.sequence.num_tokens // BLOCK)
        ids = [*device_ids, *self.fresh(wanted - len(device_ids))]
        self.ledger.lend(holding, [list(ids) for _ in self.ledger.layout.groups], **options)
        self.ledger.check_integrity()

    def running(self, tokens: list[int], *device_ids: int, **options: Any) -> Holding:
        holding = self.lent(tokens, *device_ids, **options)
        self.land(self.ledger.plan_load(holding))
        return holding

    def on_host_only(self, tokens: list[int], **options: Any) -> None:
        self.serve(tokens, **options)
        self.given.clear()

    def table(self, holding: Holding) -> list[int]:
        return self.ledger.block_ids(holding)[0]
