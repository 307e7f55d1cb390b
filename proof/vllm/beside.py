"""Scenarios on one rank with what vLLM may do beside loads and stores: n-gram drafts, other connectors, preemptions."""

from __future__ import annotations

from functools import partial

from .bench import Bench, Scenario, run_part
from .host_memory import host_blocks, num_different
from .models import DENSE
from .rows import Row
from .storm import storm, stuck
from .transfers import OURS, PEER

__all__ = ["SCENARIOS"]

SMALL_POOL = 70
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
"""With a vocabulary of 512 tokens, nearly every token has occurred before: in most steps there is a draft."""


def ngram(bench: Bench) -> Row:
    """Most drafts are rejected, some accepted. What the host has of a block is what an engine without drafts computes
    for the same tokens."""
    _let_numba_be_scanned()
    with bench.engine(SMALL_POOL, PEER, speculative_config=DRAFTS) as engine:
        theirs = bench.talk(engine).num_cached_tokens
    with bench.engine(SMALL_POOL, OURS) as engine:
        bench.talk(engine)
        plain = host_blocks(engine)
    with bench.engine(SMALL_POOL, OURS, speculative_config=DRAFTS) as engine:
        served = bench.talk(engine)
        stored = host_blocks(engine)
    num_other, num_accepted = num_different(stored, plain), sum(served.num_accepted.values())
    row = bench.judge(
        "speculation by n-grams", served,
        f"{num_accepted:,} of {served.num_drafted:,} drafted tokens accepted; {len(stored)} blocks stored, "
        f"{num_other} with other bytes than without drafts; the peer finds {theirs:,} tokens",
    )  # fmt: skip
    return row.missed(
        "" if num_accepted else "no draft was accepted",
        "" if num_accepted < served.num_drafted else "no draft was rejected",
        "" if stored else "nothing was stored",
        "wrong KV was stored" if num_other else "",
        f"{served.num_cached_tokens:,} tokens cached" if served.num_cached_tokens < theirs else "",
    )


def _let_numba_be_scanned() -> None:
    """vLLM 0.32 for CPUs looks at `__dict__` of each module attribute when an engine starts. The library object of
    `llvmlite`, which n-grams bring, takes that name for a function, and the engine does not start."""
    from llvmlite.binding import ffi

    ffi.lib._fntab["__dict__"] = {}


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
