"""Counts events as they happen, in plain numbers, in the thread that calls the ledger."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import attrs

from ... import RequestState, Tier
from ..._common.arguments import check_type
from ..._common.env import Env
from ..._common.tiers import TIERS
from ...ledger import (
    CacheTransferMoved,
    CacheTransferState,
    CacheTurnedOff,
    Completion,
    CompletionDelivered,
    Event,
    Fetch,
    JobMoved,
    JobState,
    LedgerRequest,
    Outcome,
    RequestMoved,
    StoreSkipped,
    WaitedForBlocks,
)
from .families import LABEL_VALUES, reason_of

# -- histogram -------------------------------------------------------------------------------------------------------
#
# A histogram in plain numbers: adding a value costs one binary search, and a copy of all counts is taken at once.

SECONDS = (1e-5, 1e-4, 5e-4, 1e-3, 5e-3, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds in seconds, from a turn of the event loop to a load that was given up and computed."""
THROUGHPUT = (1e7, 1e8, 2.5e8, 5e8, 1e9, 2.5e9, 5e9, 1e10, 2e10, 4e10, 8e10)
"""Bounds in bytes per second, from the throughput of a disk to that of a device link."""


@attrs.define
class Histogram:
    bounds: tuple[float, ...]
    """The highest value of each bucket except the last, which has no bound."""
    counts: list[int] = attrs.field(init=False)
    total: float = 0.0

    @counts.default
    def _no_counts(self) -> list[int]:
        return [0] * (len(self.bounds) + 1)

    @property
    def num_values(self) -> int:
        return sum(self.counts)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> Histogram:
        twin = Histogram(self.bounds)
        twin.counts, twin.total = self.counts[:], self.total
        return twin

    def cumulative(self) -> list[tuple[str, float]]:
        """Each bound, and the number of values that are not above it."""
        found: list[tuple[str, float]] = []
        num_below = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            num_below += count
            found.append(("+Inf" if bound == float("inf") else repr(bound), float(num_below)))
        return found


# -- observer --------------------------------------------------------------------------------------------------------

_S = RequestState
Link = tuple[str, Tier]
"""The direction, and the lower tier: the source of a load, or the destination of a store."""
_SKIPPED = LABEL_VALUES["aoffload_skipped_store_blocks_total", "reason"]
_OVER = (_S.DONE, _S.ABORTED)
MAX_REPORTS = 1024
"""Bound on reports without a settlement. A job that was given up leaves one if it still reports."""


