"""A load choice for programs: the part of its hit that a request loads is random."""

from __future__ import annotations

import random

import attrs

from aoffload._extensions.load_choice import LoadOffer

__all__ = ["RANDOM", "RandomLoadChoice"]

RANDOM = "random"
"""A program's `load_choice`, in place of a `RandomLoadChoice` of its seed."""


@attrs.define(eq=False)
class RandomLoadChoice:
    """Loads the whole hit, nothing, or any part, each in a third of the cases."""

    rng: random.Random

    def stop(self, offer: LoadOffer) -> int:
        return self.rng.choice((0, offer.num_units, self.rng.randint(0, offer.num_units)))
