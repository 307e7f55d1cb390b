"""Hits of models with a recurrent state, as a share of those that their KV alone would have in the same room.

`TRACE=FILE` and `AGENTS=FILE` name traces with `hash_ids`. Without them, their rows are left out. The sizes are those
of Qwen3.5-27B, Kimi K3 and Nemotron-3-Super: a checkpoint weighs as much as 4.6, 31 and 40 blocks of 512 tokens.

Our hits are those of a `Ledger` that serves the trace, one request after the other, with its own order of eviction
(`CheckpointOrder`). The device holds one request, so hits come from the host. All others are simulated in the same room
(`states_simulated`), because their checkpoints lie elsewhere. A last simulation computes our own rule exactly, and
shows what the order loses by computing less.

A block of the trace is one unit of five tokens, with a row for each. So a checkpoint of 4.6 blocks has 23 rows.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from aoffload import KVCacheGroup, OffloadConfig, RecurrentState
from aoffload._common.prefix import Prefix, Root
from aoffload._extensions.assembly import Ledger
from aoffload._kernel.pools import LeastRecentlyUsed
from aoffload.plan.replay import land
from aoffload.plan.trace import Blocks, read_trace

from .harness import Row
from .peer import Peer
from .states_simulated import PEERS, by_worth, ends_and_branches, kv_alone, lru, prompts

__all__ = ["run", "served"]

ROWS = 5
"""Rows of a block of the trace."""
MODELS = {"Qwen3.5-27B": 23, "Kimi K3": 155, "Nemotron-3-Super": 200}
"""Rows of a checkpoint."""
SIZES = {"TRACE": (5000, 20_000, 60_000), "AGENTS": (10_000,)}
"""Blocks of the host."""
WANTED = {("TRACE", 20_000): (0.86, 0.63, 0.58), ("AGENTS", 10_000): (0.98, 0.96, 0.95)}
"""Wanted shares of the hits of KV alone, by model. In these sizes, our hits have to be above those of each peer."""
NEAR_EXACT, MOST_TIME = 0.97, 1.5
ROOT = Root("states")


def run(vllm: Peer | None = None) -> Iterator[Row]:
    for variable, sizes in SIZES.items():
        if (named := os.environ.get(variable)) is None:
            print(f"states: {variable}=FILE names a trace to replay", file=sys.stderr)
            continue
        trace = read_trace(Path(named))
        asked = prompts(trace)
        for size in sizes:
            yield from _rows(variable, size, asked, trace.num_blocks)


def _rows(variable: str, size: int, asked: Sequence[Blocks], num_blocks: int) -> Iterator[Row]:
    limit = kv_alone(asked, num_blocks, size)
    shares = WANTED.get((variable, size))
    for place, (model, num_rows) in enumerate(MODELS.items()):
        name = f"hits, {variable.lower()}, {size:,} host blocks, {model}"
        ours, ours_s = served(asked, size, num_rows)
        weight = num_rows / ROWS
        yield _row(name, ours, "KV alone", limit, None if shares is None else shares[place])
        for peer, places in PEERS.items():
            hits = lru(asked, num_blocks, size, weight, places)
            yield _row(name, ours, peer, hits, None if shares is None else 1.0)
        yield _row(name, ours, "ours in LRU order", lru(asked, num_blocks, size, weight, ends_and_branches), None)
        yield _row(name, ours, "our rule, exact", by_worth(asked, num_blocks, size, weight), NEAR_EXACT)
        _, lru_s = served(asked, size, num_rows, in_lru_order=True)
        yield Row(
            name=f"replay of a request, {name.removeprefix('hits, ')}", value=ours_s * 1e6, unit="us",
            against="LRU order", limit=lru_s * 1e6, ratio=ours_s / lru_s, wanted=MOST_TIME, is_at_most=True,
        )  # fmt: skip


def _row(name: str, ours: int, against: str, hits: int, wanted: float | None) -> Row:
    return Row(
        name=name, value=ours, unit="blocks", against=against, limit=hits, ratio=ours / max(1, hits), wanted=wanted
    )  # fmt: skip


def served(
    asked: Sequence[Blocks], num_host_blocks: int, num_rows: int, *, in_lru_order: bool = False
) -> tuple[int, float]:
    """Serve the prompts through a `Ledger`. Returns the blocks that all of them hit, and the CPU time of a request."""
    most = max(map(len, asked))
    state = KVCacheGroup("state", RecurrentState(), block_size=ROWS, num_rows=num_rows)
    config = OffloadConfig(
        groups=[KVCacheGroup("full", block_size=1), state],
        num_host_blocks=num_host_blocks * ROWS,
        eviction=LeastRecentlyUsed if in_lru_order else "lru",
    )
    ledger = Ledger(config, (most + 2) * ROWS + 3 * num_rows + 1)
    num_hits, begun = 0, time.process_time()
    for prompt in asked:
        if len(prompt):
            num_hits += _serve(ledger, np.append(np.repeat(prompt, ROWS), np.int32(2**31 - 1))) // ROWS
    return num_hits, (time.process_time() - begun) / len(asked)


def _serve(ledger: Ledger, tokens: Blocks) -> int:
    """Compute all of `tokens` that are not cached, and write each planned checkpoint. Returns the tokens that were
    cached."""
    request = ledger.admit(Prefix.of(ROOT, tokens))
    ledger.allocate_nowait(request)
    land(ledger, ledger.plan_load(request))
    planned = [checkpoint.num_tokens for checkpoint in ledger.planned_checkpoints(request)]
    for stop in (*planned, len(tokens)):
        land(ledger, ledger.commit(request, stop, checkpoints=[stop] if stop in planned else ()))
    land(ledger, ledger.release(request))
    return request.match.num_device_tokens + request.match.num_host_tokens
