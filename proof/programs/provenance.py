"""Bytes by provenance: for every token of every block, which prefix's KV it is and which computations it depends on.

The KV of a token is a function of its group and of the prefix up to and including the token, so an interned prefix
represents the right bytes. A cell also records the version of the weights that computed it. A reset of everything
simulates new weights, and no request begins with KV of the old weights.

A cell also has marks: every token ever computed has a bit, and a cell has the bits of its own token and of all tokens
that its forward has read. When a forward is invalidated, its bits become invalid, and so do all cells with such a bit.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import attrs

from aoffload._common.prefix import KeySpan
from aoffload._config.groups import KVCacheGroup
from aoffload.testing.violations import Violation

__all__ = ["GARBAGE", "Block", "Bytes", "Cell", "Text"]


class Cell(NamedTuple):
    """One token's KV in one group."""

    prefix: int
    group: int
    marks: int
    weights: int


GARBAGE = Cell(-1, -1, 0, 0)
Block = list[Cell]


@attrs.define(eq=False)
class Text:
    """A request's tokens as the bytes see them: one interned prefix for each token."""

    tokens: list[int]
    spans: tuple[KeySpan, ...]
    prefixes: list[int]
    sampled_marks: list[int] = attrs.field(factory=list)
    """For each generated token: the marks of what it was sampled from."""

    @property
    def marks(self) -> int:
        found = 0
        for marks in self.sampled_marks:
            found |= marks
        return found


class Bytes:
    """The contents of the tiers, and which computations are known to be wrong."""

    def __init__(self, groups: Sequence[KVCacheGroup], *num_blocks: int) -> None:
        """`num_blocks`: of each tier."""
        self.groups = tuple(groups)
        self.tiers: tuple[list[Block], ...] = tuple([[] for _ in range(number)] for number in num_blocks)
        self.invalid = 0
        self.weights = 0
        """The version of the weights: how often the model got new ones."""
        self._num_marks = 0
        self._interned: dict[tuple[object, ...], int] = {}

    # -- texts ----------------------------------------------------------------------------------------------------

    def text(self, root: object, tokens: Sequence[int], spans: tuple[KeySpan, ...]) -> Text:
        text = Text([], spans, [self._intern(("root", root))])
        self.append(text, tokens)
        return text

    def append(self, text: Text, tokens: Sequence[int]) -> None:
        for token in tokens:
            at = len(text.tokens)
            embedded = tuple((span.start, span.digest) for span in text.spans if span.start <= at < span.stop)
            text.prefixes.append(self._intern((text.prefixes[-1], token, embedded)))
            text.tokens.append(token)

    def _intern(self, identity: tuple[object, ...]) -> int:
        return self._interned.setdefault(identity, len(self._interned))

    # -- computing ------------------------------------------------------------------------------------------------

    def read(
        self, text: Text, tables: Sequence[Sequence[int]], stop: int, reader: str, oldest: int = 0, start: int = 0
    ) -> int:
        """Check all KV that computing token `stop` reads, and return its marks. Wrong bytes are a violation. So is,
        from token `start` on, KV of weights older than `oldest`."""
        device, marks = self.tiers[0], 0
        for number, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            size = group.block_size
            for at in range(group.attention.required_blocks(stop, size).start * size, stop):
                block_id = table[at // size] if at // size < len(table) else 0
                block = device[block_id]
                cell = block[at % size] if block_id and block else GARBAGE
                if cell.prefix != text.prefixes[at + 1] or cell.group != number:
                    raise Violation(
                        "wrong bytes",
                        f"{reader} reads block {block_id} of group {number} at token {at}: {self.say(cell)}",
                    )
                if cell.weights < oldest and at >= start:
                    about = f"{reader} reads block {block_id} of group {number} at token {at}"
                    raise Violation("old weights", f"{about}: weights {cell.weights}, where {oldest} is the oldest")
                marks |= cell.marks
        if marks & self.invalid:
            raise Violation("bytes taken back", f"{reader} reads what hangs on a forward that was taken back")
        return marks

    def write(self, text: Text, tables: Sequence[Sequence[int]], start: int, stop: int, marks: int) -> list[int]:
        """Write tokens `[start, stop)` as a forward that has read `marks`. Returns the new mark of each token."""
        device, own = self.tiers[0], [1 << (self._num_marks + at) for at in range(stop - start)]
        self._num_marks += stop - start
        for number, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            size, seen = group.block_size, marks
            for at in range(start, stop):
                seen |= own[at - start]
                if at // size >= len(table) or not table[at // size]:
                    raise Violation(
                        "no room", f"token {at} of group {number} is to be computed and has no block: {list(table)}"
                    )
                block = device[table[at // size]]
                if len(block) != size:
                    block = device[table[at // size]] = [GARBAGE] * size
                block[at % size] = Cell(text.prefixes[at + 1], number, seen, self.weights)
        return own

    def garble(self, tables: Sequence[Sequence[int]], start: int, stop: int) -> None:
        """Write garbage to tokens `[start, stop)`, as a void forward does."""
        for group, table in zip(self.groups, tables, strict=True):
            for at in range(start, stop):
                block = self.tiers[0][table[at // group.block_size]]
                if len(block) == group.block_size:  # else nobody has written there yet
                    block[at % group.block_size] = GARBAGE

    def spoil(self, tier: int, block_ids: Sequence[int] | array[int]) -> None:
        """Leave nothing in these blocks that a request may read."""
        for block_id in block_ids:
            self.tiers[tier][block_id] = []

    def copy(self, source: int, source_id: int, destination: int, destination_id: int) -> None:
        self.tiers[destination][destination_id] = list(self.tiers[source][source_id])

    def problem(self, tier: int, block_ids: Sequence[int]) -> tuple[str, str] | None:
        """Why no request at all may read one of these blocks: the broken law, and how. None: each may be read."""
        for block_id in block_ids:
            block = self.tiers[tier][block_id]
            if not block or GARBAGE in block:
                return "wrong bytes", f"block {block_id} can be found and holds nothing of use"
            if self.invalid and any(cell.marks & self.invalid for cell in block):
                return "bytes taken back", f"block {block_id} can be found and hangs on a forward that was taken back"
        return None

    def say(self, cell: Cell) -> str:
        return "nothing of use" if cell is GARBAGE else f"prefix {cell.prefix} of group {cell.group}"
