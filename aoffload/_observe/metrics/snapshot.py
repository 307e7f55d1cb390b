"""A snapshot of a runtime, or of a ledger without one, between two calls: its counters and its present state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import TYPE_CHECKING, TypeAlias

import attrs

from aoffload import Tier
from aoffload._kernel.pools import LeastRecentlyUsed, TierBlocks
from aoffload._kernel.protocols import EvictionOrder
from aoffload._observe.observers import each_observer
from aoffload._transfer.breaker import LeftAlone, Use
from aoffload.ledger import (
    AccountStatistics,
    EvictionRule,
    EvictionStatistics,
    HintStatistics,
    LedgerLog,
    LedgerStatistics,
    Observers,
    TierStatistics,
)

from ..._eviction.accounts import AccountOrder
from ..._eviction.checkpoints import CheckpointOrder
from ..._extensions.assembly import AnyLedger
from .families import LABEL_VALUES, LOWER
from .observer import Histogram, Metrics

if TYPE_CHECKING:  # it needs torch, and a ledger does not
    from aoffload import OffloadRuntime
    from aoffload._runtime.runtime import RuntimeStatistics

Values: TypeAlias = "float | Histogram"


@attrs.frozen
class Sample:
    labels: tuple[str, ...]
    value: Values


@attrs.frozen
class Snapshot:
    at: float
    """Time of the snapshot, by the clock of the runtime, or of the metrics."""
    samples: Mapping[str, list[Sample]]
    """By the name of the metric."""


def snapshot_of_runtime(runtime: OffloadRuntime, metrics: Metrics) -> Snapshot:
    """Read all values. Call it in the event loop's thread, between two calls of the runtime."""
    found = runtime.statistics()
    verified = {"right": found.transfers.blocks_verified, "corrupt": found.transfers.blocks_corrupt}
    return _snapshot(
        runtime.env.now(),
        _counted(metrics, runtime.ledger),
        _standing(runtime.ledger, found),
        _ages(runtime.ledger),
        _lower(runtime, found),
        [
            ("aoffload_block_bytes", _one(runtime.transport.block_bytes)),
            ("aoffload_cache_off", _one(bool(found.off_reason))),
            ("aoffload_loads_declined_total", _one(found.num_loads_declined)),
            ("aoffload_room_wait_seconds", [Sample((), metrics.room_wait.copy())]),
            ("aoffload_verified_blocks_total", _each("aoffload_verified_blocks_total", "result", verified)),
        ],
    )


def snapshot_of_ledger(ledger: AnyLedger, metrics: Metrics) -> Snapshot:
    """Read all values that a ledger without a runtime has. Call it between two calls of the ledger."""
    return _snapshot(
        metrics.now(),
        _counted(metrics, ledger),
        _standing(ledger, ledger.statistics()),
        _ages(ledger) if ledger.moves.clock is not None else (),
        [
            ("aoffload_block_bytes", _one(ledger.block_bytes)),
            ("aoffload_cache_off", _one(metrics.is_cache_off)),
        ],
    )


def is_told(metrics: Metrics, ledger: AnyLedger) -> bool:
    """Whether `metrics` is among the observers of `ledger`."""
    return any(one is metrics for one in each_observer(ledger.moves.observer))


def _snapshot(at: float, *parts: Iterable[tuple[str, Iterable[Sample]]]) -> Snapshot:
    return Snapshot(at, {name: list(found) for part in parts for name, found in part})


def _counted(metrics: Metrics, ledger: AnyLedger) -> Iterator[tuple[str, Iterable[Sample]]]:
    """The observer's counters."""
    tiers = _tiers_of(ledger)
    if tiers & set(LOWER):
        yield "aoffload_fetches_total", _each("aoffload_fetches_total", "outcome", metrics.fetches)
    yield "aoffload_requests_admitted_total", _one(metrics.num_admitted)
    yield "aoffload_requests_preempted_total", _one(metrics.num_preempted)
    yield "aoffload_requests_finished_total", _finished(metrics)
    yield "aoffload_tokens_total", _each("aoffload_tokens_total", "source", metrics.tokens)
    yield "aoffload_jobs_finished_total", _by_hop("aoffload_jobs_finished_total", metrics.jobs, tiers)
    yield "aoffload_copied_bytes_total", _by_hop("aoffload_copied_bytes_total", metrics.copied_bytes, tiers)
    skipped = "aoffload_skipped_store_blocks_total"
    yield skipped, _each(skipped, "reason", metrics.skipped_blocks)
    yield "aoffload_request_seconds", _copies(metrics.state_seconds)
    yield "aoffload_copy_seconds", _of_hops(metrics.copy_seconds, tiers)
    yield "aoffload_copy_throughput_bytes_per_second", _of_hops(metrics.throughput, tiers)
    yield "aoffload_fence_latency_seconds", _of_hops(metrics.fence_latency, tiers)


