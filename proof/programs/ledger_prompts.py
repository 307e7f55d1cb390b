"""The prompts of a program over the ledger: few texts, cut anywhere, so that prompts share prefixes of any length."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

__all__ = ["SALTS", "Prompts"]

SALTS = (None, "other")


class Prompts:
    """Draws prompts. A served prompt is drawn again, because it may be cached."""

    def __init__(self, rng: random.Random, most_tokens: int, tenants: Sequence[str | None] = ()) -> None:
        """`tenants`: the salts of accounts with quotas, each of which is drawn as often as the others."""
        self._rng = rng
        self.most_tokens = most_tokens
        self._vocabulary = rng.choice((1, 2, 2, 3))
        self._bases = [self.tokens(most_tokens + 8) for _ in range(rng.choice((1, 1, 2)))]
        self._lengths = [rng.randint(1, most_tokens) for _ in range(3)]
        self._salts = tenants or (SALTS[0],) * 9 + SALTS[1:]
        self._uses_spans = rng.random() < 0.15
        self._known: list[list[int]] = []
        """Prompts that were served."""

    def tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocabulary) for _ in range(count)]

    def draw(self) -> list[int]:
        """A served prompt, or a base text cut anywhere; perhaps with a tail of its own."""
        rng = self._rng
        if self._known and rng.random() < 0.5:  # the same once more: with windows only the same end hits
            return rng.choice(self._known) + self.tokens(rng.choice((0, 0, 1, 4)))
        length = rng.choice(self._lengths) if rng.random() < 0.6 else rng.randint(1, self.most_tokens)
        tokens = rng.choice(self._bases)[:length]
        if rng.random() < 0.3:
            # The longest tails are longer than the margin before any window of the layouts.
            tokens = tokens[: rng.randint(0, len(tokens))] + self.tokens(rng.randint(1, rng.choice((6, 6, 20))))
        return tokens

    def identity(self) -> dict[str, Any]:
        """What identifies KV, except the spans, as arguments of a call."""
        tokens, salt = self.draw(), self._rng.choice(self._salts)
        return {"tokens": tokens} if salt is None else {"tokens": tokens, "salt": salt}

    def spans(self, tokens: list[int]) -> dict[str, Any]:
        rng = self._rng
        if not self._uses_spans or rng.random() < 0.5:
            return {}
        start = rng.randrange(len(tokens))
        return {"spans": [(start, rng.randint(start + 1, len(tokens)), rng.choice((b"cat", b"dog")))]}

    def served(self, tokens: list[int]) -> None:
        self._known = [*self._known[-3:], tokens[: self.most_tokens]]
