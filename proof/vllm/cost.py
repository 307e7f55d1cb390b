"""The cost of the connector in vLLM's scheduler, compared with vLLM's own, and the cost of one offer."""

from __future__ import annotations

import gc
import statistics
import time
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np

from aoffload import HostCache

from .bench import Bench, Scenario, run_part
from .hooks import HookTimes, mean, percentile
from .models import DENSE
from .rows import Row
from .transfers import IN_ONE_THREAD, OURS, PEER

__all__ = ["SCENARIOS"]

SMALL_POOL = 70
NUM_ROUNDS = 3
MOST, MOST_P99 = 0.8, 1.0
"""Our mean and 99th percentile, as shares of the peer's."""
OFFERED = 8_192
NUM_OFFERS, NUM_BEFORE = 30, 10
"""The interpreter adapts code to what it sees in its first runs: these are not counted."""
BLOCK_SIZE = 16


def hooks(bench: Bench) -> Row:
    """The same prompts with one connector and the other, in turn, both with copies in the calling thread. Then once
    more with copy threads, as the connector is: those of the peer run on a GPU only, so that is not compared."""
    began_s = time.monotonic()
    spent: dict[str, list[list[float]]] = {"ours": [], "peer": []}
    for _ in range(NUM_ROUNDS):
        spent["peer"].append(_hooks_of(bench, PEER))
        spent["ours"].append(_hooks_of(bench, IN_ONE_THREAD))
    us = {who: statistics.median(map(mean, rounds)) for who, rounds in spent.items()}
    p99 = {who: statistics.median(percentile(each, 99) for each in rounds) for who, rounds in spent.items()}
    p50 = {who: statistics.median(map(statistics.median, rounds)) for who, rounds in spent.items()}
    about = "; ".join(f"{who} {us[who]:.0f} µs a step, p50 {p50[who]:.0f}, p99 {p99[who]:.0f}" for who in us)
    shares = f"{us['ours'] / us['peer']:.2f} of the peer's mean, {p99['ours'] / p99['peer']:.2f} of its p99"
    rounds = f"{shares}, {NUM_ROUNDS} rounds of {len(spent['ours'][0])} steps"
    threads = f"with copy threads {mean(_hooks_of(bench, OURS)):.0f}"
    name = "the scheduler's hooks, beside SimpleCPUOffloadConnector"
    row = Row(name, took_s=time.monotonic() - began_s, found=f"{about}; {rounds}; {threads}")
    return row.missed(
        "" if us["ours"] <= MOST * us["peer"] else f"wanted: at most {MOST} of the mean",
        "" if p99["ours"] <= MOST_P99 * p99["peer"] else f"wanted: at most {MOST_P99} of the 99th percentile",
    )


def _hooks_of(bench: Bench, transfer: Mapping[str, Any]) -> list[float]:
    with bench.engine(SMALL_POOL, transfer) as engine:
        gc.collect()
        engine.times = HookTimes(engine.connector)
        bench.talk(engine)
        return engine.times.working_us()


class _Uncounted:
    """Blocks of an engine that counts nothing: an offer alone is what is measured."""

    def hold(self, block_ids: array[int]) -> None:
        pass

    give = hold


def offers(bench: Bench) -> Row:
    """`HostCache.offer` of a long prompt that the host has nothing of, in a cache that has served others before. The
    limit is a loop in C that looks at each block id once, measured in the same run: a set of the same ids."""
    began_s = time.monotonic()
    offered, limit = (statistics.median(times[NUM_BEFORE:]) for times in zip(*_offers_us(), strict=True))
    found = f"{OFFERED:,} blocks in {offered:.0f} µs, {offered / limit:.2f} of a set of their ids ({limit:.0f} µs)"
    row = Row(f"an offer of {OFFERED:,} blocks", took_s=time.monotonic() - began_s, found=found)
    return row.missed("" if offered <= limit else "wanted: at most the time of the set")


def _offers_us() -> list[tuple[float, float]]:
    """The time of each offer, and of a set of its block ids."""
    from aoffload import KVCacheGroup, OffloadConfig
    from aoffload.ledger import Completion, Outcome, Prefix, Root

    groups, root = [KVCacheGroup("full", block_size=BLOCK_SIZE)], Root("offers")
    config = OffloadConfig(groups=groups, num_host_blocks=NUM_OFFERS * OFFERED)
    ledger = HostCache(config, OFFERED + 1, engine_blocks=_Uncounted(), clock=time.monotonic)
    table = array("i", range(1, OFFERED + 1))
    found = []
    for seed in range(NUM_OFFERS):
        tokens = np.random.default_rng(seed).integers(0, 50_000, OFFERED * BLOCK_SIZE + 1)
        record = ledger.admit(Prefix.of(root, tokens), num_device_tokens=0)
        ledger.plan_load(record, into=[table])
        began_ns = time.thread_time_ns()
        plans = ledger.offer(record, OFFERED * BLOCK_SIZE, [table])
        ended_ns = time.thread_time_ns()
        set(table)
        found.append(((ended_ns - began_ns) / 1e3, (time.thread_time_ns() - ended_ns) / 1e3))
        if sum(plan.num_blocks for plan in plans) != OFFERED:
            raise RuntimeError(f"{sum(plan.num_blocks for plan in plans)} blocks were planned of {OFFERED}")
        for plan in plans:
            ledger.launch(plan.job_id)
            ledger.settle(Completion(plan.job_id, Outcome.LANDED, plan.num_blocks))
        ledger.release(record)
    return found


SCENARIOS = (Scenario("offers", offers, is_short=True), Scenario("hooks", hooks))

if __name__ == "__main__":
    run_part(DENSE, SCENARIOS)
