"""Draws the next call of a ledger program for the current state, so that most calls are valid, and some are not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

from aoffload._extensions.overlap import Overlap
from aoffload._kernel.loads import has_holes
from aoffload._kernel.states import RequestState

from .disk_draw import CORE_OF_DISK, DISK_WEIGHTS, RESTART_WEIGHTS
from .job_draw import JobDraw, drawn_client_hint, drawn_hint
from .ledger_machine import LedgerMachine
from .ledger_prompts import Prompts
from .ledger_state import Client
from .program import TENANTS, Call
from .remote_draw import CORE_OF_REMOTE, REMOTE_WEIGHTS, RemoteDraw

__all__ = ["LedgerDraw"]

_S = RequestState
_LOADING = (_S.LOADING, _S.DRAINING, _S.REQUEUED, _S.STRANDED)
WEIGHTS = {
    "admit": 5, "go_on": 14, "any_request": 2, "transfer": 8, "land": 2, "begin": 1.5, "end": 1.5, "invalidate": 0.7,
    "release": 1, "preempt": 0.8, "resume": 1.2, "fork": 0.8, "pin": 0.7, "unpin": 0.5, "lapse": 0.2, "prefetch": 1.2,
    "demote": 0.6, "cancel": 0.2, "reset": 0.25, "watermark": 0.3, "late": 0.8, "stray": 0.3, "again": 0.2,
    "lookup": 0.2, "client_hint": 1.0,
    "serve": 4, "evict": 2.5, "wrong": 0.2, "extend": 0.8, "withdraw": 0.4, "abandon": 0.4,
    "begin_again": 0.2,
}  # fmt: skip
WRONG = (None, -1, True, 1.5, "x", 2**70)


class LedgerDraw(RemoteDraw, JobDraw):
    """Draws calls for one machine. In each program some calls are much more frequent than in others: two calls interact
    soonest where few others come in between."""

    MAY_OVERLAP: ClassVar[bool] = True
    """Whether the ledger has steps that overlap loads."""
    CHANGES_WEIGHTS: ClassVar[bool] = True
    """Whether the ledger has a weights' epoch."""
    machine: LedgerMachine

    def __init__(self, rng: random.Random, machine: LedgerMachine) -> None:
        self.rng = rng
        self.machine = machine
        factors = (0.0, 0.0, 0.3, 1.0, 3.0)
        core = ("admit", "go_on", "transfer", "land", "serve", "evict", *CORE_OF_DISK, *CORE_OF_REMOTE)
        table = WEIGHTS | (DISK_WEIGHTS | RESTART_WEIGHTS if machine.world.num_disk_blocks else {})
        table |= REMOTE_WEIGHTS | {"restart": 0.3} if machine.world.cell_units else {}
        table |= {"hint": 0.8} if machine.world.eviction != "lru" else {}
        table |= {"weights": 0.7} if machine.world.changes_weights and self.CHANGES_WEIGHTS else {}
        self.kinds = list(table)
        self.weights = [weight * (1.0 if name in core else rng.choice(factors)) for name, weight in table.items()]
        if machine.world.store_policy.startswith("lazy"):
            self.weights[self.kinds.index("watermark")] = 4.0
        self.num_named = 0
        self.capacity = (machine.world.num_device_blocks - 1) // machine.ledger.layout.width * machine.unit
        """Tokens that fit on the device."""
        self.prompts = Prompts(rng, min(40, max(2, self.capacity)), TENANTS if machine.world.quotas else ())
        self.most_clients = rng.choice((1, 2, 2, 3, 4, 6))
        self.outcomes = rng.choice(((20, 0, 0, 0), (12, 2, 2, 1), (4, 2, 2, 2), (1, 1, 1, 1)))
        self.options = rng.random() < 0.3
        self.starts_early = rng.random() < 0.4
        self.recent = ""
        """The request of the last call, which the next call prefers."""

    def next(self) -> Call:
        """A call drawn for the current state; a kind of call that has nothing to do is drawn again."""
        while True:
            (name,) = self.rng.choices(self.kinds, self.weights)
            draw: Callable[[], Call | None] = getattr(self, f"_{name}")
            call = draw()
            if call is not None:
                self.recent = call.args.get("child", call.args.get("who", self.recent))
                return call

    # -- choosing -------------------------------------------------------------------------------------------------

    def _name(self, stem: str) -> str:
        self.num_named += 1
        return f"{stem}{self.num_named}"

    def _one(self, *states: RequestState) -> Client | None:
        found = [client for client in self.machine.clients.values() if not states or client.record.state in states]
        recent = [client for client in found if client.name == self.recent]
        if recent and self.rng.random() < 0.4:
            return recent[0]
        return self.rng.choice(found) if found else None

    def _length(self, client: Client) -> int:
        return len(client.text.tokens)

    # -- a request's life -----------------------------------------------------------------------------------------

    def _admit(self) -> Call | None:
        rng = self.rng
        if len(self.machine.clients) >= self.most_clients:
            return self._release() if rng.random() < 0.3 else None
        args: dict[str, Any] = {"who": self._name("r"), **self.prompts.identity()}
        args |= self.prompts.spans(args["tokens"])
        if self.options and rng.random() < 0.5:
            args |= rng.choice((
                {"max_hit_tokens": rng.randrange(30)}, {"hit_alignment": rng.choice((2, 3, 4, 8))},
                {"reads_cache": False},
                {"store": rng.choice(("prompt", "none"))}, {"max_store_tokens": rng.randrange(30)},
            ))  # fmt: skip
        return Call("admit", args)

    def _go_on(self) -> Call | None:
        """The next thing that an engine would do with one of its requests."""
        client = self._one()
        if client is None:
            return None
        record, rng, who = client.record, self.rng, client.name
        if client.must_end:
            return Call("release", {"who": who, "reason": "prefix_invalidated"})
        if record.waiter is not None:
            return Call("accept", {"who": who}) if record.waiter.is_over else None
        if record.state is _S.PINNED:
            queues = not self.machine.ledger.admission.queue.is_empty or rng.random() < 0.3
            return Call("queue" if queues else "allocate", self._room(client))
        if record.state is _S.ALLOCATED:
            return self._load(client) if rng.random() < 0.9 or has_holes(record) else self._compute(client)
        if record.state in (_S.LOADING, _S.DRAINING):
            if self.starts_early and not record.num_steps and self.machine.ledger.overlap.can_start(record):
                return Call("begin", {"step": self._name("s"), "who": [], "arriving": [who]})
            return self._transfer()
        if record.state is _S.PREEMPTED:
            return Call("resume", {"who": who})
        overlap = self.machine.ledger.find(Overlap)
        if overlap is not None and record in overlap:
            return Call("begin_again", {"who": who})
        return self._compute(client)

    def _room(self, client: Client) -> dict[str, Any]:
        length, more = self._length(client), self.rng.choice((0, 0, 0, 1, 4, 9, -3))
        return {"who": client.name, "num_tokens": max(1, length + more)} if more else {"who": client.name}

    def _load(self, client: Client) -> Call:
        args: dict[str, Any] = {"who": client.name}
        if self.rng.random() < 0.15:
            args["max_tokens"] = self.rng.randrange(30)
        if self.rng.random() < 0.1:
            args["max_job_bytes"] = 1000
        return Call("load", args)

    def _compute(self, client: Client) -> Call | None:
        record, rng = client.record, self.rng
        if record.num_steps:
            return self._end()
        done, length = record.num_computed_tokens, self._length(client)
        num_free = record.num_units * self.machine.unit
        if done >= length and length >= self.prompts.most_tokens + 6:
            return Call("release", {"who": client.name})
        if done >= length - 1 and num_free < length + 1 and rng.random() < 0.7:
            return Call(
                rng.choice(("extend", "extend", "queue_extension")), {"who": client.name, "num_tokens": length + 2}
            )
        new = self.prompts.tokens(rng.choice((1, 1, 2))) if rng.random() < 0.5 else []
        stop = min(num_free, length) if rng.random() < 0.6 else rng.randint(done, max(done, min(num_free, length)))
        args: dict[str, Any] = {"who": client.name, "stop": max(done, stop), "new": new if stop >= length else []}
        if self.machine.bytes.num_rows and rng.random() < 0.2:
            args["most"] = rng.choice((0, 0, 1))
        return Call("compute", args)

    def _any_request(self) -> Call | None:
        """Any call about a request, whatever its state."""
        client, rng = self._one(), self.rng
        if client is None:
            return None
        name = rng.choice(
            ("allocate", "queue", "extend", "load", "abandon", "commit", "compute", "preempt", "resume", "accept")
        )
        args: dict[str, Any] = {"who": client.name}
        if name in ("extend", "queue"):
            args["num_tokens"] = rng.randint(1, self.prompts.most_tokens + 10)
        elif name == "commit":
            args["num_computed_tokens"] = rng.randint(0, self.prompts.most_tokens)
        elif name == "compute":
            args["stop"] = rng.randint(0, self.prompts.most_tokens)
        return Call(name, args)

    def _extend(self) -> Call | None:
        client = self._one(_S.RUNNING, _S.ALLOCATED)
        if client is None or client.record.waiter is not None:
            return None
        reach = client.record.num_units * self.machine.unit
        name = self.rng.choice(("extend", "extend", "queue_extension"))
        return Call(name, {"who": client.name, "num_tokens": reach + self.rng.randint(1, 8)})

    def _withdraw(self) -> Call | None:
        found = [client for client in self.machine.clients.values() if client.record.waiter is not None]
        return Call("withdraw", {"who": self.rng.choice(found).name}) if found else None

    def _abandon(self) -> Call | None:
        client = self._one(*_LOADING)
        return None if client is None else Call("abandon", {"who": client.name})

    def _release(self) -> Call | None:
        client = self._one()
        if client is None:
            return None
        return Call(
            "release", {"who": client.name, "reason": self.rng.choice(("closed_early", "closed_early", "cancelled"))}
        )

    def _serve(self) -> Call:
        args = {**self.prompts.identity(), "new": self.prompts.tokens(self.rng.choice((0, 0, 1, 2)))}
        self.prompts.served(args["tokens"])
        return Call("serve", args)

    def _evict(self) -> Call:
        """Ask for all the room there is, or a little less: unused prefixes lose their blocks, tail first."""
        machine = self.machine
        num_free = machine.ledger.statistics().device
        units = (num_free.num_free + num_free.num_cached) // machine.ledger.layout.width
        return Call(
            "evict",
            {
                "num_tokens": max(1, units * machine.unit - self.rng.choice((0, 0, 1, 5))),
                "token": self.rng.randrange(99),
            },
        )

    def _invalidate(self) -> Call | None:
        client = self._one(_S.RUNNING)
        if client is None:
            return None
        first = client.record.ready_stop * self.machine.unit
        start = self.rng.randint(first, max(first, client.record.num_computed_tokens))
        return Call("invalidate", {"who": client.name, "from_token": start})

    def _preempt(self) -> Call | None:
        client = self._one(_S.RUNNING, *_LOADING, _S.ALLOCATED)
        return None if client is None else Call("preempt", {"who": client.name})

    def _resume(self) -> Call | None:
        client = self._one(_S.PREEMPTED)
        return None if client is None else Call("resume", {"who": client.name})

    def _fork(self) -> Call | None:
        client = self._one(_S.RUNNING)
        if client is None or len(self.machine.clients) > self.most_clients:
            return None
        more = self.rng.choice((0, 0, self._length(client) + 3))
        return Call("fork", {"who": client.name, "child": self._name("f"), "num_tokens": more})

    def _begin_again(self) -> Call | None:
        client = self._one(_S.RUNNING)
        return None if client is None else Call("begin_again", {"who": client.name})

    # -- steps ----------------------------------------------------------------------------------------------------

    def _begin(self) -> Call | None:
        if len(self.machine.steps) >= 2:
            return self._end()
        ready, early = [], []
        for client in self.machine.clients.values():
            record = client.record
            if record.num_steps:
                continue
            if record.state is _S.RUNNING or (record.state is _S.ALLOCATED and not has_holes(record)):
                ready.append(client.name)
            elif (
                self.starts_early
                and record.state in (_S.LOADING, _S.DRAINING)
                and self.machine.ledger.overlap.can_start(record)
            ):
                early.append(client.name)
        who = self.rng.sample(ready, self.rng.randint(0, len(ready)))
        arriving = self.rng.sample(early, self.rng.randint(0, len(early)))
        if not who and not arriving:
            return None
        return Call("begin", {"step": self._name("s"), "who": who, "arriving": arriving})

    def _end(self) -> Call | None:
        if not self.machine.steps:
            return None
        new = self.prompts.tokens(1) if self.rng.random() < 0.5 else []
        args = {"step": self.rng.choice(list(self.machine.steps)), "commits": self.rng.random() < 0.85, "new": new}
        if self.machine.bytes.num_rows and self.rng.random() < 0.2:
            args["most"] = self.rng.choice((0, 0, 1))
        return Call("end", args)

    # -- jobs -----------------------------------------------------------------------------------------------------

    def _transfer(self) -> Call | None:
        if not self.machine.plans:
            return None
        loads = [name for name in self.machine.plans if ":load:" in name]
        name = self.rng.choice(loads if loads and self.rng.random() < 0.6 else list(self.machine.plans))
        return self._go_on_with(name)

    # -- pins, prefetches and demotions ---------------------------------------------------------------------------

    def _cached(self, name: str, stem: str) -> Call:
        return Call(name, {"name": self._name(stem), **self.prompts.identity()})

    def _pin(self) -> Call:
        call = self._cached("pin", "p")
        if self.rng.random() < 0.4:
            call = Call("pin", {**call.args, "expires_at": float(self.rng.randint(0, 50))})
        return call

    def _client_hint(self) -> Call:
        return drawn_client_hint(self.rng, self.prompts.identity())

    def _hint(self) -> Call:
        return drawn_hint(self.rng, self.prompts.identity())

    def _unpin(self) -> Call | None:
        return Call("unpin", {"name": self.rng.choice(list(self.machine.pins))}) if self.machine.pins else None

    def _lapse(self) -> Call:
        return Call("lapse", {"now": float(self.rng.randint(0, 50))})

    def _prefetch(self) -> Call:
        return self._cached("prefetch", "e")

    def _demote(self) -> Call:
        return self._cached("demote", "e")

    def _cancel(self) -> Call | None:
        return (
            Call("cancel", {"name": self.rng.choice(list(self.machine.cache_transfers))})
            if self.machine.cache_transfers
            else None
        )

    # -- the whole ledger -----------------------------------------------------------------------------------------

    def _reset(self) -> Call:
        tiers = (None, "DEVICE", "HOST", "DISK") if self.machine.world.num_disk_blocks else (None, "DEVICE", "HOST")
        tier = self.rng.choice((*tiers, "REMOTE") if self.machine.world.cell_units else tiers)
        return Call("reset", {"tier": tier} if tier else {})

    def _watermark(self) -> Call:
        return Call("watermark")

    def _lookup(self) -> Call:
        return Call("lookup", {"tokens": self.prompts.draw()})

    def _wrong(self) -> Call | None:
        client = self._one()
        if client is None:
            return None
        method, argument = self.rng.choice((
            ("allocate_nowait", "num_tokens"), ("extend_nowait", "num_tokens"), ("queue_extension", "num_tokens"),
            ("commit", "num_computed_tokens"), ("invalidation.invalidate", "from_token"),
            ("plan_load", "max_tokens"), ("preemption.resume", "num_tokens"),
        ))  # fmt: skip
        value = self.rng.choice(WRONG[1:])
        return Call("wrong", {"method": method, "who": client.name, argument: value})
