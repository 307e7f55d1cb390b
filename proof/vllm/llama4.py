"""Scenarios with Llama 4: layers that attend to chunks, a layer that attends to everything, and experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from .bench import Bench, Scenario, Talks, run_part
from .hybrid import all_fail
from .models import LLAMA4
from .one_rank import ours
from .rows import Row
from .shared_prompt import shared_prompts
from .transfers import PEER

__all__ = ["SCENARIOS"]

POOL = 200
"""As much memory for the tokens of a conversation as 50 blocks with one group: there are four."""
NAME = "Llama 4: "


def beside_peer(bench: Bench) -> Row:
    """Ours finds all that a large pool finds, so no fewer tokens than vLLM's own connector."""
    with bench.engine(POOL, PEER) as engine:
        theirs = bench.talk(engine).num_cached_tokens
    row = ours(bench, num_blocks=POOL, model=NAME)
    wanted = bench.reference.num_cached_tokens
    return replace(row, found=f"the peer finds {theirs:,} tokens").missed(
        f"the peer finds more than a large pool: {theirs:,}" if theirs > wanted else ""
    )


SCENARIOS = (
    Scenario("ours", beside_peer, is_short=True),
    Scenario("every load fails", partial(all_fail, model=NAME, num_blocks=POOL)),
    *shared_prompts(NAME),
)

if __name__ == "__main__":
    run_part(LLAMA4, SCENARIOS, Talks(number=6, num_turns=3))
