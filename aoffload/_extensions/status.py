"""Status reports for diagnosing a stall, as values and as text: which request waits, for how long, for which blocks or
event, and which owners hold these blocks.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence

import attrs

from .._common.tiers import Tier
from .._kernel.events import Event
from .._kernel.states import RequestState

NUM_NAMED = 4
"""Request ids listed for a step; the rest are only counted."""
MAX_LENGTH = 64
"""Maximum characters of a request id in a report."""


class WaitsFor(enum.Enum):
    """The cause of a request's wait."""

    PROGRAM = "its program"
    """The next call of the program: the request waits for nothing in the runtime."""
    BLOCKS = "free blocks"
    """Device blocks: the request is in the wait queue."""
    COPIES = "copies"
    """The jobs of its load, including jobs that other requests began."""
    STEP = "a step"
    """A forward that touches its blocks."""
    FETCH = "a fetch"
    """Copies of its prompt from tiers below host memory into host memory."""
    ANSWER = "an answer"
    """The answer of the remote store to the question of which cells it has."""
    REQUEST = "another request"
    """In a `HostCache`: the load of another request, which brings the next block."""


def seconds(value: float | None) -> str:
    """An age as text; empty if it is None, because the ledger has no clock."""
    if value is None:
        return ""
    return f"{value:.1f} s" if value < 100 else f"{value:,.0f} s"


def blocks(number: int) -> str:
    return f"{number:,} block{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """`text` from outside, escaped if needed, because a terminal obeys escape sequences."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def plain(name: str) -> str:
    """A request id, escaped and truncated for a table, because clients may choose it."""
    text = printable(name)
    return text if len(text) <= MAX_LENGTH else f"{text[:MAX_LENGTH]}..."


def _estimate(value: float) -> str:
    return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"


def _for(age_s: float | None) -> str:
    return "" if age_s is None else f" for {seconds(age_s)}"


@attrs.frozen
class Holder:
    """An owner that holds device blocks. A block with several holders counts for each of them."""

    kind: str
    """`request`, `step`, `pin`, `prefetch` or `demotion`; for a job `load` or `store`."""
    name: str
    """The request id, or a number."""
    state: str
    age_s: float | None
    """Seconds that the holder has been in `state`; None without a clock."""
    num_blocks: int
    request_ids: tuple[str, ...] = ()
    """For a step, its requests. For a job, the request that began it."""
    over: tuple[str, ...] = ()
    """For a step, its requests that are over. Their blocks become free when no step holds them."""

    def __str__(self) -> str:
        of = ""
        if self.request_ids:
            of = f" of {_named(self.request_ids, self.over)}"
        return f"{self.kind} {plain(self.name)}{of}, {self.state}{_for(self.age_s)}: {blocks(self.num_blocks)}"


@attrs.frozen
class Fetching:
    """Tokens that are on their way into host memory."""

    tier: Tier
    """The tier that they come from."""
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.num_tokens:,} tokens from {self.tier.name.lower()}"


@attrs.frozen
class Declined:
    """A part of a hit that a request computes instead of loading it, because computing costs less. Both times are
    estimates, from the decision until the first token."""

    num_tokens: int
    load_s: float
    """Seconds to the first token if the part was loaded."""
    compute_s: float
    """Seconds to the first token without loading it."""

    def __str__(self) -> str:
        computes = f"computes {self.num_tokens:,} tokens of its host hit instead of loading them"
        return f"{computes}: first token in {_estimate(self.compute_s)}, with the load in {_estimate(self.load_s)}"


