"""Which runtime wrote an event: one log may have several, one after the other or side by side.

A ledger that a program drives without a runtime is one of them.
"""

from __future__ import annotations

import attrs

from .._kernel.states import TIERS, Tier
from .events import Event
from .links import in_words, pool_field
from .wording import counted, plain

__all__ = ["RuntimeLife", "Runtimes"]

_POOLS = {pool_field(row.tier): row.tier for row in TIERS}
_OWN_FIELDS = {"event", "level", "timestamp", *_POOLS, "engine_blocks", "layout"}
_ALWAYS = (Tier.DEVICE, Tier.HOST)
"""Every runtime has them."""
_PLACES_IN_CODE = {"logger", "logger_name", "pathname", "filename", "module", "func_name", "qual_name", "lineno"}
"""Fields that structlog may add about the place in the code; they differ from event to event."""
_THREADS = {"thread", "thread_name"}

Bound = tuple[tuple[str, str], ...]


@attrs.define(eq=False)
class RuntimeLife:
    """One runtime from `runtime_opened` to `runtime_closed`; or one ledger, from `ledger_opened` to `ledger_closed`."""

    number: int
    name: str
    """The fields that its logger was bound to, or its number."""
    opened_s: float
    pools: dict[Tier, int] = attrs.field(factory=dict)
    """Blocks of each tier, as far as the log says. Of the device none, where a ledger's engine has them."""
    is_engine_owned: bool = False
    """Whether an engine hands the device blocks out itself."""
    was_opened: bool = False
    """Whether the log has its beginning."""
    closed_s: float | None = None
    last_s: float = 0.0
    """The time of its latest event."""

    def is_called(self, name: str) -> bool:
        """Whether `name` is its name, with or without "runtime" or "ledger", or its number."""
        return name in (self.name, self.name.partition(" ")[2], str(self.number))

    def title(self) -> str:
        """Its name and the sizes of its pools."""
        if not self.was_opened:
            return f"{self.name} (opened before the log begins)"
        num_device = self.pools.get(Tier.DEVICE, 0)
        device = counted(num_device, "device block") if num_device else "device"
        device += " of its engine" if self.is_engine_owned else ""
        others = [f"{number:,} {in_words(tier)}" for tier, number in self.pools.items() if tier is not Tier.DEVICE]
        return f"{self.name} ({', '.join([device, *others])})"

    def describe(self) -> str:
        """Its title, and whether it was closed. After the whole log was read."""
        return self.title() if self.closed_s is not None or not self.was_opened else f"{self.title()}, never closed"


@attrs.define(eq=False)
class Runtimes:
    """Assigns events to runtimes by the fields that their loggers are bound to.

    Those are the fields that `runtime_opened` carries beyond its own; the runtime's other events carry them as well. If
    none are bound, an event belongs to the runtime that opened last.
    """

    lives: list[RuntimeLife] = attrs.field(factory=list)
    num_reopened: int = 0
    """Runtimes that were opened while another with the same bound fields had not been closed."""
    _names: tuple[str, ...] = ()
    """Names of all fields that runtimes are bound to."""
    _open: dict[Bound, RuntimeLife] = attrs.field(factory=dict)

    def opened(self, event: Event) -> tuple[RuntimeLife, RuntimeLife | None]:
        """The new runtime, and the open one with the same bound fields that it replaces: its program must have died."""
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
        # A ledger's pool has no blocks then; older logs of runtimes do not say.
        life.is_engine_owned = event.fields.get("engine_blocks") is True or not pools[Tier.DEVICE]
        self._open[bound] = life
        return life, replaced

    def closed(self, event: Event) -> RuntimeLife:
        life = self.of(event)
        life.closed_s = event.at_s
        self._open = {bound: other for bound, other in self._open.items() if other is not life}
        return life

    def of(self, event: Event) -> RuntimeLife:
        """The runtime that wrote `event`; a new one without a beginning if the log names none."""
        life = self._open.get(self._bound(event)) if self._open else None
        if life is None:
            life = self._latest(event)
        # One thread writes the events. If the machine's clock was put back, the time stays as it is.
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
