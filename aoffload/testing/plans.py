"""Plans and results. A plan is everything that one run depends on, as a line that replays it. A result describes the
end of the run."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import attrs

from ..errors import InvalidArgument
from .faults import Fault
from .injection import Cancel
from .scheduler import Decision
from .violations import Violation

__all__ = ["Backend", "Plan", "Result"]

Backend = Literal["asyncio", "trio"]


@attrs.frozen(kw_only=True)
class Plan:
    """Everything that a run depends on, besides the code."""

    scenario: str
    backend: Backend = attrs.field(default="asyncio", validator=attrs.validators.in_(("asyncio", "trio")))
    seed: int = 0
    chooser: str = "random"
    cancels: tuple[Cancel, ...] = ()
    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        parts = [f"scenario={self.scenario}", f"backend={self.backend}", f"seed={self.seed}", f"chooser={self.chooser}"]
        parts += [f"cancel={cancel}" for cancel in self.cancels]
        parts += [f"fault={fault}" for fault in self.faults]
        return " ".join(parts)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Parse a line that `str` has printed."""
        values: dict[str, Any] = {}
        cancels, faults = [], []
        for word in text.split():
            name, _, value = word.partition("=")
            if name == "cancel":
                cancels.append(Cancel.parse(value))
            elif name == "fault":
                faults.append(Fault.parse(value))
            elif name in ("scenario", "backend", "chooser"):
                values[name] = value
            elif name == "seed" and value.isdecimal():
                values[name] = int(value)
            else:
                raise InvalidArgument("plan", f"has {word!r}, which says nothing")
        if "scenario" not in values:
            raise InvalidArgument("plan", "names no scenario")
        return cls(**values, cancels=tuple(cancels), faults=tuple(faults))


@attrs.frozen(kw_only=True)
class Result:
    """The result of one run of a scenario."""

    plan: Plan
    violation: Violation | None
    outcomes: dict[str, str]
    """D, R, A or X (see `Client`), by client."""
    num_steps: int
    num_choices: int
    digest: str
    """Hash of the choices at steps with more than one option."""
    num_cancels: int
    faults: Counter[str]
    opportunities: Counter[str]
    await_lines: frozenset[tuple[str, int]]
    """Lines of the package at which a cancellation met a task."""
    waits: dict[tuple[str, int], Cancel]
    """With `note_waits`: lines of the package at which a client was suspended, each with a cancellation that meets the
    first client there."""
    suspensions: dict[str, int]
    """How often each client was suspended. A client can be cancelled at each of these points."""
    num_checks: int
    num_blocks_checked: int
    counts: Counter[str]
    """Counts of the runtime's log events. They show whether the workload has reached its purpose."""
    trace: list[Decision]
    log: list[str]
    time_s: float