class Metrics:
    """Counts events, as one of the `observers` of one runtime or of one `Ledger`. If you give the runtime an `env`,
    pass it here, too, because it has the clock."""

    def __init__(self, env: Env | None = None) -> None:
        self.now = Env().now if env is None else check_type("env", env, Env).now
        self.num_admitted = 0
        self.num_preempted = 0
        self.finished: Counter[tuple[str, str]] = Counter()
        """By outcome and reason."""
        self.tokens: Counter[str] = Counter()
        self.jobs: Counter[tuple[str, str, str]] = Counter()
        """By direction, lower tier and outcome."""
        self.copied_bytes: Counter[tuple[str, str, str]] = Counter()
        self.fetches: Counter[str] = Counter()
        self.skipped_blocks: Counter[str] = Counter()
        stays = LABEL_VALUES["aoffload_request_seconds", "state"]
        self.state_seconds = {state: Histogram(SECONDS) for state in stays}
        self.room_wait = Histogram(SECONDS)
        links = [link for row in TIERS if row.above is not None for link in (("load", row.tier), ("store", row.tier))]
        self.copy_seconds = {link: Histogram(SECONDS) for link in links}
        self.throughput = {link: Histogram(THROUGHPUT) for link in links}
        self.fence_latency = {link: Histogram(SECONDS) for link in links}
        self.is_cache_off = False
        """Whether a `CopyQueue` has turned the cache off."""
        self._since: dict[LedgerRequest, float] = {}
        """The time at which each live request entered its state."""
        self._ready: dict[LedgerRequest, int] = {}
        """Number of tokens that were ready when the request began to run."""
        self._reports: deque[tuple[int, float]] = deque()
        """Job and time of each report, as the copy threads append them."""
        self._reported: dict[int, float] = {}

    def observe(self, event: Event) -> None:
        count = _COUNTED.get(type(event))
        if count is not None:
            count(self, event)

    # -- requests -------------------------------------------------------------------------------------------------

    def request_moved(self, event: RequestMoved) -> None:
        now, record, old, state, reason = self.now(), event.request, event.old, event.new, event.reason
        since = self._since.get(record)
        if old is _S.QUEUED:
            self.num_admitted += 1
        if since is not None and old.value in self.state_seconds:
            self.state_seconds[old.value].add(now - since)
        if old is _S.RUNNING:
            self._count_computed(event)
        if state in _OVER:
            self._since.pop(record, None)
            self.finished["done" if state is _S.DONE else "aborted", reason_of(reason) if reason else ""] += 1
            return
        self._since[record] = now
        if state is _S.RUNNING:
            self._count_ready(event)
        elif state is _S.PREEMPTED:
            self.num_preempted += 1

    def _count_ready(self, event: RequestMoved) -> None:
        """Count the tokens that it does not compute: hits that are ready after the load. Other ready tokens are a
        fork's copy."""
        record, ready, match = event.request, event.num_computed_tokens, event.match
        on_device = min(ready, max(match.num_device_tokens, record.given_tokens))  # an engine's hit may end in a unit
        self.tokens["device_hit"] += on_device
        self.tokens["host_hit"] += min(ready - on_device, match.num_host_tokens)
        self._ready[record] = ready

    def _count_computed(self, event: RequestMoved) -> None:
        ready = self._ready.pop(event.request, event.num_computed_tokens)
        self.tokens["computed"] += max(0, event.num_computed_tokens - ready)  # a fork may be invalidated further back

    def waited_for_blocks(self, event: WaitedForBlocks) -> None:
        self.room_wait.add(event.seconds)

    # -- transfers ------------------------------------------------------------------------------------------------

    def job_moved(self, event: JobMoved) -> None:
        job = event.job
        link, completion = (job.plan.direction.value, max(job.plan.link)), job.completion
        if event.new is JobState.DISCARDED:
            self.jobs[*_named(link), "discarded"] += 1
        elif completion is not None and event.new is not JobState.LAUNCHED:
            self._count_completion(link, completion)
            self._count_latency(link, completion.job_id)

    def _count_completion(self, link: Link, completion: Completion) -> None:
        key = (*_named(link), completion.outcome.value)
        self.jobs[key] += 1
        self.copied_bytes[key] += completion.num_bytes
        if completion.outcome is Outcome.LANDED and completion.duration_s > 0:
            self.copy_seconds[link].add(completion.duration_s)
            self.throughput[link].add(completion.num_bytes / completion.duration_s)

    def completion_delivered(self, event: CompletionDelivered) -> None:
        """Called in the copy thread, unlike the other methods."""
        self._reports.append((event.completion.job_id, self.now()))

    def _count_latency(self, link: Link, job_id: int) -> None:
        while self._reports:
            reported_id, at = self._reports.popleft()
            self._reported.setdefault(reported_id, at)
        reported_s = self._reported.pop(job_id, None)
        if reported_s is not None:
            self.fence_latency[link].add(self.now() - reported_s)
        while len(self._reported) > MAX_REPORTS:
            del self._reported[next(iter(self._reported))]

    def cache_turned_off(self, _: CacheTurnedOff) -> None:
        self.is_cache_off = True

    def cache_transfer_moved(self, event: CacheTransferMoved) -> None:
        if isinstance(event.transfer, Fetch) and event.new in (CacheTransferState.DONE, CacheTransferState.CANCELLED):
            self.fetches[event.new.value] += 1

    def store_skipped(self, event: StoreSkipped) -> None:
        self.skipped_blocks[event.reason if event.reason in _SKIPPED else "other"] += event.num_blocks


_COUNTED: dict[type[Event], Callable[[Metrics, Any], None]] = {
    RequestMoved: Metrics.request_moved,
    WaitedForBlocks: Metrics.waited_for_blocks,
    JobMoved: Metrics.job_moved,
    CompletionDelivered: Metrics.completion_delivered,
    CacheTurnedOff: Metrics.cache_turned_off,
    CacheTransferMoved: Metrics.cache_transfer_moved,
    StoreSkipped: Metrics.store_skipped,
}


def _named(link: Link) -> tuple[str, str]:
    return link[0], link[1].name.lower()
