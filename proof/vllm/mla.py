"""Scenarios with latents (MLA): two workers hold the same bytes, and share one host memory.

The CPU kernels of MLA need weights in bfloat16, and outputs in bfloat16 depend on how requests are batched. So outputs
may differ here. Every load is verified by checksums instead: a block with other bytes than were stored would be
computed.
"""

from __future__ import annotations

from .bench import Bench, Scenario, Talks, run_part
from .models import LATENTS
from .rows import Row
from .transfers import HOST_BYTES, ours

__all__ = ["SCENARIOS"]

SMALL_POOL = 68
VERIFIED = ours(verify=True)
TALKS = Talks(number=5, num_turns=3, num_new_tokens=4)


def one_rank(bench: Bench) -> Row:
    return _row(bench, "MLA: a small pool, aoffload", 1)


def two_ranks(bench: Bench) -> Row:
    return _row(bench, "MLA: two ranks share their host memory", 2)


def _row(bench: Bench, name: str, num_ranks: int) -> Row:
    """It has to find and load all that a large pool finds, and its host memory holds as much as that of one rank."""
    with bench.engine(SMALL_POOL, VERIFIED, tensor_parallel_size=num_ranks) as engine:
        served, host = bench.talk(engine), engine.connector.ledger.statistics().host
        num_blocks = HOST_BYTES // engine.connector.ledger.block_bytes
    row = bench.judge(name, served, f"{host.num_blocks:,} host blocks", may_differ=True)
    found, wanted = served.num_cached_tokens, bench.reference.num_cached_tokens
    computed, fewest = served.num_scheduled_tokens, bench.reference.num_scheduled_tokens
    return row.missed(
        f"{found:,} tokens cached, of {wanted:,}" if found < wanted else "",
        f"{computed:,} tokens computed, and {fewest:,} without a load that is lost" if computed > fewest else "",
        f"{num_blocks:,} blocks would fit" if host.num_blocks != num_blocks else "",
        "" if host.num_cached else "nothing was stored",
    )


SCENARIOS = (Scenario("one rank", one_rank), Scenario("two ranks", two_ranks))

if __name__ == "__main__":
    run_part(LATENTS, SCENARIOS, TALKS, dtype="bfloat16")
