"""Draws calls about a remote store, for worlds that have one."""

from __future__ import annotations

import random
from typing import Any

from .disk_draw import DiskDraw
from .ledger_remote import RemoteCalls
from .program import Call

__all__ = ["CORE_OF_REMOTE", "REMOTE_WEIGHTS", "RemoteDraw"]

REMOTE_WEIGHTS = {
    "remote_stores": 3, "fetch": 2.5, "match_fetched": 1.5, "forget_host": 0.6, "lose_cell": 0.5, "poison_cell": 0.7,
    "arrive": 1.2, "end_remote": 0.8, "late": 1.5,
}  # fmt: skip
CORE_OF_REMOTE = ("remote_stores", "fetch", "match_fetched")


class RemoteDraw(DiskDraw):
    rng: random.Random
    machine: RemoteCalls

    def store_and_fetch(self, evicts: list[Call], *, allocates: bool) -> list[Call]:
        """A prompt is asked for twice and goes out to the store, is gone from here, and is fetched for one or two
        requests. Meanwhile, others may remove some of it or spoil it.

        `evicts`: what empties the device. `allocates`: requests take blocks of the ledger's."""
        rng, known = self.rng, self.prompts.identity()
        self.prompts.served(known["tokens"])
        sequence = [Call("serve", {**known, "new": self.prompts.tokens(rng.choice((0, 0, 1)))}), Call("serve", known)]
        sequence += self.to_host(known) if allocates else []
        sequence += [Call("land"), Call("remote_stores", {"most": rng.choice((1000, 1000, 4))})]
        sequence += [self._end_remote(), Call("remote_stores", {"most": 1000})] if rng.random() < 0.5 else []
        sequence.append(Call("land"))
        if rng.random() < 0.3:
            sequence.append(Call(rng.choice(("lose_cell", "poison_cell")), {"at": rng.randrange(9)}))
        sequence += [*evicts, self._forget_host()]
        wanted = {**known, "tokens": known["tokens"] + self.prompts.tokens(rng.choice((0, 1, 1, 4)))}
        ends = rng.choice(([], [Call("land")], [self._end_remote()]))
        return sequence + self._come_back(known, wanted, ends, allocates=allocates)

    def _come_back(
        self, known: dict[str, Any], wanted: dict[str, Any], ends: list[Call], *, allocates: bool
    ) -> list[Call]:
        rng = self.rng
        names = [self._name("c") for _ in range(rng.choice((1, 1, 2)))]
        sequence = [Call("admit", {"who": name, **wanted}) for name in names]
        for _ in names:
            sequence.append(
                Call("fetch", {"name": self._name("fetch"), **rng.choice((wanted, known)), **self._answer()})
            )
        sequence += ends
        sequence += [Call("match_fetched", {"who": name}) for name in names]
        sequence += [Call("allocate", {"who": name}) for name in names] if allocates else []
        return sequence + [Call("load", {"who": name}) for name in names]

    def store_and_invalidate_in_remote_store(self, evicts: list[Call], *, allocates: bool) -> list[Call]:
        """What a forward has computed goes out to the store, also what other requests have computed after it, and then
        it turns out that the forward has failed. Nobody may find any of it afterwards."""
        rng, who = self.rng, self._name("w")
        prompt = {**self.prompts.identity(), "reads_cache": False}
        known = {name: value for name, value in prompt.items() if name != "reads_cache"}
        longer = {**known, "tokens": known["tokens"] + self.prompts.tokens(rng.choice((0, 1, 4, 8)))}
        length = len(known["tokens"])
        sequence = [Call("admit", {"who": who, **prompt})]
        sequence += [Call("allocate", {"who": who})] if allocates else []
        sequence += [Call("load", {"who": who}), Call("compute", {"who": who, "stop": length}), Call("land")]
        sequence += [Call("serve", longer)] * rng.choice((1, 2, 2)) + (self.to_host(known) if allocates else [])
        sequence.append(Call("land"))
        sequence.append(Call("remote_stores", {"most": rng.choice((1000, 1000, 4)), "blind": rng.random() < 0.3}))
        jobs = [f"watermark:store:{at}" for at in range(6)]
        launches, is_late = [Call("launch", {"job": job}) for job in jobs], rng.random() < 0.5
        if is_late:  # the puts have failed, and arrive after the removal
            sequence.append(Call("end_remote", {"outcome": "failed", "at": 3}))
        else:
            sequence += rng.choice(([Call("land")], [Call("land")], launches))
        sequence += [*evicts, self._forget_host()] if is_late or rng.random() < 0.5 else []
        sequence.append(Call("invalidate", {"who": who, "from_token": rng.randint(0, max(0, length - 2))}))
        sequence += [Call("release", {"who": who, "reason": "failed"})] * rng.choice((0, 1))
        sequence += [Call("land")] * rng.choice((0, 1)) + [Call("arrive", {"at": 0})] * (3 * is_late)
        return sequence + self._come_back(known, longer, [Call("land")], allocates=allocates)

    def _answer(self) -> dict[str, Any]:
        """What the store is said to have: mostly what it has."""
        return {"told": self.rng.choice((0, 1, 2, 99))} if self.rng.random() < 0.25 else {}

    def _fetch(self) -> Call:
        found = super()._fetch()
        return Call(found.name, {**found.args, **self._answer()}) if self.machine.world.cell_units else found

    def _remote_stores(self) -> Call:
        args: dict[str, Any] = {"most": self.rng.choice((1, 4, 8, 1000, 1000))}
        return Call("remote_stores", args | ({"blind": True} if self.rng.random() < 0.2 else {}))

    def _lose_cell(self) -> Call | None:
        return Call("lose_cell", {"at": self.rng.randrange(9)}) if self.machine.store else None

    def _arrive(self) -> Call | None:
        return Call("arrive", {"at": self.rng.randrange(9)}) if self.machine.on_their_way else None

    def _end_remote(self) -> Call:
        """Copies bring wrong bytes, are given up, or fail. A put that fails has arrived, arrives later, or never."""
        rng = self.rng
        outcome = rng.choice(("failed", "corrupt", "corrupt", "unproven", "unproven"))
        return Call("end_remote", {"outcome": outcome, "at": rng.randrange(4)})

    def _poison_cell(self) -> Call | None:
        return Call("poison_cell", {"at": self.rng.randrange(9)}) if self.machine.store else None
