"""Answers of an engine, and how they are compared: tokens exactly, log-probabilities up to the order of summation."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["MOST_APART", "Answer", "Comparison", "compare", "digest"]

MOST_APART = 1e-3
"""Most by which log-probabilities may differ. Batches of other sizes add in another order: 1e-5. Other KV: 1e-1."""


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each token, when it was sampled."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Of the prompt, found in the engine's own cache or loaded."""


@dataclass(frozen=True)
class Comparison:
    num_equal: int
    different: tuple[str, ...]
    """Ids of requests with other tokens or log-probabilities, and of those that only one side has."""
    most_apart: float
    """The largest difference between log-probabilities of the same token."""

    @property
    def is_equal(self) -> bool:
        return self.num_equal > 0 and not self.different

    def __str__(self) -> str:
        if self.is_equal:
            return f"{self.num_equal} equal, at most {self.most_apart:.0e} apart"
        first = ", ".join(self.different[:3])
        return f"{len(self.different)} of {self.num_equal + len(self.different)} differ: {first}"


def digest(answers: Mapping[str, Answer]) -> str:
    """Of all tokens, in the order of request ids: 12 hexadecimal digits."""
    found = hashlib.sha256()
    for name in sorted(answers):
        tokens = answers[name].tokens
        found.update(f"{name}:{len(tokens)};".encode())
        found.update(struct.pack(f"<{len(tokens)}q", *tokens))
    return found.hexdigest()[:12]


def compare(answers: Mapping[str, Answer], reference: Mapping[str, Answer]) -> Comparison:
    most, different = 0.0, []
    for name in sorted(answers.keys() | reference.keys()):
        mine, other = answers.get(name), reference.get(name)
        if mine is None or other is None or mine.tokens != other.tokens or len(mine.logprobs) != len(other.logprobs):
            different.append(name)
            continue
        apart = [abs(a - b) for a, b in zip(mine.logprobs, other.logprobs, strict=True)]
        most = max([most, *apart])
        if not all(each <= MOST_APART for each in apart):  # also where one is no number
            different.append(name)
    return Comparison(len(answers.keys() | reference.keys()) - len(different), tuple(different), most)
