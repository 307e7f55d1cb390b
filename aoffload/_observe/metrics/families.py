"""All metrics as a table: name, kind, labels, meaning. docs/metrics.md says what to do about each."""

from __future__ import annotations

import enum

import attrs

from aoffload import Tier
from aoffload._kernel.states import CACHE_TIERS, TIERS
from aoffload._transfer.breaker import Use
from aoffload.ledger import Direction, EvictionRule, HintEnd, Outcome

__all__ = ["FAMILIES", "LABEL_VALUES", "LOWER", "REASONS", "Family", "Kind", "ShownWith", "reason_of"]


class Kind(enum.Enum):
    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class ShownWith(enum.Enum):
    """What has to be configured for a metric to be there."""

    ANYTHING = "anything"
    LOWER_TIERS = "a tier below host memory"
    LEARNED_EVICTION = "eviction that learns"


@attrs.frozen
class Family:
    name: str
    """As it is queried: counters end in `_total`."""
    kind: Kind
    labels: tuple[str, ...]
    help: str
    shown_with: ShownWith = ShownWith.ANYTHING


_HOP = ("direction", "tier")
_GAUGE, _COUNTER, _HISTOGRAM = Kind.GAUGE, Kind.COUNTER, Kind.HISTOGRAM
_LOWER, _LEARNED = ShownWith.LOWER_TIERS, ShownWith.LEARNED_EVICTION

