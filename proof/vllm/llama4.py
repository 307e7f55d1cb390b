"""Scenarios with Llama 4: layers that attend to chunks, a layer that attends to everything, and experts."""

from __future__ import annotations

from functools import partial

from .bench import Bench, Scenario, Talks, run_part
from .hybrid import all_fail
from .models import LLAMA4
from .rows import Row
from .transfers import PEER, faulty

__all__ = ["SCENARIOS"]

POOL = 110
"""There are four groups, so a token takes four times as many blocks as with one."""
NAME = "Llama 4: "


def ours(bench: Bench) -> Row:
    """It has to find all that a large pool finds, and so no fewer tokens than vLLM's own connector."""
    with bench.engine(POOL, PEER) as engine:
        theirs = bench.talk(engine).num_cached_tokens
    with bench.engine(POOL, faulty("Counted")) as engine:
        served, transport = bench.talk(engine), engine.worker_connector.transport
    row = bench.judge(
        f"{NAME}a small pool, aoffload", served,
        f"{transport.blocks_loaded:,} blocks loaded; the peer finds {theirs:,} tokens",
    )  # fmt: skip
    found, wanted = served.num_cached_tokens, max(theirs, bench.reference.num_cached_tokens)
    return row.missed(
        f"{found:,} tokens cached, of {wanted:,}" if found < wanted else "",
        "" if transport.blocks_loaded else "nothing was loaded",
    )


SCENARIOS = (
    Scenario("ours", ours, is_short=True),
    Scenario("every load fails", partial(all_fail, model=NAME, num_blocks=POOL)),
)

if __name__ == "__main__":
    run_part(LLAMA4, SCENARIOS, Talks(number=6, num_turns=3))
