"""Regions and fences by layer: each layer of a forward waits for its own KV while that of later layers loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import torch

from ..._transfer.region import KVRegion
from .layers import LayerPlace

if TYPE_CHECKING:
    from ..._transfer.fences import LoadedRegion

__all__ = ["NOTHING_TO_WAIT_FOR", "LayerFences", "layer_regions"]


def layer_regions(kv_cache: torch.Tensor) -> list[KVRegion]:
    """One region for each slot of the rows of `kv_cache` [num_blocks, slots, ...], for a runtime that loads by layer.

        OffloadRuntime(config, layer_regions(kv_cache[:num_blocks]))

    The memory layout does not change: a block of region `i` is `kv_cache[block_id, i]`, and the next block lies one
    row further. A row is still copied as one piece, unless a load is to arrive layer by layer. With several groups a
    slot holds one layer of each. Raises `RegionError` if the bytes of a slot do not lie together.
    """
    return [KVRegion.of(slot) for slot in kv_cache.unbind(1)]


@attrs.frozen
class LayerFences:
    """One fence for each slot of the KV tensor's rows: behind it a forward may read the slot. Empty: all is there."""

    slots: tuple[LoadedRegion, ...] = ()

    @classmethod
    def of(cls, regions: Sequence[LoadedRegion], num_slots: int) -> LayerFences:
        """From the regions of a load that `layer_regions` made. Regions in another number say nothing about layers:
        every layer then waits for all of them."""
        if len(regions) == num_slots:
            return cls(tuple(regions))
        jobs = [job for region in regions for job in region.jobs]
        return cls((attrs.evolve(regions[0], jobs=tuple(dict.fromkeys(jobs))),) * num_slots)

    def wait_for(self, place: LayerPlace) -> None:
        """Wait for the loaded KV of a layer, in the forward's thread: on a CPU sleep until it is there, on a GPU sleep
        until its copy is queued and have the current stream wait. `RegionNotLoaded` if it never comes."""
        if self.slots:
            self.slots[place.slot].wait()

    def give_up(self, error: str) -> None:
        """Have threads that wait for a copy to begin raise `RegionNotLoaded` now. Copies already begun are unharmed.

        Call from any thread.
        """
        for region in self.slots:
            region.give_up(error)


NOTHING_TO_WAIT_FOR = LayerFences()
