"""The way to the metrics, which are a module of their own that need not be there."""

from __future__ import annotations

import importlib
from typing import Any

from ...runtime import OffloadRuntime
from .errors import ApiError

__all__ = ["metrics_page"]


def metrics_page(runtime: OffloadRuntime) -> tuple[bytes, str]:
    """What `aoffload.metrics` has to say about `runtime`, and its content type; 501 if it can't be imported."""
    try:
        metrics: Any = importlib.import_module("aoffload.metrics")
    except ImportError as error:
        message = f"there are no metrics in this installation: {error}"
        raise ApiError(501, message, kind="server_error", code="no_metrics") from error
    page: tuple[bytes, str] = metrics.page(runtime)
    return page
