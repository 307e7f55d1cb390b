"""Timelines of one request, prefetch, demotion, pin, step or job, from its first event to its last.

This module also has their runtimes and links.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from .._common.tiers import BELOW, TIERS, Tier
from .._kernel.states import Direction
from .events import Event, FieldError, Kind
from .wording import counted, plain

# -- links -----------------------------------------------------------------------------------------------------------
#
# Links: the pairs of tiers that jobs copy between, and tiers in words. Both follow from `TIERS`.

_WORDS = {
    Tier.HOST: ("in", "host memory"),
    Tier.DISK: ("on", "the disk"),
    Tier.CUSTOM: ("in", "the custom tier"),
    Tier.REMOTE: ("in", "the remote store"),
}


def name_of(tier: Tier) -> str:
    """The name of a tier in events."""
    return tier.name.lower()


def tier_words(tier: Tier) -> str:
    return _WORDS[tier][1] if tier in _WORDS else f"the {name_of(tier)}"


def in_words(tier: Tier) -> str:
    """The place of blocks in words: `in host memory`."""
    return " ".join(_WORDS.get(tier, ("in", tier_words(tier))))


def pool_field(tier: Tier) -> str:
    """The field of events that has the size of the tier's pool."""
    return f"num_{name_of(tier)}_blocks"


@attrs.frozen
class HopRow:
    tier: Tier
    """The lower one of the two tiers: the source of a load, or the destination of a store."""
    direction: Direction
    source: Tier
    destination: Tier
    name: str
    """A name such as `load from disk`."""

    def of(self, blocks: str) -> str:
        """A phrase such as `load of 7 blocks from the disk`."""
        way = "from" if self.direction is Direction.LOAD else "to"
        return f"{self.direction.value} of {blocks} {way} {tier_words(self.tier)}"


def _hops_of(tier: Tier, above: Tier) -> tuple[HopRow, HopRow]:
    return (
        HopRow(tier, Direction.LOAD, tier, above, f"load from {name_of(tier)}"),
        HopRow(tier, Direction.STORE, above, tier, f"store to {name_of(tier)}"),
    )


LINKS = tuple(link for row in TIERS if row.above is not None for link in _hops_of(row.tier, row.above))
"""The links nearest to the compute first, loads before stores."""
_BY_ENDS = {(name_of(link.source), name_of(link.destination)): link for link in LINKS}
_BY_DIRECTION = {link.direction.value: link for link in LINKS if link.tier is BELOW}
"""For older logs, whose jobs do not name tiers: all of those jobs are of the tier below the device."""


def link_of(event: Event) -> HopRow:
    """The link of an event's job. May raise `FieldError`."""
    fields = event.fields
    if "source" not in fields and "destination" not in fields:
        return _found(_BY_DIRECTION, fields.get("direction"), "direction")
    link = _found(_BY_ENDS, (fields.get("source"), fields.get("destination")), "source")
    if fields.get("direction") != link.direction.value:
        raise FieldError("direction")
    return link


def _found(rows: dict[Any, HopRow], key: object, field: str) -> HopRow:
    try:
        return rows[key]
    except (KeyError, TypeError):  # for example a list
        raise FieldError(field) from None


# -- runtimes --------------------------------------------------------------------------------------------------------
#
# Assigns each event to a runtime, because one log may have several, one after the other or side by side.
#
# A ledger that a program drives without a runtime counts as one of them.

_POOLS = {pool_field(row.tier): row.tier for row in TIERS}
_OWN_FIELDS = {"event", "level", "timestamp", *_POOLS, "engine_blocks", "layout"}
_ALWAYS = (Tier.DEVICE, Tier.HOST)
"""Every runtime has them."""
_PLACES_IN_CODE = {"logger", "logger_name", "pathname", "filename", "module", "func_name", "qual_name", "lineno"}
"""Fields that structlog may add about the place in the code. They differ from event to event."""
_THREADS = {"thread", "thread_name"}

Bound = tuple[tuple[str, str], ...]


