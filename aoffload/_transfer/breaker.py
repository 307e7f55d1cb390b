"""What fails is left alone for a while: a disk, or one node of a store. What is not asked of it costs nobody time."""

from __future__ import annotations

import enum
import re
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import attrs

from .._common.tiers import Tier

FIRST_S, LONGEST_S = 0.5, 30.0
PATIENCE = 2
"""Failures in a row that open it."""
MAX_LINES = 8
"""Nodes that are left alone, each in a line of its own; more are summed up."""
NUM_WORST = 3
MAX_MOVES = 1024
"""Kept until somebody takes them."""
_USES = {"ask": "questions", "load": "loads", "store": "stores"}


class Use(enum.Enum):
    """What is asked of a disk or a store. Each has breakers of its own: a store that is full still answers."""

    ASK = "ask"
    LOAD = "load"
    STORE = "store"


@attrs.frozen
class Opened:
    """It has opened, perhaps once more: what was tried has failed again."""

    for_s: float
    num_failures: int
    """In a row."""
    num_refused: int
    """Jobs refused since it has opened first."""
    error: str

    @property
    def is_first(self) -> bool:
        """Whether it was closed before."""
        return self.num_failures == PATIENCE


@attrs.frozen
class Closed:
    after_s: float
    """Since it has opened first."""
    num_refused: int


BreakerMove: TypeAlias = Opened | Closed


@attrs.frozen
class LeftAlone:
    """What has failed, and has not succeeded since: it is asked for nothing, or for one thing at a time."""

    use: Use
    node: str
    """Of a store; empty where it has one, and for a disk."""
    error: str
    """The last one."""
    num_failures: int = PATIENCE
    """In a row."""

    def __str__(self) -> str:
        return f"no {_USES[self.use.value]}{at_node(self.node, self.error)} for now: {self.error}"


@attrs.frozen
class StorageMove:
    """Something is left alone from now on, or still, or not any more."""

    tier: Tier
    use: Use
    node: str
    move: BreakerMove


def at_node(node: str, error: str) -> str:
    """Where it has failed, unless `error` says so."""
    is_said = not node or re.search(rf"(?<!\w){re.escape(node)}(?!\w)", error)
    return "" if is_said else f" at {node}"


def in_lines(name: str, alone: Sequence[LeftAlone]) -> Iterator[str]:
    """What is left alone of the storage `name`: a line for each, or with many nodes one for each use."""
    of_use = {use: [one for one in alone if one.use is use] for use in Use}
    for use, found in of_use.items():
        if len(alone) > MAX_LINES and len(found) > NUM_WORST:
            yield f"{name} is left alone, no {_USES[use.value]} at {len(found):,} nodes for now; {_worst(found)}"
        else:
            yield from (f"{name} is left alone, {one}" for one in found)


def _worst(alone: Sequence[LeftAlone]) -> str:
    first, *others = sorted(alone, key=lambda one: -one.num_failures)[:NUM_WORST]
    named = ", ".join(f"{one.node} ({one.num_failures:,})" for one in others)
    return f"most failures in a row: {first.node} ({first.num_failures:,}: {first.error}), {named}"


def in_words(move: StorageMove) -> str:
    """`move`, for a log of lines."""
    what = f"{_USES[move.use.value]} of the {move.tier.name.lower()} tier"
    if isinstance(move.move, Closed):
        where = at_node(move.node, "")
        return f"{what}{where} succeed again, after {move.move.after_s:.1f} s; {move.move.num_refused:,} were refused"
    times, for_s, error = move.move.num_failures, move.move.for_s, move.move.error
    failed = f"have failed {times:,} times in a row, and are left alone for {for_s:g} s: {error}"
    return f"{what}{at_node(move.node, error)} {failed}"


def taken(moves: deque[StorageMove]) -> Sequence[StorageMove]:
    """Return and remove what threads have appended."""
    return [moves.popleft() for _ in range(len(moves))] if moves else ()


@attrs.define(eq=False)
class Breaker:
    """Opens after two failures in a row, for half a second and then twice as long each time; a success closes it."""

    _num_failures: int = 0
    error: str = ""
    """The last one."""
    _num_refused: int = 0
    _opened_s: float = 0.0
    _until_s: float = 0.0

    def is_open(self, now: float) -> bool:
        """Whether to ask for nothing now."""
        return self.is_on_trial and now < self._until_s

    @property
    def is_on_trial(self) -> bool:
        """Whether it has opened and nothing has succeeded since: one attempt at a time is enough to find out."""
        return self._num_failures >= PATIENCE

    def left_alone(self, use: Use, node: str = "") -> LeftAlone:
        """What there is to say while it is on trial."""
        return LeftAlone(use, node, self.error, self._num_failures)

    def refused(self) -> None:
        """Something that was asked for nevertheless is refused."""
        self._num_refused += 1

    def succeeded(self, now: float) -> BreakerMove | None:
        """What changes with it, if anything."""
        was_on_trial, self._num_failures = self.is_on_trial, 0
        return Closed(max(0.0, now - self._opened_s), self._num_refused) if was_on_trial else None

    def failed(self, now: float, error: str) -> BreakerMove | None:
        """One more failure. Those that end while it is open began before: they do not count."""
        if self.is_open(now):
            return None
        self._num_failures += 1
        self.error = error
        num_times = self._num_failures - PATIENCE
        if num_times < 0:
            return None
        if not num_times:
            self._opened_s, self._num_refused = now, 0
        for_s = min(LONGEST_S, FIRST_S * 2.0 ** min(num_times, 16))
        self._until_s = now + for_s
        return Opened(for_s, self._num_failures, self._num_refused, error)
