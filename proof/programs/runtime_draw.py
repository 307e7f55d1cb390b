"""Draws programs over the runtime: a client's next call mostly follows from its earlier calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import attrs

from aoffload._kernel.states import RequestState
from aoffload.testing.faults import DISK_FAULTS, FAULTS, REMOTE_FAULTS

from .job_draw import drawn_epoch
from .load_choice import RANDOM
from .program import Call, World, draw_world, with_a_disk, with_learning, with_states, words_of
from .runtime_arguments import ArgumentDrawing
from .runtime_director import Director
from .runtime_disk_draw import DiskDrawing

__all__ = ["Drawing", "draw_opening", "draw_runtime_world", "draw_runtime_world_with_states"]

NAMES = ("a", "b", "c", "d")
FAULTS_THAT_LAST = ("fail", "refuse", "no_fence", "log")
"""Faults that may last: from one opportunity on they happen at every one."""
NO_FAULTS = ("compute", "device_lost")
_MANY = {"leap": 250, "block": 250, "worker": 250, "log": 60}
"""Faults with many opportunities in a program."""
OF_HINTS = 0.06
"""The share of the calls that are hints, where eviction learns."""
OF_STATES = 0.02
"""The share of the calls with which two requests begin to compute the same prompt, where there is a recurrent state."""
OF_WEIGHTS = 0.05
"""The share of the calls that set the weights' epoch, in worlds that do."""
SEQUENCES = ("evict_prompt", "same_prompt")
"""What is drawn for one client and is more than a call of its own."""
STATES = {
    RequestState.QUEUED: "entered", RequestState.MATCHED: "entered", RequestState.PINNED: "entered",
    RequestState.ALLOCATED: "allocated", RequestState.LOADING: "loading", RequestState.RUNNING: "running",
    RequestState.DRAINING: "loading", RequestState.REQUEUED: "loading", RequestState.STRANDED: "loading",
    RequestState.PREEMPTED: "preempted", RequestState.DONE: "none", RequestState.ABORTED: "none",
}  # fmt: skip


def draw_runtime_world(rng: random.Random) -> World:
    return with_learning(with_a_disk(_draw_tiers(rng)))


def draw_runtime_world_with_states(rng: random.Random) -> World:
    return with_learning(with_a_disk(with_states(_draw_tiers(rng))))


def _draw_tiers(rng: random.Random) -> World:
    """Draw a world. Most bugs need KV in host memory, so most worlds have a host, and a policy that stores there."""
    world = draw_world(rng)
    kind = rng.random()
    if kind < 0.3:
        return attrs.evolve(world, num_host_blocks=0) if kind < 0.06 else world
    policy, num_host_blocks = rng.choice(("eager", "eager", world.store_policy)), world.num_host_blocks
    num_host_blocks = max(num_host_blocks, world.num_device_blocks)
    return attrs.evolve(world, num_host_blocks=num_host_blocks, store_policy=policy)


def draw_opening(rng: random.Random, world: World) -> list[Call]:
    """The calls that have to come first: the configuration and the faults."""
    faults = _faults(rng) if rng.random() < 0.6 else []
    if world.num_disk_blocks and rng.random() < 0.4:
        kinds = rng.sample(DISK_FAULTS, rng.choice((1, 1, 2)))
        faults += [Call("fault", {"kind": kind, **_when(rng, kind)}) for kind in kinds]
    needs_verify = any(FAULTS[fault.args["kind"]].needs_verify for fault in faults)
    return _configure(rng, verify=needs_verify or rng.random() < 0.25) + _chosen(world) + faults


def _when(rng: random.Random, kind: str) -> dict[str, Any]:
    """Erasures are few, and each one that fails is repeated, so faults of erasures come early and often last."""
    if kind == "disk_erase":
        return {"at": rng.choice((0, 0, 1, 3)), "lasting": rng.random() < 0.7}
    return {"at": rng.choice((0, 0, 1, 2, 3, 8, 20))}


