"""A snapshot of a runtime between two of its calls: its counters and its present state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import attrs

from aoffload import OffloadRuntime, Tier
from aoffload.ledger import TierStatistics

from .families import LABEL_VALUES
from .histogram import Histogram
from .observer import Metrics

__all__ = ["Sample", "Snapshot", "take_snapshot"]

Values: TypeAlias = "float | Histogram"


@attrs.frozen
class Sample:
    labels: tuple[str, ...]
    value: Values


@attrs.frozen
class Snapshot:
    at: float
    """Time of the snapshot, by the runtime's clock."""
    samples: Mapping[str, list[Sample]]
    """By the name of the metric."""


def take_snapshot(runtime: OffloadRuntime, metrics: Metrics) -> Snapshot:
    """Read all values. In the event loop's thread, between two calls of the runtime."""
    samples = {name: list(found) for name, found in (*_counted(metrics), *_standing(runtime))}
    return Snapshot(runtime.env.now(), samples)


def _counted(metrics: Metrics) -> Iterator[tuple[str, Iterable[Sample]]]:
    """The observer's counters."""
    yield "aoffload_requests_admitted_total", _one(metrics.num_admitted)
    yield "aoffload_requests_preempted_total", _one(metrics.num_preempted)
    yield "aoffload_requests_finished_total", _finished(metrics)
    yield "aoffload_tokens_total", _each("aoffload_tokens_total", "source", metrics.tokens)
    yield "aoffload_jobs_finished_total", _by_direction("aoffload_jobs_finished_total", metrics.jobs)
    yield "aoffload_copied_bytes_total", _by_direction("aoffload_copied_bytes_total", metrics.copied_bytes)
    skipped = "aoffload_skipped_store_blocks_total"
    yield skipped, _each(skipped, "reason", metrics.skipped_blocks)
    yield "aoffload_room_wait_seconds", [Sample((), metrics.room_wait.copy())]
    yield "aoffload_request_seconds", _copies(metrics.state_seconds)
    yield "aoffload_copy_seconds", _copies(metrics.copy_seconds)
    yield "aoffload_copy_throughput_bytes_per_second", _copies(metrics.throughput)
    yield "aoffload_fence_latency_seconds", _copies(metrics.fence_latency)


def _standing(runtime: OffloadRuntime) -> Iterator[tuple[str, Iterable[Sample]]]:
    """The present state of the runtime."""
    ledger, found = runtime.ledger, runtime.statistics()
    live = Counter(holding.state.value for holding in ledger.holdings.values())
    yield "aoffload_requests", _each("aoffload_requests", "state", live)
    yield "aoffload_requests_waiting", _one(found.num_waiting)
    by_tier = {Tier.DEVICE: found.device, Tier.HOST: found.host}
    yield "aoffload_blocks", _occupancy(by_tier)
    yield "aoffload_pool_blocks", [Sample((tier.name.lower(),), one.num_blocks) for tier, one in by_tier.items()]
    yield "aoffload_block_bytes", _one(runtime.transport.block_bytes)
    evicted = [Sample((tier.tier.name.lower(),), tier.num_evicted) for tier in ledger.cache.tiers]
    yield "aoffload_evicted_blocks_total", evicted
    yield "aoffload_pins", _one(found.num_pins)
    jobs = Counter(job.state.value for job in ledger.jobs.unsettled.values())
    jobs["quarantined"] = len(ledger.jobs.quarantined)
    yield "aoffload_jobs", _each("aoffload_jobs", "state", jobs)
    yield "aoffload_late_completions_total", _one(found.num_late_completions)
    verified = {"right": found.transfers.blocks_verified, "corrupt": found.transfers.blocks_corrupt}
    yield "aoffload_verified_blocks_total", _each("aoffload_verified_blocks_total", "result", verified)
    yield "aoffload_cache_off", _one(bool(found.off_reason))
    yield "aoffload_loads_paused", _one(found.loads_paused)
    yield "aoffload_lost_log_events_total", _one(runtime.telemetry.num_lost_events)
    yield "aoffload_observer_failures_total", _one(runtime.observers.num_failures)


def _one(value: float) -> list[Sample]:
    return [Sample((), value)]


def _each(name: str, label: str, values: Mapping[str, int]) -> list[Sample]:
    """A sample for every value of the label, zeros too: a rate needs a point to begin at."""
    return [Sample((value,), values.get(value, 0)) for value in LABEL_VALUES[name, label]]


def _by_direction(name: str, values: Mapping[tuple[str, str], int]) -> list[Sample]:
    directions, outcomes = LABEL_VALUES[name, "direction"], LABEL_VALUES[name, "outcome"]
    keys = [(direction, outcome) for direction in directions for outcome in outcomes]
    return [Sample(key, values.get(key, 0)) for key in keys]


def _finished(metrics: Metrics) -> list[Sample]:
    reasons = LABEL_VALUES["aoffload_requests_finished_total", "reason"]
    keys = [("aborted" if reason else "done", reason) for reason in reasons]
    return [Sample(key, metrics.finished[key]) for key in keys]


def _occupancy(by_tier: Mapping[Tier, TierStatistics]) -> Iterator[Sample]:
    for tier, found in by_tier.items():
        for state in LABEL_VALUES["aoffload_blocks", "state"]:
            yield Sample((tier.name.lower(), state), getattr(found, f"num_{state}"))


def _copies(histograms: Mapping[str, Histogram]) -> list[Sample]:
    return [Sample((value,), histogram.copy()) for value, histogram in histograms.items()]
