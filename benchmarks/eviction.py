"""Learned eviction, compared with LRU and with a clairvoyant cache: hits on traces, hits with hints, and its cost.

`TRACE=FILE`, `SYNTHETIC=FILE` and `AGENTS=FILE` name traces with `hash_ids`. Without them, their rows are left out. The
device holds one request, so hits come from the host. The trace of agents also has `stop`, the reason why each turn
ended, and `returns_s`, the seconds until the next request of the session. From these, hints are made with errors and
lies; a row has the median over `SEEDS` and the worst of them.

The clairvoyant cache (`Belady`) is an eviction order in the same replay, which evicts the end of the path that is
requested again last. The share of the gap is (hits - hits of LRU) / (hits of `Belady` - hits of LRU).
"""

from __future__ import annotations

import heapq
import math
import os
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aoffload._common.prefix import TOKEN_BYTES, Prefix
from aoffload._common.tiers import Tier
from aoffload._config.groups import FullAttention, KVCacheGroup
from aoffload._eviction.learned import Guard, LearnedOrder, Learning
from aoffload._eviction.returns import ReturnTimes
from aoffload._kernel.layout import Layout
from aoffload._kernel.records import LedgerRequest, Part
from aoffload._kernel.tokens import TokenSequence
from aoffload.plan.replay import BLOCK_SIZE, ROOT, Predicted, predictions, replay
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
    yield from _on_hints()


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
        learning.began(request)
        learning.ended(None, request, sequence.num_prompt_units, None)  # type: ignore[arg-type]
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
    times = ReturnTimes()
    order = LearnedOrder(times, Guard(times, 10_000))
    run: Any = SimpleNamespace(before=None)
    parts = [Part(Tier.HOST, 0, 1, run, 0, 0) for _ in range(1000)]
    for part in parts:
        order.add(part)
    begun = time.process_time()
    for number in range(NUM_TOUCHES):
        part = parts[number % 1000]
        order.remove(part)
        order.add(part)
    took = (time.process_time() - begun) * 1e6 / NUM_TOUCHES
    return _row("touch of a part", took, "us", MOST_TOUCH_US, took, MOST_TOUCH_US, at_most=True)


# -- hints -----------------------------------------------------------------------------------------------------------


class Belady:
    """Evicts the end of the path that is requested again last. Knows the trace."""

    def __init__(self, uses: dict[int, list[int]], present: list[int]) -> None:
        """`uses`: for each block, the numbers of the requests for it, the last one first. `present`: the number of the
        present request."""
        self._uses, self._present = uses, present
        self._idle: dict[Part, None] = {}
        self._heap: list[tuple[float, int, int, Part]] = []
        self._num_added = self._built_at = 0

    def add(self, part: Part) -> None:
        self._idle[part] = None
        part.last_use = 1
        self._push(part)

    def _push(self, part: Part) -> None:
        self._num_added += 1
        heapq.heappush(self._heap, (*self._key(part), self._num_added, part))

    def add_newer(self, part: Part, than: Part) -> None:
        self.add(part)

    add_back = add

    def remove(self, part: Part) -> None:
        del self._idle[part]

    def oldest(self) -> Part | None:
        if self._built_at != self._present[0]:  # what the device hits is no use here, but its next use is later
            self._built_at, self._heap = self._present[0], []
            for part in self._idle:
                self._push(part)
        heap = self._heap
        while heap:
            part, key = heap[0][3], heap[0][:2]
            if part in self._idle and part.blocks and key == self._key(part):
                return part
            heapq.heappop(heap)
            if part in self._idle and part.blocks:  # it has lost its end, so it returns sooner
                self._push(part)
        return None

    def _key(self, part: Part) -> tuple[float, int]:
        """Of parts that return together, the last one of the path goes first."""
        run = part.run
        at = ((part.stop - run.start) * BLOCK_SIZE - 1) * TOKEN_BYTES
        uses = self._uses.get(int.from_bytes(run.tokens[at : at + TOKEN_BYTES], "little"), [])
        while uses and uses[-1] <= self._present[0]:
            uses.pop()
        return (-uses[-1] if uses else -math.inf, -run.start)

    def are_adjacent(self, older: Part, newer: Part) -> bool:
        return True

    def __iter__(self) -> Iterator[Part]:
        return iter(list(self._idle))


def _clairvoyant(trace: Trace, num_host: int) -> int:
    uses, present = dict[int, list[int]](), [0]
    for number in range(len(trace.requests) - 1, -1, -1):
        for block in trace.requests[number].blocks.tolist():
            uses.setdefault(block, []).append(number)

    def begins(number: int) -> None:
        present[0] = number

    found = replay(trace, trace.most_blocks + 2, num_host, eviction=lambda: Belady({**uses}, present), begins=begins)
    return int((found.device + found.host).sum())


SHORT_S, LONG_S = 20.0, 1e5
"""Lies: what a prompt that returns late or never is said to do, and what one that returns soon is said to do."""
SOON_S = 300.0
KINDS: dict[str, tuple[float, float]] = {
    "a factor of 2, a tenth lies": (2.0, 0.1), "a factor of 4, a tenth lies": (4.0, 0.1),
    "a factor of 2, 30 % lies": (2.0, 0.3), "only lies": (1.0, 1.0),
}  # fmt: skip
"""The error of the predicted times, evenly spread on a logarithmic scale up to the factor, and the share of lies."""
WANTED_SHARES = {
    "a factor of 2, a tenth lies": (0.75, 0.70, 0.45), "a factor of 4, a tenth lies": (0.62, 0.55, 0.38),
    "a factor of 2, 30 % lies": (0.62, 0.55, 0.38), "only lies": (0.0, 0.0, 0.0), "the stop reason": (0.25, 0.20, 0.0),
}  # fmt: skip
HINT_SIZES = (2500, 5000, 10_000)


def _on_hints() -> Iterator[Row]:
    if (named := os.environ.get("AGENTS")) is None:
        return
    trace, seeds = read_trace(Path(named)), range(int(os.environ.get("SEEDS", "10")))
    for place, size in enumerate(HINT_SIZES):
        least, most = _hits(trace, size, "lru"), _clairvoyant(trace, size)
        for kind, wanted in WANTED_SHARES.items():
            if kind in KINDS:
                drawn = [_predicted(trace, seed, *KINDS[kind]) for seed in seeds]
            else:
                drawn = [predictions(trace, "stop")]
            shares: list[float] = []
            for hints in drawn:
                found = replay(trace, trace.most_blocks + 2, size, eviction="learned", hints=hints)
                shares.append((int((found.device + found.host).sum()) - least) / (most - least))
            median = statistics.median(shares)
            yield Row(
                name=f"share of the gap, {kind}, {size:,} host blocks", value=100 * median, unit="%",
                against=f"{least:,} by LRU, {most:,} at most", limit=100.0, ratio=median, wanted=wanted[place],
                spread=f"worst {100 * min(shares):.1f} %",
            )  # fmt: skip


def _predicted(trace: Trace, seed: int, factor: float, lies: float) -> list[Predicted | None]:
    """A hint for each turn. Of those that do not return, a fifth get no hint."""
    rng, found = random.Random(seed), list[Predicted | None]()
    for returns_s in (math.inf if each.returns_s is None else each.returns_s for each in trace.requests):
        if rng.random() < lies:
            found.append(Predicted(SHORT_S if returns_s > SOON_S else LONG_S))
        elif returns_s == math.inf:
            found.append(Predicted(math.inf) if rng.random() < 0.8 else None)
        else:
            found.append(Predicted(max(returns_s, 0.5) * factor ** rng.uniform(-1, 1)))
    return found
