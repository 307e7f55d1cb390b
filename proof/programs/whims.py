"""Choices of loads for programs: what a request loads of its hit, by no reason at all."""

from __future__ import annotations

import random

import attrs

from aoffload._extensions.load_choice import LoadOffer

__all__ = ["WHIM", "Whim"]

WHIM = "whim"
"""A program's `load_choice`, in place of a `Whim` of its seed."""


@attrs.define(eq=False)
class Whim:
    """Often all, often nothing, and else any part."""

    rng: random.Random

    def stop(self, offer: LoadOffer) -> int:
        return self.rng.choice((0, offer.num_units, self.rng.randint(0, offer.num_units)))
