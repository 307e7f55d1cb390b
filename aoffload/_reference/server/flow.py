"""The text of one answer, while it is generated."""

from __future__ import annotations

import anyio
import attrs

from .stops import Stops
from .tokenizer import Speller

__all__ = ["Flow"]


@attrs.define(eq=False)
class Flow:
    """Takes tokens from the engine's loop without blocking it, and hands pieces of text to the task that sends them.

    The text in between is bounded by the length of the answer.
    """

    speller: Speller
    stops: Stops
    end_token_ids: frozenset[int]
    """Tokens that end this answer."""
    _finish_reason: str = "length"
    _pieces: list[str] = attrs.field(factory=list)
    _is_over: bool = False
    _news: anyio.Event = attrs.field(factory=anyio.Event)

    @property
    def finish_reason(self) -> str:
        """`stop` if the answer ended with an end token or a stop string, `length` if at its limit."""
        return "stop" if self.stops.was_met else self._finish_reason

    def take(self, token_id: int) -> bool:
        """Take a token; returns whether it is the last one."""
        if token_id in self.end_token_ids:
            self._finish_reason = "stop"
            return True
        self._put(self.stops.feed(self.speller.feed(token_id)))
        return self.stops.was_met

    def finish(self) -> None:
        """Add the text that was held back: no further token comes."""
        self._put(self.stops.feed(self.speller.finish()))
        self._put(self.stops.finish())
        self.close()

    def close(self) -> None:
        """End the text: `next_text` does not wait any more."""
        self._is_over = True
        self._news.set()

    def text(self) -> str:
        """Take all text that was not taken yet."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    async def next_text(self) -> str:
        """Wait for more text: that of one token, or of several if the reader is slower. Empty: the text is over."""
        while not self._pieces and not self._is_over:
            self._news = anyio.Event()
            await self._news.wait()
        return self.text()

    def _put(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._news.set()
