"""What to buy, as one sentence.

The planner knows hits, and it knows prices only if they are given. It does not know what computing costs. So the rule
is based on the prompt tokens that a size saves from being computed:

    goal    the device alone saves some; unlimited host memory saves the most. A size is enough if it brings at least
            `ENOUGH` of that difference
    choice  the smallest enough host size of the table, without a disk. With prices: the cheapest enough row, without
            disks that would have to take more writes than a runtime makes
    nothing if unlimited memory adds less than `LEAST` of all prompt tokens, or if a load takes longer than computing
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from ..trace.wording import duration
from .forecast import BY_DISTANCE, Forecast, Row, binary_size

ENOUGH, LEAST = 0.8, 0.05


@attrs.frozen
class Advice:
    sentence: str
    """What to buy, or that nothing is worth buying."""
    row: Row | None = None
    """The row to buy. None: nothing."""


def percent(part: float) -> str:
    """Whole percent; one decimal below 1 %."""
    return f"{100 * part:.1f} %" if 0.0005 <= part < 0.0095 else f"{100 * part:.0f} %"


def saved(forecast: Forecast, row: Row) -> float:
    """The share of prompt tokens that need not be computed."""
    return sum(row.tokens) / forecast.trace.num_prompt_tokens


def advise(forecast: Forecast) -> Advice:
    alone, unlimited = forecast.rows[1], forecast.rows[-1]
    least, most = saved(forecast, alone), saved(forecast, unlimited)
    if forecast.load_share >= 1:
        return Advice(
            f"Buy nothing: loading a token from host memory takes {percent(forecast.load_share)} of the time that "
            "computing it takes."
        )
    if most - least < LEAST:
        return Advice(_nothing(least, most))
    has_disk = forecast.prices is not None
    rows = [row for row in _rows(forecast) if not row.disk_bytes or (has_disk and not forecast.writes_too_much(row))]
    enough = [row for row in rows if saved(forecast, row) - least >= ENOUGH * (most - least)]
    if enough:
        row = min(enough, key=lambda row: (row.price or 0.0, row.host_bytes, row.disk_bytes))
        return Advice(f"Buy {_named(row)}: {_brings(forecast, row)}.", row)
    row = max(rows, key=lambda row: (saved(forecast, row), -row.host_bytes, -row.disk_bytes))
    if saved(forecast, row) - least < LEAST:
        return Advice(
            f"Buy none of these sizes: the best of them, {_named(row)}, would save {percent(saved(forecast, row))} of "
            f"the prompt tokens, and the device alone saves {percent(least)}; unlimited host memory would save "
            f"{percent(most)}, so plan larger sizes with --host."
        )
    return Advice(f"Buy at least {_named(row)}, the best of these sizes: {_brings(forecast, row)}.", row)


def _rows(forecast: Forecast) -> Iterator[Row]:
    """The rows to choose from. The table may have others only."""
    found = [row for row in forecast.rows if row.host_bytes and row.kind == BY_DISTANCE and row.name != "endless"]
    yield from found or (forecast.of_size(size, 0, BY_DISTANCE) for size in forecast.host_sizes())


def _nothing(least: float, most: float) -> str:
    if percent(least) == percent(most):
        return (
            f"Buy nothing: offloading brings nothing here, because the device alone hits {percent(least)} of the "
            "prompt tokens, and unlimited host memory would hit no more."
        )
    return (
        f"Buy nothing: unlimited host memory would hit {percent(most)} of the prompt tokens, and the device alone hits "
        f"{percent(least)} already."
    )


def _named(row: Row) -> str:
    disk = f" and a disk of {binary_size(row.disk_bytes)}" if row.disk_bytes else ""
    price = "" if row.price is None else f" ({row.price:,.2f} a month)"
    return f"{binary_size(row.host_bytes)} of host memory{disk}{price}"


def _brings(forecast: Forecast, row: Row) -> str:
    here, least, most = (saved(forecast, each) for each in (row, forecast.rows[1], forecast.rows[-1]))
    found = (
        f"{percent(here)} of the prompt tokens would be hits, {_points(least, here)} more than with the device alone"
    )
    if not _difference(here, most):
        return f"{found} and as many as with unlimited host memory"
    found += f" and {_points(here, most)} fewer than with unlimited host memory"
    twice = saved(forecast, forecast.of_size(2 * row.host_bytes, row.disk_bytes, BY_DISTANCE))
    added = _points(here, twice) if _difference(here, twice) else "less than 1 point"
    return f"{found}; twice the host memory would add {added}"


def _difference(less: float, more: float) -> int:
    """Points between the percentages as they are printed."""
    return round(100 * more) - round(100 * less)


def _points(less: float, more: float) -> str:
    found = _difference(less, more)
    return f"{found} {'point' if found == 1 else 'points'}"


# -- lines below the sentence ----------------------------------------------------------------------------------------


def consequences(forecast: Forecast, advice: Advice) -> Iterator[str]:
    """What the row brings, and the speeds at which loading stops being faster than computing. Empty without speeds."""
    speeds, trace = forecast.speeds, forecast.trace
    if speeds is None:
        return
    alone, row = forecast.rows[1], advice.row
    if row is not None and row.first_token is not None and alone.first_token is not None:
        before, after = alone.first_token, row.first_token
        first = (
            f"With it, the time to the first token goes from {duration(before.p50_s)} to {duration(after.p50_s)} "
            f"(median), and from {duration(before.p90_s)} to {duration(after.p90_s)} (90th percentile)"
        )
        fewer = (alone.num_computed_tokens - row.num_computed_tokens) / speeds.prefill_tokens_per_s
        hourly = f", and prefill takes {duration(fewer / trace.duration_s * 3600)} less in an hour"
        yield f"{first}{hourly if trace.duration_s else ''}."
    least_gbs = forecast.sizes.kv_bytes_per_token / 1e9 * speeds.prefill_tokens_per_s
    most_tokens = speeds.host_gbs * 1e9 / forecast.sizes.kv_bytes_per_token
    share = (
        f"Loading a token from host memory takes {percent(forecast.load_share)} of the time that computing it takes. "
    )
    yield (
        f"{share if forecast.load_share < 1 else ''}Loading is faster only above {least_gbs:,.3g} GB/s from the host "
        f"at this prefill speed, and only below {most_tokens:,.0f} prefill tokens/s at this host speed."
    )


def rule(forecast: Forecast) -> str:
    """What the sentence is based on."""
    goal = (
        f"that saves at least {percent(ENOUGH)} of the prompt tokens that unlimited host memory would save in addition "
        "to the device alone"
    )
    if forecast.prices is None:
        chosen = (
            f"The first sentence is based on hits, not on money: it names the smallest host memory of the table {goal}."
        )
    else:
        chosen = f"The first sentence is based on your prices of memory: it names the cheapest row of the table {goal}."
    if forecast.prices is not None and forecast.sizes.disk:
        chosen += " It leaves out a disk that would get more than its size in writes a day."
    slow = ", or if loading takes longer than computing" if forecast.speeds is not None else ""
    return (
        f"{chosen} It says to buy nothing if unlimited host memory would add less than {percent(LEAST)} of all prompt "
        f"tokens{slow}. It assumes eager stores and LRU eviction, and knows no price of computing."
    )
