"""Status reports for diagnosing a stall: who waits for what, since when, and who holds it; as values and in words.

`Fork` is the answer of `Ledger.fork`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence

import attrs

from .states import RequestState, Tier

NUM_NAMED = 4
"""Requests of a step that a line names; of the others it has the number."""
MAX_LENGTH = 64
"""Of a request id in a line."""


class WaitsFor(enum.Enum):
    PROGRAM = "its program"
    """Nothing here: the next call is the program's."""
    ROOM = "room"
    COPIES = "copies"
    """Its own, or those that another request began."""
    STEP = "a step"
    """A forward that touches its blocks."""
    FETCH = "a fetch"
    """What only tiers below host memory have of it is on its way into host memory."""
    ANSWER = "an answer"
    """Of the remote store, about what it has."""
    REQUEST = "another request"
    """With `engine_blocks`: that one's load brings the next block."""


def seconds(value: float | None) -> str:
    """An age in words; empty where no clock was given."""
    if value is None:
        return ""
    return f"{value:.1f} s" if value < 100 else f"{value:,.0f} s"


def blocks(number: int) -> str:
    return f"{number:,} block{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """`text` of others as it may stand in a line: a terminal obeys escape sequences."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def plain(name: str) -> str:
    """A request id as it may stand in a table: clients may choose it."""
    text = printable(name)
    return text if len(text) <= MAX_LENGTH else f"{text[:MAX_LENGTH]}..."


def _estimate(value: float) -> str:
    return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"


def _for(age_s: float | None) -> str:
    return "" if age_s is None else f" for {seconds(age_s)}"


class EvictionRule(enum.Enum):
    """Which order a tier evicts by."""

    LRU = "lru"
    """The last use: what was used the longest ago goes first."""
    LEARNED = "learned"
    OWN = "own"
    """An order of the program's own."""


_RULES = {EvictionRule.LRU: "the last use", EvictionRule.LEARNED: "what was learned"}


@attrs.frozen
class TierEviction:
    """A tier whose eviction learns, and why the present order rules: the guard's two small caches tell which of both
    orders hits more. Their hits are of an eighth of the traffic, and what is old counts less."""

    tier: Tier
    rule: EvictionRule
    """LEARNED, or LRU."""
    learned_hits: float
    lru_hits: float
    num_switches: int
    """From one order to the other; the first is LEARNED."""
    num_evicted_learned: int
    """Blocks that were evicted while what was learned ruled."""
    num_evicted_lru: int


@attrs.frozen
class EvictionStatistics:
    """What eviction that learns does, and what it remembers."""

    tiers: tuple[TierEviction, ...]
    num_remembered_runs: int
    """Stretches of prompts whose requests are counted."""
    num_remembered_bytes: int
    """About so much memory of this process."""

    def __str__(self) -> str:
        ruled = ", ".join(f"{each.tier.name.lower()} by {_RULES[each.rule]}" for each in self.tiers)
        return f"eviction: {ruled}, as the guard has it"

    @property
    def learned(self) -> tuple[Tier, ...]:
        """The tiers in which what was learned rules."""
        return tuple(each.tier for each in self.tiers if each.rule is EvictionRule.LEARNED)


class HintEnd(enum.Enum):
    """Why a hint is over."""

    TRUE = "true"
    """The prompt was asked for."""
    LAPSED = "lapsed"
    """It was not, within the time."""
    DROPPED = "dropped"
    """Another hint about the same prompt has come, too many others have, or a reset."""


@attrs.frozen
class Holder:
    """Who holds device blocks. Blocks that several hold count for each of them."""

    kind: str
    """`request`, `step`, `pin`, `prefetch`, `demotion`; of jobs `load` or `store`."""
    name: str
    """The request id, or a number."""
    state: str
    age_s: float | None
    """Seconds in that state; None without a clock."""
    num_blocks: int
    request_ids: tuple[str, ...] = ()
    """Of a step: its requests. Of a job: the one that began it."""
    over: tuple[str, ...] = ()
    """Of a step: those of its requests that are over. Their blocks are free once no step holds them."""

    def __str__(self) -> str:
        of = ""
        if self.request_ids:
            of = f" of {_named(self.request_ids, self.over)}"
        return f"{self.kind} {plain(self.name)}{of}, {self.state}{_for(self.age_s)}: {blocks(self.num_blocks)}"


