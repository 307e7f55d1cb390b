"""Opening in bounded time: a disk that hangs, or one whose file system allocates slowly, must not hold the start up."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..._transfer.starting import started_thread
from ...env import Env
from ...errors import ConfigError
from .slots import DiskSlots

__all__ = ["opened_within"]


def opened_within(timeout_s: float, open_slots: Callable[[], DiskSlots], env: Env) -> DiskSlots:
    """What `open_slots` returns, called in a thread of its own. `ConfigError("path")` if it takes longer than
    `timeout_s` seconds: the thread then closes what it opens in the end. Until that another opener is refused."""
    is_over = threading.Lock()  # taken by the thread when it has opened, or by the caller when it has given up
    has_ended = threading.Event()
    found: list[DiskSlots] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            slots = open_slots()
            if is_over.acquire(blocking=False):
                found.append(slots)
            else:
                slots.close()
        except Exception as error:  # noqa: BLE001 - the caller raises it
            errors.append(error)
        has_ended.set()

    started_thread(env, work, "aoffload-disk-opener")
    if not has_ended.wait(timeout_s) and is_over.acquire(blocking=False):
        raise ConfigError("path", f"does not answer: it was not open within {timeout_s:g} s")
    has_ended.wait()
    if errors:
        raise errors[0]
    return found[0]
