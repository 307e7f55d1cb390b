"""Selects the records that a restart may use: the digest of their unit matches its tokens, and all units before it
exist.

    records   [unit 0 | A] [unit 2 | A] [unit 1 | A] [unit 1 | B] [unit 0 | A, older] [unit 5 | C]
    proven    A: 0, 1, 2    (not B and C, whose first units are missing; of the two slots for A's unit 0 the newer)

Pure: it reads no file. numpy links all records at once, and cuts them into runs: consecutive units that have no other
children. Only the last digest of a run is computed: it covers all tokens of the run, and each record names the digest
of the record before it. Python loops only over runs, in slices.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from typing import Any, TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from ..._common.prefix import TOKEN_BYTES, Hasher
from .plans import RestoredRun
from .table import DIGEST_BYTES, SlotLayout

ORPHAN = -2
"""The parent of a unit whose parent record is missing."""
NO_PARENT = -1
RUN_UNITS = 512
"""No run crosses a multiple of this number of units, which bounds a slice."""
Numbers: TypeAlias = NDArray[np.int64]


@attrs.frozen
class Run:
    """Neighbours in the arrays of `Chains`, from `first` on. `parent` is the run that they follow."""

    first: int
    num_units: int
    parent: int
    position: int
    components: int
    """The components that it has slots in, as bits."""


class Chains:
    """Sound records, linked to the units that they follow. `proven` walks them from their roots.

    `slots`: all slots that a restored run may name. `data_sums`: the sums of their data, `uint8 [len(slots), 16]`.
    """

    def __init__(self, layout: SlotLayout, slots: Numbers, records: NDArray[Any]) -> None:
        self._layout = layout
        self._num_components = len(layout.widths)
        self._token_bytes = layout.unit_tokens * TOKEN_BYTES
        widths = np.array(layout.widths)
        fits = np.flatnonzero(records["component"] < self._num_components)
        fits = fits[records["place"][fits] < widths[records["component"][fits]]]
        chosen, units, firsts = _newest(fits, records)
        same = _equal(records["digest"][chosen], records["digest"][firsts[units]])
        chosen, units = chosen[same], units[same]
        components = records["component"][chosen].astype(np.int64)
        whole = _whole_components(units, components, len(firsts), widths)
        masks = whole @ (1 << np.arange(self._num_components)) if len(firsts) else np.zeros(0, np.int64)
        parents = _parents(records, firsts)
        positions = records["position"][firsts].astype(np.int64)
        order, starts = _runs(parents, positions, masks)
        self._deal(slots, records, chosen, units, components, whole, order)
        self._note(records, firsts[order], parents, order, starts, masks[order])

    def _deal(
        self, slots: Numbers, records: NDArray[Any], chosen: Numbers, units: Numbers, components: Numbers,
        whole: NDArray[np.bool_], order: Numbers,
    ) -> None:  # fmt: skip
        """Put the slots in the order of the units, component by component. Slots of components that are incomplete in
        their unit are left out."""
        place_of = np.empty(len(order), np.int64)
        place_of[order] = np.arange(len(order))
        kept = whole[units, components]
        chosen, units = chosen[kept], place_of[units[kept]]
        in_order = np.argsort(units, kind="stable")  # components and places of a unit are in order already
        chosen = chosen[in_order]
        self.slots, self.data_sums = slots[chosen], records["data_sum"][chosen]
        self._bounds = np.concatenate(([0], np.cumsum(np.bincount(units, minlength=len(order)))))

    def _note(
        self, records: NDArray[Any], chosen: Numbers, parents: Numbers, order: Numbers, starts: Numbers, masks: Numbers
    ) -> None:  # fmt: skip
        """Keep the arrays that the walk reads. `chosen`: a record of each unit, in their order."""
        self.num_units = len(chosen)
        self._digests, self._tokens = _bytes(records["digest"][chosen]), _bytes(records["tokens"][chosen])
        self._roots = _bytes(records["root"][chosen[starts]])
        run_of = np.empty(len(order), np.int64)
        run_of[order] = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(order))))
        before = parents[order][starts]
        parent_runs = before.copy()
        parent_runs[before >= 0] = run_of[before[before >= 0]]
        stops = np.append(starts[1:], len(order))
        columns = (starts, stops - starts, parent_runs, records["position"][chosen[starts]], masks[starts])
        self._runs = [Run(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        by_parent = np.argsort(parent_runs, kind="stable")
        edges = np.searchsorted(parent_runs[by_parent], np.arange(NO_PARENT, len(starts) + 1))
        self._children: list[int] = by_parent.tolist()
        self._edges: list[int] = edges.tolist()

    def _children_of(self, run: int) -> list[int]:
        return self._children[self._edges[run + 1] : self._edges[run + 2]]

    def _digest_after(self, run: Run) -> bytes:
        at = (run.first + run.num_units - 1) * DIGEST_BYTES
        return bytes(self._digests[at : at + DIGEST_BYTES])

    def _root_of(self, number: int) -> bytes:
        return bytes(self._roots[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES])

    def proven(self, most_units: int) -> Iterator[list[RestoredRun]]:
        """The proven runs, a prefix before the runs after it, about `most_units` units at a time. A run without any
        slot is included for its tokens, because a later window needs them."""
        leading = sum(1 << component for component, leads in enumerate(self._layout.leading) if leads)
        found, num_units = list[RestoredRun](), 0
        held = dict[int, int]()
        for number, is_right in self._walk():
            run = self._runs[number]
            num_units += run.num_units
            if is_right:
                held[number] = run.components & (held[run.parent] | ~leading if run.parent >= 0 else run.components)
                found.append(self._restored(number, held[number]))
            if num_units >= most_units:
                yield found
                found, num_units = [], 0
        yield found

    def _walk(self) -> Iterator[tuple[int, bool]]:
        """Every run that leads to a root, depth first, and whether its tokens are right. Runs after a wrong one are not
        visited."""
        for first in self._children_of(NO_PARENT):
            stack = [(first, hashlib.sha256(self._root_of(first)), True)]
            while stack:
                number, before, is_last = stack.pop()
                hasher = before if is_last else before.copy()
                is_right = self._is_right(self._runs[number], hasher)
                if is_right:
                    children = self._children_of(number)
                    stack += [(child, hasher, not index) for index, child in enumerate(children)]
                yield number, is_right

    def _is_right(self, run: Run, hasher: Hasher) -> bool:
        """Whether the digest of all tokens up to the end of the run is that of its last record."""
        start = run.first * self._token_bytes
        hasher.update(self._tokens[start : start + run.num_units * self._token_bytes])
        return bool(hasher.digest() == self._digest_after(run))

    def _restored(self, number: int, held: int) -> RestoredRun:
        run = self._runs[number]
        start, size = run.first * self._token_bytes, run.num_units * self._token_bytes
        before = self._digest_after(self._runs[run.parent]) if run.parent >= 0 else b""
        position, tokens = run.position, bytes(self._tokens[start : start + size])
        digest, slots = self._digest_after(run), tuple(self._slots_of(run, held))
        return RestoredRun(self._root_of(number), before, digest, position, position + run.num_units, tokens, slots)

    def _slots_of(self, run: Run, held: int) -> Iterator[array[int]]:
        """The slots in each component. The slots of a unit are neighbours, component after component."""
        rows = self.slots[self._bounds[run.first] : self._bounds[run.first + run.num_units]].astype(np.int32)
        rows, at = rows.reshape(run.num_units, -1), 0
        for component, width in enumerate(self._layout.widths):
            is_there = run.components >> component & 1
            yield array("i", rows[:, at : at + width].tobytes() if is_there and held >> component & 1 else b"")
            at += width if is_there else 0


def _bytes(rows: NDArray[Any]) -> memoryview:
    """The bytes of an array, without a copy to a `bytes`, which would hold the interpreter lock."""
    flat = np.ascontiguousarray(rows).reshape(-1)
    return flat.data.cast("B") if len(flat) else memoryview(b"")


def _equal(one: NDArray[np.uint64], other: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Which digests, each as four numbers, are equal."""
    found: NDArray[np.bool_] = one[:, 0] == other[:, 0]
    for column in range(1, one.shape[1]):
        found &= one[:, column] == other[:, column]
    return found


