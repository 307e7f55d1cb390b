"""Metrics for Prometheus (extra `metrics`). docs/metrics.md lists them."""

from .collector import MetricsCollector
from .observer import Metrics

__all__ = ["Metrics", "MetricsCollector"]
