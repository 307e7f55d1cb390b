"""A pytest plugin: a JSON line for each test as soon as it is over, so that a run that is cut off keeps these results.

`python -m pytest -p proof.gpu.listener --lines FILE`
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lines", type=Path, required=True, metavar="FILE", help="a JSON line for each test")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Listener(config.getoption("--lines")))


class Listener:
    """Writes the outcome of each test: that of its call, or of a set-up or tear-down that failed or was skipped."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.write_text("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        line = {
            "test": report.location[2],
            "outcome": report.outcome,
            "reason": _reason(report),
            "properties": dict(report.user_properties),
        }
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _reason(report: pytest.TestReport) -> str:
    """One line: why it was skipped, or what it failed with."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return "" if crash is None else f"failed: {crash.message.splitlines()[0]}"
