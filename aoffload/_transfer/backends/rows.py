"""Views of CPU regions with which one numpy call, which releases the GIL, moves many blocks."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from ..region import KVRegion, byte_rows
from ..turns import SWITCH_S

# -- pieces ----------------------------------------------------------------------------------------------------------
#
# Pieces: the contiguous parts of a block, found from the addresses of the regions.

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


# -- stripes ---------------------------------------------------------------------------------------------------------
#
# Stripes: copies of separately allocated regions, a few blocks per call.

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
        """The stripes of `pieces`. No stripe crosses the address `divide`."""
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


# -- rows ------------------------------------------------------------------------------------------------------------

LARGE_SHARE = 0.2
"""Share of waiting that counts as contention. Among many small calls only a few wait, but these waits take as long as
all the calls."""


@attrs.define(eq=False)
class LockWaits:
    """Seconds per call that the last timed calls of one thread spent neither copying nor computing.

    That is time without the GIL or without a core, and fewer calls help against both. A wait for the GIL takes
    `SWITCH_S` at least; a call without a wait loses some hundred nanoseconds.
    """

    last_s: float = 0.0
    last_share: float = 0.0
    """Share of waiting in the time of those calls, including the time between them."""

    @property
    def have_begun(self) -> bool:
        return self.last_s > SWITCH_S or self.last_share > LARGE_SHARE

    @contextmanager
    def timing(self, num_calls: int) -> Iterator[None]:
        """Times the `num_calls` calls inside."""
        began_s, began_own_s = time.perf_counter(), time.thread_time()
        yield
        took_s = time.perf_counter() - began_s
        waited_s = took_s - (time.thread_time() - began_own_s)
        self.last_s, self.last_share = waited_s / num_calls, waited_s / took_s if took_s else 0.0


LONG_ROW_BYTES = 16 * 1024
"""From this length on, rows cost no more than their bytes; rows of 4 KiB took a tenth longer."""
LEAST_ROW_BYTES = 64
"""The alignment of torch's allocations. With shorter rows, indices would be as large as the data."""


class RowMover(Protocol):
    """Moves blocks between scattered device rows and extents, which are stretches of consecutive host rows.

    An extent is a contiguous `uint8 [num_blocks, block_bytes]`; all extents together have as many blocks as there are
    ids. Ids are int64, distinct and already checked.
    """

    def gather(self, block_ids: NDArray[np.int64], extents: Extents) -> None: ...
    def scatter(self, block_ids: NDArray[np.int64], extents: Extents) -> None: ...


