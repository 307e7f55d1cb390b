"""What all tests share: how Hypothesis draws, a program that never configured structlog, rank processes that need not
import torch each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from aoffload.ledger import is_compiled

settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")
"""The same examples each time, however slow or busy the machine is."""


def pytest_report_header() -> str:
    return f"core: {'compiled' if is_compiled else 'pure'}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where the core is compiled, what only the pure one can do is skipped, with the reason that its marker gives."""
    for item in items:
        if is_compiled and (marker := item.get_closest_marker("pure")) is not None:
            item.add_marker(pytest.mark.skip(reason=f"pure core only: {marker.args[0]}"))


@pytest.fixture(autouse=True)
def unconfigured_structlog() -> Iterator[None]:
    """`structlog.testing.capture_logs` leaves it configured, and runtimes of later tests would print their events."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank processes are forks of one clean process that has imported torch; in all else they are as if spawned."""
    import torch.multiprocessing

    context: Any = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["aoffload._transfer.ranks.serving"])
    monkeypatch.setattr(torch.multiprocessing, "get_context", lambda method: context)
