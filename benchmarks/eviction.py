"""Learned eviction, compared with LRU: hits on traces, and its cost.

`TRACE=FILE`, `SYNTHETIC=FILE` and `AGENTS=FILE` name traces with `hash_ids`. Without them, their rows are left out. The
device holds one request, so hits come from the host.
"""

from __future__ import annotations

import os
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

from aoffload._common.prefix import Prefix
from aoffload._common.tiers import Tier
from aoffload._config.groups import FullAttention, KVCacheGroup
from aoffload._eviction.learned import Guard, LearnedOrder, Learning, ReturnTimes
from aoffload._kernel.layout import Layout
from aoffload._kernel.records import LedgerRequest, Part
from aoffload._kernel.tokens import TokenSequence
from aoffload.plan.replay import ROOT, replay
from aoffload.plan.trace import Trace, read_trace

from .harness import Row
from .made_traces import MADE, made
from .peer import Peer

__all__ = ["run"]

HOST_SIZES = (1000, 2500, 5000, 10_000, 20_000, 40_000)
WANTED = {2500: 1.65, 5000: 1.25, 10_000: 1.046}
"""Wanted ratio of hits to those of LRU, on the conversation trace."""
NEVER_BELOW = 0.995
MADE_SIZES, MADE_REQUESTS, MADE_NEVER_BELOW = (1000, 4000), 6000, 0.99
NUM_TIMED, TIMED_SIZE, MOST_TIME = 3, 10_000, 1.3
NUM_TOUCHES, MOST_TOUCH_US = 100_000, 2.0


def run(vllm: Peer | None = None) -> Iterator[Row]:
    yield from _on_traces()
    yield from _on_made_traces()
    yield _touch()


def _row(name: str, value: float, unit: str, limit: float, ratio: float, wanted: float, *, at_most: bool) -> Row:
    return Row(
        name=name, value=value, unit=unit, against="the last use", limit=limit, ratio=ratio, wanted=wanted,
        is_at_most=at_most,
    )  # fmt: skip


def _hits(trace: Trace, num_host: int, eviction: str) -> int:
    found = replay(trace, trace.most_blocks + 2, num_host, eviction=eviction)
    return int((found.device + found.host).sum())


def _on_traces() -> Iterator[Row]:
    nothing = dict[int, float]()
    for variable, wanted in (("TRACE", WANTED), ("SYNTHETIC", nothing), ("AGENTS", nothing)):
        if (named := os.environ.get(variable)) is None:
            print(f"eviction: {variable}=FILE names a trace to replay", file=sys.stderr)
            continue
        trace = read_trace(Path(named))
        for size in HOST_SIZES:
            ours, other = _hits(trace, size, "learned"), _hits(trace, size, "lru")
            least = wanted.get(size, NEVER_BELOW)
            name = f"hits, {variable.lower()}, {size:,} host blocks"
            yield _row(name, ours, "blocks", other, ours / max(1, other), least, at_most=False)
        yield _takes(trace, variable.lower())
        if wanted:
            yield _remembers(trace)


def _on_made_traces() -> Iterator[Row]:
    for name in MADE:
        for size in MADE_SIZES:
            trace = made(name, size, MADE_REQUESTS)
            ours, other = _hits(trace, size, "learned"), _hits(trace, size, "lru")
            ratio = ours / other if other else 1.0
            yield _row(
                f"hits, {name}, {size:,} host blocks", ours, "blocks", other, ratio, MADE_NEVER_BELOW, at_most=False
            )


def _takes(trace: Trace, name: str) -> Row:
    """CPU time of a replay, the shortest of several, in turns."""
    best = {"lru": float("inf"), "learned": float("inf")}
    for _ in range(NUM_TIMED):
        for eviction in best:
            begun = time.process_time()
            _hits(trace, TIMED_SIZE, eviction)
            best[eviction] = min(best[eviction], time.process_time() - begun)
    ours, other = (best[eviction] * 1e6 / len(trace.requests) for eviction in ("learned", "lru"))
    return _row(f"replay of a request, {name}", ours, "us", other, ours / other, MOST_TIME, at_most=True)


def _remembers(trace: Trace) -> Row:
    """Memory of the learner after a whole trace, for each run that it remembers."""
    layout = Layout.of([KVCacheGroup("full", FullAttention(), 1)])
    sequences = [TokenSequence(Prefix.of(ROOT, each.blocks), 1) for each in trace.requests]
    tracemalloc.start()
    learning = Learning(layout, {Tier.HOST: TIMED_SIZE})
    for number, sequence in enumerate(sequences):
        request = LedgerRequest(str(number), sequence, 0, number, 0, hit_alignment=1, ledger=None)
        learning.seen(request, 0, sequence.num_prompt_units)
        del request
    size, num_runs = tracemalloc.get_traced_memory()[0], len(learning.counts)
    tracemalloc.stop()
    each, block = size / num_runs, 512 * 128 * 1024
    return Row(
        name=f"memory of each of {num_runs:,} runs that are remembered", value=each, unit="bytes",
        against="a block of 512 tokens, 128 KiB each", limit=block, ratio=each / block,
    )  # fmt: skip


def _touch() -> Row:
    """Time for a part to leave its order and return as the newest."""
    times = ReturnTimes(10_000)
    order = LearnedOrder(times, Guard(times, 10_000))
    parts = [Part(Tier.HOST, 0, 1, None, 0, 0) for _ in range(1000)]  # type: ignore[arg-type]
    for part in parts:
        order.add(part)
    begun = time.process_time()
    for number in range(NUM_TOUCHES):
        part = parts[number % 1000]
        order.remove(part)
        order.add(part)
    took = (time.process_time() - begun) * 1e6 / NUM_TOUCHES
    return _row("touch of a part", took, "us", MOST_TOUCH_US, took, MOST_TOUCH_US, at_most=True)