FAMILIES = (
    Family("aoffload_requests", _GAUGE, ("state",), "Live requests by state."),
    Family("aoffload_requests_waiting", _GAUGE, (), "Requests in the wait queue for device blocks."),
    Family("aoffload_oldest_request_seconds", _GAUGE, ("state",), "Age of the oldest stay in each state of a request."),
    Family("aoffload_oldest_wait_seconds", _GAUGE, (), "Longest current wait for device blocks."),
    Family("aoffload_oldest_step_seconds", _GAUGE, (), "How long the oldest step has been open: it holds its blocks."),
    Family("aoffload_requests_admitted_total", _COUNTER, (), "Requests that were matched and pinned."),
    Family("aoffload_requests_finished_total", _COUNTER, ("outcome", "reason"), "Requests that are over."),
    Family("aoffload_requests_preempted_total", _COUNTER, (), "Preemptions: device blocks given up half-way."),
    Family("aoffload_tokens_total", _COUNTER, ("source",), "Tokens made ready on the device, by where they came from."),
    Family("aoffload_blocks", _GAUGE, ("tier", "state"), "Blocks of each tier by what they are. They add up to all."),
    Family("aoffload_pool_blocks", _GAUGE, ("tier",), "All blocks of each tier."),
    Family("aoffload_block_bytes", _GAUGE, (), "Bytes of one block over all tensors."),
    Family("aoffload_evicted_blocks_total", _COUNTER, ("tier", "order"), "Cached blocks whose room was needed."),
    Family("aoffload_eviction_learned", _GAUGE, ("tier",), "1: what was learned rules; 0: the last use.", _LEARNED),
    Family("aoffload_eviction_switches_total", _COUNTER, ("tier",), "Times that the ruling order changed.", _LEARNED),
    Family(
        "aoffload_shadow_hit_blocks", _GAUGE, ("tier", "order"),
        "Hits of the guard's two small caches lately: the order with more of them rules.", _LEARNED,
    ),
    Family("aoffload_remembered_runs", _GAUGE, (), "Stretches of prompts whose requests are counted.", _LEARNED),
    Family("aoffload_remembered_bytes", _GAUGE, (), "About the memory that they take in this process.", _LEARNED),
    Family("aoffload_hints", _GAUGE, (), "Prompts that a hint spares, or would.", _LEARNED),
    Family("aoffload_hints_ended_total", _COUNTER, ("outcome",), "Hints that are over.", _LEARNED),
    Family("aoffload_pins", _GAUGE, (), "Prompts that somebody keeps cached by a pin."),
    Family("aoffload_jobs", _GAUGE, ("state",), "Transfers that are not over, and those in quarantine."),
    Family("aoffload_jobs_finished_total", _COUNTER, (*_HOP, "outcome"), "Transfers that are over."),
    Family("aoffload_copied_bytes_total", _COUNTER, (*_HOP, "outcome"), "Bytes that finished transfers moved."),
    Family("aoffload_late_completions_total", _COUNTER, (), "Reports of a transfer that was settled before."),
    Family("aoffload_verified_blocks_total", _COUNTER, ("result",), "Loaded blocks whose checksum was compared."),
    Family("aoffload_skipped_store_blocks_total", _COUNTER, ("reason",), "Blocks that were not stored."),
    Family("aoffload_request_seconds", _HISTOGRAM, ("state",), "Time in each state of a request, once left."),
    Family("aoffload_room_wait_seconds", _HISTOGRAM, (), "Time in the wait queue for device blocks, however it ended."),
    Family("aoffload_copy_seconds", _HISTOGRAM, _HOP, "Time of one copy that landed, without its fences."),
    Family(
        "aoffload_copy_throughput_bytes_per_second", _HISTOGRAM, _HOP, "Bytes by time of a copy that landed."
    ),
    Family(
        "aoffload_fence_latency_seconds", _HISTOGRAM, _HOP,
        "Time from the report of the copy thread to the settlement in the event loop.",
    ),
    Family("aoffload_loads_declined_total", _COUNTER, (), "Host hits that were computed, or a part: that cost less."),
    Family("aoffload_fetches_total", _COUNTER, ("outcome",), "Fetches from below host memory that are over.", _LOWER),
    Family("aoffload_fetches_declined_total", _COUNTER, (), "Fetches given up: computing was sooner.", _LOWER),
    Family(
        "aoffload_fetches_skipped_total", _COUNTER, ("tier",), "Fetches not begun: the tier fails, and is left alone.",
        _LOWER,
    ),
    Family("aoffload_fetching_requests", _GAUGE, (), "Requests that wait for a fetch.", _LOWER),
    Family("aoffload_fetching_tokens", _GAUGE, ("tier",), "Tokens that requests wait for, by where they are.", _LOWER),
    Family("aoffload_restored_blocks", _GAUGE, (), "Blocks of an earlier process that were found on the disk.", _LOWER),
    Family("aoffload_write_budget_bytes", _GAUGE, (), "Bytes that may still be written to the disk today.", _LOWER),
    Family("aoffload_rejected_cells_total", _COUNTER, (), "Cells of a remote store that did not verify.", _LOWER),
    Family("aoffload_storage_off", _GAUGE, ("tier",), "1 since a tier below host memory is not used any more.", _LOWER),
    Family(
        "aoffload_storage_left_alone", _GAUGE, ("tier", "use"),
        "Disks and nodes of a store that have failed, and have not succeeded since.", _LOWER,
    ),
    Family("aoffload_cache_off", _GAUGE, (), "1 since nothing is loaded or stored any more, for good."),
    Family("aoffload_loads_paused", _GAUGE, (), "1 while too much is in quarantine to load (engine-owned blocks)."),
    Family("aoffload_lost_log_events_total", _COUNTER, (), "Log events that the logger raised at."),
    Family("aoffload_observer_failures_total", _COUNTER, (), "Calls that an observer raised at."),
    Family("aoffload_snapshot_age_seconds", _GAUGE, (), "Age of what this scrape shows: the loop may not answer."),
)  # fmt: skip

REASONS = (
    "closed_early", "cancelled", "deadline", "abandoned", "runtime_closed", "prefix_invalidated", "error", "other",
)  # fmt: skip
"""Why a request was aborted. Programs may give any reason; those not listed here count as `other`."""


def reason_of(reason: str) -> str:
    """`reason` as one of `REASONS`."""
    head = reason.partition(":")[0]
    return head if head in REASONS else "other"


