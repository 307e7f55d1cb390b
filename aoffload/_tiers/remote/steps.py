"""Work that calls a store, in steps: it yields each call that may block, and gets its result or a `StoreError` back.

Whoever runs the work decides when a call is made and how long it takes: a thread at once, a simulator when it is due.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeAlias, TypeVar

from ...errors import StoreError

__all__ = ["Steps", "run_steps"]


Found = TypeVar("Found")
Steps: TypeAlias = Generator[Callable[[], Any], Any, Found]


def run_steps(steps: Steps[Found]) -> Found:
    """Do the work in this thread, one that no interrupt reaches: whatever a call raises there, its store has failed."""
    try:
        call = next(steps)
        while True:
            try:
                found = call()
            except BaseException as error:  # noqa: BLE001 - somebody's store, and perhaps a panic of its Rust or C++
                call = steps.throw(_store_error(error))
            else:
                call = steps.send(found)
    except StopIteration as over:
        result: Found = over.value
        return result


def _store_error(error: BaseException) -> StoreError:
    try:
        return StoreError(str(error) if isinstance(error, StoreError) else repr(error))
    except BaseException:  # noqa: BLE001 - the words are the store's, too
        return StoreError(f"a {type(error).__name__} that cannot be shown")