def _standing(ledger: AnyLedger, found: LedgerStatistics) -> Iterator[tuple[str, Iterable[Sample]]]:
    """The present state of the ledger, and the number of events that its observers have lost."""
    live = Counter(record.state.value for record in ledger.live_requests.values())
    yield "aoffload_requests", _each("aoffload_requests", "state", live)
    yield "aoffload_requests_waiting", _one(found.num_waiting)
    present = [tier for tier in ledger.cache.tiers if not tier.is_absent]
    yield "aoffload_blocks", [sample for tier in present for sample in _occupancy(tier, tier.statistics())]
    ours = [tier for tier in present if not tier.is_outside]  # the state of an engine's pool is not known here
    pools = [Sample((tier.tier.name.lower(),), tier.pool.num_blocks) for tier in ours]
    yield "aoffload_pool_blocks", pools
    yield "aoffload_evicted_blocks_total", _evicted(ours, found.eviction)
    if found.eviction is not None:
        yield from _learned(found.eviction)
    yield "aoffload_weights_switches_total", _one(found.num_weights_changes)
    if found.quotas:
        yield from _accounts(found.quotas)
    yield from _hints(found.hints)
    yield "aoffload_pins", _one(found.num_pins)
    jobs = Counter(job.state.value for job in ledger.jobs.unsettled.values())
    jobs["quarantined"] = len(ledger.jobs.quarantined)
    yield "aoffload_jobs", _each("aoffload_jobs", "state", jobs)
    if tiers := _tiers_of(ledger) & set(LOWER):
        situation, name = ledger.reports, "aoffload_fetching_tokens"
        tokens = {tier.name.lower(): number for tier, number in situation.fetching().items()}
        yield "aoffload_fetching_requests", _one(situation.num_fetching)
        yield name, [sample for sample in _each(name, "tier", tokens) if sample.labels[0] in tiers]
    yield "aoffload_late_completions_total", _one(found.num_late_completions)
    yield "aoffload_loads_paused", _one(found.loads_paused)
    told = list(each_observer(ledger.moves.observer))
    num_lost = sum(one.num_lost_events for one in told if isinstance(one, LedgerLog))
    yield "aoffload_lost_log_events_total", _one(num_lost)
    num_failures = sum(one.num_failures for one in told if isinstance(one, Observers))
    yield "aoffload_observer_failures_total", _one(num_failures)


def _hints(found: HintStatistics | None) -> Iterator[tuple[str, Iterable[Sample]]]:
    """Answers to the hints of clients, and their pins."""
    answers, reasons = Counter[tuple[str, str]](), Counter[str]()
    for (verb, outcome, reason), number in ({} if found is None else found.answers).items():
        answers[verb.value, outcome.value] += number
        reasons[reason.value] += number
    name = "aoffload_hints_answered_total"
    keys = product(LABEL_VALUES[name, "verb"], LABEL_VALUES[name, "outcome"])
    yield name, [Sample(key, answers[key]) for key in keys]
    yield "aoffload_hints_refused_total", _each("aoffload_hints_refused_total", "reason", reasons)
    yield "aoffload_hint_pins", _one(0 if found is None else found.num_pins)


def _rule_of(order: EvictionOrder) -> EvictionRule:
    if isinstance(order, AccountOrder):  # of quotas, which have an order for each account
        return EvictionRule.LRU if order.is_lru else EvictionRule.CHECKPOINTS
    rules = {LeastRecentlyUsed: EvictionRule.LRU, CheckpointOrder: EvictionRule.CHECKPOINTS}
    return rules.get(type(order), EvictionRule.OWN)


def _evicted(tiers: Iterable[TierBlocks], found: EvictionStatistics | None) -> Iterator[Sample]:
    learns = {} if found is None else {each.tier: each for each in found.tiers}
    for tier in tiers:
        by_rule = dict.fromkeys(EvictionRule, 0)
        each = learns.get(tier.tier)
        if each is not None:
            by_rule |= {EvictionRule.LEARNED: each.num_evicted_learned, EvictionRule.LRU: each.num_evicted_lru}
        else:
            by_rule[_rule_of(tier.order)] = tier.num_evicted
        for rule, number in by_rule.items():
            yield Sample((tier.tier.name.lower(), rule.value), number)


def _accounts(found: Iterable[AccountStatistics]) -> Iterator[tuple[str, Iterable[Sample]]]:
    """The accounts of tenants, by name."""
    shares = [((account.name, each.tier.name.lower()), each) for account in found for each in account.tiers]
    yield "aoffload_account_blocks", [Sample(labels, each.num_blocks) for labels, each in shares]
    yield "aoffload_account_floor_blocks", [Sample(labels, each.floor) for labels, each in shares]
    yield "aoffload_account_ceiling_blocks", [Sample(labels, each.ceiling) for labels, each in shares]
    yield "aoffload_account_evicted_blocks_total", [Sample(labels, each.num_evicted) for labels, each in shares]
    yield "aoffload_account_replaced_blocks_total", [Sample(labels, each.num_replaced) for labels, each in shares]
    yield "aoffload_account_refused_blocks_total", [Sample(labels, each.num_refused) for labels, each in shares]
    yield "aoffload_account_pinned_blocks", [Sample((account.name,), account.num_pinned) for account in found]


