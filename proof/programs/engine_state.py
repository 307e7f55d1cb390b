"""The state of a program over an engine's device blocks: a ledger, and the engine's pool, clock and requests."""

from __future__ import annotations

import attrs

from aoffload._host_cache.host_cache import HostCache

from .engine_pool import EnginePool, pool_of
from .fingerprint import with_handles
from .ledger_state import Client, LedgerState
from .program import World

__all__ = ["EngineClient", "EngineState"]


@attrs.define(eq=False)
class EngineClient(Client):
    """One request as the engine knows it."""

    tables: list[list[int]] = attrs.field(factory=list)
    """The engine's block tables, one for each group."""
    num_computed: int = 0
    """Tokens whose KV is in the tables, including those not offered yet."""
    unoffered: list[int] = attrs.field(factory=list)
    """Tokens that were sampled since the last offer."""
    unwritten: dict[int, range] = attrs.field(factory=dict)
    """By group: positions in its table whose blocks were never written."""
    has_loaded: bool = False
    """A load was planned, and nothing was offered since: other requests may wait for that."""
    checkpoints: dict[int, list[int]] = attrs.field(factory=dict)
    """Blocks of the checkpoints that it has written, by number of tokens."""
    incoming: list[int] = attrs.field(factory=list)
    """Blocks into which a load copies a checkpoint."""
    is_woken: bool = False
    """It was told to ask again."""

    def wake(self) -> None:
        self.is_woken = True

    def prefix(self, num_tokens: int) -> int:
        return self.text.prefixes[num_tokens]


class EngineState(LedgerState):
    """A ledger on an engine's blocks, with the engine's pool and clock."""

    clients: dict[str, EngineClient]  # type: ignore[assignment]
    ledger: HostCache  # type: ignore[assignment]

    def _open(self, world: World) -> HostCache:  # type: ignore[override]
        self.now = 0.0
        self.pool: EnginePool = pool_of(world)
        cache = HostCache(
            world.config(weights_epoch=self.first_epoch),
            world.num_device_blocks,
            self.pool.engine_blocks(),
            clock=lambda: self.now,
            observer=self.recorder,
        )
        with_handles(cache)
        return cache
