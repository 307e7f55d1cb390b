"""The way to `aoffload.metrics`, which has an extra of its own and need not be there."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

import attrs

from ...runtime import OffloadRuntime
from .errors import ApiError

__all__ = ["Metrics", "NoMetrics", "PrometheusMetrics", "find_metrics"]


class Metrics(Protocol):
    """What counts the events of a runtime, and says how many there were."""

    @property
    def runtime_options(self) -> Mapping[str, Any]:
        """What the runtime is to be opened with."""
        ...

    def watch(self, runtime: OffloadRuntime) -> None: ...

    def scrape(self) -> tuple[bytes, str]:
        """Text for Prometheus and its content type; `ApiError` with 501 if there is none. In the loop's thread."""
        ...


def find_metrics() -> Metrics:
    """Those of `aoffload.metrics`, if that can be imported."""
    try:
        return PrometheusMetrics(
            importlib.import_module("aoffload.metrics"), importlib.import_module("prometheus_client")
        )
    except ImportError as error:
        return NoMetrics(str(error))


@attrs.frozen
class NoMetrics:
    reason: str
    runtime_options: Mapping[str, Any] = attrs.field(factory=dict, init=False)

    def watch(self, runtime: OffloadRuntime) -> None:
        """Nothing to watch it with."""

    def scrape(self) -> tuple[bytes, str]:
        message = f"there are no metrics in this installation: {self.reason}"
        raise ApiError(501, message, kind="server_error", code="no_metrics")


class PrometheusMetrics:
    """A registry of its own: two servers in one process count for themselves."""

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