@attrs.frozen(eq=False)
class Rows:
    """All regions as one array of equal rows: block `b` is, in this order, the rows `b * strides + offsets`.

    The array runs from the lowest address to the highest, and includes foreign memory between tensors, which no index
    ever names. Rows may overlap: they may start closer together than they are long.
    """

    array: Elements
    strides: NDArray[np.int64]
    offsets: NDArray[np.int64]
    are_blocks: bool
    """Whether each block is exactly one row, with the block id as its index. Then ids need no conversion to indices."""

    @classmethod
    def of(cls, pieces: Sequence[Piece], unit: int, row_bytes: int) -> Rows:
        """Rows of `row_bytes`, one per `unit` bytes. `unit` divides `common_unit`, `row_bytes` divides every size."""
        lowest = min(pieces, key=lambda piece: piece.address)
        span = max(piece.end for piece in pieces) - lowest.address
        element = element_type(math.gcd(unit, lowest.address))
        shape = ((span - row_bytes) // unit + 1, row_bytes // element.itemsize)
        array = strided(lowest.rows[:, : element.itemsize].view(element), shape, (unit, element.itemsize))
        parts = [(piece, at) for piece in pieces for at in range(0, piece.num_bytes, row_bytes)]
        strides = np.array([piece.stride_bytes // unit for piece, _ in parts], dtype=np.int64)
        offsets = np.array([(piece.address - lowest.address + at) // unit for piece, at in parts], dtype=np.int64)
        # A single stride if all are equal, so that indices take one call.
        are_blocks = len(parts) == 1 and strides[0] == 1 and offsets[0] == 0
        return cls(array, strides[:1] if (strides == strides[0]).all() else strides, offsets, bool(are_blocks))

    def indices(self, block_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.are_blocks:
            return block_ids
        return (block_ids[:, None] * self.strides + self.offsets).reshape(-1)

    def paired(self, block_ids: NDArray[np.int64], extents: Extents) -> list[tuple[NDArray[np.int64], Elements]]:
        """Indices and host rows for each extent. One call makes all indices, since it releases the GIL, too."""
        indices, start = self.indices(block_ids), 0
        element, row_length = self.array.dtype, self.array.shape[1]
        pairs = []
        for extent in extents:
            stop = start + len(extent) * len(self.offsets)
            pairs.append((indices[start:stop], extent.view(element).reshape(-1, row_length)))
            start = stop
        return pairs


@attrs.frozen(eq=False)
class FlatRows:
    """Moves blocks with one call per stretch of consecutive host blocks.

    Needs a common divisor of addresses, strides and sizes that is large enough. One dense region always has one, and so
    have layers or keys and values stacked in one tensor; separate tensors have at least their alignment in common.
    """

    dense: Rows
    """Rows side by side, as `np.take` needs them: as long as the common divisor."""
    long: Rows
    """Rows for loads, which may overlap: as long as the common divisor of the piece sizes."""

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> FlatRows:
        unit = common_unit(pieces)
        longest = math.gcd(*(piece.num_bytes for piece in pieces))
        dense = Rows.of(pieces, unit, unit)
        return cls(dense, dense if longest == unit else Rows.of(pieces, unit, longest))

    def gather(self, block_ids: NDArray[np.int64], extents: Extents) -> None:
        for indices, host_rows in self.dense.paired(block_ids, extents):
            # "raise" would buffer the output; the ids were checked when the plan was launched.
            np.take(self.dense.array, indices, axis=0, out=host_rows, mode="clip")

    def scatter(self, block_ids: NDArray[np.int64], extents: Extents) -> None:
        for indices, host_rows in self.long.paired(block_ids, extents):
            self.long.array[indices] = host_rows


@attrs.frozen(eq=False)
class PatientRows:
    """For regions whose common rows are short. A store takes several fast calls per extent; under GIL contention, one.

    Contention is measured by how long earlier calls waited for the GIL. Only one thread stores, so `waits` is its own.
    """

    rows: FlatRows
    stripes: Stripes
    waits: LockWaits = attrs.field(factory=LockWaits)

    def gather(self, block_ids: NDArray[np.int64], extents: Extents) -> None:
        start = 0
        for number, extent in enumerate(extents):
            num_moved = self._gather_alone(block_ids[start : start + len(extent)], extent)
            start += num_moved
            if num_moved < len(extent):
                rest = [extent[num_moved:], *extents[number + 1 :]]
                with self.waits.timing(len(rest)):
                    self.rows.gather(block_ids[start:], rest)
                return

    def _gather_alone(self, block_ids: NDArray[np.int64], extent: NDArray[np.uint8]) -> int:
        """Copy a few blocks per call until a call had to wait for the GIL. Returns how many blocks were copied."""
        for part in progressions(block_ids):
            if self.waits.have_begun:
                return int(part.start)
            with self.waits.timing(len(self.stripes.stripes)):
                self.stripes.gather_progression(block_ids[part], extent[part])
        return len(block_ids)

    def scatter(self, block_ids: NDArray[np.int64], extents: Extents) -> None:
        self.rows.scatter(block_ids, extents)


def row_mover(regions: tuple[KVRegion, ...]) -> RowMover:
    """The fastest `RowMover` for the blocks of `regions`."""
    pieces = pieces_of(regions)
    unit, shortest = common_unit(pieces), min(piece.num_bytes for piece in pieces)
    if unit < min(LEAST_ROW_BYTES, shortest):
        return Stripes.of(pieces)
    rows = FlatRows.of(pieces)
    return rows if unit >= min(LONG_ROW_BYTES, shortest) else PatientRows(rows, Stripes.of(pieces))


def gaps(ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """For each id but the last, whether the next one is not its successor."""
    found: NDArray[np.bool_] = ids[1:] - ids[:-1] != 1
    return found


def stretches(ids: NDArray[np.int64]) -> list[slice]:
    """The maximal slices of consecutive ids."""
    breaks = gaps(ids)
    if len(ids) and not np.count_nonzero(breaks):  # the common case
        return [slice(0, len(ids))]
    found: list[slice] = []
    start = 0
    for last in (*breaks.nonzero()[0].tolist(), len(ids) - 1):
        if start <= last:
            found.append(slice(start, last + 1))
        start = last + 1
    return found


# -- columns ---------------------------------------------------------------------------------------------------------
#
# Columns: one region of all blocks in host memory, for loads region by region.

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
