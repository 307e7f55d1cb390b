"""Access to `aoffload.metrics`, which needs an extra that may not be installed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

import attrs

from ..._runtime.runtime import OffloadRuntime
from .errors import ApiError


class Metrics(Protocol):
    """Counts the events of a runtime."""

    @property
    def runtime_options(self) -> Mapping[str, Any]:
        """Arguments that the runtime is opened with."""
        ...

    def watch(self, runtime: OffloadRuntime) -> None: ...

    def scrape(self) -> tuple[bytes, str]:
        """Text for Prometheus and its content type. `ApiError` with 501 without metrics. Call it in the loop's
        thread."""
        ...


def find_metrics() -> Metrics:
    """The metrics of `aoffload.metrics`, or `NoMetrics` if that cannot be imported."""
    try:
        return PrometheusMetrics(
            importlib.import_module("aoffload.metrics"), importlib.import_module("prometheus_client")
        )
    except ImportError:
        return NoMetrics()


@attrs.frozen
class NoMetrics:
    runtime_options: Mapping[str, Any] = attrs.field(factory=dict, init=False)

    def watch(self, runtime: OffloadRuntime) -> None:
        """Does nothing."""

    def scrape(self) -> tuple[bytes, str]:
        message = "metrics are not installed: pip install aoffload[metrics]"
        raise ApiError(501, message, kind="server_error", code="no_metrics")


class PrometheusMetrics:
    """Has a registry of its own, so two servers in one process count separately."""

    def __init__(self, metrics: Any, client: Any) -> None:
        self._module, self._client = metrics, client
        self._observer = metrics.Metrics()
        self._registry = client.CollectorRegistry()

    @property
    def runtime_options(self) -> Mapping[str, Any]:
        return {"observers": [self._observer]}

    def watch(self, runtime: OffloadRuntime) -> None:
        self._registry.register(self._module.MetricsCollector(runtime, self._observer))

    def scrape(self) -> tuple[bytes, str]:
        return self._client.generate_latest(self._registry), self._client.CONTENT_TYPE_LATEST
