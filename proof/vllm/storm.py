"""A storm: many requests in a pool so small that they preempt each other while their stores are under way.

Some requests are over after a few tokens, before their stores are. The others generate many tokens, so each of them
asks for a block now and then, while stores hold blocks of requests that are over.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from .bench import LARGE_POOL, Bench
from .engines import Engine, Served
from .prompts import words
from .rows import Row
from .slow_stores import NUM_STEPS
from .transfers import ours, peer

__all__ = ["storm", "stuck"]

POOL, MOST_RUNNING, MOST_TOKENS = 30, 16, 512
NUM_STORMS, NUM_REQUESTS = 2, 60
SHARE_SHORT = 0.5
SLOW_OURS, SLOW_PEER = ours("SlowOurs", "proof.vllm.slow_stores"), peer("SlowPeer", "proof.vllm.slow_stores")


STUCK = ours("StuckOurs", "proof.vllm.slow_stores", store_timeout_s=1)
_HOW: Mapping[str, tuple[int, Mapping[str, Any] | None]] = {
    "in a large pool": (LARGE_POOL, None), "without": (POOL, None), "the peer": (POOL, SLOW_PEER),
    "ours": (POOL, SLOW_OURS),
}  # fmt: skip


def storm(bench: Bench) -> Row:
    """Over some storms together: at most as many preemptions as with vLLM's own connector, and the same outputs as in a
    pool where all fits."""
    ran = {how: Served() for how in _HOW}
    waits: list[bool] = []
    for number in range(NUM_STORMS):
        requests = _requests(number)
        for how, (num_blocks, transfer) in _HOW.items():
            ran[how] = _both(ran[how], _serve(bench, num_blocks, transfer, requests, waits if how == "ours" else []))
    reference, without, theirs, served = ran.values()
    counts = "; ".join(
        f"{how} {each.num_preemptions} preemptions, {each.num_scheduled_tokens:,} tokens computed"
        for how, each in ran.items()
    )
    row = Bench(bench.model, reference=reference).judge(
        f"{NUM_STORMS} storms of {NUM_REQUESTS} requests, stores {NUM_STEPS} steps late", served,
        f"{counts}; {sum(waits)} steps of waiting",
    )  # fmt: skip
    return row.missed(
        "" if served.num_preemptions <= theirs.num_preemptions else "more preemptions than with the peer",
        "" if without.num_preemptions else "nothing is preempted in such a pool",
        "" if any(waits) else "no request has waited for a block",
    )


def stuck(bench: Bench) -> Row:
    """No store ever ends. Requests wait a while for the blocks of the first ones, and then go on without."""
    requests, waits = _requests(0), list[bool]()
    reference = _serve(bench, LARGE_POOL, None, requests, [])
    served = _serve(bench, POOL, STUCK, requests, waits)
    row = Bench(bench.model, reference=reference).judge(
        f"a storm of {NUM_REQUESTS} requests, no store ends", served,
        f"{served.num_preemptions} preemptions, {sum(waits)} steps of waiting",
    )  # fmt: skip
    return row.missed("" if any(waits) else "no request has waited for a block")


def _serve(
    bench: Bench, num_blocks: int, transfer: Mapping[str, Any] | None, requests: Mapping[str, tuple[list[int], int]],
    waits: list[bool],
) -> Served:  # fmt: skip
    """Run `requests`. Append what the connector answers to `has_pending_block_frees` to `waits`."""
    with bench.engine(num_blocks, transfer, max_num_seqs=MOST_RUNNING, max_model_len=MOST_TOKENS) as engine:
        if engine.connector is not None:
            _note_waits(engine, waits)
        for name, (prompt, num_new) in requests.items():
            engine.submit({name: prompt}, num_new)
        engine.finish()
        return engine.rest()


def _requests(number: int) -> dict[str, tuple[list[int], int]]:
    """Prompts, each with the number of tokens to generate."""
    drawn, found = random.Random(f"storm {number}"), {}
    for each in range(NUM_REQUESTS):
        is_short = drawn.random() < SHARE_SHORT
        num_tokens, num_new = (range(100, 250), range(1, 6)) if is_short else (range(20, 100), range(100, 200))
        name = f"s{number}.{each}"
        found[name] = (words(name, drawn.choice(num_tokens)), drawn.choice(num_new))
    return found


def _both(one: Served, other: Served) -> Served:
    """Two runs as one."""
    return Served(
        one.answers | other.answers, one.num_blocks + other.num_blocks, one.num_free + other.num_free,
        one.num_preemptions + other.num_preemptions, one.num_scheduled_tokens + other.num_scheduled_tokens,
        one.problems + other.problems, one.took_s + other.took_s,
    )  # fmt: skip


def _note_waits(engine: Engine, answers: list[bool]) -> None:
    """Append what the connector answers to `has_pending_block_frees`, from now on."""
    asked = engine.connector.has_pending_block_frees

    def asking() -> bool:
        answers.append(asked())
        return answers[-1]

    engine.connector.has_pending_block_frees = asking
