"""Metrics for Prometheus (extra `metrics`). docs/metrics.md lists them."""

from .._extras import needed

with needed("metrics", "aoffload.metrics"):
    from .collector import LedgerCollector, MetricsCollector
    from .observer import Metrics

__all__ = ["LedgerCollector", "Metrics", "MetricsCollector"]