@attrs.frozen
class Fetching:
    """Tokens that are on their way into host memory."""

    tier: Tier
    """Where they come from."""
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.num_tokens:,} tokens from {self.tier.name.lower()}"


@attrs.frozen
class Declined:
    """A part of a hit that is not loaded, since computing it costs less, and what went for that: the estimates of the
    time from then to the first token."""

    num_tokens: int
    load_s: float
    """If they were loaded."""
    compute_s: float

    def __str__(self) -> str:
        computes = f"computes {self.num_tokens:,} tokens that the host has"
        return f"{computes}: first token in {_estimate(self.compute_s)}, with the load in {_estimate(self.load_s)}"


@attrs.frozen
class RequestStatus:
    """A live request, and what it waits for."""

    request_id: str
    state: RequestState
    age_s: float | None
    """Seconds in that state; None without a clock."""
    num_blocks: int
    """Device blocks that it holds; shared ones count."""
    waits_for: WaitsFor
    place: int | None = None
    """Its place in line for room, from 1. Extensions come first."""
    waited_s: float | None = None
    """Seconds in line, or since the remote store was asked."""
    num_missing: int = 0
    """Blocks that it waits for in line."""
    held_by: tuple[Holder, ...] = ()
    """Who holds what it waits for: the biggest holders of device blocks, the jobs, also of a fetch, the steps, or the
    other request."""
    fetching: tuple[Fetching, ...] = ()
    """What a fetch still brings for it, by the tier that it comes from."""
    declined: Declined | None = None
    """What of its hit it computes instead of loading it; until it is over, or matched again."""
    cancelled: str = ""
    """Why it is cancelled; its task has not left its block yet. Empty: it is not."""

    def __str__(self) -> str:
        state = f"request {plain(self.request_id)}, {self.state.value}{_for(self.age_s)}, {blocks(self.num_blocks)}"
        return f"{state}; waits for {self.what()}"

    def what(self) -> str:
        """What it waits for, who holds that, and why it does not load its hit, in words."""
        found = self._what() if self.declined is None else f"{self._what()}; {self.declined}"
        if self.cancelled:
            return f"its task to leave its block, cancelled ({plain(self.cancelled)}); {found}"
        return found

    def _what(self) -> str:
        if self.waits_for is WaitsFor.PROGRAM:
            return "its program: the next call is not ours"
        held = "; ".join(map(str, self.held_by)) or "nobody"
        if self.waits_for is WaitsFor.FETCH:
            return f"fetching {' and '.join(map(str, self.fetching)) or 'what another fetch brings'}: {held}"
        if self.waits_for is WaitsFor.ANSWER:
            return f"asking the remote store{_for(self.waited_s)}"
        if self.waits_for is WaitsFor.ROOM:
            line = f"room for {blocks(self.num_missing)}{_for(self.waited_s)}, place {self.place} in line"
            return f"{line}; held by {held}"
        return f"{self.waits_for.value}: {held}"


def _named(names: Sequence[str], over: Sequence[str]) -> str:
    """A few of `names`, those that are over first."""
    first = [f"{plain(name)} (over)" for name in over] + [plain(name) for name in names if name not in over]
    rest = len(first) - NUM_NAMED
    return ", ".join(first[:NUM_NAMED]) + (f" and {rest:,} more" if rest > 0 else "")


def explained(about: str, requests: Iterable[RequestStatus], holders: Iterable[Holder]) -> str:
    """A table for people."""
    rows: list[tuple[str, ...]] = []
    for one in requests:
        rows.append((plain(one.request_id), one.state.value, seconds(one.age_s), f"{one.num_blocks:,}", one.what()))
    lines = [about, *_table(("request", "state", "for", "blocks", "waits for"), rows)]
    held = [f"  {holder}" for holder in holders]
    lines += ["device blocks are held by", *(held or ["  nobody"])]
    return "\n".join(lines)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    for row in (head, *rows):
        yield ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
