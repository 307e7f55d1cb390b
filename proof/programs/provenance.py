"""Bytes by provenance: for every token of every block, which prefix's KV it is and which computations it depends on.

The KV of a token is a function of its group and of the prefix up to and including the token, so an interned prefix
represents the right bytes. A cell also records when it was computed, counted in changes of the weights. A reset of
everything simulates new weights; a change of the weights' epoch sets other weights, or those of an earlier epoch again.
No request begins with KV of other weights, and none can be found.

A checkpoint of a recurrent state has one cell in each of its rows. The state is a function of the prefix before its
position, so the same interned prefix represents it, and the cell has the number of the row in place of a group.

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

__all__ = ["GARBAGE", "Block", "Bytes", "Cell", "Text", "row_group"]


class Cell(NamedTuple):
    """One token's KV in one group."""

    prefix: int
    group: int
    marks: int
    weights: int


def row_group(row: int) -> int:
    """What a cell of a checkpoint has in place of its group."""
    return -2 - row


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
        self.num_rows = sum(group.num_rows for group in groups if group.is_recurrent)
        """Blocks of a checkpoint; 0: the model has no recurrent state."""
        self.tiers: tuple[list[Block], ...] = tuple([[] for _ in range(number)] for number in num_blocks)
        self.invalid = 0
        self.weights = 0
        """How often the weights have changed."""
        self.versions: list[tuple[int, str]] = [(0, "")]
        """After each change: the version of the weights. Equal versions compute equal KV."""
        self._num_marks = 0
        self._interned: dict[tuple[object, ...], int] = {}

    # -- weights --------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> str:
        """The weights' epoch."""
        return self.versions[-1][1]

    def new_weights(self) -> None:
        """The weights of all epochs are others from now on."""
        number, epoch = self.versions[-1]
        self._change((number + 1, epoch))

    def set_epoch(self, epoch: str) -> None:
        """The weights of `epoch` compute from now on."""
        if epoch != self.epoch:
            self._change((self.versions[-1][0], epoch))

    def _change(self, version: tuple[int, str]) -> None:
        self.weights += 1
        self.versions.append(version)

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
        from token `start` on, KV that was computed before change `oldest` of the weights, unless by equal weights."""
        device, marks = self.tiers[0], 0
        for number, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            size = group.block_size
            if group.is_recurrent:
                continue
            for at in range(group.attention.required_blocks(stop, size).start * size, stop):
                block_id = table[at // size] if at // size < len(table) else 0
                block = device[block_id]
                cell = block[at % size] if block_id and block else GARBAGE
                if cell.prefix != text.prefixes[at + 1] or cell.group != number:
                    raise Violation(
                        "wrong bytes",
                        f"{reader} reads block {block_id} of group {number} at token {at}: {self.say(cell)}",
                    )
                if self._is_old(cell, oldest) and at >= start:
                    about = f"{reader} reads block {block_id} of group {number} at token {at}"
                    raise Violation("old weights", f"{about}: weights {cell.weights}, where {oldest} is the oldest")
                marks |= cell.marks
        if marks & self.invalid:
            raise Violation("bytes taken back", f"{reader} reads what hangs on a forward that was taken back")
        return marks

    def _is_old(self, cell: Cell, oldest: int) -> bool:
        return cell.weights < oldest and self.versions[cell.weights] != self.versions[oldest]

    def read_checkpoint(self, text: Text, block_ids: Sequence[int], stop: int, reader: str, oldest: int = 0) -> int:
        """Check a checkpoint from which `reader` continues at token `stop`, and return its marks."""
        marks = 0
        if len(block_ids) != self.num_rows:
            raise Violation("wrong bytes", f"{reader} gets a checkpoint of {len(block_ids)} rows, not {self.num_rows}")
        for row, block_id in enumerate(block_ids):
            block = self.tiers[0][block_id]
            cell = block[0] if block else GARBAGE
            about = f"{reader} reads row {row} of the checkpoint at token {stop}, block {block_id}: {self.say(cell)}"
            if cell.prefix != text.prefixes[stop] or cell.group != row_group(row):
                raise Violation("wrong bytes", about)
            if self._is_old(cell, oldest):
                raise Violation("old weights", about)
            marks |= cell.marks
        if marks & self.invalid:
            raise Violation("bytes taken back", f"{reader} reads a checkpoint of a forward that was taken back")
        return marks

    def write_checkpoint(self, text: Text, block_ids: Sequence[int], stop: int, marks: int) -> None:
        for row, block_id in enumerate(block_ids):
            self.tiers[0][block_id] = [Cell(text.prefixes[stop], row_group(row), marks, self.weights)]

    def checkpoint_problem(self, tier: int, block_ids: Sequence[int]) -> str:
        """Why these blocks are no checkpoint; empty if they are one."""
        cells = [(self.tiers[tier][block_id] or [GARBAGE])[0] for block_id in block_ids]
        if [cell.group for cell in cells] != [row_group(row) for row in range(self.num_rows)]:
            return f"has rows {[cell.group for cell in cells]}"
        return "has rows of several positions or prompts" if len({cell.prefix for cell in cells}) > 1 else ""

    def write(self, text: Text, tables: Sequence[Sequence[int]], start: int, stop: int, marks: int) -> list[int]:
        """Write tokens `[start, stop)` as a forward that has read `marks`. Returns the new mark of each token."""
        device, own = self.tiers[0], [1 << (self._num_marks + at) for at in range(stop - start)]
        self._num_marks += stop - start
        for number, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            if group.is_recurrent:
                continue
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
            for at in () if group.is_recurrent else range(start, stop):
                block = self.tiers[0][table[at // group.block_size]]
                if len(block) == group.block_size:  # else nobody has written there yet
                    block[at % group.block_size] = GARBAGE

    def spoil(self, tier: int, block_ids: Sequence[int] | array[int]) -> None:
        """Leave nothing in these blocks that a request may read."""
        for block_id in block_ids:
            self.tiers[tier][block_id] = []

    def copy(self, source: int, source_id: int, destination: int, destination_id: int) -> None:
        self.tiers[destination][destination_id] = list(self.tiers[source][source_id])

    def problem(self, tier: int, block_ids: Sequence[int], epoch: str | None = None) -> tuple[str, str] | None:
        """Why no request of the weights' epoch `epoch` (None: any) may read one of these blocks: the broken law, and
        how. None: each may be read."""
        version = self.versions[-1][0], epoch
        for block_id in block_ids:
            block = self.tiers[tier][block_id]
            if not block or GARBAGE in block:
                return "wrong bytes", f"block {block_id} can be found and holds nothing of use"
            if epoch is not None and any(self.versions[cell.weights] != version for cell in block):
                return "old weights", f"block {block_id} can be found under {version} and was computed by others"
            if self.invalid and any(cell.marks & self.invalid for cell in block):
                return "bytes taken back", f"block {block_id} can be found and hangs on a forward that was taken back"
        return None

    def say(self, cell: Cell) -> str:
        return "nothing of use" if cell is GARBAGE else f"prefix {cell.prefix} of group {cell.group}"
