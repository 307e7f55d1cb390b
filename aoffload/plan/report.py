"""The forecast as a text table, and as JSON, with cautions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .._runtime.costs import WORTH
from ..trace.output import text_table
from ..trace.wording import counted, duration, plain, share
from .forecast import NO_STORE, Forecast, Row, binary_size

# -- cautions --------------------------------------------------------------------------------------------------------
#
# Cautions about a forecast, one line each.

DAY_S = 86_400


def cautions(forecast: Forecast) -> Iterator[str]:
    trace = forecast.trace
    if trace.num_dropped:
        yield f"the recorder could not keep up with {trace.num_dropped:,} requests: they are missing"
    too_short = sum(request.num_tokens <= trace.block_tokens for request in trace.requests)
    if 2 * too_short > len(trace.requests):
        yield (
            f"{too_short:,} of {counted(len(trace.requests), 'prompt')} are no longer than a block of the trace, "
            f"{trace.block_tokens} tokens, and never hit: record with a smaller `block_tokens`"
        )
    too_long = sum(len(request.blocks) >= forecast.num_device for request in trace.requests)
    if too_long:
        yield f"{counted(too_long, 'request')} {'does' if too_long == 1 else 'do'} not fit the device"
    yield from dict.fromkeys(_too_short(forecast, row) for row in forecast.rows if forecast.is_too_short_for(row))
    yield from _never_fetched(forecast)
    yield from _too_much_written(forecast)
    yield from _too_busy(forecast)


def _too_short(forecast: Forecast, row: Row) -> str:
    age = "it is never full" if row.age_s is None else f"it keeps blocks for {duration(row.age_s)}"
    num_bytes = row.host_bytes if row.is_disk_idle else max(row.host_bytes, row.disk_bytes)
    size, lasts = binary_size(num_bytes), duration(forecast.trace.duration_s)
    return f"the trace, of {lasts}, is too short for {size}: {age}, and a longer one would hit more"


def _never_fetched(forecast: Forecast) -> Iterator[str]:
    """A runtime fetches only blocks that arrive sooner than they can be computed."""
    speeds = forecast.speeds
    if speeds is not None and forecast.sizes.disk and forecast.is_disk_idle:
        yield (
            f"at {speeds.disk_gbs:g} GB/s a fetch from the disk takes {forecast.fetch_share:.0%} of the time that "
            f"computing takes; a runtime fetches what takes less than {WORTH:.0%}, so it would leave the disk alone: "
            "rows with a disk hit nothing there"
        )


def _too_much_written(forecast: Forecast) -> Iterator[str]:
    """Blocks that host memory evicts go to the disk, within `DiskTier.daily_writes`, by default the disk's size per
    day."""
    lasts_s = forecast.trace.duration_s
    rows = [row for row in forecast.rows if row.disk_bytes]
    if not rows or not lasts_s:
        return
    row = max(rows, key=lambda row: (row.stored_bytes - row.host_bytes) / row.disk_bytes)
    written = max(0, row.stored_bytes - row.host_bytes) / lasts_s * DAY_S
    if written > row.disk_bytes:
        yield (
            f"behind {binary_size(row.host_bytes)}, {binary_size(written)} a day, at this rate, would go to a disk of "
            f"{binary_size(row.disk_bytes)}: near its `daily_writes`, by default its size, only what was asked for "
            "twice is written, then nothing, and it would hit less"
        )


def _too_busy(forecast: Forecast) -> Iterator[str]:
    busy = [(row.first_token.busy, row) for row in forecast.rows[1:] if row.first_token is not None]
    over = [(share, row) for share, row in busy if share >= 1]
    if over:
        share, row = max(over, key=lambda pair: pair[0])
        about = f"{row.name}, {binary_size(row.host_bytes)}" if row.host_bytes else row.name
        more = f", and with {counted(len(over) - 1, 'other size')} more than all of it" if len(over) > 1 else ""
        yield (
            f"{about}: computing takes {share:.0%} of the trace's time{more}, so that times to first token grow as "
            "long as it lasts"
        )


# -- report ----------------------------------------------------------------------------------------------------------

NOT_KNOWN = "-"


def as_text(forecast: Forecast) -> Iterator[str]:
    """The lines of the table."""
    yield from summary(forecast)
    yield ""
    yield from text_table([heading(forecast), *(cells(forecast, row) for row in forecast.rows)], first_left=3)
    if forecast.quotas:
        yield ""
        yield from text_table(list(by_tenant(forecast)), first_left=3)
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
    if "returns" in forecast.hints:
        yield "hints: returns have the true time of each return, so these rows are an upper bound on the gain of hints"


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
        *_configured(row),
        f"{'≥ ' if forecast.is_too_short_for(row) else ''}{row.num_hit_blocks:,}",
        *(share(blocks, asked) for blocks in row.blocks),
        share(sum(row.tokens), forecast.trace.num_prompt_tokens),
    ]
    if forecast.speeds is not None:
        times = row.first_token
        found += [] if times is None else [f"{times.busy:.0%}", duration(times.p50_s), duration(times.p90_s)]
    found += [_rate(row.loaded_bytes, seconds), _rate(row.stored_bytes, seconds), _age(forecast, row)]
    return found + (["" if row.price is None else f"{row.price:,.2f}"] if forecast.prices is not None else [])


def _configured(row: Row) -> list[str]:
    return [
        NOT_KNOWN if row.kind == NO_STORE else str(row.kind),
        binary_size(row.host_bytes) if row.host_bytes else NOT_KNOWN,
        binary_size(row.disk_bytes) if row.disk_bytes else NOT_KNOWN,
    ]


def by_tenant(forecast: Forecast) -> Iterator[list[str]]:
    """The lines of a table of the hits of each tenant that has a quota, and of all other requests."""
    yield ["blocks hit by tenant", "stores, eviction", "host", "disk", *map(plain, forecast.quotas), "others"]
    asked = [forecast.num_asked_by_tenant[tenant] for tenant in forecast.quotas]
    asked.append(forecast.trace.num_asked - sum(asked))
    for row in forecast.rows[1:]:
        hits = [row.tenants[tenant] for tenant in forecast.quotas]
        hits.append(row.num_hit_blocks - sum(hits))
        yield [row.name, *_configured(row), *(f"{n:,} ({share(n, of)})" for n, of in zip(hits, asked, strict=True))]


def _rate(num_bytes: int, seconds: float) -> str:
    return f"{num_bytes / seconds / 1e9:.2f}" if seconds else NOT_KNOWN


def _age(forecast: Forecast, row: Row) -> str:
    if row.age_s is not None:
        return duration(row.age_s)
    lasts = forecast.trace.duration_s
    return NOT_KNOWN if row.has_evicted or row.name == "no cache" or not lasts else f"> {duration(lasts)}"


def as_json(forecast: Forecast) -> dict[str, Any]:
    """The forecast in bytes, seconds, blocks and tokens, as the field names say."""
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
            "num_asked_blocks_by_tenant": forecast.num_asked_by_tenant,
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
        "store": row.kind.store,
        "eviction": row.kind.eviction,
        "hints": row.kind.hints,
        "has_quotas": row.kind.has_quotas,
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
        "hit_blocks_by_tenant": dict(row.tenants),
    }
