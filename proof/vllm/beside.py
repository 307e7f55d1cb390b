"""Scenarios on one rank with what vLLM may do beside loads and stores: n-gram drafts, other connectors, preemptions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from aoffload import Tier
from aoffload._kernel.index import held_ids

from .bench import Bench, Scenario, run_part
from .engines import Engine
from .models import DENSE
from .rows import Row
from .storm import storm, stuck
from .transfers import OURS, PEER

__all__ = ["SCENARIOS"]

SMALL_POOL = 70
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
"""With a vocabulary of 512 tokens, nearly every token has occurred before: in most steps there is a draft."""
MOST_APART = 1e-3
"""Most by which elements of KV may differ between batches of other sizes. KV of another token differs by 0.1."""


def ngram(bench: Bench) -> Row:
    """Most drafts are rejected, some accepted. What the host has of a block is what an engine without drafts computes
    for the same tokens."""
    _let_numba_be_scanned()
    with bench.engine(SMALL_POOL, PEER, speculative_config=DRAFTS) as engine:
        theirs = bench.talk(engine).num_cached_tokens
    with bench.engine(SMALL_POOL, OURS) as engine:
        bench.talk(engine)
        plain = dict(_host_blocks(engine))
    with bench.engine(SMALL_POOL, OURS, speculative_config=DRAFTS) as engine:
        counted = _count_drafts(engine)
        served = bench.talk(engine)
        stored = dict(_host_blocks(engine))
    num_other = sum(
        prefix not in plain or not np.allclose(block, plain[prefix], rtol=0, atol=MOST_APART)
        for prefix, block in stored.items()
    )
    row = bench.judge(
        "speculation by n-grams", served,
        f"{counted['accepted']:,} of {counted['drafted']:,} drafted tokens accepted; {len(stored)} blocks stored, "
        f"{num_other} with other bytes than without drafts; the peer finds {theirs:,} tokens",
    )  # fmt: skip
    return row.missed(
        "" if counted["accepted"] else "no draft was accepted",
        "" if counted["accepted"] < counted["drafted"] else "no draft was rejected",
        "" if stored else "nothing was stored",
        "wrong KV was stored" if num_other else "",
        f"{served.num_cached_tokens:,} tokens cached" if served.num_cached_tokens < theirs else "",
    )


def _let_numba_be_scanned() -> None:
    """vLLM 0.32 for CPUs looks at `__dict__` of each module attribute when an engine starts. The library object of
    `llvmlite`, which n-grams bring, takes that name for a function, and the engine does not start."""
    from llvmlite.binding import ffi

    ffi.lib._fntab["__dict__"] = {}


def _count_drafts(engine: Engine) -> Counter[str]:
    """What the scheduler counts from now on."""
    found, count = Counter[str](), engine.scheduler.make_spec_decoding_stats

    def counting(stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *arguments: Any, **options: Any) -> Any:
        found.update(drafted=num_draft_tokens, accepted=num_accepted_tokens)
        return count(stats, num_draft_tokens, num_accepted_tokens, *arguments, **options)

    engine.scheduler.make_spec_decoding_stats = counting
    return found


def _host_blocks(engine: Engine) -> Iterator[tuple[bytes, Any]]:
    """Each block in host memory: all tokens up to its end, and its numbers."""
    ledger, host = engine.connector.ledger, engine.worker_connector._worker._transport.backend._host
    for run in ledger.cache.index.runs.values():
        before, each = b"", run.before
        while each is not None:
            before, each = bytes(each.tokens) + before, each.before
        part = run.parts[run.place(Tier.HOST, 0)]
        unit_bytes = len(run.tokens) // (run.stop - run.start)
        for at in range(part.stop - run.start):
            (block_id,) = held_ids(run, Tier.HOST, 0, run.start + at, run.start + at + 1)
            yield before + bytes(run.tokens[: (at + 1) * unit_bytes]), host[block_id].view(np.float32).copy()


def multi(bench: Bench, order: str) -> Row:
    """vLLM asks the first connector that has a hit to load, and has both store. Copies of both hold vLLM's blocks."""
    with bench.engine(SMALL_POOL, PEER) as engine:
        theirs = bench.talk(engine).num_cached_tokens
    connectors = [OURS, PEER] if order == "ours first" else [PEER, OURS]
    transfer = {
        "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": connectors},
    }  # fmt: skip
    with bench.engine(SMALL_POOL, transfer) as engine:
        served = bench.talk(engine)
        (ledger,) = [each.ledger for each in engine.connector.sub_connectors if hasattr(each, "ledger")]
        num_stored = ledger.statistics().host.num_cached
    row = bench.judge(
        f"MultiConnector, {order}",
        served,
        f"{num_stored} blocks in our host memory; the peer alone finds {theirs:,} tokens",
    )
    return row.missed(
        "" if num_stored else "nothing was stored",
        f"{served.num_cached_tokens:,} tokens cached" if served.num_cached_tokens < theirs else "",
    )


SCENARIOS = (
    Scenario("ngram", ngram, is_short=True),
    Scenario("multi, ours first", partial(multi, order="ours first"), is_short=True),
    Scenario("multi, the peer first", partial(multi, order="the peer first")),
    Scenario("storm", storm),
    Scenario("stuck", stuck),
)

if __name__ == "__main__":
    run_part(DENSE, SCENARIOS)
