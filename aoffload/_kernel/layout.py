"""The layout: KV cache groups, the unit, and the attention components of a model.

A group is a set of layers that share a block table. The *unit* is the least common multiple of the groups' block sizes:
one unit of tokens fills whole blocks of every group, so all positions in the kernel count units.

Groups that read the same tokens form a *component*: one attention component. Component 0 is full attention, which reads
every token before a position. Then come the components with a window (a sliding one, or the chunk of chunked local
attention), which read only the last tokens before a position. A component has `width` blocks per unit, those of all its
groups together.

The last component may be the *recurrent state*: all groups of layers that keep a state in place of KV. A *checkpoint*
is a copy of that state at the end of some unit. It takes `width` blocks, in the place of the unit that it ends, and
most units have none. To continue at unit `stop`, a request needs the checkpoint of unit `stop - 1` and no other: in
this respect the component is a window of one unit. It has no block table, because a forward does not read checkpoints:
the engine copies a checkpoint into the running state before it begins, and copies the running state out where a
checkpoint is planned.

The functions at the end compute with ranges of units: intersection and difference of several ranges and one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from .._config.groups import AttentionKind, FullAttention, KVCacheGroup, shortest_hit

MAX_ANSWERS = 1024
"""Maximum positions for which `Component.first_unit` caches its result."""


@dataclass(slots=True, frozen=True)
class Component:
    """An attention component: all groups of one attention kind, which need the same tokens at any position.

    In tables and parts, the ids of a unit are adjacent: `width` ids, group after group.
    """

    number: int
    kind: AttentionKind
    block_sizes: tuple[int, ...]
    unit_tokens: int
    width: int
    _firsts: dict[int, int] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Cache of `first_unit`: one request needs the same few positions many times."""

    def first_needed(self, num_tokens: int) -> int:
        """The first unit whose blocks are needed to continue computing at token `num_tokens`.

        A window that begins inside a unit needs all of it."""
        return self.first_token(num_tokens) // self.unit_tokens

    def first_unit(self, stop: int) -> int:
        """As `first_needed`, for a position in units: at unit `stop`."""
        if not self.number:
            return 0
        first = self._firsts.get(stop)
        if first is None:
            if len(self._firsts) >= MAX_ANSWERS:
                self._firsts.clear()
            first = self._firsts[stop] = self.first_needed(stop * self.unit_tokens)
        return first

    def first_token(self, num_tokens: int) -> int:
        """The first token whose KV is needed to continue computing at token `num_tokens`."""
        return self.kind.required_blocks(num_tokens, 1).start if self.number else 0

    def before_window(self, stop: int) -> list[int]:
        """The places, among the ids of unit `first_unit(stop)`, of blocks before all that is needed at unit `stop`.
        None in the recurrent state, whose blocks belong together."""
        needed = self.first_token(stop * self.unit_tokens) % self.unit_tokens
        found: list[int] = []
        at = 0
        for block_size in self.block_sizes:
            found += range(at, at + needed // block_size)
            at += self.unit_tokens // block_size
        return found

    def margin(self, num_units: int) -> int:
        """Units to store before a window of `num_units`, in addition to it, because the next turn of a conversation
        matches somewhat earlier than this turn ended."""
        return -(-num_units // 4)

    def free_unit(self, stop: int) -> int:
        """The last position, at most `stop`, at which a request can go on computing without any block of this
        component. Chunked attention has such positions after 0, where a chunk begins."""
        at = self.kind.free_end(stop * self.unit_tokens)
        while at % self.unit_tokens:
            at = self.kind.free_end(at - 1)
        return at // self.unit_tokens


@dataclass(slots=True, frozen=True)
class Layout:
    """The groups of a model as components over one unit.

    The index counts in units of `unit_tokens`, the least common multiple of the block sizes, so that a hit is valid for
    every group. With one group a unit is a block. The first component is full attention; its width is 0 where every
    group has a window.
    """

    groups: tuple[KVCacheGroup, ...]
    unit_tokens: int
    components: tuple[Component, ...]
    """Full attention, the windows, and the recurrent state, if there is one."""
    places: tuple[tuple[int, int], ...]
    """For each group: its component, and the offset of the group's ids among those of a unit in that component."""
    paged: tuple[Component, ...]
    """The components with a block table: full attention and the windows."""
    windows: tuple[Component, ...]
    partial: tuple[Component, ...]
    """All components but full attention: a hit needs only a part of their blocks."""
    width: int
    """Block ids of one unit in all block tables together."""
    full: Component
    """The component of full attention, the first one."""
    recurrent: Component | None
    """The recurrent state, the last component."""

    @classmethod
    def of(cls, groups: Sequence[KVCacheGroup]) -> Layout:
        unit = shortest_hit([group.block_size for group in groups])
        kinds: list[AttentionKind] = [FullAttention()]
        sizes: list[list[int]] = [[]]
        places: list[tuple[int, int]] = []
        states = [group for group in groups if group.is_recurrent]
        for group in groups:
            if not group.is_recurrent and group.attention not in kinds:
                kinds.append(group.attention)
                sizes.append([])
        num_rows = 0
        for group in groups:
            if group.is_recurrent:
                places.append((len(kinds), num_rows))
                num_rows += group.num_rows
                continue
            number = kinds.index(group.attention)
            places.append((number, sum(unit // size for size in sizes[number])))
            sizes[number].append(group.block_size)
        paged = tuple(
            Component(number, kind, tuple(found), unit, sum(unit // size for size in found))
            for number, (kind, found) in enumerate(zip(kinds, sizes, strict=True))
        )
        recurrent = Component(len(paged), states[0].attention, (), unit, num_rows) if states else None
        components = paged if recurrent is None else (*paged, recurrent)
        return cls(
            groups=tuple(groups),
            unit_tokens=unit,
            components=components,
            places=tuple(places),
            paged=paged,
            windows=paged[1:],
            partial=components[1:],
            width=sum(component.width for component in paged),
            full=paged[0],
            recurrent=recurrent,
        )

    def starts(self, stop: int) -> list[int]:
        """For each component, the first unit needed to continue computing at unit `stop`."""
        found = [0] * len(self.components)
        for component in self.partial:
            found[component.number] = component.first_unit(stop)
        return found

    def starts_of(self, component: Component, start: int, stop: int) -> list[int]:
        """For each component, the start of a lease up to unit `stop`. The lease pins full attention, and `component`
        from unit `start` on, but no other component."""
        found = [stop] * len(self.components)
        found[component.number] = start
        found[0] = 0
        return found

    def num_blocks(self, full_start: int, start: int, stop: int) -> int:
        """Number of blocks that a load brings so that a request can go on at unit `stop`: in full attention the blocks
        from unit `full_start` on, in the others the needed blocks from unit `start` on."""
        found = (stop - full_start) * self.full.width
        for component in self.partial:
            found += (stop - max(start, component.first_unit(stop))) * component.width
        return found

    def num_units(self, num_tokens: int) -> int:
        """Units that hold `num_tokens`, rounded up."""
        return -(-num_tokens // self.unit_tokens)

    def by_group(self, tables: Sequence[Sequence[int]]) -> list[list[int]]:
        """Convert ids of whole units, one sequence per block table, to one list per group. The lists of groups with a
        recurrent state are empty."""
        if len(self.groups) == 1 and self.recurrent is None:
            return [list(tables[self.places[0][0]])]
        found: list[list[int]] = []
        for group, (number, offset) in zip(self.groups, self.places, strict=True):
            if group.is_recurrent:
                found.append([])
                continue
            ids, width = tables[number], self.components[number].width
            per_unit = self.unit_tokens // group.block_size
            rows = (ids[at + offset : at + offset + per_unit] for at in range(0, len(ids), width))
            found.append(list(chain.from_iterable(rows)))
        return found

    def positions(self, component: int, start: int, stop: int) -> Iterator[tuple[int, range]]:
        """For each group of `component`: its number, and the block positions of units `[start, stop)`."""
        for number, (group, (its_component, _)) in enumerate(zip(self.groups, self.places, strict=True)):
            if its_component == component:
                per_unit = self.unit_tokens // group.block_size
                yield number, range(start * per_unit, stop * per_unit)

    def deal(self, blocks: array[int], num_units: int) -> list[array[int]]:
        """Divide `blocks`, which are for `num_units` more units, among the block tables."""
        if len(self.paged) == 1:
            return [blocks]
        found: list[array[int]] = []
        at = 0
        for component in self.paged:
            found.append(blocks[at : at + num_units * component.width])
            at += num_units * component.width
        return found


def within(ranges: Iterable[range], start: int, stop: int) -> list[range]:
    """`ranges`, clipped to `[start, stop)`; empty ones are dropped."""
    cut = (range(max(units.start, start), min(units.stop, stop)) for units in ranges)
    return [units for units in cut if units]


def without(ranges: Iterable[range], start: int, stop: int) -> list[range]:
    """`[start, stop)` without `ranges`, as non-empty ranges."""
    found: list[range] = []
    for units in sorted(filter(None, ranges), key=lambda units: units.start):
        if units.start > start:
            found.append(range(start, min(units.start, stop)))
        start = max(start, units.stop)
    found.append(range(start, stop))
    return [units for units in found if units]


def outside(first: int, last: int, start: int, stop: int) -> list[range]:
    """The part of `[start, stop)` that is not in `[first, last)`, which may be empty: up to two ranges."""
    if first >= last or last <= start or stop <= first:
        return [range(start, stop)] if start < stop else []
    found = [range(start, first)] if start < first else []
    if last < stop:
        found.append(range(last, stop))
    return found
