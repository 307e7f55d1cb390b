"""A ledger observer that checks the events that it gets."""

from __future__ import annotations

from typing import Any

from ...core.observing import NullObserver
from ..violations import Violation

__all__ = ["Recorder"]


class Recorder(NullObserver):
    """Checks that every state change begins in the state in which the one before ended."""

    __slots__ = ("_hear",)  # a function: the fingerprint of a ledger leaves its states out

    def __init__(self) -> None:
        states: dict[int, tuple[Any, Any]] = {}

        def hear(entity: Any, old: Any) -> None:
            known = states.get(id(entity))
            if known is not None and known[1] is not old:
                raise Violation("events", f"{entity} moved from {old}, but was told to be {known[1]}")
            states[id(entity)] = entity, entity.state  # keeps the entity, so that its id is not reused

        self._hear = hear

    def request_moved(self, holding: Any, old: Any, reason: str) -> None:
        self._hear(holding, old)

    def job_moved(self, job: Any, old: Any, reason: str) -> None:
        self._hear(job, old)

    def pin_moved(self, pin: Any, old: Any) -> None:
        self._hear(pin, old)

    def cache_transfer_moved(self, transfer: Any, old: Any) -> None:
        self._hear(transfer, old)

    def overlap_moved(self, early: Any, old: Any) -> None:
        self._hear(early, old)
