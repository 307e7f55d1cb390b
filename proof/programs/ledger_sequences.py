"""Sequences of calls that belong together. Most failures need one; any other call may come in between."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from aoffload._kernel.states import JobState

from .ledger_draw import LedgerDraw
from .ledger_machine import LedgerMachine
from .program import Call

__all__ = ["LedgerSequences"]

Step: TypeAlias = Callable[[], Call | None]
"""Draws the next call of a sequence for the current state; None, if it does not fit any more."""


class LedgerSequences(LedgerDraw):
    """Draws single calls, and begins a sequence now and then."""

    def __init__(self, rng: random.Random, machine: LedgerMachine) -> None:
        super().__init__(rng, machine)
        self._ahead: list[Step] = []
        self._sequences: tuple[Callable[[], list[Step]], ...] = (
            self._pin_and_request,
            self._forked,
            self._reset_between,
        )
        if machine.world.num_host_blocks:
            self._sequences += (self._demote_and_load,) * 4
        if machine.world.num_disk_blocks:
            self._sequences += (self._store_and_fetch_from_disk,) * 4 + (self._store_and_invalidate_on_disk,)
        if machine.world.cell_units:
            self._sequences += (
                (self._demote_and_load,) * 4
                + (self._store_and_fetch,) * 6
                + (self._store_and_invalidate_in_remote_store,) * 7
            )
            self.outcomes = rng.choice(((12, 2, 2, 1), (4, 2, 2, 2), (1, 1, 1, 1)))
        has_more = machine.world.num_disk_blocks or machine.world.cell_units
        often = (0.03, 0.06, 0.12, 0.3) if has_more else (0.0, 0.03, 0.06, 0.12)
        self._how_often = rng.choice((0.2, 0.4, 0.6) if machine.world.cell_units else often)

    def next(self) -> Call:
        while True:
            if not self._ahead and self.rng.random() < self._how_often:
                self._ahead = self.rng.choice(self._sequences)()
            if not self._ahead or self.rng.random() < 0.25:
                return super().next()
            if (call := self._ahead.pop(0)()) is not None:
                return call

    def _served(self) -> tuple[Call, dict[str, Any]]:
        """A prompt that is served, and what identifies it."""
        served = self._serve()
        return served, {name: value for name, value in served.args.items() if name != "new"}

    def _longer(self, known: dict[str, Any], *tails: int) -> dict[str, Any]:
        return {**known, "tokens": known["tokens"] + self.prompts.tokens(self.rng.choice(tails))}

    # -- sequences ----------------------------------------------------------------------------------------------------

    def _demote_and_load(self) -> list[Step]:
        """A prompt goes to the host, and one or two requests want it again, which find more or less of it there."""
        rng, policy = self.rng, self.machine.world.store_policy
        served, known = self._served()
        wanted, names = self._longer(known, 0, 0, 1, 4), [self._name("r") for _ in range(rng.choice((1, 1, 2)))]
        sequence: list[Step] = [_call(served.name, served.args)]
        if policy == "off" or rng.random() < 0.1:
            sequence.append(_call("demote", {"name": self._name("e"), **known}))
        elif policy.startswith("lazy"):
            sequence.append(self._watermark)
        sequence += [_call("land"), self._evict]
        sequence += [_call("admit", {"who": name, **wanted}) for name in names]
        sequence += [_call("allocate", {"who": name}) for name in names]
        if rng.random() < 0.3:
            sequence += self._same_prompt(known)
        if rng.random() < 0.2:
            sequence.append(partial(self._extend_further, names[0]))
        sequence += [_call("load", {"who": name}) for name in names]
        ends = rng.random()
        if ends < 0.15:  # a forward starts on it, and counts
            return [*sequence, partial(self._start_early, names[0]), _call("land"), self._end]
        return sequence + (self._in_vain(names[0], known) if ends < 0.6 else [])

    def _same_prompt(self, known: dict[str, Any]) -> list[Step]:
        """Another request computes the same first tokens, and may hold the rest of the room."""
        rng, who = self.rng, self._name("t")
        num_same = rng.randint(1, len(known["tokens"]))
        tokens = known["tokens"][:num_same] + self.prompts.tokens(rng.choice((0, 0, 2, 8)))
        sequence: list[Step] = [
            _call("admit", {"who": who, **known, "tokens": tokens, "reads_cache": False}),
            partial(self._squeeze, who) if rng.random() < 0.4 else _call("allocate", {"who": who}),
            _call("load", {"who": who}),
        ]
        return [*sequence, _call("compute", {"who": who, "stop": rng.randint(num_same, len(tokens))})]

    def _in_vain(self, name: str, known: dict[str, Any]) -> list[Step]:
        """A load fails or is abandoned. A forward may have started on it, and other requests may come meanwhile."""
        rng, sequence = self.rng, list[Step]()
        is_early = rng.random() < 0.5
        if is_early:
            sequence.append(partial(self._start_early, name))
        if rng.random() < 0.5:
            sequence += self._same_prompt(known)
        if rng.random() < 0.4:
            who = self._name("r")
            sequence += [_call("admit", {"who": who, "tokens": [9]}), partial(self._squeeze, who)]
        sequence += [_call("abandon", {"who": name})] if rng.random() < 0.4 else [partial(self._lose, name)] * 3
        if is_early and rng.random() < 0.5:
            sequence += [_call("land"), _call("begin_again", {"who": name})]
        resets, leaves = _call("reset", {"tier": "DEVICE"}), partial(self._release_but, name)
        afterwards: tuple[list[Step], ...] = (
            [],
            [resets],
            [leaves, resets],
            [leaves, leaves, resets],
            [self._late, self._invalidate],
        )
        return [*sequence, *rng.choice(afterwards)]

    def _pin_and_request(self) -> list[Step]:
        """A prompt is pinned. A request wants it and most of the room, and no other request holds room that it could
        wait for. Or the cache is reset while the request waits."""
        rng, (served, known) = self.rng, self._served()
        who, num_tokens = self._name("r"), len(known["tokens"])
        kept = {**known, "tokens": known["tokens"][: rng.choice((num_tokens, rng.randint(1, num_tokens)))]}
        wanted = self._longer(rng.choice((kept, known)), 0, 1, 4, 8)
        # With a hit, windows need fewer blocks than tokens: a request for a little more than the capacity may fit.
        unit = self.machine.unit
        most = max(1, self.capacity + rng.choice((2 * unit, unit, 0, 0, 0, -1, -2, -5)))
        begins: list[Step] = [_call(served.name, served.args), *[self._evict] * rng.choice((0, 1))]
        asks, waits = _call("admit", {"who": who, **wanted}), _call("queue", {"who": who, "num_tokens": most})
        leaves: list[Step] = [partial(self._release_but, who)] * 3
        if rng.random() < 0.7:
            return [*begins, _call("pin", {"name": self._name("p"), **kept}), asks, *leaves, waits]
        # The prompt is gone before the request's turn comes.
        holder = self._name("r")
        holds: list[Step] = [_call("admit", {"who": holder, "tokens": [9]}), partial(self._squeeze, holder)]
        return [*begins, *leaves, *holds, asks, waits, self._reset, *leaves]

    def _reset_between(self) -> list[Step]:
        """A request for a cached prompt makes its usual calls, and everything is reset between two of them."""
        rng, (served, known), who = self.rng, self._served(), self._name("r")
        wanted = self._longer(known, 1, 4, 8)
        lands: list[Step] = [_call("land")] * rng.choice((0, 1))
        goes_on: list[Step] = [
            _call("admit", {"who": who, **wanted}),
            _call(rng.choice(("allocate", "queue")), {"who": who}),
            _call("accept", {"who": who}),
            _call("load", {"who": who}),
            *lands,
            _call("compute", {"who": who, "stop": len(wanted["tokens"])}),
        ]
        if rng.random() < 0.3:
            del goes_on[3]  # it computes without a load
        goes_on.insert(rng.randint(1, len(goes_on) - 1), _call("reset"))
        return [_call(served.name, served.args), *[self._evict] * rng.choice((0, 1)), *goes_on]

    def _forked(self) -> list[Step]:
        """A request is forked, the fork goes on or is preempted, and then its parent is invalidated."""
        child, names = self._name("f"), list[str]()

        def forks() -> Call | None:
            call = self._fork()
            if call is None or call.name != "fork":
                return None
            names.append(call.args["who"])
            return Call("fork", {**call.args, "child": child})

        def is_preempted() -> Call | None:
            return Call("preempt", {"who": child}) if names else None

        def goes_on() -> Call | None:
            client = self.machine.clients.get(child)
            return self._compute(client) if client is not None and client.record.num_units else None

        def was_wrong() -> Call | None:
            return Call("invalidate", {"who": names[0], "from_token": self.rng.randrange(6)}) if names else None

        between = self.rng.choice(([], [is_preempted], [goes_on], [goes_on, is_preempted], [is_preempted]))
        return [forks, *between, was_wrong]

    def _store_and_fetch_from_disk(self) -> list[Step]:
        return [_call(one.name, one.args) for one in self.down_and_up([self._evict()], restarts=True)]

    def _store_and_invalidate_on_disk(self) -> list[Step]:
        return [_call(one.name, one.args) for one in self.store_and_invalidate_on_disk()]

    def _store_and_fetch(self) -> list[Step]:
        return self._with_room_now(self.store_and_fetch([Call("evict")], allocates=True))

    def _store_and_invalidate_in_remote_store(self) -> list[Step]:
        return self._with_room_now(self.store_and_invalidate_in_remote_store([Call("evict")], allocates=True))

    def _with_room_now(self, sequence: list[Call]) -> list[Step]:
        """How much is to be evicted is known when it is."""
        return [self._evict if one.name == "evict" else _call(one.name, one.args) for one in sequence]

    # -- calls of sequences -------------------------------------------------------------------------------------------

    def _extend_further(self, name: str) -> Call | None:
        client = self.machine.clients.get(name)
        if client is None:
            return None
        reach = client.record.num_units * self.machine.unit
        return Call("extend", {"who": name, "num_tokens": reach + self.rng.choice((1, 4, self.capacity))})

    def _squeeze(self, name: str) -> Call:
        """Allocate all the room there is, or one unit less."""
        pool = self.machine.ledger.statistics().device
        units = (pool.num_free + pool.num_cached) // self.machine.ledger.layout.width
        num_tokens = (units - self.rng.choice((0, 0, 1))) * self.machine.unit
        return Call("allocate", {"who": name, "num_tokens": max(1, num_tokens)})

    def _start_early(self, name: str) -> Call | None:
        client = self.machine.clients.get(name)
        if client is None or client.record.num_steps or not self.machine.ledger.overlap.can_start(client.record):
            return None
        return Call("begin", {"step": self._name("s"), "who": [], "arriving": [name]})

    def _lose(self, name: str) -> Call | None:
        """Launch one of the copies that a load waits for, or let it fail."""
        client = self.machine.clients.get(name)
        jobs = client.record.load.jobs if client is not None and client.record.load is not None else ()
        for planned in self.machine.plans:
            job = self.machine.job(planned)
            if job is not None and job in jobs:
                if job.state is JobState.QUEUED:
                    return Call("launch", {"job": planned})
                outcome = self.rng.choice(("failed", "unproven", "unproven", "corrupt"))
                return Call("settle", {"job": planned, "outcome": outcome, "at": self.rng.choice((0, 0, 1))})
        return None

    def _release_but(self, name: str) -> Call | None:
        others = [other for other in self.machine.clients if other != name]
        return Call("release", {"who": self.rng.choice(others)}) if others else None


def _call(name: str, args: Mapping[str, Any] | None = None) -> Step:
    return lambda: Call(name, args or {})
