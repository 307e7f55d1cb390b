"""vLLM's blocks as the ledger sees them: held by copies, named in block tables, found in vLLM's prefix cache."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from .._transfer.region import KVRegion
from ..errors import RegionError


class BlockTable(Sequence[int]):
    """The ids of a list of vLLM's blocks. An id is read on access, because tables are long and few of their ids are
    needed."""

    __slots__ = ("_blocks",)

    def __init__(self, blocks: Sequence[Any]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [block.block_id for block in self._blocks[at]]
        return self._blocks[at].block_id


@attrs.define(eq=False)
class EnginePool:
    """`EngineBlocks` over vLLM's `BlockPool`. All groups share one pool, so an id names one block in all of them."""

    pool: Any
    group_ids: Sequence[int]
    """vLLM's number of each group of the ledger."""
    block_sizes: Sequence[int]
    """Tokens per block, group by group."""
    hashes_of: Callable[[str], Sequence[Any]]
    """The block hashes of a request, one for each `hash_block_size` tokens; none if the request is not known."""

    def hold(self, block_ids: array[int]) -> None:
        blocks = self.pool.blocks
        self.pool.touch([blocks[block_id] for block_id in block_ids])

    def give(self, block_ids: array[int]) -> None:
        blocks = self.pool.blocks
        self.pool.free_blocks([blocks[block_id] for block_id in reversed(block_ids)])  # evict a prefix from its end

    def find(self, request_id: str, group: int, start: int, stop: int) -> list[int]:
        """Blocks that vLLM's cache still has, although the request's table no longer contains them: they left the
        window, or the request has ended."""
        per_block = self.block_sizes[group] // self.pool.hash_block_size
        hashes, group_id = self.hashes_of(request_id), [self.group_ids[group]]
        found = []
        for at in range(start, stop):
            last = (at + 1) * per_block - 1
            cached = self.pool.get_cached_block(hashes[last], group_id) if last < len(hashes) else None
            found.append(cached[0].block_id if cached else 0)
        return found

    def forget_cached(self) -> None:
        """Empty vLLM's prefix cache. Requests keep the blocks that they use."""
        if self.is_all_free:
            self.pool.reset_prefix_cache()
        else:
            self.pool.evict_blocks(set(range(len(self.pool.blocks))))

    def is_private(self, block_id: int) -> bool:
        """Whether the block has one owner: a request, or a copy that holds the block."""
        return bool(self.pool.blocks[block_id].ref_cnt == 1)

    @property
    def is_all_free(self) -> bool:
        """Whether no block is in use. The null block is never free, and does not count."""
        return bool(self.pool.get_num_free_blocks() == len(self.pool.blocks) - 1)


# -- regions ---------------------------------------------------------------------------------------------------------
#
# Where the bytes of a block are in memory, from vLLM's `KVCacheTensor`s.


@attrs.frozen
class Placement:
    """One part of each block in the memory of the whole KV cache. For block `b`, it is the `block_bytes` bytes that
    start at `offset + b * block_bytes`."""

    offset: int
    block_bytes: int


def placements_of(tensors: Sequence[Any], num_blocks: int) -> tuple[Placement, ...]:
    """The parts of a block over all `tensors`, each part once. Groups share memory, because a block belongs to one
    group at a time. `RegionError` if the memory belongs to another process."""
    if any(tensor.host_resident for tensor in tensors):
        raise RegionError("kv_cache_tensors", "are partly in host memory already, which aoffload does not support")
    return tuple(dict.fromkeys(place for tensor in tensors for place in _placements(tensor, num_blocks)))


def _placements(tensor: Any, num_blocks: int) -> Iterator[Placement]:
    plane_bytes = num_blocks * tensor.block_stride
    if tensor.layer_stride < plane_bytes:  # a block contains the pages of all layers
        yield Placement(tensor.offset // plane_bytes * plane_bytes, tensor.block_stride)
        return
    if tensor.layer_stride % plane_bytes:
        raise RegionError("kv_cache_tensors", f"leave gaps of {tensor.layer_stride % plane_bytes} bytes between layers")
    for number in range(len(tensor.layers)):
        start = tensor.offset + number * tensor.layer_stride
        for plane in range(tensor.layer_stride // plane_bytes):  # several if the layout has heads before blocks
            yield Placement(start + plane * plane_bytes, tensor.block_stride)


def block_bytes_of(placements: Sequence[Placement]) -> int:
    return sum(place.block_bytes for place in placements)


def tensors_of(kv_caches: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor with the name of its layer. vLLM registers a list of tensors for a recurrent layer, one for each part
    of its state."""
    for name, caches in kv_caches.items():
        for cache in caches if isinstance(caches, list | tuple) else (caches,):
            yield name, cache


def regions_at(placements: Sequence[Placement], kv_caches: Mapping[str, Any], num_blocks: int) -> list[KVRegion]:
    """The regions of `placements` in the memory of the tensors that vLLM registers. All layers are in one
    allocation."""
    memories = {cache.untyped_storage().data_ptr(): cache for _, cache in tensors_of(kv_caches)}
    if len(memories) != 1:
        raise RegionError("kv_caches", f"are in {len(memories)} allocations, but must be in one")
    (cache,) = memories.values()
    raw = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
    found = []
    for place in placements:
        stop = place.offset + num_blocks * place.block_bytes
        if len(raw) < stop:
            raise RegionError("kv_caches", f"have {len(raw)} bytes of memory, but need {stop}")
        blocks = raw[place.offset : stop].view(num_blocks, place.block_bytes)
        found.append(KVRegion(blocks, place.block_bytes, place.block_bytes))
    return found
