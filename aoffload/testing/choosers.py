"""Choosers pick the next step of a run. A run is a function of its seed and of its chooser's picks."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Protocol

import attrs

from ..errors import InvalidArgument

__all__ = ["Chooser", "Exactly", "Option", "PriorityChooser", "RandomChooser", "chooser_of"]


@attrs.frozen
class Option:
    """One step that can run next, of a task, a copy or a thread."""

    actor: int
    """Number of the actor that would take the step, in the order of creation."""
    name: str
    since: int
    """The step at which the option became ready."""
    run: object


class Chooser(Protocol):
    """Chooses the next step of a simulation among the steps that are possible."""

    def choose(self, step: int, options: Sequence[Option]) -> int:
        """The index of one of `options`. They come oldest first, so a fair loop would always run 0."""
        ...


class RandomChooser:
    """Picks every option with the same probability."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(f"random {seed}")

    def choose(self, step: int, options: Sequence[Option]) -> int:
        return self._random.randrange(len(options))


class PriorityChooser:
    """Probabilistic concurrency testing (Burckhardt et al., ASPLOS 2010): the actor with the highest priority runs. At
    `depth - 1` steps, drawn from the first `num_steps`, the actor that would run gets the lowest priority.

    For every program, a run finds a bug that needs `depth` ordering constraints among n actors with a probability of
    at least 1 / (n * num_steps ** (depth - 1)).
    """

    def __init__(self, seed: int | str, depth: int, num_steps: int = 150) -> None:
        self._random = random.Random(f"pct {depth} {seed}")
        self._priorities: dict[int, float] = {}
        self._falls = {self._random.randrange(num_steps): -float(place + 1) for place in range(depth - 1)}

    def choose(self, step: int, options: Sequence[Option]) -> int:
        for option in options:
            if option.actor not in self._priorities:
                self._priorities[option.actor] = self._random.random()
        best = self._best(options)
        if step in self._falls:
            self._priorities[options[best].actor] = self._falls.pop(step)
            best = self._best(options)
        return best

    def _best(self, options: Sequence[Option]) -> int:
        return max(range(len(options)), key=lambda index: self._priorities[options[index].actor])


class Exactly:
    """Picks the first option, except at the listed steps. Shrunk runs are written and replayed with this chooser."""

    def __init__(self, decisions: Mapping[int, int]) -> None:
        self.decisions = dict(decisions)

    def choose(self, step: int, options: Sequence[Option]) -> int:
        return min(self.decisions.get(step, 0), len(options) - 1)

    def __str__(self) -> str:
        return "exactly:" + ",".join(f"{step}={index}" for step, index in sorted(self.decisions.items()))


def chooser_of(text: str, seed: int | str) -> Chooser:
    """The chooser that `text` names: `random`, `random:NUMBER` (another order of the same workload), `pct:DEPTH` or
    `exactly:STEP=INDEX,...`."""
    kind, _, detail = text.partition(":")
    try:
        if kind == "random":
            return RandomChooser(f"{seed}:{int(detail)}" if detail else seed)
        if kind == "pct":
            return PriorityChooser(seed, int(detail))
        if kind == "exactly":
            pairs = (pair.split("=") for pair in detail.split(",") if pair)
            return Exactly({int(step): int(index) for step, index in pairs})
    except ValueError:
        pass
    raise InvalidArgument(
        "chooser", f"must be random, random:NUMBER, pct:DEPTH or exactly:STEP=INDEX,..., got {text!r}"
    )
