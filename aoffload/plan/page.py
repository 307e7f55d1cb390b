"""`--html FILE`: the forecast as one page that needs no network, no script and no other file."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import attrs
import numpy as np

from ..trace.output import asset, content_hash, filled_in, whole_file
from ..trace.wording import duration, share, size
from .forecast import BY_DISTANCE, Forecast, Kind, Row, binary_size
from .report import by_tenant, cautions, cells, heading, summary

# -- chart -----------------------------------------------------------------------------------------------------------
#
# One chart as SVG, with sizes along a logarithmic axis.

WIDTH, HEIGHT = 1000.0, 320.0
LEFT, RIGHT, TOP, BOTTOM = 70.0, 20.0, 16.0, 34.0
MAX_TICKS = 12
NUM_LEVELS = 5


@attrs.define(eq=False)
class Chart:
    """A chart from `least` to `most` bytes, and from 0 to `top`."""

    least: float
    most: float
    top: float
    write: Callable[[float], str]
    """The label of a level."""
    _shapes: list[str] = attrs.field(factory=list)

    def x(self, size: float) -> float:
        along = math.log(max(size, self.least) / self.least) / math.log(self.most / self.least)
        return LEFT + (WIDTH - LEFT - RIGHT) * min(1.0, along)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(1.0, value / self.top)

    def line(self, kind: str, points: Iterable[tuple[float, float]]) -> None:
        path = " ".join(f"{self.x(size):.1f},{self.y(value):.1f}" for size, value in points)
        self._shapes.append(f'<polyline class="{kind}" points="{path}"/>')

    def mark(self, kind: str, size: float, value: float, about: str) -> None:
        shape = f'<circle class="{kind}" cx="{self.x(size):.1f}" cy="{self.y(value):.1f}" r="4">'
        self._shapes.append(f"{shape}<title>{html.escape(about)}</title></circle>")

    def level(self, value: float, about: str) -> None:
        at = self.y(value)
        self._shapes.append(f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        self._shapes.append(_text(WIDTH - RIGHT - 6, at - 4, "end", about))

    def upright(self, kind: str, size: float, about: str) -> None:
        at = self.x(size)
        self._shapes.append(f'<line class="{kind}" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        self._shapes.append(_text(at + 5, HEIGHT - BOTTOM - 6, "start", about))

    def svg(self, about: str) -> str:
        inside = "\n".join([*self._grid(), *self._shapes])
        head = (
            f'<svg class="chart" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" aria-label="{html.escape(about)}">'
        )
        return f"{head}\n{inside}\n</svg>"

    def _grid(self) -> Iterator[str]:
        for number in range(NUM_LEVELS + 1):
            value = self.top * number / NUM_LEVELS
            at = self.y(value)
            yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
            yield _text(LEFT - 8, at + 4, "end", self.write(value))
        for power in _powers(self.least, self.most):
            at = self.x(power)
            yield f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            yield _text(at, HEIGHT - BOTTOM + 18, "middle", binary_size(power))


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _powers(least: float, most: float) -> Sequence[int]:
    """Powers of two between both, at most `MAX_TICKS`, evenly spaced."""
    first, last = math.ceil(math.log2(least)), math.floor(math.log2(most))
    step = max(1, -(-(last - first + 1) // MAX_TICKS))
    return [2**power for power in range(max(0, first), last + 1, step)]


# -- page ------------------------------------------------------------------------------------------------------------

NUM_POINTS = 240
NUM_COLOURS = 6


def write_page(forecast: Forecast, trace: Path, file: Path) -> str:
    """Write the page. Returns a line about it. Raises `OSError`, also if `file` is the trace itself."""
    page = make_page(forecast)
    with whole_file(file, beside=trace) as output:
        output.write(page)
    return f"{file}: {size(len(page))}"


def make_page(forecast: Forecast) -> str:
    """The page as text, in ASCII."""
    style, (first, *others) = asset(__package__, "plan.css"), summary(forecast)
    parts = {
        "TITLE": html.escape(first),
        "POLICY": f"default-src 'none'; style-src {content_hash(style)}",
        "STYLE": style,
        "SUMMARY": "".join(f"<p>{html.escape(line)}</p>" for line in others),
        "WARNINGS": "".join(f'<p class="warning">{html.escape(line)}</p>' for line in cautions(forecast)),
        "LEGEND": _legend(forecast),
        "HITS": _hits(forecast),
        "TIMES": _times(forecast),
        "TABLE": _table(forecast),
    }
    page = filled_in(asset(__package__, "plan.html"), parts)
    return page.encode("ascii", "xmlcharrefreplace").decode()


def _sized(forecast: Forecast, kind: Kind) -> list[Row]:
    """Rows without a disk, by size."""
    rows = [row for row in forecast.rows if row.name == "host" and row.kind == kind]
    return sorted(rows, key=lambda row: row.host_bytes)


def _legend(forecast: Forecast) -> str:
    entries = [("curve", f"{BY_DISTANCE}: every size")]
    entries += [(f"line{at % NUM_COLOURS}", f"{kind}: sizes of the table") for at, kind in enumerate(forecast.kinds)]
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
    for number, kind in enumerate(forecast.kinds):
        for row in _sized(forecast, kind):
            about = f"{kind}, {binary_size(row.host_bytes)}: {share(row.num_hit_blocks, asked)}"
            chart.mark(f"mark{number % NUM_COLOURS}", row.host_bytes, row.num_hit_blocks / asked, about)
    return chart.svg("Share of blocks hit, by the size of host memory")


def _times(forecast: Forecast) -> str:
    """The chart of times. Empty without speeds."""
    known = [row.first_token for row in forecast.rows[1:] if row.first_token is not None]
    if not known:
        return ""
    chart = _new_chart(forecast, max(max(times.p90_s for times in known) * 1.1, 1e-9), _time)
    alone = forecast.rows[1].first_token
    assert alone is not None
    chart.level(alone.p50_s, "device alone, p50")
    chart.level(alone.p90_s, "device alone, p90")
    for number, kind in enumerate(forecast.kinds):
        for name, style in (("p50_s", ""), ("p90_s", " p90")):
            points = [(float(row.host_bytes), float(getattr(row.first_token, name))) for row in _sized(forecast, kind)]
            chart.line(f"line{number % NUM_COLOURS}{style}", points)
    title = "<h2>Time to the first token <small>solid: median; dashed: 90th percentile</small></h2>"
    return f"<section>{title}{chart.svg('Time to the first token, by the size of host memory')}</section>"


def _time(seconds: float) -> str:
    return duration(seconds) if seconds else "0"


def _table(forecast: Forecast) -> str:
    tables = [[heading(forecast), *(cells(forecast, row) for row in forecast.rows)]]
    if forecast.quotas:
        tables.append(list(by_tenant(forecast)))
    return "".join(f"<table>{''.join(_lines(table))}</table>" for table in tables)


def _lines(table: list[list[str]]) -> Iterator[str]:
    first, *others = table
    yield _line("th", first)
    for row in others:
        yield _line("td", row)


def _line(tag: str, texts: list[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) + "</tr>\n"
