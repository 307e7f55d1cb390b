"""How the block of a request is entered, and why it is left."""

from __future__ import annotations

from inspect import CO_ASYNC_GENERATOR
from types import FrameType

import anyio

__all__ = ["is_cancellation", "may_be_suspended"]

ENTERS = ("__aenter__", "enter_async_context")


def may_be_suspended(frame: FrameType | None) -> bool:
    """Whether the block entered in `frame` may be suspended at a `yield` while its task runs other code: true in the
    body of an async generator. A generator that is a context manager (`contextlib.asynccontextmanager`) is entered by
    another block in turn, and that block decides."""
    while frame is not None:
        driver = frame.f_back
        if frame.f_code.co_name not in ENTERS:
            if not frame.f_code.co_flags & CO_ASYNC_GENERATOR:
                return False
            if driver is None or driver.f_code.co_name not in ENTERS:
                return True
        frame = driver
    return False


def is_cancellation(error: BaseException) -> bool:
    """Whether `error` is only cancellation: task groups inside the block may have wrapped it in exception groups."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_cancellation(inner) for inner in error.exceptions)
    return isinstance(error, anyio.get_cancelled_exc_class())
