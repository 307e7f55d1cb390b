"""The text of one answer, as it comes."""

from __future__ import annotations

import anyio
import attrs

from .stops import Stops
from .tokenizer import Speller

__all__ = ["Flow"]


@attrs.define(eq=False)
class Flow:
    """Takes tokens from the engine's loop, which does not wait, and hands pieces of text to whoever sends them.

    What lies in between is bounded by the length of the answer.
    """

    speller: Speller
    stops: Stops
    end_token_ids: frozenset[int]
    """Those that end this answer."""
    _finish_reason: str = "length"
    _pieces: list[str] = attrs.field(factory=list)
    _is_over: bool = False
    _news: anyio.Event = attrs.field(factory=anyio.Event)

    @property
    def finish_reason(self) -> str:
        """`stop` if the answer came to its own end or to a stop string; `length` if it was as long as it may get."""
        return "stop" if self.stops.was_met else self._finish_reason

    def take(self, token_id: int) -> bool:
        """A token; whether it is the last one."""
        if token_id in self.end_token_ids:
            self._finish_reason = "stop"
            return True
        self._put(self.stops.feed(self.speller.feed(token_id)))
        return self.stops.was_met

    def finish(self) -> None:
        """No token comes any more."""
        self._put(self.stops.feed(self.speller.finish()))
        self._put(self.stops.finish())
        self.close()

    def close(self) -> None:
        """Whoever waits for more has all there is."""
        self._is_over = True
        self._news.set()

    def text(self) -> str:
        """All text that nobody has taken yet."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    async def next_text(self) -> str:
        """Wait for more text: that of one token, or of several where the reader was slower. Empty: it is over."""
        while not self._pieces and not self._is_over:
            self._news = anyio.Event()
            await self._news.wait()
        return self.text()

    def _put(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._news.set()
