"""Block tables of an engine with its own blocks: they hit its prefix cache, grow, shrink, and lose blocks before a
window. Used over a `HostCache` and over a runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias

import attrs

from aoffload._config.groups import KVCacheGroup

from .engine_pool import EnginePool
from .provenance import row_group

__all__ = ["EngineTables", "HasTables", "Tables"]

Tables: TypeAlias = list[list[int]]
"""Block ids, a list for each group."""


class HasTables(Protocol):
    """A request as its engine knows it."""

    tables: Tables
    unwritten: dict[int, range]
    """By group: positions in its table whose blocks were never written."""

    def prefix(self, num_tokens: int) -> int:
        """The number of the prefix of so many tokens."""
        ...


@attrs.define(eq=False)
class EngineTables:
    """Keeps the tables of requests, with a reference to each block that is named."""

    pool: EnginePool
    groups: Sequence[KVCacheGroup]
    unit: int
    nulls_the_past: bool
    """Whether blocks that a load leaves unwritten before a window are given back at once."""
    spoil: Callable[[list[int]], object]
    """Called with blocks that were taken: nothing of what they hold may be read."""

    @property
    def num_rows(self) -> int:
        """Blocks of a checkpoint of the recurrent state; 0: there is no such state."""
        return sum(group.num_rows for group in self.groups if group.is_recurrent)

    def hit(self, prefix: Callable[[int], int], num_tokens: int, fewer: int) -> tuple[int, Tables]:
        """How many of `num_tokens` tokens the engine's own cache has, and their blocks, not yet referred to. With a
        recurrent state, a hit ends at a checkpoint. The `fewer` longest hits are left aside, and the last token is
        always left to compute."""
        for units in range((num_tokens - 1) // self.unit, 0, -1):
            tables = self._tables_of(prefix, units * self.unit)
            if tables is not None:
                if fewer <= 0:
                    return units * self.unit, tables
                fewer -= 1
        return 0, [[] for _ in self.groups]

    def _tables_of(self, prefix: Callable[[int], int], num_tokens: int) -> Tables | None:
        found: Tables = []
        for number, group in enumerate(self.groups):
            size = group.block_size
            if group.is_recurrent:
                found.append([])
                continue
            needed = group.attention.required_blocks(num_tokens, size)
            own = [self.pool.cached((number, prefix((at + 1) * size))) for at in needed]
            if not all(own):
                return None
            found.append([0] * needed.start + own)
        return found if all(self.checkpoint(prefix(num_tokens))) else None

    def checkpoint(self, prefix: int) -> list[int]:
        """The cached blocks of the checkpoint after `prefix`, 0 for a missing one. Empty without a recurrent state."""
        return [self.pool.cached((row_group(row), prefix)) for row in range(self.num_rows)]

    def take_checkpoint(self) -> list[int]:
        """Blocks for a checkpoint; none if there is no room."""
        if self.num_rows > len(self.pool.free):
            return []
        taken = self.pool.take(self.num_rows)
        self.spoil(taken)
        return taken

    def share(self, tables: Iterable[Sequence[int]]) -> None:
        for table in tables:
            self.pool.share(table)

    def drop(self, tables: Iterable[Sequence[int]]) -> None:
        for table in tables:
            self.pool.drop(table)

    def change(self, client: HasTables, tables: Tables) -> None:
        """Refer to `tables` in place of what the request has."""
        self.share(tables)
        self.drop(client.tables)
        client.tables = tables

    def free(self, client: HasTables) -> None:
        self.change(client, [])

    def grow(self, client: HasTables, num_tokens: int, skipped_before: int = 0) -> bool:
        """Extend the tables to `num_tokens`, with null blocks where computing token `skipped_before` reads nothing.
        False: there is no room."""
        wanted: list[list[bool]] = []
        for group, table in zip(self.groups, client.tables, strict=True):
            if group.is_recurrent:
                wanted.append([])
                continue
            first = group.attention.required_blocks(skipped_before, group.block_size).start if skipped_before else 0
            stop = -(-num_tokens // group.block_size)
            wanted.append([at >= first for at in range(len(table), stop)])
        if sum(map(sum, wanted)) > len(self.pool.free):
            return False
        for table, more in zip(client.tables, wanted, strict=True):
            fresh = self.pool.take(sum(more))
            self.spoil(fresh)
            table += [fresh.pop() if is_wanted else 0 for is_wanted in more]
        return True

    def shrink(self, client: HasTables, num_tokens: int) -> None:
        """Keep the whole blocks of the first `num_tokens` in every group, and give back the rest."""
        for group, table in zip(self.groups, client.tables, strict=True):
            self.pool.drop(table[num_tokens // group.block_size :])
            del table[num_tokens // group.block_size :]

    def loaded(self, client: HasTables, before: int, num_ready: int, *, is_whole: bool) -> None:
        """A load from token `before` on has brought `num_ready`. Of a window, it brings only what is needed at its end:
        nothing is written to the blocks before that, and the engine gives them back, or keeps them until its windows
        move on. Tokens that did not come get other blocks: a copy may still write to the old ones."""
        for number, (group, table) in enumerate(zip(self.groups, client.tables, strict=True)):
            first = before // group.block_size
            past = group.attention.required_blocks(num_ready, group.block_size).start
            client.unwritten[number] = range(first, past)
            if self.nulls_the_past:
                self.pool.drop(table[first:past])
                table[first:past] = [0] * len(table[first:past])
        if not is_whole:
            self.shrink(client, num_ready)

    def cache(self, client: HasTables, num_computed: int) -> None:
        """Whole blocks of computed tokens hit from now on."""
        for number, (group, table) in enumerate(zip(self.groups, client.tables, strict=True)):
            for at in () if group.is_recurrent else range(num_computed // group.block_size):
                if table[at] and at not in client.unwritten.get(number, ()):
                    self.pool.cache((number, client.prefix((at + 1) * group.block_size)), table[at])

    def move_windows(self, client: HasTables, num_computed: int) -> None:
        """Give back what computing token `num_computed` reads no more."""
        for group, table in zip(self.groups, client.tables, strict=True):
            past = group.attention.required_blocks(num_computed, group.block_size).start
            self.pool.drop(table[:past])
            table[:past] = [0] * len(table[:past])

    def go_back(self, client: HasTables, start: int) -> bool:
        """Keep the blocks of the first `start` tokens alone. False: what is read there has left a window."""
        self.shrink(client, start)
        is_there = True
        for number, (group, table) in enumerate(zip(self.groups, client.tables, strict=True)):
            unwritten = client.unwritten.get(number, range(0))
            client.unwritten[number] = range(unwritten.start, min(unwritten.stop, start // group.block_size))
            if group.is_recurrent:
                continue
            needed = group.attention.required_blocks(start, group.block_size)
            is_there = is_there and all(table[at] and at not in unwritten for at in needed)
        return is_there
