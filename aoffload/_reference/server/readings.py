"""Bodies that are being read: bounded in time and in sum, and ended when the server is shut down."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio
import attrs

from .errors import ApiError, HungUp, too_slow, unavailable

if TYPE_CHECKING:
    from starlette.types import Receive

__all__ = ["Readings"]

MAX_READING_BYTES = 64 * 2**20
READ_TIMEOUT_S = 30.0


@attrs.define(eq=False)
class _Reading:
    scope: anyio.CancelScope
    body: bytearray = attrs.field(factory=bytearray)
    num_bytes: int = 0
    refusal: Callable[[], ApiError] = too_slow
    """Why it ends, should its scope be cancelled."""


@attrs.define(eq=False)
class Readings:
    """Reads bodies. Together they hold at most `max_bytes`: the oldest unfinished one gives way.

    A client that sends at any normal speed has finished its body long before it is the oldest one.
    """

    max_bytes: int = MAX_READING_BYTES
    timeout_s: float = READ_TIMEOUT_S
    num_bytes: int = attrs.field(default=0, init=False)
    """Bytes of unfinished bodies."""
    _open: OrderedDict[_Reading, None] = attrs.field(factory=OrderedDict, init=False)
    _refusal: Callable[[], ApiError] | None = attrs.field(default=None, init=False)

    def __len__(self) -> int:
        """Bodies that are being read."""
        return len(self._open)

    async def read(self, receive: Receive, most_bytes: int) -> bytes | None:
        """The body. None: it is longer than `most_bytes`; it was still read to its end, because a client that is still
        sending may not read an error. Raises `HungUp`, or `ApiError` if the body takes too long or has to give way."""
        if self._refusal is not None:
            raise self._refusal()
        reading = _Reading(anyio.CancelScope(deadline=anyio.current_time() + self.timeout_s))
        self._open[reading] = None
        try:
            with reading.scope:
                return await self._read(reading, receive, most_bytes)
        finally:
            self._forget(reading)
        raise reading.refusal()

    def end(self, refusal: Callable[[], ApiError]) -> None:
        """End every reading, and refuse each later one, with the error that `refusal` makes."""
        self._refusal = refusal
        for reading in tuple(self._open):
            self._stop(reading, refusal)

    async def _read(self, reading: _Reading, receive: Receive, most_bytes: int) -> bytes | None:
        body, more = reading.body, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise HungUp
            if reading not in self._open:
                raise reading.refusal()  # its body is gone
            part = message.get("body", b"")
            if len(body) + len(part) > most_bytes:
                most_bytes = -1  # also for whatever follows
                self._count(reading, -reading.num_bytes)
                body.clear()
            else:
                body += part
                self._count(reading, len(part))
            more = message.get("more_body", False)
        return None if most_bytes < 0 else bytes(body)

    def _count(self, reading: _Reading, num_bytes: int) -> None:
        reading.num_bytes += num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes:
            oldest = next(iter(self._open))
            self._forget(oldest)
            oldest.body.clear()
            self._stop(oldest, _gives_way)

    def _forget(self, reading: _Reading) -> None:
        if reading in self._open:
            del self._open[reading]
            self.num_bytes -= reading.num_bytes
            reading.num_bytes = 0

    @staticmethod
    def _stop(reading: _Reading, refusal: Callable[[], ApiError]) -> None:
        reading.refusal = refusal
        reading.scope.cancel()


def _gives_way() -> ApiError:
    return unavailable("too many bodies are being sent at once")
