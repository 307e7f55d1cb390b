"""vLLM's classes around the counts: its log line and its Prometheus metrics."""

from __future__ import annotations

from typing import Any

import attrs

from .internals import KVConnectorPromMetrics, KVConnectorStats


@attrs.frozen
class Family:
    labels: tuple[str, ...]
    help: str
    is_gauge: bool = False


FAMILIES = {
    "jobs": Family(("direction", "tier", "outcome"), "Copies that have ended: loads from this tier and stores to it."),
    "copied_blocks": Family(("direction", "tier"), "Blocks that arrived on every rank."),
    "copied_bytes": Family(("direction", "tier"), "Bytes that copies moved, on all ranks together."),
    "copy_seconds": Family(("direction", "tier"), "Time that copies took, on the slowest rank."),
    "overdue_jobs": Family(("direction", "tier"), "Copies that took longer than transfer_timeout_s."),
    "skipped_store_blocks": Family(("reason",), "Blocks that were not stored."),
    "lost_tokens": Family((), "Tokens that a load failed to bring, so they are computed."),
    "declined_loads": Family((), "Hits that were not loaded because computing costs less."),
    "fetches": Family((), "Fetches that requests have waited for."),
    "late_fetches": Family((), "Fetches cancelled at their deadline, because computing is faster."),
    "declined_fetches": Family((), "Fetches not begun because computing is faster."),
    "restored_blocks": Family((), "Blocks of an earlier process that were restored from the disk."),
    "hints": Family(("verb", "outcome", "reason"), "Hints of requests by outcome."),
    "turned_off": Family(("what",), "Times that the cache, or a tier below host memory, was turned off."),
    "blocks": Family(
        ("tier", "state"), "Blocks of each tier by state; on the device, blocks that copies hold.", is_gauge=True
    ),
    "disk_budget_bytes": Family((), "Bytes that may still be written to the disk today.", is_gauge=True),
    "disk_off": Family((), "1 if the disk is no longer used.", is_gauge=True),
    "remote_off": Family((), "1 if the remote store is no longer used.", is_gauge=True),
    "left_alone": Family(
        ("tier", "use"), "1 while the tier is suspended after failures (remote: every node).", is_gauge=True
    ),
    "off": Family((), "1 if the cache is off for good: it loads and stores nothing.", is_gauge=True),
}
"""`vllm:aoffload_NAME`, counters with `_total` at the end."""


class OffloadStatistics(KVConnectorStats):  # type: ignore[misc]
    """Counts of an interval, and the gauges at its end. `data` maps names as in `counts` to numbers."""

    def reset(self) -> None:
        self.data.clear()

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: OffloadStatistics) -> OffloadStatistics:
        for name, value in other.data.items():
            is_gauge = FAMILIES[name.partition("|")[0]].is_gauge
            self.data[name] = value if is_gauge else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name.replace("|", " "): value for name, value in self.data.items()}


class OffloadMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:aoffload_*` of each engine."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._metrics = {name: self._made(name, family) for name, family in FAMILIES.items()}

    def _made(self, name: str, family: Family) -> Any:
        labels = [*self._labelnames, *family.labels]
        if family.is_gauge:
            return self._gauge_cls(f"vllm:aoffload_{name}", family.help, labels, multiprocess_mode="mostrecent")
        return self._counter_cls(f"vllm:aoffload_{name}_total", family.help, labels)

    def observe(self, transfer_stats_data: dict[str, float], engine_idx: int = 0) -> None:
        for key, value in transfer_stats_data.items():
            name, *labels = key.split("|")
            metric = self._metrics[name].labels(*self.per_engine_labelvalues[engine_idx], *labels)
            if FAMILIES[name].is_gauge:
                metric.set(value)
            else:
                metric.inc(value)
