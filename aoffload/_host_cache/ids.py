"""The block ids in an engine's tables, translated to the components of the layout. The engine has one table per
group."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from operator import lt
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .._common.arguments import shown
from .._config.config import MAX_BLOCKS
from .._kernel.layout import Component, Layout
from .._kernel.pools import id_range
from ..errors import InvalidArgument

MAX_WITHOUT_NUMPY = 64
"""A loop over at most this many ids is faster than numpy."""

Find: TypeAlias = Callable[[int, int, int], Sequence[int]]
"""Called with a group number, `first` and `last`; returns the blocks `[first, last)` of the group, 0 for a missing
one."""


@dataclass(slots=True, eq=False)
class EngineIds:
    """Block tables from the first token on, one for each group. Only the requested ids of a table are read, and none of
    a group with a recurrent state."""

    layout: Layout
    num_rows: int
    name: str
    """The argument's name, for error messages."""
    tables: tuple[Sequence[int], ...]

    @classmethod
    def of(cls, layout: Layout, num_rows: int, name: str, tables: Any, num_units: int) -> EngineIds:
        """Check that `tables` reach to `num_units` at least: lists, ranges, arrays or numpy arrays."""
        try:
            found = tuple(tables)
            lengths = [*map(len, found)]
        except Exception:  # noqa: BLE001 - whatever a foreign sequence raises
            raise InvalidArgument(name, f"must be block ids for each group, got {shown(tables)}") from None
        if len(layout.groups) == len(found) == 1 and lengths[0] >= num_units:  # the common case
            return cls(layout, num_rows, name, found)
        wanted = [
            0 if group.is_recurrent else num_units * (layout.unit_tokens // group.block_size) for group in layout.groups
        ]
        if len(lengths) != len(wanted) or any(map(lt, lengths, wanted)):
            raise InvalidArgument(name, f"must hold {wanted} ids at least, group by group; got {lengths}")
        return cls(layout, num_rows, name, found)

    def of_component(self, component: Component, start: int, stop: int) -> array[int]:
        """The ids of units `[start, stop)`, 0 where the engine names the null block."""
        return self._of_component(component, start, stop, self._named)

    def _named(self, group: int, first: int, last: int) -> Sequence[int]:
        return self.tables[group][first:last]

    def with_found(self, component: Component, start: int, stop: int, named: array[int], find: Find) -> array[int]:
        """The ids `named`, with the results of `find` in place of null blocks."""
        found = self._of_component(component, start, stop, find)
        return array("i", [block_id or other for block_id, other in zip(named, found, strict=True)])

    def check(self, num_units: int) -> None:
        """Check all ids of the first `num_units`."""
        for component in self.layout.paged:
            if component.width:
                self.of_component(component, 0, num_units)

    def _of_component(self, component: Component, start: int, stop: int, read: Find) -> array[int]:
        if start == stop:
            return array("i")
        if len(self.tables) == 1:
            return self._read(read, 0, start * component.width, stop * component.width)
        of_groups: list[array[int]] = []
        for number, (its_component, _) in enumerate(self.layout.places):
            if its_component == component.number:
                per_unit = self.layout.unit_tokens // self.layout.groups[number].block_size
                of_groups.append(self._read(read, number, start * per_unit, stop * per_unit))
        if len(of_groups) == 1:
            return of_groups[0]
        rows = [np.frombuffer(ids, np.int32).reshape(stop - start, -1) for ids in of_groups]
        return array("i", np.concatenate(rows, axis=1).tobytes())

    def _read(self, read: Find, group: int, first: int, last: int) -> array[int]:
        part: Any = self.tables[group]
        try:
            part = read(group, first, last)
            ids = array("i", part) if type(part) is list else _as_ids(part)
        except Exception as error:
            problem = f"must be block ids, got {shown(part)} ({type(error).__name__})"
            raise InvalidArgument(self.name, problem) from error
        if not _are_rows(ids, self.num_rows):
            wrong = next(block_id for block_id in ids if not 0 <= block_id < self.num_rows)
            raise InvalidArgument(self.name, f"must lie in [0, {self.num_rows}), got {wrong}")
        if len(ids) != last - first:
            raise InvalidArgument(self.name, f"must be {last - first} ids, got {len(ids)}")
        return ids


def checkpoint_ids(component: Component | None, num_rows: int, name: str, given: Any) -> array[int]:
    """The engine's blocks of one checkpoint. `InvalidArgument` names `name` unless they are `component.width` different
    blocks in `[1, num_rows)`."""
    if component is None:
        raise InvalidArgument(name, "must not be given: no group has a recurrent state")
    try:
        if isinstance(given, Mapping | Set):
            raise TypeError("it has no order")
        ids = array("i", islice(given, component.width + 1))
    except Exception as error:  # noqa: BLE001 - whatever a foreign sequence raises
        problem = f"must be block ids of a checkpoint, got {shown(given)} ({type(error).__name__})"
        raise InvalidArgument(name, problem) from None
    if len(ids) != component.width or len(set(ids)) != len(ids):
        raise InvalidArgument(name, f"must hold {component.width} different block ids for a checkpoint, got {[*ids]}")
    if min(ids) < 1 or max(ids) >= num_rows:
        raise InvalidArgument(name, f"must lie in [1, {num_rows}), got {[*ids]}")
    return ids


@dataclass(slots=True, eq=False)
class FewRows:
    """The rows that a call names, if they are few."""

    rows: frozenset[int]
    are_distinct: bool

    def shared_with(self, others: Iterable[array[int]]) -> int:
        """A row that one of `others` names, too; the null block if there is none."""
        for ids in others:
            if not self.rows.isdisjoint(ids):
                return min(self.rows.intersection(ids))
        return 0


@dataclass(slots=True, eq=False)
class ManyRows:
    """The rows that a call names, for many rows: thousands of ids are compared without a Python loop."""

    num_rows: int
    blocks: Sequence[array[int]]

    @property
    def are_distinct(self) -> bool:
        if len(self.blocks) == 1:
            rows = np.frombuffer(self.blocks[0], np.int32)
            if (rows[1:] > rows[:-1]).all():  # the common case
                return True
        return int(np.count_nonzero(self._marks())) == sum(map(len, self.blocks))

    def _marks(self) -> NDArray[np.bool_]:
        """One mark for each row."""
        marks = np.zeros(self.num_rows, np.bool_)
        for ids in self.blocks:
            marks[np.frombuffer(ids, np.int32)] = True
        return marks

    def shared_with(self, others: Sequence[array[int]]) -> int:
        """A row that one of `others` names, too; the null block if there is none."""
        marks = self._marks() if others else np.zeros(0, np.bool_)
        for ids in others:
            rows = np.frombuffer(ids, np.int32)
            if (shared := rows[marks[rows]]).size:
                return int(shared.min())
        return 0


def named_rows(num_rows: int, blocks: Sequence[array[int]]) -> FewRows | ManyRows:
    num_ids = len(blocks[0]) if len(blocks) == 1 else sum(map(len, blocks))
    if num_ids > MAX_WITHOUT_NUMPY:
        return ManyRows(num_rows, blocks)
    rows = frozenset(blocks[0]) if len(blocks) == 1 else frozenset().union(*blocks)
    return FewRows(rows, len(rows) == num_ids)


def has_null(ids: array[int]) -> bool:
    return 0 in ids if len(ids) <= MAX_WITHOUT_NUMPY else not np.frombuffer(ids, np.int32).all()


def without_null(ids: array[int]) -> array[int]:
    """The blocks of the engine among `ids`."""
    return array("i", filter(None, ids))


def _are_rows(ids: array[int], num_rows: int) -> bool:
    """Whether all ids are in `[0, num_rows)`."""
    if len(ids) <= MAX_WITHOUT_NUMPY:
        return not ids or (min(ids) >= 0 and max(ids) < num_rows)
    return bool(np.frombuffer(ids, np.uint32).max() < num_rows)  # a negative id is a very large one there


def _as_ids(part: Sequence[int]) -> array[int]:
    """A part of an engine's table that is not a list, as an array of ids."""
    if isinstance(part, range) and part.step == 1:
        return id_range(part.start, part.stop)
    if isinstance(part, np.ndarray) and part.dtype.kind in "iu" and part.ndim == 1:
        wide = part.astype(np.int64)
        if wide.size and wide.min() >= -1 and wide.max() <= MAX_BLOCKS:
            return array("i", wide.astype(np.int32).tobytes())
    return array("i", part)
