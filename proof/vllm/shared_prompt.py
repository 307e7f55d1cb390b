"""Users of one system prompt, in a model with windows: cached tokens, beside vLLM's own connector.

Every question is longer than the window, so the request has left the end of the system prompt when its prompt is
computed. Other prompts evict the system prompt from vLLM's own prefix cache before the next users come, so only host
memory still has it. The second user shows that the prefix is shared; from the third user on all of it has to hit. If
vLLM retains all windows, it has to hit from the second user on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from .bench import LARGE_POOL, Bench, Scenario
from .engines import Served
from .prompts import users, words
from .rows import Row
from .transfers import OURS, PEER

__all__ = ["POOL", "shared_prompts"]

NUM_USERS, NUM_SHARED = 8, 640
QUESTION = range(160, 320)
"""Lengths of the users' own questions in tokens."""
WAVE = 4
POOL = 110
FILLERS = {f"filler{number}": words(f"filler {number}", 1000) for number in range(4)}
"""They take every block of a pool of `POOL` blocks."""


def shared_prompts(model: str) -> tuple[Scenario, ...]:
    """The scenarios of a model. `model` stands before the names of their rows."""
    return (
        Scenario("shared, one after another", partial(_shared, model=model, at_once=1), is_short=True),
        Scenario("shared, in waves", partial(_shared, model=model, at_once=WAVE)),
        Scenario("shared, windows retained", partial(_shared, model=model, at_once=1, retains_all=True)),
    )


def _shared(bench: Bench, model: str, at_once: int, retains_all: bool = False) -> Row:
    """Our connector has to find as many tokens as vLLM's own one, and all of the system prompt for all users but the
    first, or the first two. `retains_all`: vLLM's prefix cache retains the windows at all blocks."""
    waves = _waves(at_once)
    if retains_all:
        bench = Bench(bench.model, {**bench.options, "prefix_cache_retention_interval": None})
    reference = _serve(bench, LARGE_POOL, waves)
    theirs = _serve(bench, POOL, waves, PEER)
    served = _serve(bench, POOL, waves, OURS)
    how = ("one after another" if at_once == 1 else f"{at_once} at once") + ", windows retained" * retains_all
    num_new = 1 if retains_all else 2
    row = Bench(bench.model, reference=reference).judge(
        f"{model}{NUM_USERS} users of a system prompt, {how}", served,
        f"by user {_by_user(served)}; the peer finds {theirs.num_cached_tokens:,}: {_by_user(theirs)}",
    )  # fmt: skip
    found, wanted = served.num_cached_tokens, max(theirs.num_cached_tokens, (NUM_USERS - num_new) * NUM_SHARED)
    return row.missed(f"{found:,} tokens cached, of {wanted:,}" if found < wanted else "")


def _waves(at_once: int) -> list[dict[str, list[int]]]:
    """The prompts of those users who come at once, wave after wave."""
    prompts = list(users(NUM_USERS, NUM_SHARED, QUESTION).items())
    return [dict(prompts[first : first + at_once]) for first in range(0, NUM_USERS, at_once)]


def _serve(
    bench: Bench, num_blocks: int, waves: Sequence[Mapping[str, list[int]]], transfer: Mapping[str, Any] | None = None
) -> Served:
    with bench.engine(num_blocks, transfer) as engine:
        for wave in waves:
            engine.serve(wave)
            engine.serve(FILLERS, 1)
        served = engine.rest()
    for filler in FILLERS:
        del served.answers[filler]
    return served


def _by_user(served: Served) -> str:
    return " ".join(str(served.answers[name].num_cached_tokens) for name in sorted(served.answers))
