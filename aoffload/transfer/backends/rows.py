"""How the regions of a CPU pool look to numpy, so that one call that lets go of the GIL moves many blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from ..region import KVRegion, byte_rows

__all__ = ["FlatRows", "RowMover", "Stripes", "row_mover", "stretches"]

Elements = NDArray[Any]
"""Bytes, read in the widest integers that fit."""

MIN_PIECE_BYTES = 16 * 1024
"""Cutting a region's block into smaller pieces than this costs more than calling once per block does."""


class RowMover(Protocol):
    """Moves blocks between scattered rows of the device and neighbouring rows of host memory.

    `host_rows` is `uint8 [len(block_ids), block_bytes]`, contiguous. Ids are int64, distinct and were checked.
    """

    def gather(self, block_ids: NDArray[np.int64], host_rows: NDArray[np.uint8]) -> None: ...
    def scatter(self, block_ids: NDArray[np.int64], host_rows: NDArray[np.uint8]) -> None: ...


@attrs.frozen(eq=False)
class Piece:
    """A contiguous part of every block: block `b` has `num_bytes` of it at `address + b * stride_bytes`."""

    rows: NDArray[np.uint8]
    address: int
    stride_bytes: int
    num_bytes: int
    host_offset: int


@attrs.frozen(eq=False)
class FlatRows:
    """All regions as one array of equal rows, of which each block is a fixed pattern.

    Possible where addresses, strides and sizes have a common divisor that is large enough: always for one dense
    region, and for layers or keys and values stacked in one tensor. The array may run over memory between tensors that
    is nobody's; no index ever names it.
    """

    rows: Elements
    rows_per_stride: int
    row_offsets: NDArray[np.int64]

    def gather(self, block_ids: NDArray[np.int64], host_rows: NDArray[np.uint8]) -> None:
        # "raise" would buffer the output; the ids were checked when the plan was launched.
        np.take(self.rows, self._indices(block_ids), axis=0, out=self._as_rows(host_rows), mode="clip")

    def scatter(self, block_ids: NDArray[np.int64], host_rows: NDArray[np.uint8]) -> None:
        self.rows[self._indices(block_ids)] = self._as_rows(host_rows)

    def _indices(self, block_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return (block_ids[:, None] * self.rows_per_stride + self.row_offsets).reshape(-1)

    def _as_rows(self, host_rows: NDArray[np.uint8]) -> Elements:
        return host_rows.reshape(-1).view(self.rows.dtype).reshape(-1, self.rows.shape[1])


@attrs.frozen(eq=False)
class Stripe:
    """Evenly spaced pieces as one strided array `[num_blocks, num_pieces, elements]`."""

    blocks: Elements
    host_offset: int

    def of_host(self, host_rows: NDArray[np.uint8]) -> Elements:
        _, num_pieces, elements = self.blocks.shape
        num_bytes = num_pieces * elements * self.blocks.itemsize
        columns = host_rows[:, self.host_offset : self.host_offset + num_bytes].view(self.blocks.dtype)
        return columns.reshape(len(host_rows), num_pieces, elements)


@attrs.frozen(eq=False)
class Stripes:
    """Regions that no common row length fits: one call per neighbouring blocks and stripe for a store."""

    stripes: tuple[Stripe, ...]

    def gather(self, block_ids: NDArray[np.int64], host_rows: NDArray[np.uint8]) -> None:
        for stripe in self.stripes:
            host = stripe.of_host(host_rows)
            # `np.take` would first copy a whole strided region, so neighbours are copied as slices.
            for part in stretches(block_ids):
                first = int(block_ids[part.start])
                np.copyto(host[part], stripe.blocks[first : first + part.stop - part.start])

    def scatter(self, block_ids: NDArray[np.int64], host_rows: NDArray[np.uint8]) -> None:
        for stripe in self.stripes:
            stripe.blocks[block_ids] = stripe.of_host(host_rows)


def row_mover(regions: tuple[KVRegion, ...]) -> RowMover:
    """The fastest way to move the blocks of `regions`."""
    pieces = list(_joined(_pieces(regions)))
    unit = math.gcd(*_grid(pieces))
    # With different strides a block is no fixed pattern of rows.
    has_one_stride = len({piece.stride_bytes for piece in pieces}) == 1
    if has_one_stride and unit >= min(MIN_PIECE_BYTES, min(piece.num_bytes for piece in pieces)):
        return _flat_rows(pieces, unit)
    element = _element_type(unit)
    return Stripes(tuple(_stripe(alike, element) for alike in _evenly_spaced(pieces)))


def stretches(ids: NDArray[np.int64]) -> Iterator[slice]:
    """The maximal slices in which each id follows the one before."""
    bounds = [0, *(np.flatnonzero(np.diff(ids) != 1) + 1).tolist(), len(ids)]
    for start, stop in itertools.pairwise(bounds):
        if start < stop:
            yield slice(start, stop)


def _pieces(regions: tuple[KVRegion, ...]) -> Iterator[Piece]:
    host_offset = 0
    for region in regions:
        rows = byte_rows(region).numpy()
        yield Piece(rows, region.address, region.block_stride_bytes, region.block_bytes, host_offset)
        host_offset += region.block_bytes


def _joined(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Neighbours on both sides are one piece: keys and values that follow each other inside a block."""
    current = next(pieces)
    for piece in pieces:
        adjacent = piece.address == current.address + current.num_bytes
        if adjacent and piece.stride_bytes == current.stride_bytes:
            num_bytes = current.num_bytes + piece.num_bytes
            rows = _strided(current.rows, (len(current.rows), num_bytes), (current.stride_bytes, 1))
            current = attrs.evolve(current, rows=rows, num_bytes=num_bytes)
        else:
            yield current
            current = piece
    yield current


def _grid(pieces: list[Piece]) -> Iterator[int]:
    """Numbers of bytes of which the length of a common row has to be a divisor."""
    for piece in pieces:
        yield piece.num_bytes
        yield piece.address - pieces[0].address
        yield piece.stride_bytes


def _flat_rows(pieces: list[Piece], unit: int) -> FlatRows:
    lowest = min(pieces, key=lambda piece: piece.address)
    end = max(piece.address + (len(piece.rows) - 1) * piece.stride_bytes + piece.num_bytes for piece in pieces)
    num_rows = (end - lowest.address) // unit
    element = _element_type(math.gcd(unit, lowest.address))
    flat = _strided(lowest.rows, (num_rows * unit,), (1,)).view(element).reshape(num_rows, -1)
    offsets = [
        (piece.address - lowest.address) // unit + row for piece in pieces for row in range(piece.num_bytes // unit)
    ]
    return FlatRows(flat, lowest.stride_bytes // unit, np.array(offsets, dtype=np.int64))


def _evenly_spaced(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Longest runs of pieces of one size and stride at equal distances: the layers, if allocated one by one."""
    alike: list[Piece] = []
    for piece in pieces:
        if alike and not _continues(alike, piece):
            yield alike
            alike = []
        alike.append(piece)
    yield alike


def _continues(alike: list[Piece], piece: Piece) -> bool:
    last = alike[-1]
    if (piece.stride_bytes, piece.num_bytes) != (last.stride_bytes, last.num_bytes):
        return False
    return len(alike) == 1 or piece.address - last.address == last.address - alike[-2].address


def _stripe(alike: list[Piece], element: np.dtype[Any]) -> Stripe:
    first = alike[0]
    if any(piece.address % element.itemsize for piece in alike):
        element = np.dtype(np.uint8)
    spacing = alike[1].address - first.address if len(alike) > 1 else first.num_bytes
    shape = (len(first.rows), len(alike), first.num_bytes // element.itemsize)
    rows = first.rows[:, : element.itemsize].view(element)
    return Stripe(_strided(rows, shape, (first.stride_bytes, spacing, element.itemsize)), first.host_offset)


def _element_type(num_bytes: int) -> np.dtype[Any]:
    """The widest integer that divides `num_bytes`. Void types of the whole size would hold the GIL."""
    return np.dtype(f"u{math.gcd(num_bytes, 8)}")


def _strided(array: Elements, shape: tuple[int, ...], strides: tuple[int, ...]) -> Elements:
    return np.lib.stride_tricks.as_strided(array, shape, strides)
