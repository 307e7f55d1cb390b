"""What a transport knows of a device that answers no call any more."""

from __future__ import annotations

from ..errors import DeviceGone
from .backends.base import LostDevice

__all__ = ["DeviceLoss"]


class DeviceLoss:
    """Noticed by whichever thread asks the device first, and known to all from then on. Never taken back."""

    def __init__(self) -> None:
        self.reason = ""
        """Empty while the device answers."""

    def notice(self, error: BaseException | None) -> None:
        """Look at what a backend has raised. Before anybody is told of it: who is told may ask at once."""
        if isinstance(error, LostDevice):
            self.reason = self.reason or f"device lost: {error}"

    def check(self) -> None:
        """`DeviceGone` once it was noticed."""
        if self.reason:
            raise DeviceGone(self.reason)
