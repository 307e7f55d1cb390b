"""Draws calls that launch, complete and fail jobs, for every kind of ledger."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from aoffload._kernel.states import JobState

from .ledger_jobs import JobCalls
from .program import EPOCHS, Call
from .vocabulary import VERBS

__all__ = ["JobDraw", "drawn_client_hint", "drawn_epoch", "drawn_hint"]

BAD_EPOCHS = (None, 7, b"a", "a" * 257, "\ud800")


def drawn_hint(rng: random.Random, identity: dict[str, Any]) -> Call:
    """A hint about a prompt, some of them of a category."""
    category = {"category": rng.choice(("search", "shell"))} if rng.random() < 0.5 else {}
    return Call("hint", {**identity, "expires_at": float(rng.randint(0, 50)), **category})


def drawn_epoch(rng: random.Random) -> Call:
    """A weights' epoch, or something that cannot be one."""
    return Call("weights", {"epoch": rng.choice((*EPOCHS * 8, *BAD_EPOCHS))})


def drawn_client_hint(rng: random.Random, identity: dict[str, Any]) -> Call:
    """A hint of a client, mostly a pin. Some have times that no program may give."""
    args: dict[str, Any] = {**identity, "verb": rng.choice(("pin", "pin", "pin", *VERBS))}
    if rng.random() < 0.5:
        args |= {"ttl_s": rng.choice((0.5, 3.0, 20.0, 1e6, 0, -1.0, True)), "now": float(rng.randint(0, 50))}
    return Call("client_hint", args)


class JobDraw:
    rng: random.Random
    machine: JobCalls
    outcomes: Sequence[int]
    """Weights of a copy's outcomes: it lands, fails, brings corrupt blocks, or ends unproven."""

    def _go_on_with(self, name: str) -> Call | None:
        """Launch or discard a queued job, or end a launched one."""
        job = self.machine.job(name)
        if job is None or job.state is JobState.QUEUED:
            return Call("discard" if self.rng.random() < 0.05 else "launch", {"job": name})
        if job.parked is not None:
            return None
        (outcome,) = self.rng.choices(("landed", "failed", "corrupt", "unproven"), self.outcomes)
        args: dict[str, Any] = {"job": name}
        if outcome != "landed":
            args |= {"outcome": outcome, "at": self.rng.randrange(8)}
        return Call("settle", args)

    def _weights(self) -> Call:
        return drawn_epoch(self.rng)

    def _land(self) -> Call | None:
        return Call("land") if self.machine.plans else None

    def _late(self) -> Call | None:
        return Call("late", {"job": self.rng.choice(list(self.machine.unproven))}) if self.machine.unproven else None

    def _stray(self) -> Call | None:
        return Call("stray", {"job": self.rng.choice(list(self.machine.unproven))}) if self.machine.unproven else None

    def _again(self) -> Call | None:
        return Call("again", {"job": self.rng.choice(list(self.machine.over))}) if self.machine.over else None
