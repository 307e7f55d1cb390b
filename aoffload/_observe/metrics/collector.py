"""The collectors that a Prometheus registry asks at each scrape."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from aoffload import InvalidArgument, WrongThread

from ..._common.arguments import check_has, check_type
from ..._extensions.assembly import AnyLedger, check_ledger
from .families import FAMILIES, Family, Kind
from .observer import Histogram, Metrics
from .snapshot import Sample, Snapshot, is_told, snapshot_of_ledger, snapshot_of_runtime

if TYPE_CHECKING:
    from aoffload import OffloadRuntime

AGE = "aoffload_snapshot_age_seconds"


class SnapshotCollector(Collector):
    """A collector of snapshots. All values of a scrape are read at one moment, between two calls of the runtime or the
    ledger."""

    def __init__(self, first: Snapshot, timeout_s: float) -> None:
        self._last = first
        self._timeout_s = timeout_s
        self._families = [family for family in FAMILIES if family.name in first.samples or family.name == AGE]

    @abstractmethod
    def _snapshot(self) -> Snapshot:
        """A new snapshot if there is an answer within `timeout_s`, otherwise the last one."""

    @abstractmethod
    def _now(self) -> float:
        """The clock of the snapshots."""

    def describe(self) -> Iterable[Metric]:
        return [_metric_of(family, ()) for family in self._families]

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot()
        samples = {**snapshot.samples, AGE: [Sample((), max(0.0, self._now() - snapshot.at))]}
        for family in self._families:
            yield _metric_of(family, samples[family.name])


class MetricsCollector(SnapshotCollector):
    """Exports `metrics`, one of the `observers` of `runtime`, to a registry. At most one per registry.

    A scrape may come from any thread. All its values are read at one moment, in the event loop and between two calls of
    the runtime, because the ledger has no locks. If the loop does not answer within `timeout_s`, the scrape gets the
    values of the previous one, and their age.
    """

    def __init__(self, runtime: OffloadRuntime, metrics: Metrics, timeout_s: float = 5.0) -> None:
        check_has("runtime", runtime, "OffloadRuntime", "ledger env statistics")
        check_type("metrics", metrics, Metrics)
        _check_told(runtime.ledger, metrics)
        self._runtime = runtime
        self._metrics = metrics
        self._asking = threading.Lock()
        super().__init__(snapshot_of_runtime(runtime, metrics), timeout_s)

    def _now(self) -> float:
        return self._runtime.env.now()

    def _snapshot(self) -> Snapshot:
        try:
            self._runtime._session.check_may_read()
        except WrongThread:
            with self._asking:  # one question to the loop at a time
                return self._ask_loop()
        return self._take()

    def _take(self) -> Snapshot:
        self._last = snapshot_of_runtime(self._runtime, self._metrics)
        return self._last

    def _ask_loop(self) -> Snapshot:
        """Have the loop take the snapshot. Its errors are raised here, because none may reach the worker."""
        answered = threading.Event()
        errors: list[Exception] = []

        def answer() -> None:
            try:
                self._take()
            except Exception as error:  # noqa: BLE001 - see above
                errors.append(error)
            answered.set()

        self._runtime.worker.call_soon(answer)
        answered.wait(self._timeout_s)
        if errors:
            raise errors[0]
        return self._last


class Lock(Protocol):
    """`threading.Lock` or `threading.RLock`."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...
    def release(self) -> None: ...


class LedgerCollector(SnapshotCollector):
    """Exports `metrics`, the observer of `ledger` or one of its `Observers`, to a registry. At most one per registry.

    `lock` is the lock that the program holds while it calls the ledger, which has no locks itself. A scrape may come
    from any thread. It takes the lock and reads all its values at one moment. If it does not get the lock within
    `timeout_s`, it exports the values of the previous scrape, and their age.

    With a `CopyQueue`, make it with `CopyQueue(..., observer=observers)`, open its transport with
    `deliver=observers.hearing(copies.deliver)`, and hold the lock around `submit` and `advance`, not in `deliver`.
    Without this, `aoffload_cache_off` and `aoffload_fence_latency_seconds` show nothing. `aoffload_oldest_...` need the
    ledger's `clock`, and `aoffload_block_bytes` its `block_bytes`. `aoffload_room_wait_seconds` and
    `aoffload_verified_blocks_total` are not exported.
    """

    def __init__(self, ledger: AnyLedger, metrics: Metrics, lock: Lock, timeout_s: float = 5.0) -> None:
        _check_told(check_ledger("ledger", ledger), metrics)
        check_has("lock", lock, "lock", "acquire release")
        self._ledger = ledger
        self._metrics = metrics
        self._lock = lock
        super().__init__(snapshot_of_ledger(ledger, metrics), timeout_s)

    def _now(self) -> float:
        return self._metrics.now()

    def _snapshot(self) -> Snapshot:
        if self._lock.acquire(timeout=self._timeout_s):
            try:
                self._last = snapshot_of_ledger(self._ledger, self._metrics)
            finally:
                self._lock.release()
        return self._last


def _check_told(ledger: AnyLedger, metrics: Metrics) -> None:
    if not is_told(metrics, ledger):
        raise InvalidArgument("metrics", "must be among the observers; otherwise the metrics stay 0")


def _metric_of(family: Family, samples: Iterable[Sample]) -> Metric:
    if family.kind is Kind.GAUGE:
        gauge = GaugeMetricFamily(family.name, family.help, labels=tuple(family.labels))
        for sample in samples:
            gauge.add_metric(sample.labels, _number(sample))
        return gauge
    if family.kind is Kind.COUNTER:
        counter = CounterMetricFamily(family.name, family.help, labels=tuple(family.labels))
        for sample in samples:
            counter.add_metric(sample.labels, _number(sample))
        return counter
    histogram = HistogramMetricFamily(family.name, family.help, labels=tuple(family.labels))
    for sample in samples:
        assert isinstance(sample.value, Histogram)
        histogram.add_metric(sample.labels, sample.value.cumulative(), sample.value.total)
    return histogram


def _number(sample: Sample) -> float:
    assert not isinstance(sample.value, Histogram)
    return float(sample.value)
