"""The KV layout as it is understood: said once at the start, and compared with the block sizes of the configuration."""

from __future__ import annotations

from collections.abc import Sequence

from .._config.config import GroupLike
from ..errors import RegionError
from .local import LocalTransport
from .region import KVRegion

__all__ = ["check_block_sizes", "described"]


MIN_TELLING_AXES = 3
"""A block of fewer axes may have tokens, heads and their sizes in one of them."""


def described(transport: object) -> str:
    """The regions of `transport` in one line, alike ones together; empty where the tensors are elsewhere.

    For example `4 regions of 100 blocks [16, 8, 64] torch.float16 (16384 bytes) on cpu`.
    """
    kinds: dict[str, int] = {}
    for region in _regions(transport):
        kind = _kind(region)
        kinds[kind] = kinds.get(kind, 0) + 1
    return ", ".join(f"{number} region{'s' * (number > 1)} of {kind}" for kind, number in kinds.items())


def _regions(transport: object) -> Sequence[KVRegion]:
    return transport.regions if isinstance(transport, LocalTransport) else ()


def _kind(region: KVRegion) -> str:
    shape = f" {list(region.block_shape)}" if region.block_shape else ""
    gap = "" if region.block_stride_bytes == region.block_bytes else f", {region.block_stride_bytes} bytes apart"
    blocks = f"{region.num_blocks} blocks{shape} {region.tensor.dtype}"
    return f"{blocks} ({region.block_bytes} bytes{gap}) on {region.device}"


def check_block_sizes(transport: object, groups: Sequence[GroupLike]) -> None:
    """`RegionError` where the shape of a block says that it holds another number of tokens than any group's blocks.

    A block of at least three axes has one that counts its tokens, in all layouts in use. Regions made by hand, of a
    stride and a size in bytes, say nothing and are taken as they are.
    """
    sizes = {group.block_size for group in groups}
    for number, region in enumerate(_regions(transport)):
        if len(region.block_shape) >= MIN_TELLING_AXES and sizes.isdisjoint(region.block_shape):
            wanted = " or ".join(map(str, sorted(sizes)))
            problem = f"a block of region {number} is {list(region.block_shape)}, where no axis counts {wanted} tokens"
            advice = "see block_size, and block_axis of KVRegion.of; KVRegion(tensor, stride, bytes) is not compared"
            raise RegionError("kv_caches", f"{problem}: {advice}")
