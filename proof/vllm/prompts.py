"""Prompts as token ids, the same in every process."""

from __future__ import annotations

import random
from collections.abc import Sequence

__all__ = ["Conversations", "burst", "users", "words"]

VOCABULARY = 512
FIRST_WORD = 3
"""Ids below are special."""


def words(seed: str, number: int) -> list[int]:
    """`number` token ids, drawn by `seed`."""
    drawn = random.Random(seed)
    return [drawn.randrange(FIRST_WORD, VOCABULARY) for _ in range(number)]


def burst(number: int, num_shared: int, num_own: int) -> dict[str, list[int]]:
    """Prompts that share their first `num_shared` tokens."""
    shared = words("shared", num_shared)
    return {f"b{each}": shared + words(f"own {each}", num_own) for each in range(number)}


def users(number: int, num_shared: int, question: range) -> dict[str, list[int]]:
    """Prompts of users with one system prompt of `num_shared` tokens, each with a question of its own. `question`: the
    lengths that a question may have."""
    drawn, system_prompt = random.Random("questions"), words("system prompt", num_shared)
    return {f"user{user}": system_prompt + words(f"question {user}", drawn.choice(question)) for user in range(number)}


class Conversations:
    """Conversations that take turns: each prompt is all that was said before, and something new."""

    def __init__(self, number: int, seed: str = "talk") -> None:
        self._seed = seed
        self._said: list[list[int]] = [[] for _ in range(number)]

    def prompts(self, turn: int) -> dict[str, list[int]]:
        """The prompts of this turn, by request id."""
        found = {}
        for talk, said in enumerate(self._said):
            drawn = random.Random(f"{self._seed} {talk} {turn}")
            number = drawn.randrange(200, 300) if turn == 0 else drawn.randrange(80, 140)
            said += words(f"{self._seed} {talk} {turn} asks", number)
            found[f"c{talk}.{turn}"] = list(said)
        return found

    def hear(self, name: str, answer: Sequence[int]) -> None:
        """What was answered to the prompt `name`."""
        self._said[int(name[1:].partition(".")[0])] += answer
