"""The forecast as text and as JSON: the advice, the table, and warnings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .._runtime.costs import WORTH
from ..trace.output import text_table
from ..trace.wording import counted, duration, plain
from .advice import Advice, advise, consequences, percent, rule
from .forecast import BY_DISTANCE, NO_STORE, Forecast, Row, binary_size
from .mixes import LOAD, Made

# -- warnings --------------------------------------------------------------------------------------------------------
#
# Warnings about a forecast: one line for each cause, whichever number of rows it concerns.


def span(seconds: float) -> str:
    """A duration that may be hours."""
    if seconds < 7200:
        return duration(seconds)
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02} min"


def cautions(forecast: Forecast) -> Iterator[str]:
    trace = forecast.trace
    if trace.num_dropped:
        yield f"The trace lacks {counted(trace.num_dropped, 'request')}, because the recorder could not keep up."
    too_short = sum(request.num_tokens <= trace.block_tokens for request in trace.requests)
    if 2 * too_short > len(trace.requests):
        yield (
            f"{too_short:,} of {counted(len(trace.requests), 'prompt')} are not longer than a block of the trace "
            f"({trace.block_tokens} tokens), so they never hit. Record with smaller blocks: Recorder(block_tokens=...)."
        )
    too_long = sum(len(request.blocks) >= forecast.num_device for request in trace.requests)
    if too_long:
        yield f"{counted(too_long, 'request')} {'does' if too_long == 1 else 'do'} not fit the device."
    yield from _too_short(forecast)
    yield from _never_fetched(forecast)
    yield from _too_much_written(forecast)
    yield from _too_busy(forecast)


def _too_short(forecast: Forecast) -> Iterator[str]:
    rows = [row for row in forecast.rows if forecast.is_too_short_for(row)]
    if not rows:
        return
    sizes = [row.host_bytes if row.is_disk_idle else max(row.host_bytes, row.disk_bytes) for row in rows]
    least = min(sizes)
    larger = " and more" if max(sizes) > least else ""
    ages = [row.age_s for row, size in zip(rows, sizes, strict=True) if size == least and row.age_s is not None]
    why = f"A block stays there for {span(min(ages))}" if ages else "It never fills this size"
    yield (
        f"The trace lasts {span(forecast.trace.duration_s)}, too short for {binary_size(least)}{larger}. {why}, so "
        "a longer trace could show more hits in the rows marked ≥."
    )


def _never_fetched(forecast: Forecast) -> Iterator[str]:
    """A runtime fetches only blocks that arrive sooner than they can be computed."""
    speeds = forecast.speeds
    if speeds is not None and forecast.sizes.disk and forecast.is_disk_idle:
        yield (
            f"A runtime would not use the disk: at {speeds.disk_gbs:g} GB/s, fetching a token takes "
            f"{percent(forecast.fetch_share)} of the time that computing it takes, and a runtime fetches only below "
            f"{percent(WORTH)}. So rows with a disk hit nothing there."
        )


def _too_much_written(forecast: Forecast) -> Iterator[str]:
    rows = [row for row in forecast.rows if forecast.writes_too_much(row)]
    if rows:
        row = max(rows, key=lambda row: forecast.daily_writes(row) / row.disk_bytes)
        yield (
            f"{binary_size(row.host_bytes)} of host memory would evict {binary_size(forecast.daily_writes(row))} a day "
            f"to a disk of {binary_size(row.disk_bytes)}. The disk takes its own size a day (DiskTier.daily_writes), "
            "so it would hit less than the table says."
        )


def _too_busy(forecast: Forecast) -> Iterator[str]:
    busy = [(row.first_token.busy, row) for row in forecast.rows[1:] if row.first_token is not None]
    over = [(share, row) for share, row in busy if share >= 1]
    if over:
        share, row = max(over, key=lambda pair: pair[0])
        rows = "this row" if len(over) == 1 else f"{len(over)} of the {len(forecast.rows)} rows"
        yield (
            f"Computing takes more time than the trace lasts ({percent(share)} with {label(row)}). In {rows}, times to "
            "first token grow with the length of the trace."
        )


# -- report ----------------------------------------------------------------------------------------------------------

NOT_KNOWN = "-"
MADE_UP = "This mix is an invented workload. Plan with a trace of your own for a real answer (aoffload plan TRACE)."
OWN_USERS = (
    f"The number of users depends on the prefill speed: if nothing is cached, prefill takes at most {percent(LOAD)} of "
    "the time (with more than 1 user). To compare hardware at the same workload, pass --users."
)
ASSUMES = "The mix assumes:"


def as_text(forecast: Forecast, made: Made | None = None) -> Iterator[str]:
    """The lines for a terminal. The first one says what to buy."""
    advice = advise(forecast, made)
    yield advice.sentence
    yield from below(forecast, advice, made)
    yield ""
    yield from text_table([heading(forecast), *(cells(forecast, row) for row in forecast.rows)], num_left(forecast))
    if forecast.quotas:
        yield ""
        yield from text_table(list(by_tenant(forecast)), num_left(forecast))
    warnings = list(cautions(forecast))
    if warnings:
        yield ""
        yield from (f"warning: {warning}" for warning in warnings)
    yield ""
    yield from basis(forecast)
    yield rule(forecast)
    if made is not None:
        yield ASSUMES
        yield from (f"- {line}" for line in made.mix.assumptions(made.users))


def below(forecast: Forecast, advice: Advice, made: Made | None) -> Iterator[str]:
    """The lines below the first sentence."""
    if made is not None:
        yield MADE_UP
        if made.has_own_users:
            yield OWN_USERS
    yield from consequences(forecast, advice)


def basis(forecast: Forecast) -> Iterator[str]:
    """What was planned: the trace, and the numbers given."""
    trace = forecast.trace
    yield (
        f"{plain(trace.name)}: {counted(len(trace.requests), 'request')} in {span(trace.duration_s)}, "
        f"{counted(trace.num_prompt_tokens, 'prompt token')}, blocks of {counted(trace.block_tokens, 'token')}."
    )
    given = [
        f"{binary_size(forecast.sizes.kv_bytes_per_token)} of KV in a token",
        f"{binary_size(forecast.sizes.device)} of device memory for cached KV",
    ]
    if forecast.speeds is not None:
        speeds = forecast.speeds
        given += [f"prefill at {speeds.prefill_tokens_per_s:,.6g} tokens/s", f"{speeds.host_gbs:g} GB/s from the host"]
        given += [f"{speeds.disk_gbs:g} GB/s from the disk"] * bool(forecast.sizes.disk)
    yield f"Planned with {', '.join(given)}."
    if "returns" in forecast.hints:
        yield (
            "Rows with hints: returns know the true time of each return, so these rows are an upper bound on the gain "
            "of hints."
        )


def _has_kinds(forecast: Forecast) -> bool:
    return forecast.kinds != (BY_DISTANCE,)


def num_left(forecast: Forecast) -> int:
    """Number of columns with text, which are flush left. Those after them have numbers."""
    return 1 + _has_kinds(forecast)


def label(row: Row) -> str:
    """The memory of a row."""
    if row.name == "endless":
        return "unlimited host"
    if not row.host_bytes:
        return row.name
    disk = f" + disk {binary_size(row.disk_bytes)}" if row.disk_bytes else ""
    return f"host {binary_size(row.host_bytes)}{disk}"


def _kind(row: Row) -> str:
    return NOT_KNOWN if row.kind == NO_STORE else str(row.kind)


def _configured(forecast: Forecast, row: Row) -> list[str]:
    return [label(row), *([_kind(row)] if _has_kinds(forecast) else [])]


def heading(forecast: Forecast) -> list[str]:
    names = ["memory", *(["stores, eviction"] if _has_kinds(forecast) else []), "tokens hit", "on device", "in host"]
    names += ["on disk"] if forecast.sizes.disk else []
    if forecast.speeds is not None:
        names += ["busy", "first token p50", "p90"]
    names += ["loads GB/s", "stores GB/s", "age at eviction"]
    return names + (["a month"] if forecast.prices is not None else [])


def cells(forecast: Forecast, row: Row) -> list[str]:
    asked, seconds = max(1, forecast.trace.num_prompt_tokens), forecast.trace.duration_s
    mark = "≥ " if forecast.is_too_short_for(row) else ""
    tiers = row.tokens if forecast.sizes.disk else row.tokens[:2]
    found = [*_configured(forecast, row), mark + percent(sum(row.tokens) / asked)]
    found += [percent(tokens / asked) for tokens in tiers]
    if forecast.speeds is not None:
        times = row.first_token
        found += [] if times is None else [percent(times.busy), duration(times.p50_s), duration(times.p90_s)]
    found += [_rate(row.loaded_bytes, seconds), _rate(row.stored_bytes, seconds), _age(forecast, row)]
    return found + (["" if row.price is None else f"{row.price:,.2f}"] if forecast.prices is not None else [])


def by_tenant(forecast: Forecast) -> Iterator[list[str]]:
    """The lines of a table of the hits of each tenant that has a quota, and of all other requests."""
    kinds = ["stores, eviction"] if _has_kinds(forecast) else []
    yield ["blocks hit by tenant", *kinds, *map(plain, forecast.quotas), "others"]
    asked = [forecast.num_asked_by_tenant[tenant] for tenant in forecast.quotas]
    asked.append(forecast.trace.num_asked - sum(asked))
    for row in forecast.rows[1:]:
        hits = [row.tenants[tenant] for tenant in forecast.quotas]
        hits.append(row.num_hit_blocks - sum(hits))
        shares = (f"{n:,} ({percent(n / of if of else 0.0)})" for n, of in zip(hits, asked, strict=True))
        yield [*_configured(forecast, row), *shares]


def _rate(num_bytes: int, seconds: float) -> str:
    return f"{num_bytes / seconds / 1e9:.2f}" if seconds else NOT_KNOWN


def _age(forecast: Forecast, row: Row) -> str:
    if row.age_s is not None:
        return span(row.age_s)
    lasts = forecast.trace.duration_s
    return NOT_KNOWN if row.has_evicted or row.name == "no cache" or not lasts else f"> {span(lasts)}"


def as_json(forecast: Forecast, made: Made | None = None) -> dict[str, Any]:
    """The forecast in bytes, seconds, blocks and tokens, as the field names say."""
    trace, advice = forecast.trace, advise(forecast, made)
    bought = advice.row
    return {
        "advice": {
            "sentence": advice.sentence,
            "host_bytes": 0 if bought is None else bought.host_bytes,
            "disk_bytes": 0 if bought is None else bought.disk_bytes,
            "consequences": list(consequences(forecast, advice)),
            "rule": rule(forecast),
        },
        "mix": None if made is None else _mix(made),
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


def _mix(made: Made) -> dict[str, Any]:
    return {
        "users": made.users,
        "has_own_users": made.has_own_users,
        "assumptions": [*made.mix.assumptions(made.users)],
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
