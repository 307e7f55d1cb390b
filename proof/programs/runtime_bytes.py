"""Simulated KV: each token records the forward that wrote it, and each forward records the tokens that it read.

A block holds the tag of the prefix that ends in it, as in every simulation; and, token by token, the prefix that its KV
stands for and the forward that has written it. Invalidating a forward makes everything wrong that was computed from it,
however indirectly; only requests that were told may read that.

A running state is known by the forward that has computed it last, which has read all before. A row of a checkpoint has
one token, the last one that the state summarises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, TypeAlias

import attrs

from aoffload._common.prefix import KeySpan, Root
from aoffload._common.tiers import Tier
from aoffload._kernel.records import LedgerRequest
from aoffload.testing.asks import Ask
from aoffload.testing.engine import first_read
from aoffload.testing.serving import SimulatedEngine
from aoffload.testing.violations import Violation

from .program import EPOCHS

__all__ = ["Forward", "ProgramEngine", "Read", "Tables", "Written", "extend_chain"]

Tables: TypeAlias = list[list[int]]
"""Block ids, a list for each group."""


@attrs.define(eq=False)
class Forward:
    """One forward of a request, over tokens `[start, stop)`."""

    by: str
    start: int
    stop: int
    weights: int = 0
    wrong_from: float = math.inf
    """The first token that is wrong: it was invalidated, or computed from something that was."""
    _children: list[tuple[Forward, int]] = attrs.field(factory=list)
    """The forwards that have read it, each with the token up to which it did."""

    def __str__(self) -> str:
        return f"the forward of {self.by} over [{self.start}, {self.stop})"

    def read_by(self, child: Forward, stop: int) -> None:
        self._children.append((child, stop))
        if self.wrong_from < stop:
            child.take_back(child.start)

    def take_back(self, start: int) -> None:
        """Invalidate its tokens from `start` on, and every forward that has read them."""
        if max(start, self.start) >= self.wrong_from:
            return
        self.wrong_from = max(start, self.start)
        for child, stop in self._children:
            if self.wrong_from < stop:
                child.take_back(child.start)


Cell: TypeAlias = "tuple[int, Forward, int] | None"
"""One token: the number of the prefix that it ends, the forward that computed it, and its position in the prompt."""


class Written(int):
    """What a block holds: as a number, the tag of the prefix that ends in it."""

    cells: tuple[Cell, ...]

    @classmethod
    def of(cls, tag: int, cells: tuple[Cell, ...]) -> Written:
        found = cls(tag)
        found.cells = cells
        return found


@attrs.define
class Read:
    """What attention has found in the blocks that it read."""

    forwards: dict[Forward, int] = attrs.field(factory=dict)
    """The forwards that wrote it, each with the token up to which it was read."""
    problem: str = ""
    """The first bytes that are not those of the prefix."""
    stale: str = ""
    """The first bytes that are those of the prefix, but were invalidated."""


@attrs.define(eq=False)
class ProgramEngine(SimulatedEngine):
    """Writes and reads blocks token by token."""

    SERVES_STATES: ClassVar[bool] = True
    _chains: dict[object, int] = attrs.field(factory=dict)
    """The number of every prefix, by the number of the prefix before its last token, that token, and its span."""
    weights: int = 0
    """How often the weights have changed. Each reset of everything, also one of an earlier runtime, changes them."""
    versions: list[tuple[int, str]] = attrs.field(factory=lambda: [(0, "")])
    """After each change: the version of the weights. Equal versions compute equal KV."""
    epochs: dict[bytes, str] = attrs.field(factory=dict)
    """By digest of a root: the weights' epoch of the KV under it."""
    oldest: dict[LedgerRequest, int] = attrs.field(factory=dict)
    """By request: how often the weights had changed when it got its blocks or its load ended. It reads no earlier KV,
    unless equal weights computed it."""
    met: Callable[[str], object] = attrs.field(default=lambda feature: None)
    """Called with features that the program has met."""
    computing: set[LedgerRequest] = attrs.field(factory=set)
    """Requests that have begun to compute in place of a load: no answer comes any more."""

    def chain(self, roots: tuple[object, object], tokens: Sequence[int], spans: Iterable[KeySpan] = ()) -> list[int]:
        """The numbers of the prefixes of `tokens`, the shortest first."""
        found: list[int] = []
        return extend_chain(self._chains, found, roots, tokens, tuple(spans))

    def lengthened(self, chain: list[int], tokens: Sequence[int]) -> list[int]:
        """`chain` with generated `tokens` after it, which lie in no span."""
        return extend_chain(self._chains, list(chain), None, tokens, ())

    def identity(self, ask: Ask, group: int, tokens: tuple[int, ...]) -> object:
        return group, self.chain((ask.salt, ask.adapter), tokens, ask.key_spans)[-1]

    def follow(self, before: ProgramEngine) -> None:
        """It comes after `before` on the same disk: what that has stored may hit."""
        self.tags, self._chains, self.committed = before.tags, before._chains, before.committed
        self.weights, self.versions, self.epochs = before.weights, before.versions, before.epochs
        self.num_epochs = before.num_epochs

    def forget_everything(self) -> None:
        super().forget_everything()
        number, epoch = self.versions[-1]
        self._change((number + 1, epoch))

    def set_epoch(self, epoch: str) -> None:
        """The weights of `epoch` compute from now on. Requests that were matched before publish nothing any more, or
        are matched again."""
        if epoch != self.epoch:
            self.num_resets += 1
            self.num_epochs += 1
            self._change((self.versions[-1][0], epoch))

    @property
    def epoch(self) -> str:
        """The weights' epoch."""
        return self.versions[-1][1]

    def _change(self, version: tuple[int, str]) -> None:
        self.weights += 1
        self.versions.append(version)

    def know(self, root: Root) -> None:
        """Requests have KV under `root`, and under the roots of the same keys in other epochs."""
        if root.digest not in self.epochs:
            self.epochs |= {root.under_weights(epoch).digest: epoch for epoch in EPOCHS}

    def is_old(self, forward: Forward, oldest: int) -> bool:
        """Whether other weights have computed `forward` before change `oldest`."""
        return forward.weights < oldest and self.versions[forward.weights] != self.versions[oldest]

    def answered(self, record: LedgerRequest) -> None:
        """The request has just got its blocks, or its load has just ended."""
        if record not in self.computing:
            self.oldest[record] = self.weights if self.num_resets else 0

    def may_be_cached(self, chain: Sequence[int], checkpoints: Iterable[int] = ()) -> None:
        """From now on, whole blocks of this prefix may hit, and of the recurrent state these `checkpoints`."""
        for group, config in enumerate(self.runtime.config.groups):
            size = config.block_size
            for end in checkpoints if config.is_recurrent else range(size, len(chain) + 1, size):
                self.committed.add((group, chain[end - 1]))

    def missing(self, chain: Sequence[int], start: int, stop: int) -> int:
        """The first end of a block after token `start` that a hit of `stop` tokens takes, and that was never cached; 0:
        there is none."""
        for group, config in enumerate(self.runtime.config.groups):
            size = config.block_size
            ends = range(size, stop + 1, size)
            for end in ends[-1:] if config.is_recurrent else ends:
                if end > start and (group, chain[end - 1]) not in self.committed:
                    return end
        return 0

    def allocated(self, tables: Tables) -> int:
        """Tokens that block tables reach to."""
        pairs = zip(tables, self.runtime.config.groups, strict=True)
        return int(min(len(table) * config.block_size for table, config in pairs if not config.is_recurrent))

    # -- a forward ------------------------------------------------------------------------------------------------

    def read(self, tables: Tables, chain: Sequence[int], stop: int) -> Read:
        """What attention reads for the token at `stop` in every group."""
        found = Read()
        for group, config in enumerate(self.runtime.ledger.layout.groups):
            start = stop if config.is_recurrent else first_read(config.attention, stop)
            self._read_group(found, tables[group], config.block_size, chain, start, stop)
        return found

    def _read_group(
        self, found: Read, table: list[int], size: int, chain: Sequence[int], start: int, stop: int
    ) -> None:
        content, forwards = self.device.content, found.forwards
        for index in range(start // size, -(-stop // size)):
            block_id = table[index] if index < len(table) else 0
            held = content[block_id]
            cells = held.cells if isinstance(held, Written) and block_id else ()
            self.num_blocks_checked += 1
            for position in range(max(start, index * size), min(stop, (index + 1) * size)):
                offset = position - index * size
                cell = cells[offset] if offset < len(cells) else None
                if cell is None or cell[0] != chain[position]:
                    found.problem = found.problem or _about(position, block_id, held, cell)
                    continue
                forward = cell[1]
                forwards[forward] = max(forwards.get(forward, 0), position + 1)
                if forward.wrong_from <= position:
                    found.stale = found.stale or f"token {position} (block {block_id}), which {forward} has taken back"

    def write_tokens(self, tables: Tables, chain: Sequence[int], forward: Forward, start: int, stop: int) -> None:
        """Write the KV of tokens `[start, stop)` to their blocks. Earlier tokens in the same blocks stay."""
        content = self.device.content
        for group, config in enumerate(self.runtime.config.groups):
            size, table = config.block_size, tables[group]
            for index in () if config.is_recurrent else range(start // size, -(-stop // size)):
                first, last = index * size, min(stop, (index + 1) * size)
                held = content[table[index]]
                before = held.cells if isinstance(held, Written) else ()
                cells = [before[at] if at < len(before) else None for at in range(start - first)]
                cells += [(chain[position], forward, position) for position in range(max(start, first), last)]
                tag = self.tags.of((group, chain[last - 1]))
                content[table[index]] = Written.of(tag, tuple(cells))

    def check_written(self, name: str, tables: Tables, chain: Sequence[int], start: int, stop: int) -> None:
        """Computed tokens are still in their blocks, except where a window has moved on."""
        for group, config in enumerate(self.runtime.config.groups):
            for position in () if config.is_recurrent else range(start, stop):
                index, offset = divmod(position, config.block_size)
                block_id = tables[group][index]
                held = self.device.content[block_id]
                cells = held.cells if isinstance(held, Written) else ()
                cell = cells[offset] if offset < len(cells) else None
                if block_id and (cell is None or cell[0] != chain[position]):
                    raise Violation("wrong bytes", f"{name} computed {_about(position, block_id, held, cell)}")

    # -- the recurrent state --------------------------------------------------------------------------------------

    @property
    def has_states(self) -> bool:
        """Whether the model has a recurrent state."""
        return self.runtime.ledger.layout.recurrent is not None

    def _row_tags(self, prefix: int) -> list[int]:
        """The tags of the rows of the checkpoint after `prefix`."""
        groups = enumerate(self.runtime.config.groups)
        return [
            tag for group, config in groups if config.is_recurrent for tag in self.state_tags((group, prefix), config)
        ]

    def write_state(self, block_ids: Sequence[int], prefix: int, forward: Forward, stop: int) -> None:
        """Copy the running state that `forward` has at token `stop` into a checkpoint."""
        for tag, block_id in zip(self._row_tags(prefix), block_ids, strict=True):
            self.device.content[block_id] = Written.of(tag, ((~prefix, forward, stop - 1),))

    def read_state(self, found: Read, block_ids: Sequence[int], prefix: int, stop: int) -> None:
        """Copy the checkpoint of `stop` tokens, which end with `prefix`, into the running state."""
        tags = self._row_tags(prefix)
        if len(block_ids) != len(tags):
            found.problem = found.problem or f"a checkpoint of {len(block_ids)} rows, not {len(tags)}"
        for row, (tag, block_id) in enumerate(zip(tags, block_ids, strict=False)):
            held = self.device.content[block_id]
            if not isinstance(held, Written) or held != tag or not block_id:
                about = self.tags.name(held)
                found.problem = found.problem or f"row {row} of the state at {stop} in block {block_id}: {about}"
            else:
                self.go_on(found, [cell[1] for cell in held.cells if cell is not None], stop)

    @staticmethod
    def go_on(found: Read, forwards: Iterable[Forward], stop: int) -> None:
        """Go on from a running state at token `stop`, which `forwards` have computed."""
        for forward in forwards:
            found.forwards[forward] = max(found.forwards.get(forward, 0), stop)
            if forward.wrong_from < stop:
                found.stale = found.stale or f"the state at token {stop}, which {forward} has taken back"

    def tear(self, block_ids: Sequence[int], content: int) -> None:
        """Leave `content`, which nobody may read, in these blocks."""
        for block_id in block_ids:
            self.device.content[block_id] = content

    def is_checkpoint(self, block_ids: Sequence[int], prefix: int) -> bool:
        """Whether these blocks hold the state after `prefix`."""
        return [self.device.content[block_id] for block_id in block_ids] == self._row_tags(prefix)

    # -- what can be found ----------------------------------------------------------------------------------------

    def check_findable(self) -> None:
        """Nothing that was invalidated can be found in any tier."""
        memories = {Tier.DEVICE: self.device.content, Tier.HOST: self.transport.host.content}
        if self.transport.disk is not None:
            memories[Tier.DISK] = self.transport.disk.slots.content
        for run in self.runtime.ledger.cache.index.runs.values():
            for part in run.parts:
                for block_id in part.blocks:
                    held, where = memories[part.tier][block_id], f"{part.tier.name} block {block_id} of {run}"
                    self._check_right(held, where)
                    self._check_weights(held, self.epochs.get(run.root.digest), where)

    @staticmethod
    def is_taken_back(held: object) -> bool:
        """Whether a block holds something that was invalidated."""
        cells = held.cells if isinstance(held, Written) else ()
        return any(cell is not None and cell[1].wrong_from <= cell[2] for cell in cells)

    def _check_right(self, held: object, where: str) -> None:
        for cell in held.cells if isinstance(held, Written) else ():
            if cell is not None and cell[1].wrong_from <= cell[2]:
                raise Violation("wrong bytes", f"{where} can be found, and {cell[1]} has taken back token {cell[2]}")

    def _check_weights(self, held: object, epoch: str | None, where: str) -> None:
        """The weights of the epoch under whose root the block can be found have computed all of it. A process that is
        killed during a reset may leave blocks from before the reset on the disk, so resets do not count here."""
        for cell in held.cells if epoch is not None and isinstance(held, Written) else ():
            if cell is not None and self.versions[cell[1].weights][1] != epoch:
                raise Violation("old weights", f"{where} can be found under {epoch!r}, and {cell[1]} is of others")

    def blocks_of(self, tables: Tables, start: int) -> list[tuple[int, int]]:
        """Every block in `tables` from token `start` on, with its current generation."""
        generation, groups = self.device.generation, self.runtime.config.groups
        return [
            (block_id, generation[block_id])
            for table, config in zip(tables, groups, strict=True)
            for block_id in table[start // config.block_size :]
            if block_id
        ]


def extend_chain(
    known: dict[object, int], chain: list[int], roots: object, tokens: Sequence[int], spans: tuple[KeySpan, ...]
) -> list[int]:
    """Append to `chain` the numbers of the prefixes that go on with `tokens`."""
    before = chain[-1] if chain else known.setdefault(roots, len(known))
    for position, token in enumerate(tokens, len(chain)):
        span = next((span for span in spans if span.start <= position < span.stop), None)
        before = known.setdefault((before, token, span), len(known))
        chain.append(before)
    return chain


def _about(position: int, block_id: int, held: object, cell: Cell) -> str:
    what = {0: "poison", -1: "torn bytes"}.get(held, "") if not isinstance(held, Written) else ""  # type: ignore[call-overload]
    if not what:
        what = "nothing there" if cell is None else f"the KV of another prefix, by {cell[1].by}"
    return f"token {position} in block {block_id}: {what}"
