"""An answer as server-sent events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio
import attrs

from ...errors import AoffloadError
from ..engine.sequence import Generation
from .flow import Flow
from .reply import Reply
from .wire import Wire, usage_of

__all__ = ["Stream"]


@attrs.define(eq=False)
class Stream:
    """Sends text while more is generated. A slow reader holds up no other request and keeps no blocks."""

    flow: Flow
    wire: Wire
    reply: Reply
    has_usage: bool = attrs.field(kw_only=True)
    """Whether the last event has the token counts; all others then have `usage: null`."""

    async def run(self, generate: Callable[[], Awaitable[Generation]]) -> None:
        """Generate and send. Raises the `AoffloadError` of `generate` after all text before it was sent."""
        outcome: list[Generation | AoffloadError] = []

        async def make() -> None:
            try:
                outcome.append(await generate())
                self.flow.finish()
            except AoffloadError as error:
                outcome.append(error)
                self.flow.close()

        async with anyio.create_task_group() as group:
            group.start_soon(make)
            await self._send_text()
        (found,) = outcome
        if isinstance(found, AoffloadError):
            raise found
        await self._send_end(found)

    async def _send_text(self) -> None:
        """Send the text. The opening goes with the first piece; until then an error can still have its own status."""
        opening = self.wire.first()
        while text := await self.flow.next_text():
            for value in [*opening, self.wire.piece(text)]:
                await self._send(value)
            opening = []

    async def _send_end(self, generation: Generation) -> None:
        await self._send(self.wire.piece("", self.flow.finish_reason))
        if self.has_usage:
            await self.reply.event(self.wire.last(usage_of(generation)))
        await self.reply.end_stream()

    async def _send(self, value: Mapping[str, Any]) -> None:
        await self.reply.event({**value, "usage": None} if self.has_usage else value)
