"""The collector that a Prometheus registry asks at each scrape."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from aoffload import InvalidArgument, OffloadRuntime, RuntimeClosed, WrongThread

from .families import FAMILIES, Family, Kind
from .histogram import Histogram
from .observer import Metrics
from .snapshot import Sample, Snapshot, take_snapshot

__all__ = ["MetricsCollector"]

AGE = "aoffload_snapshot_age_seconds"


class MetricsCollector(Collector):
    """Shows `metrics`, one of the `observers` of `runtime`, to a registry. At most one per registry.

    A scrape may come from any thread. All its values are read at one moment, in the event loop and between two calls of
    the runtime, because the ledger has no locks. If the loop does not answer within `timeout_s`, the scrape shows the
    values of the one before, and their age.
    """

    def __init__(self, runtime: OffloadRuntime, metrics: Metrics, timeout_s: float = 5.0) -> None:
        if metrics not in runtime.observers.others:
            raise InvalidArgument("metrics", "must be among the observers of the runtime")
        self._runtime = runtime
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._last = take_snapshot(runtime, metrics)
        self._asking = threading.Lock()

    def describe(self) -> Iterable[Metric]:
        return [_metric_of(family, ()) for family in FAMILIES]

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot()
        samples = {**snapshot.samples, AGE: [Sample((), max(0.0, self._runtime.env.now() - snapshot.at))]}
        for family in FAMILIES:
            yield _metric_of(family, samples[family.name])

    def _snapshot(self) -> Snapshot:
        try:
            self._runtime._session.check_usable()
        except WrongThread:
            with self._asking:  # one question to the loop at a time
                return self._ask_loop()
        except RuntimeClosed:
            pass  # not open yet, or closed: nothing changes
        return self._take()

    def _take(self) -> Snapshot:
        self._last = take_snapshot(self._runtime, self._metrics)
        return self._last

    def _ask_loop(self) -> Snapshot:
        """Have the loop take the snapshot. Its errors are raised here: none may reach the worker."""
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


def _metric_of(family: Family, samples: Iterable[Sample]) -> Metric:
    if family.kind is Kind.GAUGE:
        gauge = GaugeMetricFamily(family.name, family.help, labels=family.labels)
        for sample in samples:
            gauge.add_metric(sample.labels, _number(sample))
        return gauge
    if family.kind is Kind.COUNTER:
        counter = CounterMetricFamily(family.name, family.help, labels=family.labels)
        for sample in samples:
            counter.add_metric(sample.labels, _number(sample))
        return counter
    histogram = HistogramMetricFamily(family.name, family.help, labels=family.labels)
    for sample in samples:
        assert isinstance(sample.value, Histogram)
        histogram.add_metric(sample.labels, sample.value.cumulative(), sample.value.total)
    return histogram


def _number(sample: Sample) -> float:
    assert not isinstance(sample.value, Histogram)
    return float(sample.value)