def _chosen(world: World) -> list[Call]:
    """In half of the worlds, not all that could be loaded is. Which follows from the world itself."""
    chance = random.Random(f"{words_of(world)} choice")
    choice = chance.choice((None, None, "cost", RANDOM))
    speed = {"prefill_tokens_per_s": chance.choice((30.0, 1e3, 3e4))} if chance.random() < 0.7 else {}
    return [Call("configure", {"load_choice": choice, **speed})] if choice else []


def _configure(rng: random.Random, *, verify: bool) -> list[Call]:
    options = dict[str, Any]()
    if verify:
        options["verify"] = True
    if rng.random() < 0.3:
        options["max_jobs_in_flight"] = rng.choice((1, 2))
    if rng.random() < 0.2:
        options["max_bytes_in_flight"] = rng.randint(1, 6)
    return [Call("configure", options)] if options else []


def _faults(rng: random.Random) -> list[Call]:
    kinds = [kind for kind in FAULTS if kind not in (*NO_FAULTS, *DISK_FAULTS, *REMOTE_FAULTS)]
    found = []
    for _ in range(rng.choice((1, 2, 2, 3, 4))):
        kind = rng.choice(kinds)
        at = rng.randrange(_MANY[kind]) if kind in _MANY else rng.choice((0, 0, 0, 1, 1, 2, 3, 5))
        lasts = {"lasting": True} if kind in FAULTS_THAT_LAST and rng.random() < 0.2 else {}
        found.append(Call("fault", {"kind": kind, "at": at, **lasts}))
    return found


