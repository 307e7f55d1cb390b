"""An observer of a ledger that looks at what it is told."""

from __future__ import annotations

from typing import Any

from ...core.observer import NullObserver
from ..violations import Violation

__all__ = ["Recorder"]


class Recorder(NullObserver):
    """Hears of every move: each begins where the one before has ended."""

    __slots__ = ("_hear",)  # the fingerprint of a ledger must not go on in here

    def __init__(self) -> None:
        states: dict[int, tuple[Any, Any]] = {}

        def hear(entity: Any, old: Any) -> None:
            known = states.get(id(entity))
            if known is not None and known[1] is not old:
                raise Violation("events", f"{entity} moved from {old}, but was told to be {known[1]}")
            states[id(entity)] = entity, entity.state  # kept, so that no id comes twice

        self._hear = hear

    def request_moved(self, holding: Any, old: Any, reason: str) -> None:
        self._hear(holding, old)

    def job_moved(self, job: Any, old: Any, reason: str) -> None:
        self._hear(job, old)

    def pin_moved(self, pin: Any, old: Any) -> None:
        self._hear(pin, old)

    def errand_moved(self, errand: Any, old: Any) -> None:
        self._hear(errand, old)

    def early_moved(self, early: Any, old: Any) -> None:
        self._hear(early, old)
