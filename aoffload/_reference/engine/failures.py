"""Errors that an engine raises besides those of the runtime."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import AoffloadError

__all__ = ["EngineClosed", "StepFailed"]


class EngineClosed(AoffloadError):  # noqa: N818 - reads as what it is at the call
    """The engine is closed, or was never opened."""


class StepFailed(AoffloadError):  # noqa: N818
    """The forward of a step failed. Raised for every request of that step and no other; `__cause__` says why."""

    def __init__(self, request_ids: Sequence[str], cause: Exception) -> None:
        super().__init__(f"the step of {', '.join(request_ids)} failed: {type(cause).__name__}: {cause}")
        self.request_ids = tuple(request_ids)
        self.__cause__ = cause
