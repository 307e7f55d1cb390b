"""Draws the next call of a program over a ledger whose device blocks belong to an engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

from aoffload._kernel.states import RequestState

from .disk_draw import CORE_OF_DISK, DISK_WEIGHTS
from .engine_machine import EngineMachine
from .engine_state import EngineClient
from .job_draw import JobDraw, drawn_client_hint, drawn_hint
from .ledger_prompts import Prompts
from .program import TENANTS, Call
from .remote_draw import CORE_OF_REMOTE, REMOTE_WEIGHTS, RemoteDraw

__all__ = ["EngineDraw"]

_S = RequestState
WEIGHTS = {
    "admit": 5, "go_on": 14, "transfer": 8, "land": 2, "serve": 4, "evict": 1.5, "any_request": 1.5, "ask": 1,
    "invalidate": 0.9, "release": 1.2, "pin": 0.6, "unpin": 0.4, "client_hint": 1.0, "lapse": 0.2, "reset": 0.4,
    "late": 0.6, "stray": 0.4, "again": 0.2, "lookup": 0.2, "tick": 0.4, "wrong": 0.4, "same_prompt": 0.8,
    "decline": 2, "offer_deferred": 2,
}  # fmt: skip
CORE = ("admit", "go_on", "transfer", "land", "serve", "evict", "offer_deferred")
WRONG = (-1, True, 1.5, "x", 2**70)


class EngineDraw(RemoteDraw, JobDraw):
    machine: EngineMachine
    CHANGES_WEIGHTS: ClassVar[bool] = True

    def __init__(self, rng: random.Random, machine: EngineMachine) -> None:
        self.rng, self.machine = rng, machine
        factors = (0.0, 0.0, 0.3, 1.0, 3.0)
        table = WEIGHTS | (DISK_WEIGHTS | {"sequence": 1.0} if machine.world.num_disk_blocks else {})
        table |= REMOTE_WEIGHTS | {"sequence": 3.0} if machine.world.cell_units else {}
        table |= {"hint": 0.8} if machine.world.eviction != "lru" else {}
        table |= {"weights": 0.7} if machine.world.changes_weights and self.CHANGES_WEIGHTS else {}
        self.kinds, core = list(table), (*CORE, *CORE_OF_DISK, *CORE_OF_REMOTE)
        self.weights = [weight * (1.0 if name in core else rng.choice(factors)) for name, weight in table.items()]
        self.capacity = (machine.world.num_device_blocks - 1) // machine.ledger.layout.width * machine.unit
        self.prompts = Prompts(rng, min(40, max(2, self.capacity)), TENANTS if machine.world.quotas else ())
        self.most_clients = rng.choice((1, 2, 3, 4, 6))
        self.outcomes = rng.choice(((20, 0, 0, 0), (12, 2, 2, 1), (4, 2, 2, 2), (1, 1, 1, 1)))
        self.options = rng.random() < 0.3
        self.num_named = 0
        self._ahead: list[Call] = []

    def next(self) -> Call:
        """A call drawn for the current state; a kind of call that has nothing to do is drawn again."""
        while True:
            if self._ahead:
                return self._ahead.pop(0)
            (name,) = self.rng.choices(self.kinds, self.weights)
            draw: Callable[[], Call | None] = getattr(self, f"_{name}")
            if (call := draw()) is not None:
                return call

    def _name(self, stem: str) -> str:
        self.num_named += 1
        return f"{stem}{self.num_named}"

    def _one(self, *states: RequestState) -> EngineClient | None:
        found = [client for client in self.machine.clients.values() if not states or client.record.state in states]
        return self.rng.choice(found) if found else None

    # -- a request's life -----------------------------------------------------------------------------------------

    def _admit(self) -> Call | None:
        rng = self.rng
        if len(self.machine.clients) >= self.most_clients:
            return self._release() if rng.random() < 0.3 else None
        return Call("admit", {"who": self._name("r"), **self._prompt()})

    def _prompt(self) -> dict[str, Any]:
        rng, args = self.rng, self.prompts.identity()
        args |= self.prompts.spans(args["tokens"])
        if rng.random() < 0.15:
            args["fewer"] = rng.choice((1, 1, 2, 9))
        if self.options and rng.random() < 0.5:
            args |= rng.choice((
                {"max_hit_tokens": rng.randrange(30)}, {"hit_alignment": rng.choice((2, 3, 4, 8))},
                {"reads_cache": False},
                {"store": rng.choice(("prompt", "none"))}, {"max_store_tokens": rng.randrange(30)},
            ))  # fmt: skip
        return args

    def _same_prompt(self) -> Call:
        """Several requests want a prompt that the host may have: one of them loads it."""
        rng, prompt = self.rng, self.prompts.identity()
        self.prompts.served(prompt["tokens"])
        names = [self._name("t") for _ in range(rng.choice((2, 2, 3)))]
        longer = prompt["tokens"] + self.prompts.tokens(rng.choice((0, 1, 4)))
        self._ahead = [Call("evict")] if rng.random() < 0.8 else []
        for name in names:
            self._ahead += [Call("admit", {"who": name, **prompt, "tokens": longer}), Call("load", {"who": name})]
        if rng.random() < 0.2:
            self._ahead.insert(rng.randint(1, len(self._ahead)), Call("reset"))
        return Call("serve", prompt)

    def _sequence(self) -> Call:
        world, evicts = self.machine.world, [Call("evict")]
        if world.cell_units and (not world.num_disk_blocks or self.rng.random() < 0.5):
            tells = self.store_and_fetch if self.rng.random() < 0.5 else self.store_and_invalidate_in_remote_store
            first, *self._ahead = tells(evicts, allocates=False)
        else:
            first, *self._ahead = self.down_and_up(evicts, restarts=False)
        return first

    def _go_on(self) -> Call | None:
        """The next thing that an engine would do with one of its requests."""
        client, rng = self._one(), self.rng
        if client is None:
            return None
        if client.must_end:
            return Call("release", {"who": client.name, "reason": "prefix_invalidated"})
        if client.record.state is _S.MATCHED:
            return Call("ask", {"who": client.name})
        if client.record.state is _S.PINNED and rng.random() < 0.85:
            args: dict[str, Any] = {"who": client.name, "sparse": rng.random() < 0.5}
            if rng.random() < 0.15:
                args["max_tokens"] = rng.randrange(30)
            return Call("load", args)
        if client.record.state is _S.LOADING:
            return self._transfer()
        return self._compute(client)

    def _compute(self, client: EngineClient) -> Call:
        rng, done, length = self.rng, client.num_computed, len(client.text.tokens)
        if done >= length and length >= self.prompts.most_tokens + 6:
            return Call("release", {"who": client.name})
        new = self.prompts.tokens(rng.choice((1, 1, 2))) if rng.random() < 0.5 else []
        stop = length if rng.random() < 0.6 else rng.randint(done, max(done, length))
        args = {"who": client.name, "stop": stop, "new": new if stop >= length else []}
        if rng.random() < 0.15:
            args["offers"] = False
        if rng.random() < 0.15:
            args["is_last"] = True
        if self.machine.bytes.num_rows and rng.random() < 0.3:
            args |= rng.choice(({"most": 0}, {"most": 1}, {"also": rng.randint(1, 6)}))
        return Call("compute", args)

    def _any_request(self) -> Call | None:
        client = self._one()
        if client is None:
            return None
        name = self.rng.choice(("load", "ask", "offer", "compute", "offer"))
        args: dict[str, Any] = {"who": client.name}
        if name == "compute":
            args["stop"] = self.rng.randint(0, self.prompts.most_tokens)
        return Call(name, args)

    def _decline(self) -> Call | None:
        client = self._one(_S.PINNED)
        if client is None:
            return None
        return Call("decline", {"who": client.name, "from_token": self.rng.randint(0, client.record.match.num_tokens)})

    def _ask(self) -> Call | None:
        client = self._one(_S.MATCHED, _S.PINNED)
        return None if client is None else Call("ask", {"who": client.name, "fewer": self.rng.choice((0, 0, 1, 2))})

    def _invalidate(self) -> Call | None:
        client = self._one(_S.RUNNING)
        if client is None:
            return None
        first = client.num_computed - len(client.marks) if self.rng.random() < 0.2 else 0
        stop = client.record.num_computed_tokens
        return Call("invalidate", {"who": client.name, "from_token": self.rng.randint(min(first, stop), stop)})

    def _release(self) -> Call | None:
        client = self._one()
        return None if client is None else Call("release", {"who": client.name})

    def _serve(self) -> Call:
        args = {**self.prompts.identity(), "new": self.prompts.tokens(self.rng.choice((0, 0, 1, 2)))}
        self.prompts.served(args["tokens"])
        return Call("serve", args)

    def _evict(self) -> Call:
        return Call("evict")

    def _tick(self) -> Call:
        return Call("tick", {"seconds": self.rng.choice((0.5, 3.0))})

    # -- jobs -----------------------------------------------------------------------------------------------------

    def _transfer(self) -> Call | None:
        if not self.machine.plans:
            return None
        name = self.rng.choice(list(self.machine.plans))
        return self._go_on_with(name)

    # -- the whole ledger -----------------------------------------------------------------------------------------

    def _pin(self) -> Call:
        args: dict[str, Any] = {"name": self._name("p"), **self.prompts.identity()}
        if self.rng.random() < 0.4:
            args["expires_at"] = float(self.rng.randint(0, 50))
        return Call("pin", args)

    def _client_hint(self) -> Call:
        return drawn_client_hint(self.rng, self.prompts.identity())

    def _hint(self) -> Call:
        return drawn_hint(self.rng, self.prompts.identity())

    def _unpin(self) -> Call | None:
        return Call("unpin", {"name": self.rng.choice(list(self.machine.pins))}) if self.machine.pins else None

    def _lapse(self) -> Call:
        return Call("lapse", {"now": float(self.rng.randint(0, 50))})

    def _reset(self) -> Call:
        disk = ("DISK",) * 3 if self.machine.world.num_disk_blocks else ()
        tier = self.rng.choice((None, "HOST", "HOST", "DEVICE", *disk))
        return Call("reset", {"tier": tier} if tier else {})

    def _offer_deferred(self) -> Call:
        return Call("offer_deferred")

    def _lookup(self) -> Call:
        return Call("lookup", {"tokens": self.prompts.draw()})

    def _wrong(self) -> Call | None:
        client = self._one()
        if client is None:
            return None
        if self.rng.random() < 0.3:
            return Call("wrong", {"method": "abandon_load", "who": client.name})
        method, argument, values = self.rng.choice((
            ("plan_load", "max_tokens", WRONG), ("plan_load", "into", ([], [[-1] * 50], "x", 3)),
            ("offer", "num_computed_tokens", WRONG), ("offer", "block_ids", ([], [[9**9] * 50], "x", 3)),
            ("invalidate", "from_token", WRONG), ("match_again", "num_device_tokens", WRONG),
            ("decline", "from_token", WRONG),
        ))  # fmt: skip
        return Call("wrong", {"method": method, "who": client.name, argument: self.rng.choice(values)})
