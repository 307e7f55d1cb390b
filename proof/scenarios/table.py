"""The table of scenarios."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from aoffload.testing import Scenario

__all__ = ["SCENARIOS", "ScenarioRow", "scenario"]


@attrs.frozen
class ScenarioRow:
    name: str
    run: Scenario
    about: str
    events: tuple[str, ...] = ()
    """Events that the scenario is for: a campaign in which one never happened fails."""
    faults: tuple[str, ...] = ()
    """Faults that the scenario is for: they are drawn more often than others."""


SCENARIOS: dict[str, ScenarioRow] = {}


def scenario(*events: str, faults: tuple[str, ...] = ()) -> Callable[[Scenario], Scenario]:
    """Enter a function into the table under its own name."""

    def enter(function: Any) -> Scenario:
        SCENARIOS[function.__name__] = ScenarioRow(function.__name__, function, function.__doc__ or "", events, faults)
        return function  # type: ignore[no-any-return]

    return enter
