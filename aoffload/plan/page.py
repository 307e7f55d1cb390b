"""`--html FILE`: the forecast as one page that needs no network, no script and no other file."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import attrs
import numpy as np

from ..trace.output import asset, content_hash, filled_in, whole_file
from ..trace.wording import plain, size
from .advice import Advice, advise, consequences, percent, rule
from .forecast import BY_DISTANCE, Forecast, Kind, Row, binary_size
from .mixes import Made
from .report import ASSUMES, MADE_UP, basis, by_tenant, cautions, cells, heading, num_left

# -- chart -----------------------------------------------------------------------------------------------------------
#
# A chart as SVG, with sizes along a logarithmic axis. Each is drawn twice, for wide and for narrow windows, because
# text would shrink with the drawing. The style sheet shows one of them.

LEFT, RIGHT, TOP, BOTTOM = 62.0, 16.0, 16.0, 30.0
LABEL = 30.0
"""Minimum distance between two labels."""
LETTER = 7.0
"""About the width of a letter."""


@attrs.frozen
class Frame:
    name: str
    width: float
    height: float
    max_ticks: int
    """Maximum ticks of the axis of sizes."""


FRAMES = (Frame("wide", 1100.0, 320.0, 12), Frame("narrow", 360.0, 260.0, 4))
NUM_LEVELS = 5
"""About as many ticks has the upright axis."""


@attrs.define(eq=False)
class Chart:
    """A chart from `least` to `most` bytes, and from 0 to `top`."""

    frame: Frame
    least: float
    most: float
    top: float
    step: float
    """Distance of the ticks of the upright axis."""
    write: Callable[[float], str]
    """The label of a level."""
    _shapes: list[str] = attrs.field(factory=list)

    @property
    def right(self) -> float:
        return self.frame.width - RIGHT

    @property
    def bottom(self) -> float:
        return self.frame.height - BOTTOM

    def x(self, size: float) -> float:
        along = math.log(max(size, self.least) / self.least) / math.log(self.most / self.least)
        return LEFT + (self.right - LEFT) * min(1.0, along)

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - TOP) * min(1.0, value / self.top)

    def line(self, kind: str, points: Iterable[tuple[float, float]]) -> None:
        path = " ".join(f"{self.x(size):.1f},{self.y(value):.1f}" for size, value in points)
        self._shapes.append(f'<polyline class="{kind}" points="{path}"/>')

    def mark(self, kind: str, size: float, value: float, about: str) -> None:
        shape = f'<circle class="{kind}" cx="{self.x(size):.1f}" cy="{self.y(value):.1f}" r="4">'
        self._shapes.append(f"{shape}<title>{html.escape(about)}</title></circle>")

    def level(self, value: float, about: str, *, is_left: bool = False) -> None:
        """A line across the chart. Its label is at the left end below the line, or at the right end above it."""
        at = self.y(value)
        self._shapes.append(f'<line class="level" x1="{LEFT}" x2="{self.right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        self._shapes.append(
            _text(LEFT + 6, at + 14, "start", about) if is_left else _text(self.right - 6, at - 5, "end", about)
        )

    def upright(self, kind: str, size: float, about: str, low: float, high: float) -> None:
        """An upright line. Its label is right of it at `low`, or left of it at `high` if there is no space: a curve
        that rises has space there."""
        at = self.x(size)
        self._shapes.append(f'<line class="{kind}" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{self.bottom}"/>')
        if at + 6 + LETTER * len(about) <= self.right:
            self._shapes.append(_text(at + 6, low, "start", about))
        else:
            self._shapes.append(_text(at - 6, high, "end", about))

    def svg(self, about: str) -> str:
        inside = "\n".join([*self._grid(), *self._shapes])
        frame = self.frame
        head = (
            f'<svg class="chart {frame.name}" viewBox="0 0 {frame.width:.0f} {frame.height:.0f}" role="img" '
            f'aria-label="{html.escape(about)}">'
        )
        return f"{head}\n{inside}\n</svg>"

    def _grid(self) -> Iterator[str]:
        for number in range(math.floor(self.top / self.step + 1e-9) + 1):
            value = self.step * number
            at = self.y(value)
            yield f'<line class="grid" x1="{LEFT}" x2="{self.right}" y1="{at:.1f}" y2="{at:.1f}"/>'
            yield _text(LEFT - 8, at + 4, "end", self.write(value))
        for power in _powers(self.least, self.most, self.frame.max_ticks):
            at = self.x(power)
            yield f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{self.bottom}"/>'
            yield _text(at, self.bottom + 18, "middle", binary_size(power))


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _powers(least: float, most: float, max_ticks: int) -> Sequence[int]:
    """Powers of two between both, at most `max_ticks`, evenly spaced."""
    first, last = math.ceil(math.log2(least)), math.floor(math.log2(most))
    step = max(1, -(-(last - first + 1) // max_ticks))
    return [2**power for power in range(max(0, first), last + 1, step)]


MINUTE_S, HOUR_S = 60, 3600
ROUND_TIMES = (60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400)


def round_step(top: float, *, is_time: bool = False) -> float:
    """A round distance of ticks, so that there are about `NUM_LEVELS` up to `top`."""
    least = top / NUM_LEVELS
    if is_time and least > 30:
        return next((float(step) for step in ROUND_TIMES if step >= least), 86_400.0 * math.ceil(least / 86_400))
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * (1 - 1e-9))


def tick_time(seconds: float) -> str:
    """A round time with its unit."""
    if seconds == 0:
        return "0"
    for unit, factor in (("h", HOUR_S), ("min", MINUTE_S), ("s", 1), ("ms", 1e-3)):
        if seconds >= factor * (1 - 1e-9):
            return f"{seconds / factor:.4g} {unit}"
    return f"{seconds * 1e6:.4g} \u00b5s"


# -- page ------------------------------------------------------------------------------------------------------------

NUM_POINTS = 240
NUM_COLOURS = 6


def write_page(forecast: Forecast, trace: Path | None, file: Path, made: Made | None = None) -> str:
    """Write the page. Returns a line about it. Raises `OSError`, also if `file` is the trace itself."""
    page = make_page(forecast, made)
    with whole_file(file, beside=trace) as output:
        output.write(page)
    return f"{file}: {size(len(page))}"


def make_page(forecast: Forecast, made: Made | None = None) -> str:
    """The page as text, in ASCII."""
    style, advice = asset(__package__, "plan.css"), advise(forecast)
    below = [*([MADE_UP] if made else []), *consequences(forecast, advice)]
    parts = {
        "TITLE": html.escape(plain(forecast.trace.name)),
        "POLICY": f"default-src 'none'; style-src {content_hash(style)}",
        "STYLE": style,
        "ADVICE": html.escape(advice.sentence),
        "SUMMARY": _paragraphs(below),
        "WARNINGS": "".join(f'<p class="warning">{html.escape(line)}</p>' for line in cautions(forecast)),
        "LEGEND": _legend(forecast),
        "HITS": "".join(_hits(forecast, advice, frame) for frame in FRAMES),
        "TIMES": _times(forecast),
        "TABLE": _table(forecast),
        "BASIS": _paragraphs([*basis(forecast), rule(forecast)]) + _assumptions(made),
    }
    page = filled_in(asset(__package__, "plan.html"), parts)
    return page.encode("ascii", "xmlcharrefreplace").decode()


def _paragraphs(lines: Iterable[str]) -> str:
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)


def _assumptions(made: Made | None) -> str:
    if made is None:
        return ""
    lines = (f"<li>{html.escape(line)}</li>" for line in made.mix.assumptions(made.users))
    return f"<p>{ASSUMES}</p><ul>{''.join(lines)}</ul>"


def _sized(forecast: Forecast, kind: Kind) -> list[Row]:
    """Rows without a disk, by size."""
    rows = [row for row in forecast.rows if row.name == "host" and row.kind == kind]
    return sorted(rows, key=lambda row: row.host_bytes)


def _legend(forecast: Forecast) -> str:
    curve = '<polyline class="curve" points="0,5 16,5"/>'
    entries = [(curve, "any size" if forecast.kinds == (BY_DISTANCE,) else f"any size, {BY_DISTANCE}")]
    for at, kind in enumerate(forecast.kinds):
        about = "sizes in the table" if forecast.kinds == (BY_DISTANCE,) else f"{kind}, sizes in the table"
        entries.append((f'<circle class="mark{at % NUM_COLOURS}" cx="8" cy="5" r="4"/>', about))
    drawn = (f'<li><svg viewBox="0 0 16 10">{shape}</svg>{html.escape(about)}</li>' for shape, about in entries)
    return f'<ul class="legend">{"".join(drawn)}</ul>'


def _new_chart(forecast: Forecast, frame: Frame, top: float, step: float, write: Callable[[float], str]) -> Chart:
    sizes = [row.host_bytes for row in forecast.rows if row.host_bytes] + [forecast.sizes.device]
    return Chart(frame, min(sizes) / 1.5, max(sizes) * 1.3, top, step, write)


def _hits(forecast: Forecast, advice: Advice, frame: Frame) -> str:
    asked = max(1, forecast.trace.num_asked)
    alone, endless = float(forecast.on_device.sum()) / asked, forecast.num_endless / asked
    highest = max(endless, *(row.num_hit_blocks / asked for row in forecast.rows), 0.05)
    step = round_step(highest)
    top = min(1.0, step * math.ceil(1.08 * highest / step))
    chart = _new_chart(forecast, frame, top, step, percent)
    sizes = np.geomspace(chart.least, chart.most, NUM_POINTS).tolist()
    found = [forecast.num_hits(int(size // forecast.block_bytes)) / asked for size in sizes]
    device = f"device alone, {binary_size(forecast.sizes.device)}"
    if chart.y(alone) - chart.y(endless) < LABEL:
        chart.level(alone, f"{device}; unlimited host: {percent(endless)}")
    else:
        chart.level(alone, device)
        chart.level(endless, "unlimited host", is_left=True)
    if advice.row is not None:
        between = (chart.y(alone) + chart.bottom) / 2 + 4
        low = between if chart.bottom - between > LABEL / 2 else chart.y(alone) - LABEL
        size = advice.row.host_bytes
        chart.upright("bought", size, f"buy {binary_size(size)}", low, chart.y(endless) + 14)
    chart.line("curve", zip(sizes, found, strict=True))
    for number, kind in enumerate(forecast.kinds):
        for row in _sized(forecast, kind):
            about = f"{kind}, {binary_size(row.host_bytes)}: {percent(row.num_hit_blocks / asked)}"
            chart.mark(f"mark{number % NUM_COLOURS}", row.host_bytes, row.num_hit_blocks / asked, about)
    return chart.svg("Share of the prompts' blocks that hit, by the size of host memory")


def _times(forecast: Forecast) -> str:
    """The charts of times. Empty without speeds."""
    known = [row.first_token for row in forecast.rows[1:] if row.first_token is not None]
    if not known:
        return ""
    highest = max(max(times.p90_s for times in known), 1e-6)
    charts = "".join(_time_chart(forecast, frame, highest) for frame in FRAMES)
    title = "<h2>Time to first token <small>solid: median; dashed: 90th percentile</small></h2>"
    return f"<section>{title}{charts}</section>"


def _time_chart(forecast: Forecast, frame: Frame, highest: float) -> str:
    step = round_step(highest, is_time=True)
    chart = _new_chart(forecast, frame, step * math.ceil(1.08 * highest / step), step, tick_time)
    alone = forecast.rows[1].first_token
    assert alone is not None
    chart.level(alone.p90_s, "device alone, 90th percentile")
    if chart.y(alone.p50_s) - chart.y(alone.p90_s) >= LABEL:
        chart.level(alone.p50_s, "device alone, median")
    for number, kind in enumerate(forecast.kinds):
        for name, style in (("p50_s", ""), ("p90_s", " p90")):
            points = [(float(row.host_bytes), float(getattr(row.first_token, name))) for row in _sized(forecast, kind)]
            chart.line(f"line{number % NUM_COLOURS}{style}", points)
    return chart.svg("Time to first token, by the size of host memory")


def _table(forecast: Forecast) -> str:
    tables = [[heading(forecast), *(cells(forecast, row) for row in forecast.rows)]]
    if forecast.quotas:
        tables.append(list(by_tenant(forecast)))
    kind = "two" if num_left(forecast) > 1 else "one"
    return "".join(
        f'<div class="scroller"><table class="{kind}">{"".join(_lines(table))}</table></div>' for table in tables
    )


def _lines(table: list[list[str]]) -> Iterator[str]:
    first, *others = table
    yield _line("th", first)
    for row in others:
        yield _line("td", row)


def _line(tag: str, texts: list[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) + "</tr>\n"
