"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

import attrs

__all__ = ["Stops"]


@attrs.define(eq=False)
class Stops:
    """Lets a text through up to the first of `stops`, which it drops.

    Text that may be the beginning of a stop string is held back until that is known.
    """

    stops: tuple[str, ...]
    was_met: bool = False
    _held: str = ""

    def feed(self, text: str) -> str:
        """Add `text`; returns the text that can be shown now and was not before."""
        if self.was_met:
            return ""
        text = self._held + text
        found = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        if found:
            self.was_met = True
            self._held = ""
            return text[: min(found)]
        num_held = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """The text is over: returns what was held back, which was no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are a beginning of `stop`."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
