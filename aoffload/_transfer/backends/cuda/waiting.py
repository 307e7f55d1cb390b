"""How a copy thread waits for an event: blocked in the driver, or polling with ever longer sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import attrs

from ...._common.arguments import check_callable, number_of, shown
from ...._config.config import MAX_SECONDS
from ....errors import ConfigError


class WaitPolicy(Protocol):
    """How to wait for an event. One object may serve several threads at once."""

    def wait(self, has_passed: Callable[[], bool], block: Callable[[], None]) -> None:
        """Return once the event has passed. `block` sleeps until then; `has_passed` asks without waiting."""
        ...


@attrs.frozen
class BlockingWait:
    """Blocks in the driver: the thread sleeps until the device interrupts it."""

    def wait(self, has_passed: Callable[[], bool], block: Callable[[], None]) -> None:
        block()


@attrs.frozen
class AdaptivePolling:
    """Polls with sleeps that are a share of the time waited so far: late by that share at most, and never busy.

    A wait of `t` seconds ends at most `max(shortest_s, share * t)` late, apart from what the system adds to each sleep,
    and polls about `log(t / shortest_s) / share` times. A sleep is never longer than `longest_s`.
    """

    shortest_s: float = 20e-6
    longest_s: float = 1e-3
    share: float = 0.1
    clock: Callable[[], float] = time.perf_counter
    nap: Callable[[float], None] = time.sleep

    def __attrs_post_init__(self) -> None:
        for name in ("shortest_s", "longest_s", "share"):
            value = number_of(getattr(self, name))
            if value is None or not 0 < value <= MAX_SECONDS:
                raise ConfigError(name, f"must be a positive number, got {shown(getattr(self, name))}")
        check_callable("clock", self.clock, ConfigError)
        check_callable("nap", self.nap, ConfigError)

    def wait(self, has_passed: Callable[[], bool], block: Callable[[], None]) -> None:
        began_s = self.clock()
        while not has_passed():
            waited_s = self.clock() - began_s
            self.nap(min(self.longest_s, max(self.shortest_s, self.share * waited_s)))
