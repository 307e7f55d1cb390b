"""Pieces: the contiguous parts of a block, found from the addresses of the regions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from ..region import KVRegion, byte_rows

Elements = NDArray[Any]
"""Bytes, viewed as the widest integers that fit."""


@attrs.frozen(eq=False)
class Piece:
    """A contiguous part of every block: block `b` has `num_bytes` of it at `address + b * stride_bytes`."""

    rows: NDArray[np.uint8]
    address: int
    stride_bytes: int
    num_bytes: int
    host_offset: int

    @property
    def end(self) -> int:
        """The address after the last block's part."""
        return self.address + (len(self.rows) - 1) * self.stride_bytes + self.num_bytes


def pieces_of(regions: tuple[KVRegion, ...]) -> tuple[Piece, ...]:
    """The pieces of a block in the order of host memory, as few as possible."""
    return tuple(_joined(_pieces(regions)))


def common_unit(pieces: Sequence[Piece]) -> int:
    """The largest number of bytes that divides every size, stride and distance between pieces."""
    first = pieces[0].address
    grid = (number for piece in pieces for number in (piece.num_bytes, piece.address - first, piece.stride_bytes))
    return math.gcd(*grid)


def element_type(num_bytes: int) -> np.dtype[Any]:
    """The widest integer type whose size divides `num_bytes`. Copies of void types would hold the GIL."""
    return np.dtype(f"u{math.gcd(num_bytes, 8)}")


def strided(array: Elements, shape: tuple[int, ...], strides: tuple[int, ...]) -> Elements:
    return np.lib.stride_tricks.as_strided(array, shape, strides)


def _pieces(regions: tuple[KVRegion, ...]) -> Iterator[Piece]:
    host_offset = 0
    for region in regions:
        rows = byte_rows(region).numpy()
        yield Piece(rows, region.address, region.block_stride_bytes, region.block_bytes, host_offset)
        host_offset += region.block_bytes


def _joined(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Merge pieces that are adjacent on both sides, such as keys and values that follow each other inside a block."""
    current = next(pieces)
    for piece in pieces:
        adjacent = piece.address == current.address + current.num_bytes
        if adjacent and piece.stride_bytes == current.stride_bytes:
            num_bytes = current.num_bytes + piece.num_bytes
            rows = strided(current.rows, (len(current.rows), num_bytes), (current.stride_bytes, 1))
            current = attrs.evolve(current, rows=rows, num_bytes=num_bytes)
        else:
            yield current
            current = piece
    yield current
