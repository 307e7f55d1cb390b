"""Views of CPU regions with which one numpy call, which releases the GIL, moves many blocks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from ..region import KVRegion
from ..turns import SWITCH_S
from .pieces import Elements, Piece, common_unit, element_type, pieces_of, strided
from .stripes import Extents, Stripes, progressions

LARGE_SHARE = 0.2
"""Share of waiting that counts as contention: few of many small calls wait, but as long as all of them take."""


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
        return cls(array, strides[:1] if (strides == strides[0]).all() else strides, offsets)

    def indices(self, block_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return (block_ids[:, None] * self.strides + self.offsets).reshape(-1)

    def paired(self, block_ids: NDArray[np.int64], extents: Extents) -> list[tuple[NDArray[np.int64], Elements]]:
        """Indices and host rows for each extent. One call makes all indices, since it releases the GIL, too."""
        indices, start = self.indices(block_ids), 0
        element, row_length = self.array.dtype, self.array.shape[1]
        pairs = []
        for extent in extents:
            stop = start + len(extent) * len(self.offsets)
            pairs.append((indices[start:stop], extent.reshape(-1).view(element).reshape(-1, row_length)))
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
    found, start = list[slice](), 0
    for last in (*gaps(ids).nonzero()[0].tolist(), len(ids) - 1):
        if start <= last:
            found.append(slice(start, last + 1))
        start = last + 1
    return found
