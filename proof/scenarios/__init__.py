"""The scenarios that are explored. Each is a small world with a hazard in it, and bystanders that it must not affect.

A scenario is an ordinary program against the public API. It checks what the general oracles of `aoffload.testing` can't
know; runs with nothing injected have to meet more of these checks than disturbed ones.
"""

from __future__ import annotations

from . import (
    copies,
    ends,
    keeping,
    long,
    policies,
    preemption,
    ranks,
    room,
    sharing,
    taken_back,
    tasks,
    windows,
    worlds,
)
from .paged import paged_engine, paged_windows
from .table import SCENARIOS, ScenarioRow, scenario

__all__ = [
    "SCENARIOS", "ScenarioRow", "copies", "ends", "keeping", "long", "policies", "preemption", "ranks",
    "room", "sharing", "taken_back", "tasks", "windows", "worlds",
]  # fmt: skip

scenario("request_done")(paged_engine)
scenario("request_done")(paged_windows)
