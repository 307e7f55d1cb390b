"""Draws programs over a runtime whose device blocks are its engine's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from aoffload._kernel.states import RequestState

from .program import Call, World, without_laziness
from .runtime_draw import STATES, Drawing, draw_runtime_world, draw_runtime_world_with_states
from .runtime_weights import ENGINE_ODDS

__all__ = ["EngineDrawing", "draw_engine_options", "draw_engine_world", "draw_engine_world_with_states"]


def draw_engine_world(rng: random.Random) -> World:
    return _with_room(rng, draw_runtime_world(rng))


def draw_engine_world_with_states(rng: random.Random) -> World:
    return _with_room(rng, draw_runtime_world_with_states(rng))


def _with_room(rng: random.Random, world: World) -> World:
    """The world, often with room for several requests: none waits for free blocks, as engines of programs do not."""
    world = without_laziness(world)
    return attrs.evolve(world, num_device_blocks=world.num_device_blocks * rng.choice((1, 2, 3)))


def draw_engine_options(rng: random.Random) -> list[Call]:
    """Configuration that matters where an engine has blocks of its own."""
    options: dict[str, Any] = {}
    for name, values in (
        ("max_quarantined_share", (0.0, 0.1, 1.0)), ("pending_timeout_s", (0.01, 0.5, 60.0)),
        ("load_timeout_s", (0.01, 1.0)), ("store_timeout_s", (0.02, 1.0)),
    ):  # fmt: skip
        if rng.random() < 0.25:
            options[name] = rng.choice(values)
    return [Call("configure", options)] if options else []


@attrs.define(eq=False)
class EngineDrawing(Drawing):
    """As any program; but clients ask again, offer, and empty the engine's own cache."""

    ODDS = ENGINE_ODDS
    COMPUTES = ("load", "step", "offer")
    EMPTIES = (("evict", {}), ("reset", {"tier": "HOST"}))
    STATES: ClassVar[Mapping[RequestState, str]] = {**STATES, RequestState.MATCHED: "pending"}

    def _warm(self, names: tuple[str, ...]) -> list[Call]:
        """Calls that serve some prompts first and leave most of them in host memory alone."""
        rng, found, policy = self.rng, list[Call](), self._director.program.world.store_policy
        for _ in range(rng.randint(1, 3)):
            served = Call("serve", {"who": rng.choice(names), **self._serve()})
            found += [served] * (2 if policy.startswith("sel") else 1)
        found.append(Call("flush", {"who": names[0]}))
        return [*found, Call("evict", {"who": names[0]})] if rng.random() < 0.85 else found

    def _evict_prompt(self, name: str) -> Call:
        """Take prompts out of the engine's cache, by a request that takes its blocks."""
        filler = tuple(self.rng.randint(4, 9) for _ in range(self.rng.randint(1, max(2, min(40, self._room)))))
        return Call("serve", {"who": name, "tokens": filler, "store": "none"})

    def _same_prompt(self, name: str) -> Call:
        """Several clients want the same prompt, of which host memory may have some: one of them loads it."""
        rng, names = self.rng, list(self._states)
        tokens = self._tokens() + tuple(rng.randint(1, 3) for _ in range(rng.choice((0, 1, 4))))
        rng.shuffle(names)
        for who in names:
            self._states[who] = "entered"
            self._ahead += [Call("request", {"who": who, "tokens": tokens})]
            self._ahead += [Call("match_again", {"who": who, "hurry": True})] if rng.random() < 0.6 else []
            self._ahead += [Call("load", {"who": who, **({"hurry": True} if rng.random() < 0.8 else {})})]
        return Call("evict", {"who": name})

    # -- arguments ------------------------------------------------------------------------------------------------

    def _request(self) -> dict[str, Any]:
        return {**super()._request(), **self._fewer()}

    def _fewer(self) -> dict[str, Any]:
        return {"fewer": self.rng.choice((1, 1, 2, 9))} if self.rng.random() < 0.15 else {}

    def _match_again(self) -> dict[str, Any]:
        return {**self._fewer(), **self._patience()}

    _match_again_nowait = _fewer

    def _load_nowait(self) -> dict[str, Any]:
        return {**super()._load_nowait(), **({"sparse": True} if self.rng.random() < 0.4 else {})}

    def _step(self) -> dict[str, Any]:
        also = {"also": self.rng.randint(1, 6)} if self.has_states and self.rng.random() < 0.3 else {}
        return {**super()._step(), **self._patience(), **also}

    def _offer(self) -> dict[str, Any]:
        return {**self._commit(), **({"is_last": True} if self.rng.random() < 0.15 else {})}
