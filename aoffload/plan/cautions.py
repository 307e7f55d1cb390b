"""What to be careful about with a forecast, one line each."""

from __future__ import annotations

from collections.abc import Iterator

from .._runtime.costs import WORTH
from ..trace.wording import counted, duration
from .forecast import Forecast, Row, binary_size

__all__ = ["cautions"]

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
    """A runtime fetches what arrives sooner than it is computed."""
    speeds = forecast.speeds
    if speeds is not None and forecast.sizes.disk and forecast.is_disk_idle:
        yield (
            f"at {speeds.disk_gbs:g} GB/s a fetch from the disk takes {forecast.fetch_share:.0%} of the time that "
            f"computing takes; a runtime fetches what takes less than {WORTH:.0%}, so it would leave the disk alone: "
            "rows with a disk hit nothing there"
        )


def _too_much_written(forecast: Forecast) -> Iterator[str]:
    """What host memory evicts goes to the disk, within `DiskTier.daily_writes`: by default its size a day."""
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
