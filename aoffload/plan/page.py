"""`--html FILE`: the forecast as one page that needs no network, no script and no other file."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path

import numpy as np

from ..trace.output import whole_file
from ..trace.wording import duration, share, size
from .cautions import cautions
from .chart import Chart
from .forecast import Forecast, Row, binary_size
from .report import cells, heading, summary

__all__ = ["make_page", "write_page"]

NUM_POINTS = 240
NUM_COLOURS = 3


def write_page(forecast: Forecast, trace: Path, file: Path) -> str:
    """Returns a line about it. Raises `OSError`, also if `file` is the trace itself."""
    page = make_page(forecast)
    with whole_file(file, beside=trace) as output:
        output.write(page)
    return f"{file}: {size(len(page))}"


def make_page(forecast: Forecast) -> str:
    """The page as text, of ASCII only."""
    style, (first, *others) = _asset("plan.css"), summary(forecast)
    parts = {
        "TITLE": html.escape(first),
        "POLICY": f"default-src 'none'; style-src {_hash(style)}",
        "STYLE": style,
        "SUMMARY": "".join(f"<p>{html.escape(line)}</p>" for line in others),
        "WARNINGS": "".join(f'<p class="warning">{html.escape(line)}</p>' for line in cautions(forecast)),
        "LEGEND": _legend(forecast),
        "HITS": _hits(forecast),
        "TIMES": _times(forecast),
        "TABLE": _table(forecast),
    }
    # In one pass: inserted text is not searched for marks.
    page = re.sub("%([A-Z]+)%", lambda mark: parts[mark[1]], _asset("plan.html"))
    return page.encode("ascii", "xmlcharrefreplace").decode()


def _kinds(forecast: Forecast) -> list[tuple[str, str]]:
    """Store policies and evictions, each with a colour."""
    return [(store, eviction) for eviction in forecast.evictions for store in forecast.stores]


def _sized(forecast: Forecast, kind: tuple[str, str]) -> list[Row]:
    """Rows without a disk, by size."""
    rows = [row for row in forecast.rows if row.name == "host" and (row.store, row.eviction) == kind]
    return sorted(rows, key=lambda row: row.host_bytes)


def _legend(forecast: Forecast) -> str:
    entries = [("curve", "eager, lru: every size")]
    entries += [
        (f"line{at % NUM_COLOURS}", f"{s}, {e}: sizes of the table") for at, (s, e) in enumerate(_kinds(forecast))
    ]
    drawn = (
        f'<li><svg viewBox="0 0 16 10"><polyline class="{kind}" points="0,5 16,5"/></svg>{html.escape(about)}</li>'
        for kind, about in entries
    )
    return f'<ul class="legend">{"".join(drawn)}</ul>'


def _new_chart(forecast: Forecast, top: float, write: Callable[[float], str]) -> Chart:
    sizes = [row.host_bytes for row in forecast.rows if row.host_bytes] + [forecast.sizes.device]
    return Chart(min(sizes) / 2, max(sizes) * 1.3, top, write)


def _hits(forecast: Forecast) -> str:
    asked = max(1, forecast.trace.num_asked)
    top = min(1.0, -(-forecast.num_endless * 10 // asked) / 10 + 0.05)
    chart = _new_chart(forecast, top, lambda value: f"{value:.0%}")
    sizes = np.geomspace(chart.least, chart.most, NUM_POINTS).tolist()
    found = [forecast.num_hits(int(size // forecast.block_bytes)) / asked for size in sizes]
    chart.level(forecast.on_device.sum() / asked, f"device alone, {binary_size(forecast.sizes.device)}")
    chart.level(forecast.num_endless / asked, "a cache without end")
    chart.upright("knee", forecast.knee_bytes, f"knee, {binary_size(forecast.knee_bytes)}")
    chart.line("curve", zip(sizes, found, strict=True))
    for number, kind in enumerate(_kinds(forecast)):
        for row in _sized(forecast, kind):
            about = f"{', '.join(kind)}, {binary_size(row.host_bytes)}: {share(row.num_hit_blocks, asked)}"
            chart.mark(f"mark{number % NUM_COLOURS}", row.host_bytes, row.num_hit_blocks / asked, about)
    return chart.svg("Share of blocks hit, by the size of host memory")


def _times(forecast: Forecast) -> str:
    """Nothing where no speed was given."""
    known = [row.first_token for row in forecast.rows[1:] if row.first_token is not None]
    if not known:
        return ""
    chart = _new_chart(forecast, max(max(times.p90_s for times in known) * 1.1, 1e-9), _time)
    alone = forecast.rows[1].first_token
    assert alone is not None
    chart.level(alone.p50_s, "device alone, p50")
    chart.level(alone.p90_s, "device alone, p90")
    for number, kind in enumerate(_kinds(forecast)):
        for name, style in (("p50_s", ""), ("p90_s", " p90")):
            points = [(float(row.host_bytes), float(getattr(row.first_token, name))) for row in _sized(forecast, kind)]
            chart.line(f"line{number % NUM_COLOURS}{style}", points)
    title = "<h2>Time to the first token <small>solid: median; dashed: 90th percentile</small></h2>"
    return f"<section>{title}{chart.svg('Time to the first token, by the size of host memory')}</section>"


def _time(seconds: float) -> str:
    return duration(seconds) if seconds else "0"


def _table(forecast: Forecast) -> str:
    return "<table>" + "".join(_lines(forecast)) + "</table>"


def _lines(forecast: Forecast) -> Iterator[str]:
    yield _line("th", heading(forecast))
    for row in forecast.rows:
        yield _line("td", cells(forecast, row))


def _line(tag: str, texts: list[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) + "</tr>\n"


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Hash of `text` for the page's policy, which allows this style and nothing that a trace's name contains."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
