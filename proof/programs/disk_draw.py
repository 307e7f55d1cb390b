"""Draws calls about the disk, for worlds that have one."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import Any

from aoffload._kernel.states import RequestState

from .ledger_disk import DiskCalls
from .ledger_prompts import Prompts
from .program import Call

__all__ = ["CORE_OF_DISK", "DISK_WEIGHTS", "RESTART_WEIGHTS", "DiskDraw"]

DISK_WEIGHTS = {
    "write_behind": 3, "idle": 1.6, "disk_flush": 1.2, "fetch": 2.5, "match_fetched": 1.5, "forget_host": 0.6,
}  # fmt: skip
RESTART_WEIGHTS = {"restart": 0.3, "survive": 3}
CORE_OF_DISK = ("write_behind", "fetch", "match_fetched")


class DiskDraw(ABC):
    rng: random.Random
    prompts: Prompts
    machine: DiskCalls
    num_named: int

    @abstractmethod
    def _name(self, stem: str) -> str:
        """A name that nothing has yet."""

    def down_and_up(self, evicts: list[Call], restarts: bool) -> list[Call]:
        """A prompt goes down to the disk, is gone from the tiers above, and is fetched for one or two requests.

        `evicts`: what empties the device. `restarts`: the process may be killed instead."""
        rng, known = self.rng, self.prompts.identity()
        self.prompts.served(known["tokens"])
        sequence = [Call("serve", {**known, "new": self.prompts.tokens(rng.choice((0, 0, 1)))})]
        if self.machine.world.store_policy == "selective:2":
            sequence.append(Call("serve", known))
        sequence += self.to_host(known) if restarts else []
        sequence += [Call("land"), Call("disk_flush", {"most": rng.choice((1000, 1000, 3))})]
        sequence.append(Call("land"))
        killed = [self._restart(), *[Call("survive", {"most": 1000})] * rng.choice((0, 1, 1))]
        sequence += killed if restarts and rng.random() < 0.4 else [*evicts, self._forget_host()]
        wanted = {**known, "tokens": known["tokens"] + self.prompts.tokens(rng.choice((0, 1, 1, 4)))}
        names = [self._name("d") for _ in range(rng.choice((1, 1, 2)))]
        sequence += [Call("admit", {"who": name, **wanted}) for name in names]
        sequence += [Call("fetch", {"name": self._name("fetch"), **rng.choice((wanted, known))}) for _ in names]
        sequence += [Call("land")] * rng.choice((0, 1, 1, 1))
        sequence += [Call("match_fetched", {"who": name}) for name in names]
        if restarts:
            sequence += [Call("allocate", {"who": name}) for name in names]
        return sequence + [Call("load", {"who": name}) for name in names]

    def to_host(self, known: dict[str, Any]) -> list[Call]:
        """Calls that store a served prompt if the policy stores nothing at commit."""
        policy = self.machine.world.store_policy
        if policy == "off" or (policy.startswith("lazy") and self.rng.random() < 0.5):
            return [Call("demote", {"name": self._name("e"), **known})]
        return [Call("watermark")] if policy.startswith("lazy") else []

    def store_and_invalidate_on_disk(self) -> list[Call]:
        """What a forward has computed goes down to the disk, and then it turns out that the forward has failed. After a
        restart nothing of it may be there."""
        rng, who = self.rng, self._name("w")
        prompt = {**self.prompts.identity(), "reads_cache": False}
        length = len(prompt["tokens"])
        begins = [Call("admit", {"who": who, **prompt}), Call("allocate", {"who": who}), Call("load", {"who": who})]
        computes = [Call("compute", {"who": who, "stop": length}), Call("land"), Call("disk_flush", {"most": 1000})]
        lands = [[Call("land")], [Call("land")], [Call("launch", {"job": f"watermark:store:{at}"}) for at in range(6)]]
        wrong = Call("invalidate", {"who": who, "from_token": rng.randint(0, max(0, length - 2))})
        ends = [Call("land")] * rng.choice((0, 1))
        return [*begins, *computes, *rng.choice(lands), wrong, *ends, Call("restart", {"at": 1000, "most": 1000})]

    def _write_behind(self) -> Call:
        args: dict[str, Any] = {"most": self.rng.choice((1, 3, 8, 1000, 1000))}
        for flag in ("is_idle", "only_requested_twice"):
            if self.rng.random() < 0.3:
                args[flag] = True
        return Call("write_behind", args)

    def _idle(self) -> Call:
        """Often with few blocks a call, as under a low bound in flight."""
        args: dict[str, Any] = {"most": self.rng.choice((1, 1, 2, 3, 1000))}
        return Call("idle", args | ({"only_requested_twice": True} if self.rng.random() < 0.2 else {}))

    def _disk_flush(self) -> Call:
        return Call("disk_flush", {"most": self.rng.choice((2, 1000))})

    def _fetch(self) -> Call:
        """Of a prompt that a request has asked for, or of any other."""
        self.num_named += 1
        return Call("fetch", {"name": f"fetch{self.num_named}", **self.prompts.identity()})

    def _match_fetched(self) -> Call | None:
        found = [client for client in self.machine.clients.values() if client.record.state is RequestState.PINNED]
        if not found or self.rng.random() < 0.03:
            found = list(self.machine.clients.values())
        return Call("match_fetched", {"who": self.rng.choice(found).name}) if found else None

    def _forget_host(self) -> Call:
        return Call("reset", {"tier": "HOST"})

    def _restart(self) -> Call:
        return Call("restart", {"at": self.rng.randrange(6), "most": self.rng.choice((0, 2, 1000))})

    def _survive(self) -> Call | None:
        return Call("survive", {"most": self.rng.choice((1, 2, 5))}) if self.machine.survivors else None
