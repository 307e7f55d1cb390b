"""Metrics for Prometheus (extra `metrics`). docs/metrics.md lists them."""

from .._common.extras import needed

with needed("metrics", "aoffload.metrics"):
    from .._observe.metrics.collector import LedgerCollector, MetricsCollector
    from .._observe.metrics.observer import Metrics

__all__ = ["LedgerCollector", "Metrics", "MetricsCollector"]