@attrs.define(eq=False)
class Drawing(ArgumentDrawing, DiskDrawing):
    """Draws the calls of one program."""

    rng: random.Random
    _director: Director
    _states: dict[str, str] = attrs.field(factory=dict)
    _prompts: list[tuple[int, ...]] = attrs.field(factory=list)
    _ahead: list[Call] = attrs.field(factory=list)
    """Calls that are made before others are drawn."""

    STATES: ClassVar[Mapping[RequestState, str]] = STATES

    def calls(self, num_calls: int) -> Iterator[Call]:
        """About `num_calls` calls, each drawn when the ones before it have been handed out."""
        rng = self.rng
        names = NAMES[: rng.choice((1, 2, 3, 3, 4))]
        self._states = dict.fromkeys(names, "none")
        is_struck, is_hurried = rng.random() < 0.5, rng.choice((0.0, 0.2, 0.5, 0.9))
        closes_at = rng.randrange(num_calls // 2, num_calls) if rng.random() < 0.12 else -1
        warm = self._warm(names) if rng.random() < 0.9 else []
        yield from warm
        for number in range(len(warm), num_calls):
            if number == closes_at:
                yield Call("close")
            if is_struck and rng.random() < 0.05:
                yield self._cancel(rng.choice(names))
            call = self._ahead.pop(0) if self._ahead else self._next(self._client(names))
            is_in_a_hurry = rng.random() < is_hurried and "who" in call.args
            yield Call(call.name, {**call.args, "hurry": True}) if is_in_a_hurry else call

    def _client(self, names: tuple[str, ...]) -> str:
        """A client, preferably an idle one."""
        idle = [name for name in names if self._is_idle(name)]
        return self.rng.choice(idle if idle and self.rng.random() < 0.8 else names)

    def _is_idle(self, name: str) -> bool:
        actor = self._director.actors.get(name)
        return actor is None or actor.idle.is_set()

    def _state(self, name: str) -> str:
        """How far the client's request has come; how far it is expected to come, while the client has calls to make."""
        actor = self._director.actors.get(name)
        if actor is None or not actor.idle.is_set():
            return self._states[name]
        return "none" if actor.served is None else self.STATES[actor.served.request.state]

    def _warm(self, names: tuple[str, ...]) -> list[Call]:
        """Calls that serve some prompts first and leave most of them in host memory."""
        rng, found, policy = self.rng, list[Call](), self._director.program.world.store_policy
        for _ in range(rng.randint(1, 3)):
            served = self._serve()
            found += [Call("serve", {"who": rng.choice(names), **served})] * (2 if policy.startswith("sel") else 1)
            if policy == "off":
                found.append(Call("demote", {"who": rng.choice(names), "tokens": served["tokens"]}))
        found.append(Call("flush", {"who": names[0]}))
        if rng.random() < 0.85:
            found.append(Call("reset", {"who": names[0], "tier": "DEVICE"}))
        return found

    def _cancel(self, name: str) -> Call:
        how = self.rng.choice(("scope", "request", "native", "native"))
        return Call("cancel", {"who": name, "how": how, "after": self.rng.choice((0, 1, 1, 2, 3, 5, 8))})

    def _next(self, name: str) -> Call:
        odds = self.ODDS
        if self._director.program.world.num_disk_blocks and self.rng.random() < self.OF_THE_DISK:
            return self._of_the_disk(name)
        if self._director.program.world.eviction != "lru" and self.rng.random() < OF_HINTS:
            verb, in_s = self.rng.choice(("returns", "returns", "done")), self.rng.choice((0.001, 0.3, 60.0))
            return Call("client_hint", {"who": name, **self._identity(), "verb": verb, "ttl_s": in_s})
        if self.has_states and self.rng.random() < OF_STATES:
            return self._same_state(name)
        if self._director.program.world.changes_weights and self.rng.random() < OF_WEIGHTS:
            return Call("weights", {"who": name, **drawn_epoch(self.rng).args})
        drawn = _drawn(self.rng, odds.next[self._state(name)])
        for several, among in (("keep", odds.keeping), ("whole", odds.whole)):
            if drawn == several:
                drawn = _drawn(self.rng, among)
        if drawn == "any":
            drawn = self.rng.choice(odds.any)
        if drawn in SEQUENCES:
            sequence: Callable[[str], Call] = getattr(self, f"_{drawn}")
            return sequence(name)
        maker: Callable[[], dict[str, Any]] = getattr(self, f"_{drawn}", dict)
        name_of = {"early": "step", "reset_device": "reset", "reset_host": "reset", "wrong": ""}.get(drawn, drawn)
        args = maker()
        if drawn == "wrong":
            name_of = args.pop("call")
        if "of" not in args and name_of not in ("request", "serve") and self.rng.random() < 0.04:
            args["of"] = self.rng.choice(list(self._states))
        if name_of in odds.becomes and "of" not in args and drawn != "wrong":
            self._states[name] = odds.becomes[name_of]
        return Call(name_of, {"who": name, **args})

    def _same_state(self, name: str) -> Call:
        """Two requests compute the same prompt, and the checkpoint of the second lies beside the KV of the first. A
        third one may go on from there. Then it turns out that the second has failed."""
        rng, second, third = self.rng, f"{name}'", f"{name}''"
        tokens = self._tokens() + tuple(rng.randint(1, 3) for _ in range(rng.choice((2, 4, 8))))
        least = {"step": {"most": 0}} if rng.random() < 0.8 else {}
        calls = [Call("request", {"who": second, "tokens": tokens})]
        for call in self.COMPUTES:
            calls += [Call(call, {"who": name, **least.get(call, {})}), Call(call, {"who": second})]
        wants = [Call("request", {"who": third, "tokens": (*tokens, 1, 2)})]
        wants += [Call(call, {"who": third}) for call in self.COMPUTES[: rng.randint(0, len(self.COMPUTES))]]
        failed = Call("invalidate", {"who": second, "back": rng.choice((1, 3, 30))})
        self._ahead += [*calls, *wants, failed] if rng.random() < 0.7 else [*calls, failed, *wants]
        return Call("request", {"who": name, "tokens": tokens})

    def _evict_prompt(self, name: str) -> Call:
        """Take prompts off the device: by a demotion, or by a request that fills it."""
        rng = self.rng
        is_only_way = self._director.program.world.store_policy == "off"
        if self._prompts and (is_only_way or rng.random() < 0.5):
            return Call("demote", {"who": name, "tokens": max(self._prompts, key=len)})
        filler = tuple(rng.randint(4, 9) for _ in range(rng.randint(1, max(2, min(40, self._room)))))
        return Call("serve", {"who": name, "tokens": filler, "store": "none"})


def _drawn(rng: random.Random, weights: tuple[tuple[str, int], ...]) -> str:
    names, numbers = zip(*weights, strict=True)
    drawn: str = rng.choices(names, numbers)[0]
    return drawn
