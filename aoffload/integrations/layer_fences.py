"""Regions by layer: what the layers of a forward wait for, while later ones are still being loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import torch

from ..transfer.region import KVRegion
from .layers import LayerPlace

if TYPE_CHECKING:
    from ..transfer.region_fences import LoadedRegion

__all__ = ["NOTHING_TO_WAIT_FOR", "LayerFences", "layer_regions"]


def layer_regions(kv_cache: torch.Tensor) -> list[KVRegion]:
    """One region for each slot of the rows of `kv_cache` [num_blocks, slots, ...], for a runtime that loads by layer.

        OffloadRuntime(config, layer_regions(kv_cache[:num_blocks]))

    The memory stays as it is: a block of region `i` is `kv_cache[block_id, i]`, the next one a whole row further, and
    on the way to host memory and back a row is still one piece, unless the load is to come layer by layer. With
    several groups a slot holds a layer of each. Raises `RegionError` where a slot is not contiguous.
    """
    return [KVRegion.of(slot) for slot in kv_cache.unbind(1)]


@attrs.frozen
class LayerFences:
    """For each slot of a row of the KV tensor the fence behind which a forward may read it. None: all is there."""

    slots: tuple[LoadedRegion, ...] = ()

    @classmethod
    def of(cls, regions: Sequence[LoadedRegion], num_slots: int) -> LayerFences:
        """From the regions of a load, as `layer_regions` has made them. Others tell nothing about layers: then every
        layer waits for all of them."""
        if len(regions) == num_slots:
            return cls(tuple(regions))
        jobs = [job for region in regions for job in region.jobs]
        return cls((attrs.evolve(regions[0], jobs=tuple(dict.fromkeys(jobs))),) * num_slots)

    def wait_for(self, place: LayerPlace) -> None:
        """Before a layer reads what others have written, in the forward's thread: sleep until it is there, on a GPU
        have the current stream wait for it. `RegionNotLoaded` if it never comes."""
        if self.slots:
            self.slots[place.slot].wait()

    def give_up(self, error: str) -> None:
        """Have whoever waits, in any thread, raise `RegionNotLoaded` now. What is there already stays."""
        for region in self.slots:
            region.give_up(error)


NOTHING_TO_WAIT_FOR = LayerFences()
