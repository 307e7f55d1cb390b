"""A disk that hangs while it is opened holds up the start no longer than said."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("xxhash", reason="the extra `disk` is not installed")

from copies import GUARD_S

from aoffload import ConfigError
from aoffload._tiers.disk.lanes import opened_within
from aoffload.transport import Env


class Slots:
    """Counts how often it is closed."""

    def __init__(self) -> None:
        self.closed = threading.Semaphore(0)

    def close(self) -> None:
        self.closed.release()


def test_what_is_opened_in_time_is_had() -> None:
    """And stays open."""
    slots: Any = Slots()
    assert opened_within(GUARD_S, lambda: slots, Env()) is slots
    assert not slots.closed.acquire(blocking=False)


def test_why_it_cannot_be_opened_is_said() -> None:
    """As if it had been opened in the calling thread."""
    refusal = ConfigError("size", "is too much")

    def refuse() -> Any:
        raise refusal

    with pytest.raises(ConfigError) as raised:
        opened_within(GUARD_S, refuse, Env())
    assert raised.value is refusal


def test_a_disk_that_hangs_is_named_and_closed_when_it_answers() -> None:
    """The start raises an error that names the path; what is opened too late is closed, so that the next start may have
    it."""
    slots: Any = Slots()
    answers = threading.Event()

    def hang() -> Any:
        assert answers.wait(GUARD_S)
        return slots

    with pytest.raises(ConfigError, match=r"not open within 0\.01 s") as refusal:
        opened_within(0.01, hang, Env())
    assert refusal.value.argument == "path"
    answers.set()
    assert slots.closed.acquire(timeout=GUARD_S)
