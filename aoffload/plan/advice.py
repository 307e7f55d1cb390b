"""What to buy, as one sentence.

The planner knows hits, and it knows prices only if they are given. It does not know what computing costs. So the rule
is based on the prompt tokens that a size saves from being computed:

    goal    the gain of a size is the tokens that it saves beyond the device alone. Unlimited host memory has the
            largest gain. A size is enough if it has at least `ENOUGH` of the largest gain
    choice  the smallest enough host size of the table, without a disk. With prices: the cheapest enough row, without
            disks that would have to take more writes than a runtime makes
    nothing if the largest gain is less than `LEAST` of the tokens that the device alone computes, or if a load takes
            longer than computing

`LEAST` is a share of the computed tokens, not of all tokens: if hits rise from 91 % to 95 %, prefill takes about half
the time, and queues of long prompts are much shorter.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import attrs

from ..trace.wording import duration
from .forecast import BY_DISTANCE, FirstToken, Forecast, Row, Speeds, binary_size
from .mixes import Made

ENOUGH, LEAST = Fraction(4, 5), 0.1


@attrs.frozen
class Advice:
    sentence: str
    """What to buy, or that nothing is worth buying."""
    best: Row
    """The row to buy. If nothing is worth buying: the row that has enough of the gain, or the best one of the table."""
    is_worth: bool

    @property
    def row(self) -> Row | None:
        """The row to buy. None: nothing."""
        return self.best if self.is_worth else None


def percent(part: float) -> str:
    """Whole percent; one decimal below 1 %."""
    return f"{100 * part:.1f} %" if 0.0005 <= part < 0.0095 else f"{100 * part:.0f} %"


def saved(forecast: Forecast, row: Row) -> float:
    """The share of prompt tokens that need not be computed."""
    return sum(row.tokens) / forecast.trace.num_prompt_tokens


def gained(forecast: Forecast, row: Row) -> int:
    """The number of prompt tokens that `row` saves in addition to the device alone."""
    return sum(row.tokens) - sum(forecast.rows[1].tokens)


def advise(forecast: Forecast, made: Made | None = None) -> Advice:
    """`made`: the mix, whose number of users the sentence then names."""
    has_disk = forecast.prices is not None
    rows = [row for row in _rows(forecast) if not row.disk_bytes or (has_disk and not forecast.writes_too_much(row))]
    enough = [row for row in rows if gained(forecast, row) >= ENOUGH * gained(forecast, forecast.rows[-1])]
    if enough:
        row = min(enough, key=lambda row: (row.price or 0.0, row.host_bytes, row.disk_bytes))
    else:
        row = max(rows, key=lambda row: (saved(forecast, row), -row.host_bytes, -row.disk_bytes))
    is_worth, what, why = _sentence(forecast, row, bool(enough))
    users = "" if made is None else f" for {made.named_users}"
    return Advice(f"{what}{users}: {why}.", row, is_worth)


def _sentence(forecast: Forecast, row: Row, is_enough: bool) -> tuple[bool, str, str]:
    """Whether `row` is worth buying; what to buy, and why."""
    if forecast.load_share >= 1:
        share = f"{percent(forecast.load_share)} of the time that computing it takes"
        return False, "Buy nothing", f"loading a token from host memory takes {share}"
    if _less_prefill(forecast, forecast.rows[-1]) < LEAST:
        return False, "Buy nothing", _nothing(forecast)
    if is_enough:
        return True, f"Buy {_named(row)}", _brings(forecast, row)
    if _less_prefill(forecast, row) < LEAST:
        least, here, most = (percent(saved(forecast, each)) for each in (forecast.rows[1], row, forecast.rows[-1]))
        why = (
            f"the best of them, {_named(row)}, would save {here} of the prompt tokens, and the device alone saves "
            f"{least}; unlimited host memory would save {most}, so plan larger sizes with --host"
        )
        return False, "Buy none of these sizes", why
    return True, f"Buy at least {_named(row)}, the best of these sizes", _brings(forecast, row)


def _less_prefill(forecast: Forecast, row: Row) -> float:
    """The share of the tokens computed with the device alone that `row` saves."""
    before = forecast.rows[1].num_computed_tokens
    return (before - row.num_computed_tokens) / before


def _rows(forecast: Forecast) -> Iterator[Row]:
    """The rows to choose from. The table may have others only."""
    found = [row for row in forecast.rows if row.host_bytes and row.kind == BY_DISTANCE and row.name != "endless"]
    yield from found or (forecast.of_size(size, 0, BY_DISTANCE) for size in forecast.host_sizes())


def _nothing(forecast: Forecast) -> str:
    least, most = (saved(forecast, row) for row in (forecast.rows[1], forecast.rows[-1]))
    less = percent(_less_prefill(forecast, forecast.rows[-1]))
    if less == "0 %":
        more = "hardly more" if gained(forecast, forecast.rows[-1]) else "no more"
        return (
            f"offloading brings nothing here, because the device alone hits {percent(least)} of the prompt tokens, and "
            f"unlimited host memory would hit {more}"
        )
    return (
        f"unlimited host memory would reduce prefill by only {less}, because {percent(most)} of the prompt tokens "
        f"would be hits, {_points(least, most)} more than with the device alone"
    )


def _memory(row: Row) -> str:
    disk = f" and a disk of {binary_size(row.disk_bytes)}" if row.disk_bytes else ""
    return f"{binary_size(row.host_bytes)} of host memory{disk}"


def _named(row: Row) -> str:
    return _memory(row) + ("" if row.price is None else f" ({row.price:,.2f} a month)")


def _brings(forecast: Forecast, row: Row) -> str:
    here, least, most = (saved(forecast, each) for each in (row, forecast.rows[1], forecast.rows[-1]))
    found = (
        f"{percent(here)} of the prompt tokens would be hits, {_points(least, here)} more than with the device alone"
    )
    if not _difference(here, most):
        return f"{found} and as many as with unlimited host memory"
    found += f" and {_points(here, most)} fewer than with unlimited host memory"
    twice = saved(forecast, forecast.of_size(2 * row.host_bytes, row.disk_bytes, BY_DISTANCE))
    return f"{found}; twice the host memory would add {_points(here, twice)}"


def _difference(less: float, more: float) -> int:
    """Points between the percentages as they are printed."""
    return round(100 * more) - round(100 * less)


def _points(less: float, more: float) -> str:
    found = _difference(less, more)
    return f"{found or 'less than 1'} {'point' if found <= 1 else 'points'}"


# -- lines below the sentence ----------------------------------------------------------------------------------------


def consequences(forecast: Forecast, advice: Advice) -> Iterator[str]:
    """The gain of the row, and the speeds at which loading stops being faster than computing. Empty without speeds."""
    speeds = forecast.speeds
    if speeds is None:
        return
    before, after = forecast.rows[1].first_token, advice.best.first_token
    if before is not None and after is not None:
        yield _times(forecast, advice.best, before, after, speeds)
    least_gbs = forecast.sizes.kv_bytes_per_token / 1e9 * speeds.prefill_tokens_per_s
    most_tokens = speeds.host_gbs * 1e9 / forecast.sizes.kv_bytes_per_token
    share = (
        f"Loading a token from host memory takes {percent(forecast.load_share)} of the time that computing it takes. "
    )
    yield (
        f"{share if forecast.load_share < 1 else ''}Loading is faster only above {least_gbs:,.3g} GB/s from the host "
        f"at this prefill speed, and only below {most_tokens:,.0f} prefill tokens/s at this host speed."
    )


def _times(forecast: Forecast, row: Row, before: FirstToken, after: FirstToken, speeds: Speeds) -> str:
    medians, tails = ([duration(each) for each in pair] for pair in _pairs(before, after))
    memory = f"With {_memory(row)}, the time to the first token would"
    if medians[0] == medians[1] and tails[0] == tails[1]:
        return f"{memory} stay the same: {medians[0]} (median) and {tails[0]} (90th percentile)."
    found = f"{memory} go from {' to '.join(medians)} (median), and from {' to '.join(tails)} (90th percentile)"
    fewer = (forecast.rows[1].num_computed_tokens - row.num_computed_tokens) / speeds.prefill_tokens_per_s
    if forecast.trace.duration_s:
        saved = duration(fewer / forecast.trace.duration_s * 3600)
        found += f". Prefill for one hour of requests would take {saved} less"
    return f"{found}."


def _pairs(before: FirstToken, after: FirstToken) -> tuple[tuple[float, float], tuple[float, float]]:
    return (before.p50_s, after.p50_s), (before.p90_s, after.p90_s)


def rule(forecast: Forecast) -> str:
    """The rule on which the sentence is based."""
    basis, chosen = "hits, not on money", "smallest host memory"
    if forecast.prices is not None:
        basis, chosen = "your prices of memory", "cheapest row"
    least, slow = percent(LEAST), ", or if loading takes longer than computing" if forecast.speeds is not None else ""
    lines = [
        f"The advice is based on {basis}.",
        "The gain of a size is the number of prompt tokens that it hits in addition to the device alone.",
        f"The advice names the {chosen} of the table that has at least {percent(float(ENOUGH))} of the gain of "
        "unlimited host memory.",
        f"The advice is to buy nothing if unlimited host memory would reduce prefill by less than {least}{slow}.",
        "The advice assumes eager stores and LRU eviction, and knows no price of computing.",
    ]
    if forecast.prices is not None and forecast.sizes.disk:
        lines.insert(3, "The advice leaves out a disk that would get more than its size in writes a day.")
    return " ".join(lines)
