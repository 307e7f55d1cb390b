"""Whether the device of a transport is lost, and why."""

from __future__ import annotations

from ..errors import DeviceGone
from .backends.base import LostDevice

__all__ = ["DeviceLoss"]


class DeviceLoss:
    """Shared by the threads of a transport: set by the first thread that finds the device lost, and never reset."""

    def __init__(self) -> None:
        self.reason = ""
        """Empty while the device answers."""

    def notice(self, error: BaseException | None) -> None:
        """Record the loss if `error` is a `LostDevice`. Called before the error is reported."""
        if isinstance(error, LostDevice):
            self.reason = self.reason or f"device lost: {error}"

    def check(self) -> None:
        """Raise `DeviceGone` once a loss is recorded."""
        if self.reason:
            raise DeviceGone(self.reason)
