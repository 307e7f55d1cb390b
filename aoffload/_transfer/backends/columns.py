"""Columns: one region of all blocks in host memory, for loads region by region."""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs
import numpy as np
from numpy.typing import NDArray

from ..region import KVRegion, byte_rows
from .pieces import Elements, element_type
from .rows import stretches

PART_BYTES = 8 * 2**20
"""Bytes per part of a copy in two calls: few enough to stay in the CPU cache in between."""


@attrs.frozen(eq=False)
class RegionColumns:
    """One region on both sides, as equal elements: `blocks[b]` on the device, `columns[h]` in host memory."""

    blocks: Elements
    columns: Elements

    @property
    def block_bytes(self) -> int:
        return int(self.blocks.shape[1]) * self.blocks.itemsize

    def scatter(self, on_device: NDArray[np.int64], on_host: NDArray[np.int64]) -> None:
        """Load blocks with one call per stretch of consecutive host blocks."""
        for part in stretches(on_host):
            first = int(on_host[part.start])
            self.blocks[on_device[part]] = self.columns[first : first + part.stop - part.start]

    def scatter_twice(self, on_device: NDArray[np.int64], on_host: NDArray[np.int64]) -> None:
        """Load blocks with two calls per part, instead of one per stretch: each call has to reacquire the GIL."""
        num_blocks = max(1, PART_BYTES // self.block_bytes)
        for start in range(0, len(on_host), num_blocks):
            part = slice(start, start + num_blocks)
            self.blocks[on_device[part]] = self.columns[on_host[part]]


def columns_of(regions: tuple[KVRegion, ...], host: NDArray[np.uint8]) -> tuple[RegionColumns, ...]:
    """Each of `regions` with its columns of `host`, `uint8 [num_blocks, bytes of all regions]`, in their order.

    No device array covers more than one region, so none of them spans `host`.
    """
    return tuple(_columns(regions, host))


def _columns(regions: tuple[KVRegion, ...], host: NDArray[np.uint8]) -> Iterator[RegionColumns]:
    start, host_stride = 0, host.shape[1]
    for region in regions:
        stop = start + region.block_bytes
        # One type, aligned on both sides; otherwise numpy would copy through a buffer of its own.
        numbers = (region.block_bytes, region.block_stride_bytes, region.address, start, host_stride)
        element = element_type(math.gcd(*numbers))
        yield RegionColumns(byte_rows(region).numpy().view(element), host[:, start:stop].view(element))
        start = stop
