"""Work that calls a store, in steps: it yields each call that may block, and gets its result or its exception back.

Whoever runs the work decides when a call is made and how long it takes: a thread at once, a simulator when it is due.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeAlias, TypeVar

__all__ = ["Steps", "run_steps"]

Found = TypeVar("Found")
Steps: TypeAlias = Generator[Callable[[], Any], Any, Found]


def run_steps(steps: Steps[Found]) -> Found:
    """Do the work in this thread."""
    try:
        call = next(steps)
        while True:
            try:
                found = call()
            except Exception as error:  # noqa: BLE001 - the work decides what an exception of its call means
                call = steps.throw(error)
            else:
                call = steps.send(found)
    except StopIteration as over:
        result: Found = over.value
        return result
