"""Scenarios with tensor parallelism over two processes: a load is there when it is there on both."""

from __future__ import annotations

from .bench import Bench, Scenario, Talks, run_part
from .models import DENSE
from .rows import Row
from .transfers import OURS, faulty

__all__ = ["SCENARIOS"]

SMALL_POOL = 34
TALKS = Talks(number=5, num_turns=3, num_new_tokens=4)
"""Fewer steps: three processes wait for each other on two cores."""


def ours(bench: Bench) -> Row:
    with bench.engine(SMALL_POOL, OURS, tensor_parallel_size=2) as engine:
        served = bench.talk(engine)
    row = bench.judge("two ranks: a small pool, aoffload", served, f"{served.started_s:.0f} s to start")
    found, wanted = served.num_cached_tokens, bench.reference.num_cached_tokens
    return row.missed(f"{found:,} tokens cached, of {wanted:,}" if found < wanted else "")


def one_fails(bench: Bench) -> Row:
    """What has landed on one rank alone has to be computed on both."""
    with bench.engine(SMALL_POOL, faulty("FailOnSecondRank"), tensor_parallel_size=2) as engine:
        served = bench.talk(engine)
    found = f"{served.num_scheduled_tokens:,} tokens computed"
    row = bench.judge("two ranks: every third load fails on one of them", served, found)
    fewest = sum(map(len, bench.prompts.values())) - bench.reference.num_cached_tokens
    return row.missed("" if served.num_scheduled_tokens > fewest * 1.1 else "no load has failed")


SCENARIOS = (Scenario("ours", ours, is_short=True), Scenario("one fails", one_fails))

if __name__ == "__main__":
    run_part(DENSE, SCENARIOS, TALKS)  # the reference needs one rank: sums in another order are as near as ever
