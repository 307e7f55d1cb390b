"""Threads of a transport: one that the system does not give is a typed refusal."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..env import Env
from ..errors import TransferRefused

__all__ = ["started_thread"]


def started_thread(env: Env, work: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread of `env`. `TransferRefused` where the system has none left: then `work` never runs."""
    try:
        return env.start_thread(work, name)
    except RuntimeError as error:
        raise TransferRefused(f"the thread {name} cannot be started: {error}") from error
