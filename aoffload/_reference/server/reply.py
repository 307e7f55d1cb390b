"""One HTTP response: a JSON object or a stream of events, and an error at any point."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from . import sse
from .errors import ApiError

if TYPE_CHECKING:
    from starlette.types import Send

__all__ = ["FAREWELL_S", "Reply"]

FAREWELL_S = 1.0
"""Seconds that a client has to make room for an error, or for an answer that needs no admission."""

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class _State(enum.Enum):
    NEW = "new"
    STREAMING = "streaming"
    OVER = "over"


class Reply:
    """Sends one response through the `send` of its request."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._state = _State.NEW

    async def whole(self, value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] = NO_HEADERS) -> None:
        """Send the response as one JSON object."""
        body = json.dumps(value, separators=(",", ":")).encode("ascii")
        self._state = _State.OVER
        about = {"content-type": "application/json", "content-length": str(len(body)), **headers}
        await self._begin(status, about)
        await self._more(body, False)

    async def event(self, value: Mapping[str, Any]) -> None:
        """Send one event of a stream. The first one begins the response; before it an error can have its own status."""
        await self._begin_stream()
        await self._more(sse.event(value), True)

    async def end_stream(self) -> None:
        """Complete the stream."""
        await self._begin_stream()
        self._state = _State.OVER
        await self._more(sse.DONE, False)

    async def fail(self, error: ApiError) -> None:
        """Send the error: as the response with its own status, or as the last event of a stream that has begun."""
        if self._state is _State.NEW:
            await self.whole(error.as_dict(), error.status, error.headers)
        elif self._state is _State.STREAMING:
            self._state = _State.OVER
            await self._more(sse.event(error.as_dict()), False)

    async def _begin_stream(self) -> None:
        if self._state is _State.NEW:
            self._state = _State.STREAMING
            await self._begin(200, sse.HEADERS)

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _more(self, body: bytes, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