@attrs.define(eq=False)
class RuntimeLife:
    """One runtime from `runtime_opened` to `runtime_closed`, or one ledger from `ledger_opened` to `ledger_closed`."""

    number: int
    name: str
    """The fields that its logger was bound to, or its number."""
    opened_s: float
    pools: dict[Tier, int] = attrs.field(factory=dict)
    """Blocks of each tier, as far as the log says. For a ledger whose engine owns the device blocks, the device has no
    entry."""
    is_engine_owned: bool = False
    """Whether an engine owns the device blocks."""
    was_opened: bool = False
    """Whether its beginning is in the log."""
    closed_s: float | None = None
    last_s: float = 0.0
    """The time of its latest event."""

    def is_called(self, name: str) -> bool:
        """Whether `name` is its name, with or without "runtime" or "ledger", or its number."""
        return name in (self.name, self.name.partition(" ")[2], str(self.number))

    def sizes(self) -> str:
        """The sizes of its pools."""
        if not self.was_opened:
            return "opened before the log begins"
        num_device = self.pools.get(Tier.DEVICE, 0)
        device = counted(num_device, "device block") if num_device else "device"
        device += " of its engine" if self.is_engine_owned else ""
        others = [f"{number:,} {in_words(tier)}" for tier, number in self.pools.items() if tier is not Tier.DEVICE]
        return ", ".join([device, *others])

    def title(self) -> str:
        return f"{self.name} ({self.sizes()})"

    def ending(self) -> str:
        """`, never closed`, or nothing. Call it after the whole log was read."""
        return "" if self.closed_s is not None or not self.was_opened else ", never closed"

    def describe(self) -> str:
        """Its title and its ending."""
        return self.title() + self.ending()


@attrs.define(eq=False)
class Runtimes:
    """Assigns events to runtimes by the fields that their loggers are bound to.

    `runtime_opened` carries these fields besides its own, and so do the runtime's other events. If no fields are bound,
    an event belongs to the runtime that opened last.
    """

    lives: list[RuntimeLife] = attrs.field(factory=list)
    num_reopened: int = 0
    """Runtimes that were opened while another with the same bound fields had not been closed."""
    _names: tuple[str, ...] = ()
    """Names of all fields that runtimes are bound to."""
    _open: dict[Bound, RuntimeLife] = attrs.field(factory=dict)

    def opened(self, event: Event) -> tuple[RuntimeLife, RuntimeLife | None]:
        """The new runtime, and the open one with the same bound fields that it replaces, because that one's program
        must have died."""
        pools = {tier: event.count(field) for field, tier in _POOLS.items() if tier in _ALWAYS or field in event.fields}
        own = _OWN_FIELDS | _PLACES_IN_CODE | _THREADS
        names = [name for name, value in event.fields.items() if name not in own and not isinstance(value, dict | list)]
        self._names = tuple(sorted({*self._names, *names}))
        bound = self._bound(event)
        replaced = self._open.pop(bound, None)
        self.num_reopened += replaced is not None
        name = plain(", ".join(f"{name} {value}" if value.isdigit() else value for name, value in bound))
        life = self._add(event, name, event.name.removesuffix("_opened"))
        life.pools = pools
        life.was_opened = True
        # A ledger's pool has no blocks then. Older logs of runtimes lack the field.
        life.is_engine_owned = event.fields.get("engine_blocks") is True or not pools[Tier.DEVICE]
        self._open[bound] = life
        return life, replaced

    def closed(self, event: Event) -> RuntimeLife:
        life = self.of(event)
        life.closed_s = event.at_s
        self._open = {bound: other for bound, other in self._open.items() if other is not life}
        return life

    def of(self, event: Event) -> RuntimeLife:
        """The runtime that wrote `event`. A new one without a beginning if the log names none."""
        life = self._open.get(self._bound(event)) if self._open else None
        if life is None:
            life = self._latest(event)
        # One thread writes the events. If the machine's clock was set back, the time stays as it is.
        life.last_s = max(life.last_s, event.at_s)
        return life

    def _bound(self, event: Event) -> Bound:
        if not self._names:
            return ()
        fields = event.fields
        return tuple((name, str(fields[name])) for name in self._names if name in fields)

    def _latest(self, event: Event) -> RuntimeLife:
        if self._open:
            return next(reversed(self._open.values()))
        if self.lives:
            return self.lives[-1]  # an event after it was closed
        life = self._add(event, "", "runtime")
        self._open[self._bound(event)] = life
        return life

    def _add(self, event: Event, name: str, face: str) -> RuntimeLife:
        number = len(self.lives) + 1
        life = RuntimeLife(number, f"{face} {name or number}", event.at_s, last_s=event.at_s)
        self.lives.append(life)
        return life


