"""The metrics of a runtime, as a scrape has them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from aoffload import OffloadRuntime
from aoffload.ledger import Observers
from aoffload.metrics import Metrics, MetricsCollector
from aoffload.top.look import Look

__all__ = ["registry_of", "scraped"]


def registry_of(runtime: OffloadRuntime) -> CollectorRegistry:
    """Of a runtime that is open already."""
    observer, registry, metrics = runtime.ledger._moves.observer, CollectorRegistry(), Metrics(runtime.env)
    runtime.ledger._moves.observer = Observers(observer, metrics)  # type: ignore[arg-type]
    registry.register(MetricsCollector(runtime, metrics))
    return registry


def scraped(registry: CollectorRegistry) -> Look:
    return Look.of(generate_latest(registry).decode(), 0.0)
