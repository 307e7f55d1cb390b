"""The forecast as a table of text, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..trace.table import text_table
from ..trace.wording import counted, duration, plain, share
from .cautions import cautions
from .forecast import Forecast, Row, binary_size

__all__ = ["as_json", "as_text", "cells", "heading", "summary"]

NOT_KNOWN = "-"


def as_text(forecast: Forecast) -> Iterator[str]:
    """Lines."""
    yield from summary(forecast)
    yield ""
    yield from text_table([heading(forecast), *(cells(forecast, row) for row in forecast.rows)], first_left=3)
    warnings = list(cautions(forecast))
    if warnings:
        yield ""
        yield from (f"warning: {warning}" for warning in warnings)


def summary(forecast: Forecast) -> Iterator[str]:
    trace = forecast.trace
    asked, endless = trace.num_asked, forecast.num_endless
    yield (
        f"{plain(trace.name)}: {counted(len(trace.requests), 'request')} in {duration(trace.duration_s)}, "
        f"{counted(trace.num_prompt_tokens, 'prompt token')} in {counted(asked, 'block')} of {trace.block_tokens}, "
        f"{trace.num_blocks:,} of them different"
    )
    yield f"a cache without end would hit {endless:,} blocks ({share(endless, asked)})"
    knee = binary_size(forecast.knee_bytes)
    yield f"the knee is at {knee} of host memory: behind it, a GiB brings less than GiBs do on average up to the end"


def heading(forecast: Forecast) -> list[str]:
    names = ["", "stores, eviction", "host", "disk", "blocks hit", "on device", "in host", "on disk", "compute saved"]
    if forecast.speeds is not None:
        names += ["busy", "first token p50", "p90"]
    names += ["loads GB/s", "stores GB/s", "age at eviction"]
    return names + (["a month"] if forecast.prices is not None else [])


def cells(forecast: Forecast, row: Row) -> list[str]:
    asked, seconds = forecast.trace.num_asked, forecast.trace.duration_s
    found = [
        row.name,
        NOT_KNOWN if row.store == "off" else f"{row.store}, {row.eviction}",
        binary_size(row.host_bytes) if row.host_bytes else NOT_KNOWN,
        binary_size(row.disk_bytes) if row.disk_bytes else NOT_KNOWN,
        f"{'≥ ' if forecast.is_too_short_for(row) else ''}{row.num_hit_blocks:,}",
        *(share(blocks, asked) for blocks in row.blocks),
        share(sum(row.tokens), forecast.trace.num_prompt_tokens),
    ]
    if forecast.speeds is not None:
        times = row.first_token
        found += [] if times is None else [f"{times.busy:.0%}", duration(times.p50_s), duration(times.p90_s)]
    found += [_rate(row.loaded_bytes, seconds), _rate(row.stored_bytes, seconds), _age(forecast, row)]
    return found + (["" if row.price is None else f"{row.price:,.2f}"] if forecast.prices is not None else [])


def _rate(num_bytes: int, seconds: float) -> str:
    return f"{num_bytes / seconds / 1e9:.2f}" if seconds else NOT_KNOWN


def _age(forecast: Forecast, row: Row) -> str:
    if row.age_s is not None:
        return duration(row.age_s)
    lasts = forecast.trace.duration_s
    return NOT_KNOWN if row.has_evicted or row.name == "no cache" or not lasts else f"> {duration(lasts)}"


def as_json(forecast: Forecast) -> dict[str, Any]:
    """Bytes, seconds, blocks and tokens, as the names say."""
    trace = forecast.trace
    return {
        "trace": {
            "name": trace.name,
            "num_requests": len(trace.requests),
            "duration_s": trace.duration_s,
            "num_prompt_tokens": trace.num_prompt_tokens,
            "num_asked_blocks": trace.num_asked,
            "num_different_blocks": trace.num_blocks,
            "block_tokens": trace.block_tokens,
            "num_dropped": trace.num_dropped,
        },
        "block_bytes": forecast.block_bytes,
        "device_bytes": forecast.sizes.device,
        "knee_bytes": forecast.knee_bytes,
        "num_endless_hit_blocks": forecast.num_endless,
        "rows": [_row(row) | {"is_trace_too_short": forecast.is_too_short_for(row)} for row in forecast.rows],
        "warnings": list(cautions(forecast)),
    }


def _row(row: Row) -> dict[str, Any]:
    times, tiers = row.first_token, ("device", "host", "disk")
    return {
        "name": row.name,
        "store": row.store,
        "eviction": row.eviction,
        "host_bytes": row.host_bytes,
        "disk_bytes": row.disk_bytes,
        "hit_blocks": dict(zip(tiers, row.blocks, strict=True)),
        "hit_tokens": dict(zip(tiers, row.tokens, strict=True)),
        "num_computed_tokens": row.num_computed_tokens,
        "loaded_bytes": row.loaded_bytes,
        "stored_bytes": row.stored_bytes,
        "age_at_eviction_s": row.age_s,
        "first_token_p50_s": None if times is None else times.p50_s,
        "first_token_p90_s": None if times is None else times.p90_s,
        "busy": None if times is None else times.busy,
        "price_per_month": row.price,
    }
