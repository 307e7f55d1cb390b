"""Admission of requests: how many the server serves at a time, and whether it still accepts new ones."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio
import attrs

from .errors import ApiError, HungUp, too_many, too_slow, unavailable

if TYPE_CHECKING:
    from starlette.types import Receive


# -- readings --------------------------------------------------------------------------------------------------------
#
# Bodies that are being read. Their time and their total size are bounded, and they end when the server shuts down.

MAX_READING_BYTES = 64 * 2**20
READ_TIMEOUT_S = 30.0


@attrs.define(eq=False)
class _Reading:
    scope: anyio.CancelScope
    body: bytearray = attrs.field(factory=bytearray)
    num_bytes: int = 0
    refusal: Callable[[], ApiError] = too_slow
    """The error if its scope is cancelled."""


@attrs.define(eq=False)
class Readings:
    """Reads bodies. Together they hold at most `max_bytes`. Beyond that, the oldest unfinished one is refused.

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
        """The body. None: it is longer than `most_bytes`. It was still read to its end, because a client that is still
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
                raise reading.refusal()  # its body was dropped
            part = message.get("body", b"")
            if len(body) + len(part) > most_bytes:
                most_bytes = -1  # also for the rest of the body
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


# -- admission -------------------------------------------------------------------------------------------------------


class ServerState(enum.Enum):
    """Whether the server accepts new requests."""

    OPEN = "ok"
    DRAINING = "draining"
    """Admitted requests get their answers. New requests are refused."""
    ENDING = "ending"
    """Admitted requests are ended with 503."""


@attrs.define(eq=False)
class Admission:
    """Counts admitted requests: running, waiting for the engine, or sending their answer."""

    max_inside: int
    readings: Readings = attrs.field(factory=Readings)
    """Bodies that are being read, before admission."""
    num_inside: int = attrs.field(default=0, init=False)
    num_refused: int = attrs.field(default=0, init=False)
    """Requests refused with 429, because the server had too many."""
    state: ServerState = attrs.field(default=ServerState.OPEN, init=False)
    _ending: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    _empty: anyio.Event = attrs.field(factory=anyio.Event, init=False)

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold a place for the duration of the block. `ApiError` with 429 or 503 if there is no place."""
        if self.state is not ServerState.OPEN:
            raise _shut_down()
        if self.num_inside >= self.max_inside:
            self.num_refused += 1
            raise too_many()
        self.num_inside += 1
        try:
            yield
        finally:
            self.num_inside -= 1
            if not self.num_inside:
                self._empty.set()

    def drain(self) -> None:
        """Refuse requests from now on, even if their bodies are half read."""
        if self.state is ServerState.OPEN:
            self.state = ServerState.DRAINING
            self.readings.end(_shut_down)

    def end(self) -> None:
        """End the admitted requests."""
        self.state = ServerState.ENDING
        self._ending.set()

    async def wait_ending(self) -> None:
        """Wait for `end`."""
        await self._ending.wait()

    async def wait_empty(self) -> None:
        """Wait until no request is left. Call this only after `drain`, because more requests may be admitted before."""
        while self.num_inside:
            self._empty = anyio.Event()
            await self._empty.wait()


def _shut_down() -> ApiError:
    return unavailable("the server is being shut down")
