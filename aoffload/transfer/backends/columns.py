"""Columns: one region in host memory, where the regions of a block lie side by side. For loads region after region."""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs
import numpy as np
from numpy.typing import NDArray

from ..region import KVRegion, byte_rows
from .pieces import Elements, element_type
from .rows import stretches

__all__ = ["RegionColumns", "columns_of"]

PART_BYTES = 8 * 2**20
"""What is copied twice stays in the processor's cache in between."""


@attrs.frozen(eq=False)
class RegionColumns:
    """One region on both sides, as equal elements: `blocks[b]` on the device, `columns[h]` in host memory."""

    blocks: Elements
    columns: Elements

    @property
    def block_bytes(self) -> int:
        return int(self.blocks.shape[1]) * self.blocks.itemsize

    def scatter(self, on_device: NDArray[np.int64], on_host: NDArray[np.int64]) -> None:
        """One call per stretch of neighbours in host memory."""
        for part in stretches(on_host):
            first = int(on_host[part.start])
            self.blocks[on_device[part]] = self.columns[first : first + part.stop - part.start]

    def scatter_twice(self, on_device: NDArray[np.int64], on_host: NDArray[np.int64]) -> None:
        """Two calls for many stretches, each of which would have to get the GIL back."""
        num_blocks = max(1, PART_BYTES // self.block_bytes)
        for start in range(0, len(on_host), num_blocks):
            part = slice(start, start + num_blocks)
            self.blocks[on_device[part]] = self.columns[on_host[part]]


def columns_of(regions: tuple[KVRegion, ...], host: NDArray[np.uint8]) -> tuple[RegionColumns, ...]:
    """Each of `regions` with its part of `host`, `uint8 [num_blocks, bytes of all regions]`, in their order.

    No array reaches from one region to another, so none of them spans `host`.
    """
    return tuple(_columns(regions, host))


def _columns(regions: tuple[KVRegion, ...], host: NDArray[np.uint8]) -> Iterator[RegionColumns]:
    start, host_stride = 0, host.shape[1]
    for region in regions:
        stop = start + region.block_bytes
        # One type on both sides, aligned on both: numpy would copy by way of a buffer of its own.
        numbers = (region.block_bytes, region.block_stride_bytes, region.address, start, host_stride)
        element = element_type(math.gcd(*numbers))
        yield RegionColumns(byte_rows(region).numpy().view(element), host[:, start:stop].view(element))
        start = stop
