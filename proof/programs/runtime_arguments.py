"""Draws the arguments of calls to a runtime: prompts that share their beginnings, and what else there is to say."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from .runtime_director import Director
from .runtime_weights import RUNTIME_ODDS, Odds
from .vocabulary import VERBS

__all__ = ["ArgumentDrawing"]

MOST_TOKENS = 24


class ArgumentDrawing:
    """A method for each call that has arguments; `_next` of `Drawing` looks for them by name."""

    rng: random.Random
    _director: Director
    _states: dict[str, str]
    _prompts: list[tuple[int, ...]]

    ODDS: ClassVar[Odds] = RUNTIME_ODDS

    # -- prompts --------------------------------------------------------------------------------------------------

    def _tokens(self) -> tuple[int, ...]:
        """An earlier prompt, a longer one that begins with it, or one that shares any number of its first tokens."""
        rng = self.rng
        favourites = self._prompts[:3] if rng.random() < 0.6 else self._prompts
        before, kind = rng.choice(favourites) if favourites else (), rng.random()
        if before and kind < 0.4:
            return before
        num_shared = len(before) if kind < 0.75 else rng.randint(0, len(before)) if kind < 0.9 else 0
        shared = before[:num_shared]
        longest = max(2, min(MOST_TOKENS, self._room + 1))
        tail = rng.randint(1, 4) if len(shared) > 3 else max(rng.randint(1, longest), rng.randint(1, longest))
        found = shared + tuple(rng.randint(1, 3) for _ in range(max(1, min(tail, longest - len(shared)))))
        self._prompts.append(found)
        return found

    @property
    def _room(self) -> int:
        """Tokens that fit on the device."""
        world = self._director.program.world
        unit = max(shape.block_size for shape in world.groups)
        width = sum(unit // shape.block_size for shape in world.groups if shape.kind != "state")
        return (world.num_device_blocks - 1) // width * unit

    def _more(self) -> int:
        """How many more tokens than are known to ask room for; now and then up to the whole device."""
        rng = self.rng
        return rng.randint(0, self._room) if rng.random() < 0.3 else rng.choice((0, 1, 2, 3, 4, 6, 10))

    def _identity(self) -> dict[str, Any]:
        rng, found = self.rng, dict[str, Any]()
        tokens = found["tokens"] = self._tokens()
        if rng.random() < 0.05:
            found["salt"] = "x"
        if rng.random() < 0.02:
            found["adapter"] = "y"
        if rng.random() < 0.05 and len(tokens) > 1:
            start = rng.randrange(len(tokens) - 1)
            found["spans"] = ((start, rng.randint(start + 1, len(tokens)), rng.choice((b"i", b"j"))),)
        return found

    # -- arguments ------------------------------------------------------------------------------------------------

    def _request(self) -> dict[str, Any]:
        rng, found = self.rng, self._identity()
        for probability, name, value in (
            (0.06, "max_hit", rng.randint(0, 10)), (0.06, "alignment", rng.randint(1, 6)), (0.08, "reads_cache", False),
            (0.06, "store", rng.choice(("none", "prompt"))), (0.05, "max_store", rng.randint(0, 8)),
            (0.05, "deadline_s", rng.choice((0.0, 0.01, 0.05, 0.3, 40.0))), (0.04, "name", "a1"),
        ):  # fmt: skip
            if rng.random() < probability:
                found[name] = value
        return found

    def _serve(self) -> dict[str, Any]:
        return {**self._identity(), **({"new": self._new()} if self.rng.random() < 0.3 else {})}

    def _new(self) -> tuple[int, ...]:
        return tuple(self.rng.randint(1, 3) for _ in range(self.rng.randint(1, 3)))

    def _allocate(self) -> dict[str, Any]:
        return {**self._allocate_nowait(), **self._patience()}

    def _allocate_nowait(self) -> dict[str, Any]:
        rng = self.rng
        by = -rng.randint(1, 6) if rng.random() < 0.5 else self._more()
        return {"by": by} if rng.random() < 0.4 else {}

    def _patience(self) -> dict[str, Any]:
        """Perhaps a time limit for the wait."""
        rng = self.rng
        return {"give_up_s": rng.choice((0.0, 0.001, 0.01, 0.05))} if rng.random() < 0.15 else {}

    def _extend(self) -> dict[str, Any]:
        return {"by": self._more(), **self._patience()}

    def _extend_nowait(self) -> dict[str, Any]:
        return {"by": self._more()}

    def _load(self) -> dict[str, Any]:
        return {**self._load_nowait(), **self._patience()}

    def _load_nowait(self) -> dict[str, Any]:
        return {"max_tokens": self.rng.randint(0, 12)} if self.rng.random() < 0.15 else {}

    def _report_queue(self) -> dict[str, Any]:
        return {"num_tokens": self.rng.choice((0, 3, 50, 10**6))}

    def _report_compute(self) -> dict[str, Any]:
        return {"num_tokens": self.rng.choice((1, 20, 500)), "seconds": self.rng.choice((0.0, 0.01, 0.3))}

    def _wait(self) -> dict[str, Any]:
        return self._patience()

    def _step(self) -> dict[str, Any]:
        rng = self.rng
        found: dict[str, Any] = {"style": rng.choice(("inline", "inline", "inline", "thread", "held"))}
        if rng.random() < 0.5:
            found["num"] = rng.randint(1, 8)
        if rng.random() < 0.12:
            found["drafts"] = self._new()
        if rng.random() < 0.15:
            found["of"] = tuple(rng.sample(sorted(self._states), rng.randint(1, len(self._states))))
        if self.has_states and rng.random() < 0.25:
            found["most"] = rng.choice((0, 0, 1))
        return found

    @property
    def has_states(self) -> bool:
        """Whether the model has a recurrent state."""
        return any(shape.kind == "state" for shape in self._director.program.world.groups)

    def _early(self) -> dict[str, Any]:
        return {**self._step(), "early": True}

    def _commit(self) -> dict[str, Any]:
        rng, found = self.rng, dict[str, Any]()
        if rng.random() < 0.2:
            found["back"] = rng.randint(1, 3)
        if rng.random() < 0.45:
            found["new"] = self._new()
        return found

    def _commit_step(self) -> dict[str, Any]:
        rng = self.rng
        found: dict[str, Any] = {"of": tuple(rng.sample(sorted(self._states), rng.randint(1, len(self._states))))}
        if rng.random() < 0.4:
            found["new"] = self._new()
        return found

    def _invalidate(self) -> dict[str, Any]:
        return {"back": self.rng.choice((0, 1, 2, 3, 5, 8, 30))}

    def _preempt(self) -> dict[str, Any]:
        return {"give_up_s": self.rng.choice((0.0, 0.005, 0.1))} if self.rng.random() < 0.5 else {}

    def _resume(self) -> dict[str, Any]:
        rng = self.rng
        return {**({"by": rng.randint(-3, 6)} if rng.random() < 0.2 else {}), **self._patience()}

    def _leave(self) -> dict[str, Any]:
        rng, found = self.rng, dict[str, Any]()
        if rng.random() < 0.2:
            found["how"] = "error"
        if rng.random() < 0.3:
            found["record"] = True
        return found

    def _abort(self) -> dict[str, Any]:
        return {"how": self.rng.choice(("request", "runtime")), "of": self.rng.choice(list(self._states))}

    def _pin(self) -> dict[str, Any]:
        return {**self._identity(), "ttl_s": self.rng.choice((0.001, 0.02, 0.3, 60.0, 3600.0))}

    def _client_hint(self) -> dict[str, Any]:
        """Mostly a pin, until the end or the next verb about it."""
        return {**self._pin(), "verb": self.rng.choice(("pin", "pin", *VERBS))}

    def _prefetch(self) -> dict[str, Any]:
        return {**self._identity(), **self._patience()}

    _demote = _prefetch

    def _begin_prefetch(self) -> dict[str, Any]:
        return self._identity()

    _begin_demote = _lookup = _begin_prefetch
    _transfer_wait = _flush = _wait

    def _reset(self) -> dict[str, Any]:
        return {**({"timeout_s": 0.01} if self.rng.random() < 0.2 else {}), **self._patience()}

    def _reset_device(self) -> dict[str, Any]:
        return {"tier": "DEVICE", **self._reset()}

    def _reset_host(self) -> dict[str, Any]:
        return {"tier": "HOST", **self._reset()}

    def _pause(self) -> dict[str, Any]:
        return {"s": self.rng.choice((0.0, 0.001, 0.01, 0.1, 1.0))}

    def _wrong(self) -> dict[str, Any]:
        return dict(self.rng.choice(self.ODDS.wrong + (self.ODDS.wrong_states if self.has_states else ())))
