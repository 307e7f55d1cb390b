"""The addresses of blocks on both sides, and the fewest pieces in which given blocks are copied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs
import numpy as np
from numpy.typing import NDArray

from ...._kernel.states import Direction
from ...region import KVRegion
from .driver import Pieces

Numbers = NDArray[np.uint64]

WIDEST_BYTES = 16
"""Maximum bytes that a thread of a kernel moves in one access; needs data aligned to it."""


@attrs.frozen
class Part:
    """A contiguous part of every block: block `b` has `num_bytes` of it at `address + b * stride_bytes`."""

    address: int
    stride_bytes: int
    num_bytes: int
    host_offset: int
    """Its offset in a block in host memory."""
    memory: int
    """The allocation it lies in: a driver accepts no piece that spans two adjacent allocations."""


class Scratch:
    """Descriptor arrays of one thread, reused from batch to batch and grown when necessary."""

    NUM_ARRAYS = 6

    def __init__(self) -> None:
        self._arrays: Numbers = np.empty((self.NUM_ARRAYS, 0), dtype=np.uint64)

    def take(self, shape: tuple[int, int]) -> list[Numbers]:
        """All arrays with `shape`; their previous content is lost."""
        length = shape[0] * shape[1]
        if length > self._arrays.shape[1]:
            self._arrays = np.empty((self.NUM_ARRAYS, 2 * length), dtype=np.uint64)
        return [array[:length].reshape(shape) for array in self._arrays]


class Layout:
    """The addresses of some regions of every block, on the device and in host memory, where they lie side by side."""

    def __init__(self, parts: Iterable[Part], host_address: int, block_bytes: int, borders: tuple[int, ...]) -> None:
        self.parts = tuple(_joined(sorted(parts, key=lambda part: part.host_offset)))
        self._host_address = np.uint64(host_address)
        self._block_bytes = np.uint64(block_bytes)
        self._borders = borders
        self._addresses = _row(part.address for part in self.parts)
        self._strides = _row(part.stride_bytes for part in self.parts)
        self._sizes = _row(part.num_bytes for part in self.parts)
        self._host_offsets = _row(part.host_offset for part in self.parts)
        self._memories = _row(part.memory for part in self.parts)

    @classmethod
    def of_block(cls, regions: tuple[KVRegion, ...], host_address: int, borders: tuple[int, ...] = ()) -> Layout:
        """The layout of whole blocks."""
        return cls(_parts(regions), host_address, sum(region.block_bytes for region in regions), borders)

    @classmethod
    def of_each_region(
        cls, regions: tuple[KVRegion, ...], host_address: int, borders: tuple[int, ...] = ()
    ) -> tuple[Layout, ...]:
        """One layout per region, for copies region by region."""
        block_bytes = sum(region.block_bytes for region in regions)
        return tuple(cls([part], host_address, block_bytes, borders) for part in _parts(regions))

    @property
    def alignment(self) -> int:
        """The largest power of two up to 16 that divides every address and size that `pieces` returns."""
        grid = (self._addresses, self._strides, self._sizes, self._host_offsets, _row(self._borders))
        numbers = np.concatenate([*grid, [self._host_address, self._block_bytes]])
        bits = int(np.bitwise_or.reduce(numbers))
        return min(WIDEST_BYTES, bits & -bits) if bits else WIDEST_BYTES

    def pieces(
        self, direction: Direction, on_device: NDArray[np.int64], on_host: NDArray[np.int64], scratch: Scratch
    ) -> Pieces:
        """The pieces to copy for these blocks. Valid until `scratch` is used again.

        Parts that are adjacent on both sides become one piece, in whatever order the ids come: they are sorted by host
        address, so parts that touch on both sides follow each other.
        """
        order = np.argsort(on_host, kind="stable")
        shape = (len(order), len(self.parts))
        device, host, sizes, *free = scratch.take(shape)
        np.multiply(on_device[order, None].view(np.uint64), self._strides, out=device)
        np.add(device, self._addresses, out=device)
        np.multiply(on_host[order, None].view(np.uint64), self._block_bytes, out=host)
        np.add(host, self._host_offsets, out=host)
        np.add(host, self._host_address, out=host)
        sizes[:] = self._sizes
        starts = self._starts(device.reshape(-1), host.reshape(-1), sizes.reshape(-1))
        merged = [array.reshape(-1)[: len(starts)] for array in free]
        np.take(device.reshape(-1), starts, out=merged[0], mode="clip")
        np.take(host.reshape(-1), starts, out=merged[1], mode="clip")
        if len(starts):
            np.add.reduceat(sizes.reshape(-1), starts, out=merged[2])
        device, host, sizes = self._cut(*merged)
        if direction is Direction.LOAD:
            return Pieces(host, device, sizes)
        return Pieces(device, host, sizes)

    def _starts(self, device: Numbers, host: Numbers, sizes: Numbers) -> NDArray[np.intp]:
        """Indices of parts that do not continue the part before them."""
        begins = np.ones(len(sizes), dtype=bool)
        if len(sizes) > 1:
            follows = (device[1:] == device[:-1] + sizes[:-1]) & (host[1:] == host[:-1] + sizes[:-1])
            memories = np.broadcast_to(self._memories, (len(sizes) // len(self.parts), len(self.parts))).reshape(-1)
            begins[1:] = ~(follows & (memories[1:] == memories[:-1]))
        return np.flatnonzero(begins)

    def _cut(self, device: Numbers, host: Numbers, sizes: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Cut pieces that cross a border in host memory. Borders are gigabytes apart, so this is rare."""
        for border in self._borders:
            index = int(np.searchsorted(host, np.uint64(border), side="left")) - 1
            if index < 0 or int(host[index]) + int(sizes[index]) <= border:
                continue
            head = border - int(host[index])
            device = np.insert(device, index + 1, device[index] + np.uint64(head))
            host = np.insert(host, index + 1, np.uint64(border))
            sizes = np.insert(sizes, index + 1, sizes[index] - np.uint64(head))
            sizes[index] = head
        return device, host, sizes


def _parts(regions: tuple[KVRegion, ...]) -> Iterator[Part]:
    host_offset = 0
    for region in regions:
        memory = region.tensor.untyped_storage().data_ptr()
        yield Part(region.address, region.block_stride_bytes, region.block_bytes, host_offset, memory)
        host_offset += region.block_bytes


def _joined(parts: Iterable[Part]) -> Iterator[Part]:
    """Merge parts that are adjacent on both sides, such as keys and values that follow each other inside a block."""
    current: Part | None = None
    for part in parts:
        if current is not None and _continues(current, part):
            current = attrs.evolve(current, num_bytes=current.num_bytes + part.num_bytes)
            continue
        if current is not None:
            yield current
        current = part
    if current is not None:
        yield current


def _continues(current: Part, part: Part) -> bool:
    return (
        part.address == current.address + current.num_bytes
        and part.host_offset == current.host_offset + current.num_bytes
        and (part.stride_bytes, part.memory) == (current.stride_bytes, current.memory)
    )


def _row(numbers: Iterable[int]) -> Numbers:
    return np.array(list(numbers), dtype=np.uint64)