@attrs.frozen
class RequestStatus:
    """A live request, and the cause of its wait."""

    request_id: str
    state: RequestState
    age_s: float | None
    """Seconds that the request has been in `state`; None without a clock."""
    num_blocks: int
    """Device blocks that the request holds, including shared blocks."""
    waits_for: WaitsFor
    place: int | None = None
    """The place in the wait queue for blocks, from 1. Waits to extend a block table come first. None if the request is
    not in the queue."""
    waited_s: float | None = None
    """Seconds that the request has been in the wait queue, or has waited for the answer of the remote store."""
    num_missing: int = 0
    """Free blocks that the request waits for in the queue."""
    held_by: tuple[Holder, ...] = ()
    """The holders that the request waits for: the largest holders of device blocks, the jobs of its load or fetch, its
    steps, or another request."""
    fetching: tuple[Fetching, ...] = ()
    """Tokens that a fetch has still to bring for the request, by source tier."""
    declined: Declined | None = None
    """The part of the hit that the request computes instead of loading it. None once the request is over or matched
    again."""
    cancelled: str = ""
    """Why the request is being cancelled, until its task has left the `async with` block. Empty if it is not being
    cancelled."""

    def __str__(self) -> str:
        state = f"request {plain(self.request_id)}, {self.state.value}{_for(self.age_s)}, {blocks(self.num_blocks)}"
        return f"{state}; waits for {self.what()}"

    def what(self, *, names_holders: bool = True) -> str:
        """The wait as text: its cause, the holders, and the reason why a part of the hit is computed.

        `names_holders`: whether a wait for free blocks names the largest holders of device blocks."""
        found = self._what(names_holders)
        if self.declined is not None:
            found += f"; {self.declined}"
        if self.cancelled:
            return f"its task to leave its `async with` block, cancelled ({plain(self.cancelled)}); {found}"
        return found

    def _what(self, names_holders: bool) -> str:
        if self.waits_for is WaitsFor.PROGRAM:
            return "its program, which makes the next call"
        held = "; ".join(map(str, self.held_by)) or "nothing"
        if self.waits_for is WaitsFor.FETCH:
            return f"a fetch of {' and '.join(map(str, self.fetching)) or 'tokens that another fetch brings'}: {held}"
        if self.waits_for is WaitsFor.ANSWER:
            return f"an answer of the remote store{_for(self.waited_s)}"
        if self.waits_for is WaitsFor.BLOCKS:
            place = f"place {self.place} in the queue"
            found = f"{blocks(self.num_missing)}{_for(self.waited_s)}, {place}"
            return f"{found}; held by {held}" if names_holders else found
        return f"{self.waits_for.value}: {held}"


@attrs.frozen
class SlowWait(Event):
    """A request has waited for free blocks for `slow_wait_s`. Reported once per wait."""

    status: RequestStatus


@attrs.frozen
class SlowStep(Event):
    """A step has been open for `slow_step_s`. Reported once per step."""

    step: Holder


def _named(names: Sequence[str], over: Sequence[str]) -> str:
    """A few of `names`, those that are over first."""
    first = [f"{plain(name)} (over)" for name in over] + [plain(name) for name in names if name not in over]
    rest = len(first) - NUM_NAMED
    return ", ".join(first[:NUM_NAMED]) + (f" and {rest:,} more" if rest > 0 else "")


def explained(about: str, requests: Iterable[RequestStatus], holders: Iterable[Holder]) -> str:
    """The report of `Ledger.explain`: `about`, a table of the requests, and a list of the holders. Only the first wait
    for free blocks names its holders, because the list names them, too."""
    rows: list[tuple[str, ...]] = []
    names_holders = True
    for one in requests:
        what = one.what(names_holders=names_holders)
        names_holders = names_holders and one.waits_for is not WaitsFor.BLOCKS
        rows.append((plain(one.request_id), one.state.value, seconds(one.age_s), f"{one.num_blocks:,}", what))
    lines = [about, *_table(("request", "state", "for", "blocks", "waits for"), rows)]
    held = [f"  {holder}" for holder in holders]
    lines += ["device blocks are held by", *(held or ["  nothing"])]
    return "\n".join(lines)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    for row in (head, *rows):
        yield ("  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))).rstrip()
