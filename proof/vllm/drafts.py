"""Scenarios with draft layers (EAGLE, MTP), whose KV at a token depends on the token after it.

The target verifies every draft, so wrong KV in a draft layer changes no output. Two things show it. The drafts that are
accepted have to be those of an engine that computes every block itself. And the bytes in host memory have to be those
that such an engine computes, in every layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from .bench import Bench, Scenario
from .engines import BLOCK_SIZE, Engine, Served
from .host_memory import Blocks, host_blocks, num_different
from .one_rank import without
from .prompts import words
from .rows import Row
from .transfers import OURS, PEER

__all__ = ["NUM_DRAFTS", "STEP_TOKENS", "draft_scenarios"]

POOL = 90
NUM_DRAFTS = 3
STEP_TOKENS = 1024
"""A prompt is computed in one step. At the end of an earlier step, vLLM 0.32 has a draft layer read the last token of
the prompt in place of the next one, and never computes that KV again."""
LEAST_ACCEPTED = 0.3
"""Share of the drafts. A head that is never right would show nothing."""
SHARED = 6 * BLOCK_SIZE
NUM_PARTING, NUM_OWN = 6, 90
FILLERS = {f"filler{number}": words(f"filler {number}", 1000) for number in range(3)}
"""They take every block of a pool of `POOL` blocks."""


def accepted(bench: Bench, model: str) -> Row:
    """As many drafts of each request are accepted as in an engine without any cache, and all bytes in host memory are
    those of their own tokens."""
    with bench.engine(POOL, enable_prefix_caching=False) as engine:
        computed = _alone(engine, bench.prompts)
    with bench.engine(POOL, OURS) as engine:
        served = _alone(engine, bench.prompts)
        held = host_blocks(engine)
    num_accepted = sum(served.num_accepted.values())
    num_wanted = sum(computed.num_accepted.values())
    found = f"{num_accepted} of {served.num_drafted} drafts accepted, {num_wanted} without caches; "
    different = [name for name, number in computed.num_accepted.items() if served.num_accepted.get(name) != number]
    num_wrong, compared = _num_wrong(bench, held, _texts(served, bench.turn(bench.talks.num_turns - 1)))
    row = bench.judge(f"{model}drafts accepted, beside an engine without caches", served, found + compared)
    return row.missed(
        "" if not num_wrong else "wrong bytes",
        f"other drafts are accepted for {', '.join(different[:3])}" if different else "",
        "" if num_accepted >= LEAST_ACCEPTED * served.num_drafted else "hardly a draft is accepted",
    )


def _alone(engine: Engine, prompts: Mapping[str, Sequence[int]]) -> Served:
    """Serve one prompt at a time: beside others, vLLM may have no tokens left in a step for all drafts of a request."""
    for name, prompt in prompts.items():
        engine.serve({name: prompt})
    return engine.rest()


def peer(bench: Bench, model: str) -> Row:
    """Ours finds at least as many tokens."""
    with bench.engine(POOL, PEER) as engine:
        theirs = bench.talk(engine)
    with bench.engine(POOL, OURS) as engine:
        served = bench.talk(engine)
    found, wanted = served.num_cached_tokens, theirs.num_cached_tokens
    row = bench.judge(f"{model}beside SimpleCPUOffloadConnector", served, f"the peer finds {wanted:,} tokens")
    return row.missed(f"{found:,} tokens cached, and {wanted:,} with the peer" if found < wanted else "")


def parting(bench: Bench, model: str) -> Row:
    """Prompts that share whole blocks and part at the end of one: the bytes of each prompt's blocks are its own."""
    prompts = {
        f"user{number}": words("parting", SHARED) + words(f"user {number}", NUM_OWN) for number in range(NUM_PARTING)
    }
    with bench.engine(1200) as engine:
        reference = _one_by_one(engine, prompts)
    with bench.engine(POOL, OURS) as engine:
        served = _one_by_one(engine, prompts)
        held = host_blocks(engine)
    num_wrong, compared = _num_wrong(bench, held, _texts(served, prompts))
    row = Bench(bench.model, reference=reference).judge(
        f"{model}prompts that part at the end of a block", served, compared
    )
    wanted = (NUM_PARTING - 1) * (SHARED - BLOCK_SIZE)
    return row.missed(
        "" if not num_wrong else "wrong bytes",
        "" if served.num_cached_tokens >= wanted else f"wanted: {wanted:,} cached tokens",
    )


def _one_by_one(engine: Engine, prompts: Mapping[str, Sequence[int]]) -> Served:
    """Serve each prompt after others have driven the one before out of vLLM's own cache."""
    for name, prompt in prompts.items():
        engine.serve({name: prompt})
        engine.serve(FILLERS, 1)
    served = engine.rest()
    for filler in FILLERS:
        del served.answers[filler]
    return served


def _texts(served: Served, prompts: Mapping[str, Sequence[int]]) -> list[list[int]]:
    """Each of `prompts` with its answer."""
    return [[*prompt, *served.answers[name].tokens] for name, prompt in prompts.items()]


def _num_wrong(bench: Bench, held: Blocks, texts: Sequence[Sequence[int]]) -> tuple[int, str]:
    """The number of blocks of these texts with other bytes than an engine computes that has nothing of the text in any
    cache."""
    num_wrong = num_blocks = 0
    with bench.engine(POOL, OURS) as engine:
        for number, text in enumerate(texts):
            engine.engine.reset_prefix_cache(reset_connector=True)
            engine.serve({f"text{number}": text}, 1)
            engine.rest()
            right = host_blocks(engine)
            found = {tokens: held[tokens] for tokens in right if tokens in held}
            num_blocks += len(found)
            num_wrong += num_different(found, right)
    if not num_blocks:
        raise RuntimeError("host memory has no block of any text")
    return num_wrong, f"{num_wrong} of {num_blocks} blocks in host memory have other bytes than their tokens'"


def draft_scenarios(model: str) -> tuple[Scenario, ...]:
    """The scenarios of a model. `model` stands before the names of their rows."""
    return (
        Scenario("without", partial(without, num_blocks=POOL, model=model)),
        Scenario("peer", partial(peer, model=model), is_short=True),
        Scenario("accepted", partial(accepted, model=model), is_short=True),
        Scenario("parting", partial(parting, model=model), is_short=True),
    )