_STAYS = ("matched", "pinned", "allocated", "loading", "draining", "requeued", "stranded", "running", "preempted")
"""The states that a request stays in. It passes through the others within one call, which no scrape sees. MATCHED is
one only in a `HostCache`: the request was told to ask again."""
_DIRECTIONS = tuple(direction.value for direction in Direction)
_TIERS = tuple(tier.name.lower() for tier in CACHE_TIERS)
_HOPS = tuple(row.tier.name.lower() for row in TIERS if row.above is not None)
"""The lower tier of each link: loads come from it, stores go to it."""
LOWER = tuple(row.tier.name.lower() for row in TIERS if row.above not in (None, Tier.DEVICE))
"""Tiers below host memory."""
_OUTCOMES = tuple(outcome.value for outcome in Outcome)

LABEL_VALUES: dict[tuple[str, str], tuple[str, ...]] = {
    ("aoffload_requests", "state"): _STAYS,
    ("aoffload_oldest_request_seconds", "state"): _STAYS,
    ("aoffload_requests_finished_total", "outcome"): ("done", "aborted"),
    ("aoffload_requests_finished_total", "reason"): ("", *REASONS),
    ("aoffload_tokens_total", "source"): ("device_hit", "host_hit", "computed"),
    ("aoffload_blocks", "tier"): _TIERS,
    ("aoffload_blocks", "state"): ("free", "cached", "pinned", "quarantined"),
    ("aoffload_pool_blocks", "tier"): _TIERS,
    ("aoffload_evicted_blocks_total", "tier"): _TIERS,
    ("aoffload_evicted_blocks_total", "order"): tuple(rule.value for rule in EvictionRule),
    ("aoffload_eviction_learned", "tier"): _TIERS,
    ("aoffload_eviction_switches_total", "tier"): _TIERS,
    ("aoffload_shadow_hit_blocks", "tier"): _TIERS,
    ("aoffload_shadow_hit_blocks", "order"): (EvictionRule.LEARNED.value, EvictionRule.LRU.value),
    ("aoffload_hints_ended_total", "outcome"): tuple(end.value for end in HintEnd),
    ("aoffload_jobs", "state"): ("queued", "launched", "quarantined"),
    ("aoffload_jobs_finished_total", "direction"): _DIRECTIONS,
    ("aoffload_jobs_finished_total", "tier"): _HOPS,
    ("aoffload_jobs_finished_total", "outcome"): (*_OUTCOMES, "discarded"),
    ("aoffload_copied_bytes_total", "direction"): _DIRECTIONS,
    ("aoffload_copied_bytes_total", "tier"): _HOPS,
    ("aoffload_copied_bytes_total", "outcome"): _OUTCOMES,
    ("aoffload_fetches_total", "outcome"): ("done", "cancelled"),
    ("aoffload_fetching_tokens", "tier"): LOWER,
    ("aoffload_fetches_skipped_total", "tier"): LOWER,
    ("aoffload_storage_off", "tier"): LOWER,
    ("aoffload_storage_left_alone", "tier"): LOWER,
    ("aoffload_storage_left_alone", "use"): tuple(use.value for use in Use),
    ("aoffload_verified_blocks_total", "result"): ("right", "corrupt"),
    ("aoffload_skipped_store_blocks_total", "reason"): (
        *(f"{row.tier.name.lower()}_full" for row in TIERS if row.is_indexed and row.above is not None),
        "in_flight",
        "evicted",
        "other",
    ),
    ("aoffload_request_seconds", "state"): _STAYS,
    ("aoffload_copy_seconds", "direction"): _DIRECTIONS,
    ("aoffload_copy_seconds", "tier"): _HOPS,
    ("aoffload_copy_throughput_bytes_per_second", "direction"): _DIRECTIONS,
    ("aoffload_copy_throughput_bytes_per_second", "tier"): _HOPS,
    ("aoffload_fence_latency_seconds", "direction"): _DIRECTIONS,
    ("aoffload_fence_latency_seconds", "tier"): _HOPS,
}
"""Every value that a label can have, so the number of time series is bounded. Tiers that are not configured are not
shown."""
