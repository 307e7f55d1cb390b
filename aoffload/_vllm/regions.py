"""Where the bytes of a block lie, from vLLM's `KVCacheTensor`s."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from .._transfer.region import KVRegion
from ..errors import RegionError

__all__ = ["Placement", "block_bytes_of", "placements_of", "regions_at"]


@attrs.frozen
class Placement:
    """One stretch of each block in the memory of the whole KV cache: that of block `b` is the `block_bytes` bytes from
    `offset + b * block_bytes` on."""

    offset: int
    block_bytes: int


def placements_of(tensors: Sequence[Any], num_blocks: int) -> tuple[Placement, ...]:
    """The stretches of a block over all `tensors`, each one once: groups lie over one another, for a block belongs to
    one group at a time. `RegionError` for memory of other processes."""
    if any(tensor.host_resident for tensor in tensors):
        raise RegionError("kv_cache_tensors", "lie in host memory, in part: there is nothing to offload")
    return tuple(dict.fromkeys(place for tensor in tensors for place in _placements(tensor, num_blocks)))


def _placements(tensor: Any, num_blocks: int) -> Iterator[Placement]:
    plane_bytes = num_blocks * tensor.block_stride
    if tensor.layer_stride < plane_bytes:  # the pages of all layers lie together in a block
        yield Placement(tensor.offset // plane_bytes * plane_bytes, tensor.block_stride)
        return
    if tensor.layer_stride % plane_bytes:
        raise RegionError("kv_cache_tensors", f"leave gaps of {tensor.layer_stride % plane_bytes} bytes between layers")
    for number in range(len(tensor.layers)):
        start = tensor.offset + number * tensor.layer_stride
        for plane in range(tensor.layer_stride // plane_bytes):  # several where heads come before blocks
            yield Placement(start + plane * plane_bytes, tensor.block_stride)


def block_bytes_of(placements: Sequence[Placement]) -> int:
    return sum(place.block_bytes for place in placements)


def regions_at(placements: Sequence[Placement], kv_caches: Mapping[str, Any], num_blocks: int) -> list[KVRegion]:
    """The regions of `placements` in the memory of the tensors that vLLM registers: one allocation for all layers."""
    memories = {cache.untyped_storage().data_ptr(): cache for cache in kv_caches.values()}
    if len(memories) != 1:
        raise RegionError("kv_caches", f"are {len(memories)} allocations, and have to be one")
    (cache,) = memories.values()
    raw = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
    found = []
    for place in placements:
        stop = place.offset + num_blocks * place.block_bytes
        if len(raw) < stop:
            raise RegionError("kv_caches", f"have {len(raw)} bytes of memory, and need {stop}")
        blocks = raw[place.offset : stop].view(num_blocks, place.block_bytes)
        found.append(KVRegion(blocks, place.block_bytes, place.block_bytes))
    return found
