"""Plans, which the core gives to a transport, and completions, which come back. Only these frozen values cross."""

from __future__ import annotations

from array import array

import attrs

from .hops import Direction, Outcome, Tier

__all__ = ["BlockLabel", "CellLabel", "Completion", "TransferPlan"]


@attrs.frozen(slots=True)
class BlockLabel:
    """What a block holds: place `place` of the unit at `position` in `band`, of the prefix whose digests through this
    unit and before it are `digest` and `before` (empty: there is nothing before it)."""

    band: int
    place: int
    position: int
    root: bytes
    digest: bytes
    before: bytes
    tokens: bytes
    """Of this unit, as little-endian int32."""


@attrs.frozen(slots=True)
class CellLabel:
    """Units `[start, stop)` of one band of the prefix whose digest through unit `stop` is `digest`: what a remote store
    keeps as one object. `stop - start` is a power of two, and `start` a multiple of it."""

    band: int
    digest: bytes
    start: int
    stop: int


@attrs.frozen
class TransferPlan:
    """Copy block `source_ids[i]` of tier `source` to block `destination_ids[i]` of tier `destination`, for every i.

    The order is prefix order. Ids are distinct on each side and never name the null block.
    """

    job_id: int
    source: Tier
    destination: Tier
    source_ids: array[int]
    destination_ids: array[int]
    labels: tuple[BlockLabel | None, ...] = ()
    """Of a store to the disk: what each block holds. None where tokens alone do not prove it."""
    generation: int = 0
    """Of a store to the disk: how often that tier had been reset when the job was planned."""
    cell: CellLabel | None = None
    """From or to a remote store: the one cell that it copies. The ids on the remote side are the places of the blocks
    in the cell, in prefix order from 0; a load may leave out the front or the end of a cell."""

    @property
    def hop(self) -> tuple[Tier, Tier]:
        return self.source, self.destination

    @property
    def direction(self) -> Direction:
        return Direction.LOAD if self.destination < self.source else Direction.STORE

    @property
    def num_blocks(self) -> int:
        return len(self.source_ids)


@attrs.frozen
class Completion:
    """The result of one plan. `num_landed`: proven blocks at its front. `corrupt`: indices into its ids."""

    job_id: int
    outcome: Outcome
    num_landed: int = 0
    corrupt: tuple[int, ...] = ()
    error: str = ""
    num_bytes: int = 0
    duration_s: float = 0.0
