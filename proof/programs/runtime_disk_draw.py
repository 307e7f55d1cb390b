"""Draws calls about the disk, for programs over a runtime that has one."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import Any

from .program import Call

__all__ = ["DiskDrawing"]


class DiskDrawing(ABC):
    rng: random.Random
    _prompts: list[tuple[int, ...]]
    _ahead: list[Call]
    OF_THE_DISK = 0.2
    """The share of the calls that are about the disk, where there is one."""
    COMPUTES: tuple[str, ...] = ("allocate", "load", "step", "commit")
    """The calls of a request up to where others may hit what it has computed."""
    EMPTIES: tuple[tuple[str, dict[str, Any]], ...] = (("reset", {"tier": "HOST"}), ("reset", {"tier": "DEVICE"}))
    """The calls after which only the disk has anything."""

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """The prompt of a new request, and what its KV depends on besides."""

    def _of_the_disk(self, name: str) -> Call:
        """A call about the disk; the first of several, if it takes more."""
        rng = self.rng
        drawn = rng.random()
        if drawn < 0.2:
            return Call(rng.choice(("fetch", "fetch", "begin_fetch")), {"who": name, **self._identity()})
        if drawn < 0.3:
            return Call("request_fetch", {"who": name})
        if drawn < 0.65:
            return self._store_and_fetch_from_disk(name)
        if drawn < 0.77:
            return self._store_and_invalidate_on_disk(name)
        if drawn < 0.85:
            return Call(rng.choice(("restored", "transfer_wait", "transfer_cancel")), {"who": name})
        if drawn < 0.9:
            return Call("reset", {"who": name, "tier": "DISK"})
        self._ahead += self._after_a_restart(name)
        return Call("restart", {"how": rng.choice(("closed", "killed"))})

    def _after_a_restart(self, name: str) -> list[Call]:
        rng = self.rng
        wants = [Call("request", {"who": name, "tokens": (*rng.choice(self._prompts), 1)})] if self._prompts else []
        return [*([Call("restored", {"who": name})] if rng.random() < 0.7 else []), *wants]

    def _store_and_fetch_from_disk(self, name: str) -> Call:
        """A prompt is asked for until the disk has it, the tiers above forget it, and it is asked for again."""
        known = self._identity()
        if self._prompts and self.rng.random() < 0.8:
            known = {"tokens": self.rng.choice(self._prompts)}
        asked = [Call("serve", {"who": name, **known}) for _ in range(self.rng.choice((1, 2, 3)))]
        empties = [Call(call, {"who": name, **args}) for call, args in self.EMPTIES]
        longer = {**known, "tokens": (*known["tokens"], 1, 2)}
        wants = [Call("request", {"who": name, **longer}), Call("request_fetch", {"who": name})]
        wants += [Call("fetch", {"who": name, **longer})] if self.rng.random() < 0.3 else []
        self._ahead += [*asked[1:], Call("flush", {"who": name}), *empties, *wants]
        return asked[0]

    def _store_and_invalidate_on_disk(self, name: str) -> Call:
        """What a forward has computed goes down to the disk, and then it turns out that the forward has failed. After a
        restart nothing of it may be there."""
        rng, known = self.rng, {"tokens": self._identity()["tokens"]}
        sequence = [Call(call, {"who": name}) for call in self.COMPUTES]
        sequence += [Call("serve", {"who": f"{name}'", **known}) for _ in range(rng.choice((0, 1, 1, 2)))]
        sequence += [Call("flush", {"who": f"{name}'"})] * rng.choice((0, 0, 1, 2))
        sequence += [Call("invalidate", {"who": name, "back": rng.choice((1, 3, 30))})]
        sequence += [Call("flush", {"who": f"{name}'"})] * rng.choice((0, 1))
        self._ahead += [*sequence, Call("restart", {"how": "killed"}), *self._after_a_restart(name)]
        return Call("request", {"who": name, **known, "reads_cache": rng.random() < 0.3})
