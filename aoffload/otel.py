"""Spans for OpenTelemetry (extra `otel`). docs/howto/logs-and-spans.md shows how to get them."""

from ._common.extras import needed

with needed("otel", "aoffload.otel"):
    from ._observe.spans import Spans

__all__ = ["Spans"]
