"""What stores cost where nothing is ever loaded: tokens per second for prompts that nobody has sent before.

Rounds in turn: without a connector, with ours, with vLLM's own one. Each round has new prompts, the same for all three,
so that a machine that becomes slower for a while slows all of them. The model is larger than those of other parts,
because a forward has to cost what it saves from a connector's copies: half of a millisecond a token, as a GPU's.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping
from typing import Any

from .bench import Bench, Scenario, Talks, run_part
from .models import LARGER
from .prompts import words
from .rows import Row
from .transfers import IN_ONE_THREAD, OURS, PEER

__all__ = ["SCENARIOS"]

NUM_ROUNDS = 5
POOL, NUM_PROMPTS, PROMPT_TOKENS, NUM_NEW = 120, 12, 480, 8
WHO: Mapping[str, Mapping[str, Any] | None] = {"without": None, "ours": OURS, "the peer": PEER}


def unique(bench: Bench) -> Row:
    began_s = time.monotonic()
    wall: dict[str, list[float]] = {who: [] for who in WHO}
    cpu: dict[str, list[float]] = {who: [] for who in WHO}
    for number in range(NUM_ROUNDS + 1):
        for who, transfer in WHO.items():
            by_wall, by_cpu = _speeds(bench, transfer, number)
            if number:  # the first round warms the caches of the machine
                wall[who].append(by_wall)
                cpu[who].append(by_cpu)
    said = []
    for about, speeds in (("wall", wall), ("processor", cpu)):
        ratios = {
            who: [a / b for a, b in zip(speeds[who], speeds["without"], strict=True)] for who in ("ours", "the peer")
        }
        said.append(
            f"by {about} time {statistics.median(speeds['without']):,.0f} tokens a second without; "
            + ", ".join(
                f"{who} {statistics.median(each):.3f} of that ({min(each):.3f} to {max(each):.3f})"
                for who, each in ratios.items()
            )
        )
    pairs = statistics.median(a / b for a, b in zip(wall["ours"], wall["the peer"], strict=True))
    row = Row(
        "unique prompts, throughput",
        took_s=time.monotonic() - began_s,
        found="; ".join(said) + f"; ours beside the peer {pairs:.3f}",
    )
    return row.missed("" if pairs >= 1 else "less than with the peer")


def _speeds(bench: Bench, transfer: Mapping[str, Any] | None, number: int) -> tuple[float, float]:
    """Tokens per second of the clock, and of the process's processor time."""
    prompts = {f"u{number}.{each}": words(f"unique {number} {each}", PROMPT_TOKENS) for each in range(NUM_PROMPTS)}
    with bench.engine(POOL, transfer) as engine:
        engine.serve({"first": words("first", 100)}, 2)
        gc.collect()
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        answers = engine.serve(prompts, NUM_NEW)
        took_s, took_cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
        engine.rest()
    num_tokens = sum(answer.num_prompt_tokens + len(answer.tokens) for answer in answers.values())
    if found := sum(answer.num_cached_tokens for answer in answers.values()):
        raise RuntimeError(f"{found} tokens were cached of prompts that are new")
    return num_tokens / took_s, num_tokens / took_cpu_s


SCENARIOS = (Scenario("unique", unique),)

if __name__ == "__main__":
    run_part(LARGER, SCENARIOS, Talks(1, 1, 4), folder="larger")
