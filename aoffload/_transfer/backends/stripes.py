"""Stripes: copies of separately allocated regions, a few blocks per call."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from .pieces import Elements, Piece, common_unit, element_type, strided

Extents = Sequence[NDArray[np.uint8]]
"""Stretches of consecutive rows of host memory, `uint8 [num_blocks, block_bytes]` each."""


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

    def at(self, block_ids: NDArray[np.int64]) -> Elements:
        """A view of blocks whose ids are evenly spaced."""
        first, last = int(block_ids[0]), int(block_ids[-1])
        if first == last:
            return self.blocks[first : first + 1]
        step = (last - first) // (len(block_ids) - 1)
        stop = last + step
        return self.blocks[first : stop if stop >= 0 else None : step]


@attrs.frozen(eq=False)
class Stripes:
    """Moves blocks of any regions. A store takes one call per stripe and progression of ids, a load one per stripe
    and extent.

    The calls copy long contiguous pieces, so they are fast; but each has to reacquire the GIL when it is over.
    """

    stripes: tuple[Stripe, ...]

    @classmethod
    def of(cls, pieces: Sequence[Piece], divide: int = 0) -> Stripes:
        """The stripes of `pieces`. None reaches from one side of the address `divide` to the other."""
        unit = common_unit(pieces)
        sides = itertools.groupby(pieces, key=lambda piece: piece.address < divide)
        return cls(tuple(_stripe(alike, unit) for _, side in sides for alike in _evenly_spaced(side)))

    def gather(self, block_ids: NDArray[np.int64], extents: Extents) -> None:
        for ids, extent in _paired(block_ids, extents):
            # `np.take` would first copy a whole strided region, so blocks at equal distances are copied as slices.
            for part in progressions(ids):
                self.gather_progression(ids[part], extent[part])

    def gather_progression(self, block_ids: NDArray[np.int64], host_rows: NDArray[np.uint8]) -> None:
        """Store evenly spaced blocks with one call per stripe."""
        for stripe in self.stripes:
            np.copyto(stripe.of_host(host_rows), stripe.at(block_ids))

    def scatter(self, block_ids: NDArray[np.int64], extents: Extents) -> None:
        for ids, extent in _paired(block_ids, extents):
            for stripe in self.stripes:
                stripe.blocks[ids] = stripe.of_host(extent)


def progressions(ids: NDArray[np.int64]) -> Iterator[slice]:
    """Successive slices of evenly spaced ids. Any two ids are such a slice, so all but the last have two or more."""
    distances = np.diff(ids).tolist()
    start = 0
    while start < len(ids):
        stop = start + 1
        while stop < len(ids) and distances[stop - 1] == distances[start]:
            stop += 1
        yield slice(start, stop)
        start = stop


def _paired(block_ids: NDArray[np.int64], extents: Extents) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
    start = 0
    for extent in extents:
        yield block_ids[start : start + len(extent)], extent
        start += len(extent)


def _evenly_spaced(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Maximal sequences of evenly spaced pieces of one size and stride: the layers, if allocated one by one."""
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


def _stripe(alike: list[Piece], unit: int) -> Stripe:
    first = alike[0]
    element = element_type(unit)
    if any(piece.address % element.itemsize for piece in alike):
        element = np.dtype(np.uint8)
    spacing = alike[1].address - first.address if len(alike) > 1 else first.num_bytes
    shape = (len(first.rows), len(alike), first.num_bytes // element.itemsize)
    rows = first.rows[:, : element.itemsize].view(element)
    return Stripe(strided(rows, shape, (first.stride_bytes, spacing, element.itemsize)), first.host_offset)
