"""Groups of layers that share a block table, chosen so that the blocks of all groups have one size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import attrs
import torch

from ..._config.config import GroupLike
from ..._config.groups import AttentionKind, FullAttention, KVCacheGroup, SlidingWindow
from ..._config.model_layout import equal_groups
from ..._transfer.region import KVRegion
from ...errors import ConfigError

if TYPE_CHECKING:
    from ..._transfer.fences import LoadedRegion


@attrs.frozen
class LayerPlace:
    """The place of a layer's keys and values: `kv_cache[block_id, slot]`, by the block table of group `group`."""

    group: int
    slot: int
    window: int | None
    """Number of tokens that a token of this layer reads, itself included. None: itself and all tokens before it."""


@attrs.frozen
class LayerGroup:
    """Layers with one attention kind and one block table. `layers[i]` uses slot `i` of a row of the KV tensor."""

    name: str
    layers: tuple[int, ...]
    attention: AttentionKind = attrs.field(factory=FullAttention)

    @property
    def window(self) -> int | None:
        return self.attention.window if isinstance(self.attention, SlidingWindow) else None


def group_layers(kinds: Sequence[AttentionKind]) -> tuple[LayerGroup, ...]:
    """The groups of a model whose layer `i` has the attention `kinds[i]`, with the kinds in order of first occurrence.

    All groups have the same number of layers, so a block has the same number of bytes in each of them, and one pool
    serves all. That number is the greatest common divisor of the kinds' layer counts.

        kinds      s s s s s f s s s s s f          s: sliding, f: full
        group      0 0 1 1 2 5 2 3 3 4 4 5          two layers each
    """
    return tuple(LayerGroup(name, layers, kind) for name, kind, layers in equal_groups(kinds))


def places_of(groups: Iterable[LayerGroup]) -> dict[int, LayerPlace]:
    """The place of each layer, by its index."""
    return {
        layer: LayerPlace(index, slot, group.window)
        for index, group in enumerate(groups)
        for slot, layer in enumerate(group.layers)
    }


def kv_cache_groups(groups: Iterable[LayerGroup], block_size: int) -> list[KVCacheGroup]:
    """The value of `OffloadConfig(groups=...)` for a model with these groups."""
    return [KVCacheGroup(group.name, attention=group.attention, block_size=block_size) for group in groups]


def check_groups(groups: Sequence[LayerGroup], configured: Sequence[GroupLike], block_size: int) -> None:
    """Raise `ConfigError` unless a runtime with groups `configured` retains all KV that a model with `groups` reads."""
    if len(configured) != len(groups):
        raise ConfigError("groups", f"are {len(configured)} in the runtime, but {len(groups)} in the model")
    for mine, theirs in zip(groups, configured, strict=True):
        attention = getattr(theirs, "attention", None)
        if attention != mine.attention and not isinstance(attention, FullAttention):
            raise ConfigError(
                "groups", f"{theirs.name!r} keeps {attention}, but the model's layers read {mine.attention}"
            )
        if theirs.block_size != block_size:
            raise ConfigError("groups", f"{theirs.name!r} has blocks of {theirs.block_size} tokens, not {block_size}")


# -- layer fences ----------------------------------------------------------------------------------------------------
#
# Regions and fences by layer: each layer of a forward waits for its own KV while the KV of later layers loads.


def layer_regions(kv_cache: torch.Tensor) -> list[KVRegion]:
    """One region for each slot of the rows of `kv_cache` [num_blocks, slots, ...], for a runtime that loads by layer.

        OffloadRuntime(config, layer_regions(kv_cache[:num_blocks]))

    The memory layout does not change: a block of region `i` is `kv_cache[block_id, i]`, and the next block is one row
    further. A row is still copied as one piece, unless a load has to arrive layer by layer. With several groups a slot
    holds one layer of each. Raises `RegionError` if the bytes of a slot are not contiguous.
    """
    return [KVRegion.of(slot) for slot in kv_cache.unbind(1)]


@attrs.frozen
class LayerFences:
    """One fence for each slot of the KV tensor's rows. A forward may read a slot after its fence has passed. Without
    fences, everything is loaded."""

    slots: tuple[LoadedRegion, ...] = ()

    @classmethod
    def of(cls, regions: Sequence[LoadedRegion], num_slots: int) -> LayerFences:
        """The fences from the regions of a load that `layer_regions` made. If their number differs from `num_slots`,
        they do not correspond to layers, so every layer waits for all of them."""
        if len(regions) == num_slots:
            return cls(tuple(regions))
        jobs = [job for region in regions for job in region.jobs]
        return cls((attrs.evolve(regions[0], jobs=tuple(dict.fromkeys(jobs))),) * num_slots)

    def wait_for(self, place: LayerPlace) -> None:
        """Wait for the loaded KV of a layer, in the forward's thread. On a CPU, the call blocks until the KV is loaded.
        On a GPU, it blocks until the copy is queued, and makes the current stream wait. `RegionNotLoaded` if the KV
        never comes."""
        if self.slots:
            self.slots[place.slot].wait()

    def give_up(self, error: str) -> None:
        """Make threads that wait for a copy to begin raise `RegionNotLoaded` now. Copies that have begun are not
        affected.

        Any thread may call this.
        """
        for region in self.slots:
            region.give_up(error)


NOTHING_TO_WAIT_FOR = LayerFences()
