"""A restore from the disk is split into short turns of the event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("xxhash", reason="the extra `disk` is not installed")

from aoffload import DiskTier
from aoffload._tiers.disk.loop import TURN_S, DiskState, DiskWork
from aoffload.transport import Env


class Passing(Env):
    """Time passes a whole turn each time that it is asked for."""

    seconds = 0.0

    def now(self) -> float:
        self.seconds += TURN_S
        return self.seconds


class Stub:
    """The ledger, the worker and the disk of which this needs next to nothing."""

    tier = DiskTier("unused", 2**20)

    def __init__(self) -> None:
        self.restored: list[Any] = []
        self.copies = self.disk = self

    def restore(self, run: Any) -> int:
        self.restored.append(run)
        return 1

    def call_ledger(self, function: Callable[[Any], int], run: Any) -> int:
        return function(run)


def test_no_round_of_the_event_loop_takes_in_more_than_one_turn() -> None:
    """However often the reading thread has reported, and while a turn has not ended with all: each of them would take
    its millisecond in the same round, in which nothing else runs."""
    stub: Any = Stub()
    work = DiskWork(stub, stub, stub, 1, Passing(), stub)
    work.state = DiskState.READING
    asked: list[None] = []
    work._turn = lambda: asked.append(None)
    found: list[Any] = [object() for _ in range(3)]
    for run in found:
        work._hear([run])
    for number in range(1, 4):
        assert len(asked) == number
        work._take_in()
        assert stub.restored == found[:number]
    work._take_in()
    assert len(asked) == 4
    work._hear([object()])  # type: ignore[list-item]
    assert len(asked) == 5