# -- timelines -------------------------------------------------------------------------------------------------------

UNFINISHED = "unfinished"
"""The outcome of a timeline or job without a last event."""
FETCHING = "fetching"
"""The state of a request in PINNED while it waits for a fetch from below host memory."""
FACTS = (
    "num_tokens",
    "num_device_tokens",
    "num_host_tokens",
    "num_disk_tokens",
    "num_blocks",
    "num_ready_tokens",
    "num_lost_tokens",
    "num_computed_tokens",
    "num_pending",
    "num_kept_blocks",
    "num_declined_tokens",
    "num_skipped_fetches",
)
"""Counts that events carry. The last event that has one counts, because a request is matched again when its turn comes.
Exceptions: `num_pending` counts the matches that were answered PENDING. `num_kept_blocks` counts the blocks that a step
still held when the request ended. `num_declined_tokens` counts the tokens of the last load or fetch that was not worth
its time. `num_skipped_fetches` counts the fetches skipped because their tier was disabled."""


@attrs.frozen
class Interval:
    """A stretch of time in one state."""

    state: str
    start_s: float
    stop_s: float

    @property
    def duration_s(self) -> float:
        return self.stop_s - self.start_s


@attrs.define(eq=False)
class Timeline:
    """A timeline. States are those of docs/lifecycle.md, in lower case."""

    number: int
    """Number in order of beginning, from 1."""
    kind: Kind
    name: str
    """The request id. For a pin or a step, its number."""
    runtime: RuntimeLife
    lane: int
    states: list[str]
    times_s: list[float]
    """The time at which each state was entered. The last one is the end."""
    outcome: str = UNFINISHED
    reason: str = ""
    facts: dict[str, int] = attrs.field(factory=dict)
    num_held_blocks: int = 0
    """Blocks in its tables at present."""
    members: list[str] = attrs.field(factory=list)
    """For a step: the ids of its requests."""
    cancelled: str = ""
    """For a request that has not ended: the reason for its cancellation."""
    in_steps: list[str] = attrs.field(factory=list)
    """For a request that has not ended: the open steps that it is in."""
    kept: dict[str, int] = attrs.field(factory=dict)
    """For a step: its requests that have ended, and the number of blocks that it still holds of each."""

    @property
    def start_s(self) -> float:
        return self.times_s[0]

    @property
    def stop_s(self) -> float:
        return self.times_s[-1]

    @property
    def duration_s(self) -> float:
        return self.stop_s - self.start_s

    def intervals(self) -> Iterator[Interval]:
        """One interval for each state it was in, those of no length included."""
        for at in range(len(self.states) - 1):
            yield Interval(self.states[at], self.times_s[at], self.times_s[at + 1])

    def last_state(self) -> str:
        """The state before it ended."""
        return self.states[-2] if len(self.states) > 1 else ""

    @property
    def last_state_s(self) -> float:
        """Seconds in that state."""
        return self.times_s[-1] - self.times_s[-2] if len(self.states) > 1 else 0.0

    def title(self) -> str:
        """Its name among other timelines."""
        return f"{self.kind.value} {self.name}" if self.kind in (Kind.PIN, Kind.STEP) else self.name


@attrs.define(eq=False)
class JobTimeline:
    job_id: int
    link: HopRow
    num_blocks: int
    owner: str
    """The id of the request, prefetch or demotion that began it. Empty for stores of a lazy policy."""
    owner_number: int
    """The number of that timeline. 0 if there is none."""
    runtime: RuntimeLife
    lane: int
    launched_s: float
    ended_s: float
    outcome: str = UNFINISHED
    num_bytes: int = 0
    copy_s: float = 0.0
    """Duration of the copy itself, as the transport measured it."""
    error: str = ""
