"""Event loops with virtual time, so that long waits cost nothing. Time passes while all tasks wait, or jumps on
request."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any

import pytest
import sniffio
import trio.testing


class JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Never sleeps: where it would, it lets the loop's time jump instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            found: list[tuple[selectors.SelectorKey, int]] = super().select(timeout)
            return found
        found = super().select(0)
        if not found:
            self.now += timeout
        return found


class JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


class LeapingLoop(asyncio.SelectorEventLoop):
    leapt_s = 0.0

    def time(self) -> float:
        return super().time() + self.leapt_s


def leap(seconds: float) -> None:
    """Let that much time pass at once, in a loop of `leaping_backend`."""
    if sniffio.current_async_library() == "trio":
        trio.lowlevel.current_clock().jump(seconds)  # type: ignore[attr-defined]
    else:
        asyncio.get_running_loop().leapt_s += seconds  # type: ignore[attr-defined]


def leaping_backend(name: str) -> tuple[str, dict[str, Any]]:
    """For the `anyio_backend` fixture: time passes as it does outside, where threads and processes work, and leaps."""
    if name == "trio":
        return name, {"clock": trio.testing.MockClock(rate=1.0)}
    return name, {"loop_factory": LeapingLoop}


def jumping_backend(name: str) -> tuple[str, dict[str, Any]]:
    """What the `anyio_backend` fixture returns; a clock is good for one run."""
    if name == "trio":
        return name, {"clock": trio.testing.MockClock(autojump_threshold=0)}
    return name, {"loop_factory": JumpingLoop}


JUMPING = [pytest.param("asyncio", id="asyncio"), pytest.param("trio", id="trio")]
