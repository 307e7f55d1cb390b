"""The gate of fetches: what is computed sooner than it would arrive is not fetched.

A fetch may take as long as computing its tokens would; after that the request computes what has not arrived.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

__all__ = ["PrefillSpeed", "fetch_bound_s"]

WORTH = 0.8
"""A fetch is worth it if it takes at most this share of the time to compute its tokens."""
KEEP = 0.8
"""Of what was measured before, at each step."""
LEAST_TOKENS = 16
"""A request that computes fewer in a step, as when it decodes, says nothing about prompts."""


def fetch_bound_s(num_tokens: int, tokens_per_s: float | None, fetch_s: float, most_s: float) -> float:
    """How long a request may wait for a fetch of `num_tokens` that takes `fetch_s` seconds; 0: not at all.

    `tokens_per_s` is the speed of computing them, if it is known. Nobody waits longer than `most_s`.
    """
    compute_s = most_s if tokens_per_s is None else min(most_s, num_tokens / tokens_per_s)
    return compute_s if fetch_s < WORTH * compute_s else 0.0


@attrs.define(eq=False)
class _Step:
    begun_s: float
    is_counted: bool = False


@attrs.define(eq=False)
class PrefillSpeed:
    """Tokens of prompts computed a second, from the time between the begin of a step and its commits.

    `given` takes the place of what would be measured.
    """

    given: float | None = None
    tokens_per_s: float | None = attrs.field(init=False)
    """None: not known yet."""
    _num_tokens: float = 0.0
    _seconds: float = 0.0
    _steps: dict[str, _Step] = attrs.field(factory=dict)
    """By request: its step that has not been committed."""

    def __attrs_post_init__(self) -> None:
        self.tokens_per_s = self.given

    def begins(self, request_ids: Iterable[str], now: float) -> None:
        """A step with these requests begins."""
        step = _Step(now)
        for request_id in request_ids:
            self._steps[request_id] = step

    def computed(self, request_id: str, num_tokens: int, now: float) -> None:
        """The step of this request has computed so many of its tokens. Those of all its requests count together."""
        step = self._steps.pop(request_id, None)
        if step is None or num_tokens < LEAST_TOKENS:
            return
        if step.is_counted:
            self._counted(self._num_tokens + num_tokens, self._seconds)
        elif now > step.begun_s:
            step.is_counted = True
            self.report(num_tokens, now - step.begun_s)

    def report(self, num_tokens: int, seconds: float) -> None:
        """Computing so many tokens took so long, as who computes says."""
        if seconds > 0 and num_tokens >= LEAST_TOKENS:
            self._counted(KEEP * self._num_tokens + num_tokens, KEEP * self._seconds + seconds)

    def _counted(self, num_tokens: float, seconds: float) -> None:
        self._num_tokens, self._seconds = num_tokens, seconds
        if self.given is None:
            self.tokens_per_s = num_tokens / seconds

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._steps.pop(request_id, None)
