"""Circuit breakers for a disk and for the nodes of a store: after failures, calls are refused for a while instead of
waiting for a time-out."""

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
"""Consecutive failures that open a breaker."""
MAX_LINES = 8
"""Maximum open breakers that are listed in a line each; with more, their nodes are summed up."""
NUM_WORST = 3
MAX_MOVES = 1024
"""Maximum moves that are kept until they are taken."""
_USES = {"ask": "questions", "load": "loads", "store": "stores"}


class Use(enum.Enum):
    """The kinds of calls to a disk or a store. Each kind has its own breakers: a full store still serves loads."""

    ASK = "ask"
    LOAD = "load"
    STORE = "store"


@attrs.frozen
class Opened:
    """The breaker has opened, or has opened again after a failed trial."""

    for_s: float
    num_failures: int
    """Consecutive failures."""
    num_refused: int
    """Jobs refused since the breaker first opened."""
    error: str

    @property
    def is_first(self) -> bool:
        """Whether the breaker was closed before."""
        return self.num_failures == PATIENCE


@attrs.frozen
class Closed:
    after_s: float
    """Seconds since the breaker first opened."""
    num_refused: int


BreakerMove: TypeAlias = Opened | Closed


@attrs.frozen
class LeftAlone:
    """A breaker that is open or on trial: it lets no call through, or one at a time."""

    use: Use
    node: str
    """A node of the store; empty for a disk and for a store with a single node."""
    error: str
    """The last error."""
    num_failures: int = PATIENCE
    """Consecutive failures."""

    def __str__(self) -> str:
        return f"no {_USES[self.use.value]}{at_node(self.node, self.error)} for now: {self.error}"


@attrs.frozen
class StorageMove:
    """A breaker has opened, opened again, or closed."""

    tier: Tier
    use: Use
    node: str
    move: BreakerMove


def at_node(node: str, error: str) -> str:
    """The node as " at NODE"; empty if `error` already names it."""
    is_said = not node or re.search(rf"(?<!\w){re.escape(node)}(?!\w)", error)
    return "" if is_said else f" at {node}"


def in_lines(name: str, alone: Sequence[LeftAlone]) -> Iterator[str]:
    """The open breakers of the storage `name` as text: a line for each, or with many nodes a line for each use."""
    of_use = {use: [one for one in alone if one.use is use] for use in Use}
    for use, found in of_use.items():
        if len(alone) > MAX_LINES and len(found) > NUM_WORST:
            yield f"{name} is suspended, no {_USES[use.value]} at {len(found):,} nodes for now; {_worst(found)}"
        else:
            yield from (f"{name} is suspended, {one}" for one in found)


def _worst(alone: Sequence[LeftAlone]) -> str:
    first, *others = sorted(alone, key=lambda one: -one.num_failures)[:NUM_WORST]
    named = ", ".join(f"{one.node} ({one.num_failures:,})" for one in others)
    return f"most failures in a row: {first.node} ({first.num_failures:,}: {first.error}), {named}"


def in_words(move: StorageMove) -> str:
    """`move` as text for a log."""
    what = f"{_USES[move.use.value]} of the {move.tier.name.lower()} tier"
    if isinstance(move.move, Closed):
        where = at_node(move.node, "")
        return f"{what}{where} succeed again, after {move.move.after_s:.1f} s; {move.move.num_refused:,} were refused"
    times, for_s, error = move.move.num_failures, move.move.for_s, move.move.error
    failed = f"have failed {times:,} times in a row, and are suspended for {for_s:g} s: {error}"
    return f"{what}{at_node(move.node, error)} {failed}"


def taken(moves: deque[StorageMove]) -> Sequence[StorageMove]:
    """Return and remove the moves that threads have appended."""
    return [moves.popleft() for _ in range(len(moves))] if moves else ()


@attrs.define(eq=False)
class Breaker:
    """Opens after two consecutive failures for half a second, and after each further failure for twice as long. A
    success closes it."""

    _num_failures: int = 0
    error: str = ""
    """The last error."""
    _num_refused: int = 0
    _opened_s: float = 0.0
    _until_s: float = 0.0

    def is_open(self, now: float) -> bool:
        """Whether calls are refused now."""
        return self.is_on_trial and now < self._until_s

    @property
    def is_on_trial(self) -> bool:
        """Whether the breaker has opened and no call has succeeded since. One attempt at a time is enough for the
        trial."""
        return self._num_failures >= PATIENCE

    def left_alone(self, use: Use, node: str = "") -> LeftAlone:
        """A description of the breaker while it is on trial."""
        return LeftAlone(use, node, self.error, self._num_failures)

    def refused(self) -> None:
        """Count a refused call."""
        self._num_refused += 1

    def succeeded(self, now: float) -> BreakerMove | None:
        """Record a success. Returns the change of the breaker, if any."""
        was_on_trial, self._num_failures = self.is_on_trial, 0
        return Closed(max(0.0, now - self._opened_s), self._num_refused) if was_on_trial else None

    def failed(self, now: float, error: str) -> BreakerMove | None:
        """Record a failure. Returns the change of the breaker, if any. Failures while the breaker is open do not count,
        because these calls began before it opened."""
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
