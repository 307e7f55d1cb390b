"""How many requests the server admits, and until when."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import attrs

from .errors import ApiError, too_many, unavailable
from .readings import Readings

__all__ = ["Admission", "ServerState"]


class ServerState(enum.Enum):
    OPEN = "ok"
    DRAINING = "draining"
    """Admitted requests get their answers; new ones are refused."""
    ENDING = "ending"
    """Admitted requests are ended with 503."""


@attrs.define(eq=False)
class Admission:
    """Counts admitted requests: running, waiting for the engine, or being sent their answer."""

    max_inside: int
    readings: Readings = attrs.field(factory=Readings)
    """Bodies that are being read: what comes before admission."""
    num_inside: int = attrs.field(default=0, init=False)
    num_refused: int = attrs.field(default=0, init=False)
    """Requests refused with 429, because there were too many."""
    state: ServerState = attrs.field(default=ServerState.OPEN, init=False)
    _ending: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    _empty: anyio.Event = attrs.field(factory=anyio.Event, init=False)

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold a place for the duration of the block; `ApiError` with 429 or 503 if there is none."""
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
        """Refuse requests from here on, those with half a body among them."""
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
        """Wait until no request is left. Only after `drain`, or more may be admitted."""
        while self.num_inside:
            self._empty = anyio.Event()
            await self._empty.wait()


def _shut_down() -> ApiError:
    return unavailable("the server is being shut down")
