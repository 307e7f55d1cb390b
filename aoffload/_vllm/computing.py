"""The load on vLLM's compute, which decides whether a load or a fetch is worth its time: prefill speed, queued tokens,
and the part of each hit that vLLM computes instead of loading."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import attrs

from aoffload import PrefixMatch

from .._runtime.costs import LEAST_TOKENS, PrefillSpeed
from ..ledger import LoadCosts
from .requests import EngineRequest

MAX_STEPS = 64
"""Bound on steps that have begun and not ended. vLLM has few at a time."""


@attrs.define(eq=False)
class Computing:
    """One per engine. vLLM may begin a step before the previous one has ended."""

    speed: PrefillSpeed
    """Prompt tokens computed per second."""
    clock: Callable[[], float]
    costs: LoadCosts | None = attrs.field(default=None, init=False)
    """None: every hit is loaded."""
    _begun: deque[tuple[float, int]] = attrs.field(factory=lambda: deque(maxlen=MAX_STEPS), init=False)
    """Start time and number of prompt tokens of each step in progress, oldest first."""
    _last_end: float = attrs.field(default=0.0, init=False)

    def begins(self, num_scheduled_tokens: dict[str, int]) -> None:
        num_tokens = sum(number for number in num_scheduled_tokens.values() if number >= LEAST_TOKENS)
        self._begun.append((self.clock(), num_tokens))
        if self.costs is not None:
            for request_id, number in num_scheduled_tokens.items():
                self.costs.computed(request_id, number)

    def ends(self) -> None:
        """The oldest step has ended."""
        if not self._begun:
            return
        (begun, num_tokens), now = self._begun.popleft(), self.clock()
        self.speed.begins([""], max(begun, self._last_end))
        self.speed.computed("", num_tokens, now)
        self._last_end = now

    def chosen(self, found: EngineRequest, match: PrefixMatch) -> PrefixMatch:
        """The part of `match` to load. It is decided once for each match, because vLLM holds on to the first answer."""
        if self.costs is None or found.record is None or match is found.chosen:
            return match
        self.costs.bound(found.record)
        found.chosen = found.record.match
        return found.chosen

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        if self.costs is not None:
            self.costs.forget(request_id)
