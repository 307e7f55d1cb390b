"""What stores cost where nothing is ever loaded: tokens per second for prompts that nobody has sent before.

Rounds in turn: without a connector, with ours, with vLLM's own one, each in an engine of its own and with the same new
prompts. The fastest of some tries counts, because other processes slow single ones. The model is larger than those of
other parts: a forward has to cost more than the scheduler does.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .bench import Bench, Scenario, Talks, run_part
from .engines import Engine
from .models import LARGER
from .prompts import words
from .rows import Row
from .transfers import OURS, PEER

__all__ = ["SCENARIOS"]

NUM_ROUNDS, NUM_TRIES = 5, 3
POOL, NUM_PROMPTS, PROMPT_TOKENS, NUM_NEW = 120, 6, 480, 8
WHO: Mapping[str, Mapping[str, Any] | None] = {"without": None, "ours": OURS, "the peer": PEER}


@dataclass(frozen=True)
class Speed:
    """Tokens per second: of the clock, and of the processor time of all threads."""

    wall: float
    processor: float


def unique(bench: Bench) -> Row:
    began_s = time.monotonic()
    speeds: dict[str, list[Speed]] = {who: [] for who in WHO}
    for number in range(NUM_ROUNDS):
        for who, transfer in WHO.items():
            speeds[who].append(_speed(bench, transfer, number))
    ours, theirs = (statistics.median(_ratios(speeds, who, "wall")) for who in ("ours", "the peer"))
    return Row(
        "unique prompts: throughput", took_s=time.monotonic() - began_s,
        found="; ".join(_about(speeds, how) for how in ("wall", "processor")),
    ).missed("" if ours >= theirs else "less than with the peer")  # fmt: skip


def _ratios(speeds: Mapping[str, list[Speed]], who: str, how: str) -> list[float]:
    """The speed of each round, beside that without a connector in the same round."""
    pairs = zip(speeds[who], speeds["without"], strict=True)
    return [getattr(speed, how) / getattr(without, how) for speed, without in pairs]


def _about(speeds: Mapping[str, list[Speed]], how: str) -> str:
    """Medians, with the smallest and the largest ratio of a round."""
    said = []
    for who in ("ours", "the peer"):
        ratios = _ratios(speeds, who, how)
        said.append(f"{who} {statistics.median(ratios):.3f} of that ({min(ratios):.3f} to {max(ratios):.3f})")
    without = statistics.median(getattr(speed, how) for speed in speeds["without"])
    return f"by {how} time {without:,.0f} tokens a second without, {', '.join(said)}"


def _speed(bench: Bench, transfer: Mapping[str, Any] | None, number: int) -> Speed:
    found = []
    with bench.engine(POOL, transfer) as engine:
        _touch_host_memory(engine)
        engine.serve({"first": words("first", 100)}, 2)
        gc.collect()
        for at in range(NUM_TRIES):
            prompts = {f"u{each}": words(f"unique {number} {at} {each}", PROMPT_TOKENS) for each in range(NUM_PROMPTS)}
            began_s, began_cpu_s = time.monotonic(), time.process_time()
            answers = engine.serve(prompts, NUM_NEW).values()
            took_s, took_cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
            if any(answer.num_cached_tokens for answer in answers):
                raise RuntimeError("tokens were cached of prompts that are new")
            num_tokens = sum(answer.num_prompt_tokens + len(answer.tokens) for answer in answers)
            found.append(Speed(num_tokens / took_s, num_tokens / took_cpu_s))
        engine.rest()
    return Speed(max(speed.wall for speed in found), max(speed.processor for speed in found))


def _touch_host_memory(engine: Engine) -> None:
    """On a GPU host memory is page-locked, so nobody pays for its first use while prompts are computed."""
    if engine.connector is None:
        return
    if (peer := getattr(engine.worker_connector, "worker_handler", None)) is not None:
        for region in peer.cpu_kv_caches.values():
            region.zero_()
    else:
        engine.worker_connector._worker._transport.backend._host[:] = 0


SCENARIOS = (Scenario("unique", unique),)

if __name__ == "__main__":
    run_part(LARGER, SCENARIOS, Talks(1, 1, 4), folder="larger")
