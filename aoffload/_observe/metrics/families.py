"""All metrics as a table: name, kind, labels, meaning. docs/metrics.md says how to react to each."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import attrs

from aoffload import Tier
from aoffload._common.tiers import CACHE_TIERS, TIERS
from aoffload._transfer.breaker import Use
from aoffload.ledger import Direction, EvictionRule, HintOutcome, HintReason, HintVerb, Outcome


class Kind(enum.Enum):
    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class ShownWith(enum.Enum):
    """The configuration that a metric needs to be exported."""

    ANYTHING = "anything"
    LOWER_TIERS = "a tier below host memory"
    LEARNED_EVICTION = "eviction that learns"
    QUOTAS = "quotas of tenants"


@attrs.frozen
class Family:
    name: str
    """The name in queries: names of counters end in `_total`."""
    kind: Kind
    labels: Mapping[str, tuple[str, ...]]
    """All values of each label, so the number of time series is bounded. Tiers that are not configured are not
    exported."""
    help: str
    shown_with: ShownWith = ShownWith.ANYTHING


REASONS = (
    "closed_early", "cancelled", "deadline", "abandoned", "runtime_closed", "prefix_invalidated", "error", "other",
)  # fmt: skip
"""Why a request was aborted. Programs may give any reason; those not listed here count as `other`."""


def reason_of(reason: str) -> str:
    """`reason` as one of `REASONS`."""
    head = reason.partition(":")[0]
    return head if head in REASONS else "other"


_STAYS = ("matched", "pinned", "allocated", "loading", "draining", "requeued", "stranded", "running", "preempted")
"""The states that a request stays in. It passes through the others within one call, so no scrape sees them. A request
stays in MATCHED only in a `HostCache`, after the answer "ask again"."""
_DIRECTIONS = tuple(direction.value for direction in Direction)
_TIERS = tuple(tier.name.lower() for tier in CACHE_TIERS)
_LINKS = tuple(row.tier.name.lower() for row in TIERS if row.above is not None)
"""The lower tier of each link: the source of a load, or the destination of a store."""
LOWER = tuple(row.tier.name.lower() for row in TIERS if row.above not in (None, Tier.DEVICE))
"""Tiers below host memory."""
_OUTCOMES = tuple(outcome.value for outcome in Outcome)
_RULES = tuple(rule.value for rule in EvictionRule)
_SKIPPED = (
    *(f"{row.tier.name.lower()}_full" for row in TIERS if row.is_indexed and row.above is not None),
    "in_flight", "evicted", "refused", "other",
)  # fmt: skip
_STATE, _TIER, _BELOW = {"state": _STAYS}, {"tier": _TIERS}, {"tier": LOWER}
_BLOCK_STATES = {"state": ("free", "cached", "pinned", "quarantined")}
_LINK = {"direction": _DIRECTIONS, "tier": _LINKS}
_ANSWER = {"verb": tuple(verb.value for verb in HintVerb), "outcome": tuple(outcome.value for outcome in HintOutcome)}
_WHY = {"reason": tuple(reason.value for reason in HintReason if reason is not HintReason.NONE)}
_GAUGE, _COUNTER, _HISTOGRAM = Kind.GAUGE, Kind.COUNTER, Kind.HISTOGRAM
_LOWER, _LEARNED, _QUOTAS = ShownWith.LOWER_TIERS, ShownWith.LEARNED_EVICTION, ShownWith.QUOTAS
_TENANT: dict[str, tuple[str, ...]] = {"tenant": ()}
"""The values are the accounts of the configuration, so their number is bounded, too."""
_SHARED = {
    "tier": tuple(name for tier, name in zip(CACHE_TIERS, _TIERS, strict=True) if tier in (Tier.HOST, Tier.DISK))
}

FAMILIES = (
    Family("aoffload_requests", _GAUGE, _STATE, "Live requests by state."),
    Family("aoffload_requests_waiting", _GAUGE, {}, "Requests in the wait queue for device blocks."),
    Family("aoffload_oldest_request_seconds", _GAUGE, _STATE, "Age of the oldest stay in each state of a request."),
    Family("aoffload_oldest_wait_seconds", _GAUGE, {}, "Longest current wait for device blocks."),
    Family("aoffload_oldest_step_seconds", _GAUGE, {}, "Age of the oldest open step, which holds blocks."),
    Family("aoffload_requests_admitted_total", _COUNTER, {}, "Requests that were matched and pinned."),
    Family(
        "aoffload_requests_finished_total", _COUNTER, {"outcome": ("done", "aborted"), "reason": ("", *REASONS)},
        "Requests that have ended.",
    ),
    Family("aoffload_requests_preempted_total", _COUNTER, {}, "Preemptions, which release device blocks of a request."),
    Family(
        "aoffload_tokens_total", _COUNTER, {"source": ("device_hit", "host_hit", "computed")},
        "Tokens made ready on the device, by source.",
    ),
    Family(
        "aoffload_blocks", _GAUGE, _TIER | _BLOCK_STATES,
        "Blocks of each tier by state. The states add up to aoffload_pool_blocks.",
    ),
    Family("aoffload_pool_blocks", _GAUGE, _TIER, "All blocks of each tier."),
    Family("aoffload_block_bytes", _GAUGE, {}, "Bytes of one block over all tensors."),
    Family(
        "aoffload_evicted_blocks_total", _COUNTER, _TIER | {"order": _RULES},
        "Cached blocks that were evicted.",
    ),
    Family("aoffload_eviction_learned", _GAUGE, _TIER, "1: the tier evicts in the learned order; 0: LRU.", _LEARNED),
    Family("aoffload_eviction_switches_total", _COUNTER, _TIER, "Switches between learned order and LRU.", _LEARNED),
    Family(
        "aoffload_shadow_hit_blocks", _GAUGE, _TIER | {"order": ("learned", "lru")},
        "Recent hits in the simulation of each order; the tier uses the order with more.", _LEARNED,
    ),
    Family("aoffload_remembered_runs", _GAUGE, {}, "Parts of prompts whose requests are counted.", _LEARNED),
    Family("aoffload_remembered_bytes", _GAUGE, {}, "Approximate memory of the counts of learned eviction.", _LEARNED),
    Family("aoffload_weights_switches_total", _COUNTER, {}, "Changes of the weights' epoch."),
    Family("aoffload_account_blocks", _GAUGE, _TENANT | _SHARED, "Cached blocks of each tenant's account.", _QUOTAS),
    Family(
        "aoffload_account_pinned_blocks", _GAUGE, _TENANT, "Host blocks that pins of an account hold.", _QUOTAS
    ),
    Family(
        "aoffload_account_floor_blocks", _GAUGE, _TENANT | _SHARED,
        "Blocks that other accounts do not evict while another account is above its floor.", _QUOTAS,
    ),
    Family("aoffload_account_ceiling_blocks", _GAUGE, _TENANT | _SHARED, "Maximum blocks of an account.", _QUOTAS),
    Family(
        "aoffload_account_evicted_blocks_total", _COUNTER, _TENANT | _SHARED,
        "Blocks of an account that were evicted for other accounts.", _QUOTAS,
    ),
    Family(
        "aoffload_account_replaced_blocks_total", _COUNTER, _TENANT | _SHARED,
        "Blocks of an account that were evicted for its own blocks.", _QUOTAS,
    ),
    Family(
        "aoffload_account_refused_blocks_total", _COUNTER, _TENANT | _SHARED,
        "Blocks not stored because of a ceiling or of daily writes.", _QUOTAS,
    ),
    Family("aoffload_hints_answered_total", _COUNTER, _ANSWER, "Hints of clients by verb and outcome."),
    Family("aoffload_hints_refused_total", _COUNTER, _WHY, "Hints of clients that were clipped or rejected."),
    Family("aoffload_hint_pins", _GAUGE, {}, "Prompts that a hint of a client keeps cached by a pin."),
    Family("aoffload_pins", _GAUGE, {}, "Prompts that a pin keeps cached."),
    Family(
        "aoffload_jobs", _GAUGE, {"state": ("queued", "launched", "quarantined")},
        "Transfers that have not ended, and transfers in quarantine.",
    ),
    Family(
        "aoffload_jobs_finished_total", _COUNTER, _LINK | {"outcome": (*_OUTCOMES, "discarded")},
        "Transfers that have ended.",
    ),
    Family(
        "aoffload_copied_bytes_total", _COUNTER, _LINK | {"outcome": _OUTCOMES},
        "Bytes that finished transfers moved.",
    ),
    Family("aoffload_late_completions_total", _COUNTER, {}, "Reports of a transfer that was settled before."),
    Family(
        "aoffload_verified_blocks_total", _COUNTER, {"result": ("right", "corrupt")},
        "Loaded blocks whose checksum was compared.",
    ),
    Family("aoffload_skipped_store_blocks_total", _COUNTER, {"reason": _SKIPPED}, "Blocks that were not stored."),
    Family("aoffload_request_seconds", _HISTOGRAM, _STATE, "Time in each state of a request, once left."),
    Family("aoffload_room_wait_seconds", _HISTOGRAM, {}, "Time in the wait queue for device blocks, however it ended."),
    Family("aoffload_copy_seconds", _HISTOGRAM, _LINK, "Time of one copy that landed, without its fences."),
    Family(
        "aoffload_copy_throughput_bytes_per_second", _HISTOGRAM, _LINK, "Bytes per second of a copy that landed."
    ),
    Family(
        "aoffload_fence_latency_seconds", _HISTOGRAM, _LINK,
        "Time from the report of the copy thread to the settlement in the event loop.",
    ),
    Family("aoffload_loads_declined_total", _COUNTER, {}, "Host hits computed, at least in part, to save time."),
    Family(
        "aoffload_fetches_total", _COUNTER, {"outcome": ("done", "cancelled")},
        "Fetches from below host memory that have ended.", _LOWER,
    ),
    Family("aoffload_fetches_declined_total", _COUNTER, {}, "Fetches cancelled because computing is faster.", _LOWER),
    Family(
        "aoffload_fetches_skipped_total", _COUNTER, _BELOW,
        "Fetches not begun because the tier is suspended after failures.", _LOWER,
    ),
    Family("aoffload_fetching_requests", _GAUGE, {}, "Requests that wait for a fetch.", _LOWER),
    Family("aoffload_fetching_tokens", _GAUGE, _BELOW, "Tokens that requests wait for, by source tier.", _LOWER),
    Family("aoffload_restored_blocks", _GAUGE, {}, "Blocks of an earlier process restored from the disk.", _LOWER),
    Family("aoffload_write_budget_bytes", _GAUGE, {}, "Bytes that may still be written to the disk today.", _LOWER),
    Family("aoffload_rejected_cells_total", _COUNTER, {}, "Cells of a remote store that failed verification.", _LOWER),
    Family("aoffload_storage_off", _GAUGE, _BELOW, "1 if this tier below host memory is no longer used.", _LOWER),
    Family(
        "aoffload_storage_left_alone", _GAUGE, _BELOW | {"use": tuple(use.value for use in Use)},
        "Disks and nodes of a store that are suspended after failures.", _LOWER,
    ),
    Family("aoffload_cache_off", _GAUGE, {}, "1 if the cache is off for good: it loads and stores nothing."),
    Family("aoffload_loads_paused", _GAUGE, {}, "1 while blocks in quarantine pause loads (engine-owned blocks)."),
    Family("aoffload_lost_log_events_total", _COUNTER, {}, "Log events that were lost because the logger raised."),
    Family("aoffload_observer_failures_total", _COUNTER, {}, "Calls of an observer that raised."),
    Family("aoffload_snapshot_age_seconds", _GAUGE, {}, "Age of these values: the event loop may be blocked."),
)  # fmt: skip
LABEL_VALUES = {(family.name, label): values for family in FAMILIES for label, values in family.labels.items()}