def _newest(candidates: Numbers, records: NDArray[Any]) -> tuple[Numbers, Numbers, Numbers]:
    """The record that was written last for each place, sorted by unit, component and place; the unit of each; and one
    record of each unit. Units are in the order of the first eight bytes of their digests. Only these bytes tell units
    apart here, so the caller compares the digests in full."""
    key = records["digest"][:, 0][candidates]
    place = records["component"][candidates].astype(np.int64) << 16 | records["place"][candidates]
    order = np.lexsort((~records["number"][candidates], place, key))
    place, key = place[order], key[order]
    new_unit = np.ones(len(order), dtype=bool)
    new_unit[1:] = key[1:] != key[:-1]
    new_place = new_unit.copy()
    new_place[1:] |= place[1:] != place[:-1]
    units = np.cumsum(new_unit) - 1
    chosen = candidates[order]
    return chosen[new_place], units[new_place], chosen[new_unit]


def _whole_components(units: Numbers, components: Numbers, num_units: int, widths: Numbers) -> NDArray[np.bool_]:
    """`[num_units, num_components]`: whether all places of a unit in a component are there."""
    num_components = len(widths)
    counts = np.bincount(units * num_components + components, minlength=num_units * num_components).reshape(
        num_units, num_components
    )
    found: NDArray[np.bool_] = (counts == widths) & (counts > 0)
    return found


def _parents(records: NDArray[Any], firsts: Numbers) -> Numbers:
    """For each unit the unit that it follows, `NO_PARENT` or `ORPHAN`. `firsts`: a record of each, by ascending
    digest."""
    if not len(firsts):
        return np.zeros(0, np.int64)
    digests, before = records["digest"][firsts], records["before"][firsts]
    roots, positions = records["root"][firsts], records["position"][firsts].astype(np.int64)
    at = np.searchsorted(digests[:, 0], before[:, 0])
    at[at == len(firsts)] = 0
    follows = (positions == positions[at] + 1) & _equal(before, digests[at]) & _equal(roots, roots[at])
    found: Numbers = np.where(follows, at, np.where(positions == 0, NO_PARENT, ORPHAN))
    return found


def _runs(parents: Numbers, positions: Numbers, masks: Numbers) -> tuple[Numbers, Numbers]:
    """An order of the units in which the units of a run are neighbours, and the place at which each run begins."""
    num_units = len(parents)
    if not num_units:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    itself = np.arange(num_units)
    before = np.where(parents >= 0, parents, itself)
    num_children = np.bincount(before[parents >= 0], minlength=num_units)
    continues = (parents >= 0) & (num_children[before] == 1) & (masks == masks[before]) & (positions % RUN_UNITS != 0)
    heads = np.where(continues, before, itself)
    while not np.array_equal(further := heads[heads], heads):  # doubles the distance each time
        heads = further
    order = np.argsort(heads << 32 | positions, kind="stable")
    sorted_heads = heads[order]
    starts = np.flatnonzero(np.concatenate(([True], sorted_heads[1:] != sorted_heads[:-1])))
    return order, starts