def _learned(found: EvictionStatistics) -> Iterator[tuple[str, Iterable[Sample]]]:
    """Decisions and memory of learned eviction."""
    named = [(each.tier.name.lower(), each) for each in found.tiers]
    learned = [Sample((name,), each.rule is EvictionRule.LEARNED) for name, each in named]
    yield "aoffload_eviction_learned", learned
    yield "aoffload_eviction_switches_total", [Sample((name,), each.num_switches) for name, each in named]
    hits = [(name, (("learned", each.learned_hits), ("lru", each.lru_hits))) for name, each in named]
    yield "aoffload_shadow_hit_blocks", [Sample((name, order), value) for name, both in hits for order, value in both]
    yield "aoffload_remembered_runs", _one(found.num_remembered_runs)
    yield "aoffload_remembered_bytes", _one(found.num_remembered_bytes)


def _ages(ledger: AnyLedger) -> Iterator[tuple[str, Iterable[Sample]]]:
    """The age of the oldest request in each state, and of similar objects; 0 if there is none, or no clock yet."""
    states = "aoffload_oldest_request_seconds"
    yield states, _each(states, "state", ledger.reports.oldest_by_state())
    yield "aoffload_oldest_wait_seconds", _one(ledger.reports.oldest_wait_s())
    yield "aoffload_oldest_step_seconds", _one(ledger.reports.oldest_step_s())


def _one(value: float) -> list[Sample]:
    return [Sample((), value)]


def _each(name: str, label: str, values: Mapping[str, float]) -> list[Sample]:
    """A sample for every value of the label, zeros too, because a rate needs a first sample."""
    return [Sample((value,), values.get(value, 0)) for value in LABEL_VALUES[name, label]]


def _lower(runtime: OffloadRuntime, found: RuntimeStatistics) -> Iterator[tuple[str, Iterable[Sample]]]:
    """The runtime's figures for tiers below host memory."""
    disk, remote = runtime._session.disk, runtime._session.remote
    works = runtime._session.lower_tiers
    if not works:
        return
    yield "aoffload_fetches_declined_total", _one(found.num_fetches_declined)
    off = {work.tier.name.lower(): False for work in works}
    alone: dict[str, tuple[LeftAlone, ...]] = dict.fromkeys(off, ())
    skipped = [Sample((work.tier.name.lower(),), work.num_fetches_skipped) for work in works]
    yield "aoffload_fetches_skipped_total", skipped
    if disk is not None:
        alone["disk"] = disk.disk.statistics().left_alone
        off["disk"] = disk.state.value == "off"
        yield "aoffload_restored_blocks", _one(disk.num_restored)
        yield "aoffload_write_budget_bytes", _one(disk.budget.left(runtime.env.now()))
    if remote is not None:
        statistics = remote.remote.statistics()
        off["remote"], alone["remote"] = not remote.is_on, statistics.left_alone
        yield "aoffload_rejected_cells_total", _one(statistics.cells_corrupt)
    yield "aoffload_storage_off", [Sample((tier,), is_off) for tier, is_off in off.items()]
    uses = {tier: Counter(one.use for one in found) for tier, found in alone.items()}
    left = [Sample((tier, use.value), count[use]) for tier, count in uses.items() for use in Use]
    yield "aoffload_storage_left_alone", left


def _tiers_of(ledger: AnyLedger) -> set[str]:
    """Names of the configured tiers."""
    return {tier.name.lower() for tier in ledger.jobs.tiers}


def _by_hop(name: str, values: Mapping[tuple[str, str, str], int], tiers: set[str]) -> list[Sample]:
    labels = [LABEL_VALUES[name, label] for label in ("direction", "tier", "outcome")]
    keys = [(direction, tier, outcome) for direction, tier, outcome in product(*labels) if tier in tiers]
    return [Sample(key, values.get(key, 0)) for key in keys]


def _of_hops(histograms: Mapping[tuple[str, Tier], Histogram], tiers: set[str]) -> list[Sample]:
    found = [((direction, tier.name.lower()), histogram) for (direction, tier), histogram in histograms.items()]
    return [Sample(labels, histogram.copy()) for labels, histogram in found if labels[1] in tiers]


def _finished(metrics: Metrics) -> list[Sample]:
    reasons = LABEL_VALUES["aoffload_requests_finished_total", "reason"]
    keys = [("aborted" if reason else "done", reason) for reason in reasons]
    return [Sample(key, metrics.finished[key]) for key in keys]


def _occupancy(tier: TierBlocks, found: TierStatistics) -> Iterator[Sample]:
    for state in ("pinned", "quarantined") if tier.is_outside else LABEL_VALUES["aoffload_blocks", "state"]:
        yield Sample((tier.tier.name.lower(), state), getattr(found, f"num_{state}"))


def _copies(histograms: Mapping[str, Histogram]) -> list[Sample]:
    return [Sample((value,), histogram.copy()) for value, histogram in histograms.items()]
