"""`--html FILE`: the forecast as one page that needs no network, no script and no other file."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import attrs
import numpy as np

from ..trace.output import asset, content_hash, filled_in, whole_file
from ..trace.wording import plain, size
from .advice import Advice, advise, percent, rule, saved
from .forecast import BY_DISTANCE, Forecast, Kind, Row, binary_size
from .mixes import Made
from .report import ASSUMES, basis, below, by_tenant, cautions, cells, heading, num_left

# -- chart -----------------------------------------------------------------------------------------------------------
#
# A chart as SVG, with sizes along a logarithmic axis. Each is drawn twice, for wide and for narrow windows, because
# text would shrink with the drawing. The style sheet shows one of them.

LEFT, RIGHT, TOP, BOTTOM = 62.0, 16.0, 20.0, 30.0
LETTER = 6.5
"""Width of a letter, rather too much."""
ABOVE, BELOW = 10.0, 3.0
"""Height of a text above and below its base line."""
DOT, GAP = 4.0, 2.0
"""Radius of a dot; minimum distance of a label from everything else."""
NUM_PLACES = 25
"""Number of places along a line at which a label may be."""


@attrs.frozen
class Frame:
    name: str
    width: float
    height: float
    max_ticks: int
    """Maximum ticks of the axis of sizes."""


Box: TypeAlias = tuple[float, float, float, float]
"""Left, top, right and bottom."""
Point: TypeAlias = tuple[float, float]


def overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


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
    _taken: list[Box] = attrs.field(factory=list)
    """Where no label can be: curves, dots, lines and other labels."""
    _labels: list[tuple[str, list[Point], str]] = attrs.field(factory=list)
    """Each label: its text, the possible positions of its left end on the base line, best first, and the element that
    is omitted if no position is free."""

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
        places = [(self.x(size), self.y(value)) for size, value in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        self._shapes.append(f'<polyline class="{kind}" points="{path}"/>')
        for (x, y), (next_x, next_y) in pairwise(places):
            steps = max(1, math.ceil(max(abs(next_x - x), abs(next_y - y)) / 2))
            along = [(x + (next_x - x) * at / steps, y + (next_y - y) * at / steps) for at in range(steps + 1)]
            self._taken += [(x - 1, y - 1, x + 1, y + 1) for x, y in along]

    def mark(self, kind: str, size: float, value: float, about: str) -> None:
        x, y = self.x(size), self.y(value)
        shape = f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{DOT:.0f}">'
        self._shapes.append(f"{shape}<title>{html.escape(about)}</title></circle>")
        self._taken.append((x - DOT, y - DOT, x + DOT, y + DOT))

    def level(self, value: float, about: str, *, is_optional: bool = False) -> None:
        """A line across the chart. Its label is above or below it, as far to the right as there is space."""
        at = self.y(value)
        line = f'<line class="level" x1="{LEFT}" x2="{self.right}" y1="{at:.1f}" y2="{at:.1f}"/>'
        if not is_optional:
            self._shapes.append(line)
            self._taken.append((LEFT, at - 0.5, self.right, at + 0.5))
        first, last = LEFT + 3, self.right - 3 - LETTER * len(about)
        along = [last + (first - last) * number / (NUM_PLACES - 1) for number in range(NUM_PLACES)]
        places = [(x, y) for x in along for y in (at - 10, at + 17)]
        self._labels.append((about, places, line if is_optional else ""))

    def upright(self, kind: str, size: float, about: str) -> None:
        """An upright line. Its label is right or left of it, as low as there is space."""
        at, width = self.x(size), LETTER * len(about)
        self._shapes.append(f'<line class="{kind}" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{self.bottom}"/>')
        self._taken.append((at - 1, TOP, at + 1, self.bottom))
        first, last = self.bottom - 12, TOP + ABOVE
        along = [first + (last - first) * number / (NUM_PLACES - 1) for number in range(NUM_PLACES)]
        self._labels.append((about, [(x, y) for x in (at + 6, at - 6 - width) for y in along], ""))

    def _placed(self) -> Iterator[str]:
        """Each label at the first of its places where it overlaps nothing, or where it overlaps least."""
        for about, places, line in self._labels:
            boxes = [(x, y - ABOVE, x + LETTER * len(about), y + BELOW) for x, y in places]
            box = min(boxes, key=self._num_overlaps)
            if line and self._num_overlaps(box):
                continue
            self._taken.append(box)
            yield line + _text(box[0], box[3] - BELOW, "start", about)

    def _num_overlaps(self, box: Box) -> int:
        left, top, right, bottom = box
        if left < LEFT or right > self.right or top < 0 or bottom > self.bottom:
            return len(self._taken) + 1
        wider = (left - GAP, top - GAP, right + GAP, bottom + GAP)
        return sum(overlap(wider, taken) for taken in self._taken)

    def svg(self, about: str) -> str:
        inside = "\n".join([*self._grid(), *self._placed(), *self._shapes])
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
    style, advice = asset(__package__, "plan.css"), advise(forecast, made)
    parts = {
        "TITLE": html.escape(plain(forecast.trace.name)),
        "POLICY": f"default-src 'none'; style-src {content_hash(style)}",
        "STYLE": style,
        "ADVICE": html.escape(advice.sentence),
        "SUMMARY": _paragraphs(below(forecast, advice, made)),
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
    alone, endless = saved(forecast, forecast.rows[1]), saved(forecast, forecast.rows[-1])
    highest = max(0.05, *(saved(forecast, row) for row in forecast.rows))
    step = round_step(highest)
    top = min(1.0, step * math.ceil(1.08 * highest / step))
    chart = _new_chart(forecast, frame, top, step, percent)
    asked = forecast.trace.num_prompt_tokens
    sizes = np.geomspace(chart.least, chart.most, NUM_POINTS).tolist()
    found = [forecast.num_hit_tokens(int(size // forecast.block_bytes)) / asked for size in sizes]
    if chart.y(alone) - chart.y(endless) < 1:
        chart.level(alone, "device alone, unlimited host")
    else:
        chart.level(endless, "unlimited host")
        chart.level(alone, f"device alone, {binary_size(forecast.sizes.device)}")
    if advice.row is not None:
        chart.upright("bought", advice.row.host_bytes, f"buy {binary_size(advice.row.host_bytes)}")
    chart.line("curve", zip(sizes, found, strict=True))
    for number, kind in enumerate(forecast.kinds):
        for row in _sized(forecast, kind):
            about = f"{kind}, {binary_size(row.host_bytes)}: {percent(saved(forecast, row))}"
            chart.mark(f"mark{number % NUM_COLOURS}", row.host_bytes, saved(forecast, row), about)
    return chart.svg("Share of the prompt tokens that hit, by the size of host memory")


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
    if chart.y(alone.p50_s) - chart.y(alone.p90_s) >= ABOVE:
        chart.level(alone.p50_s, "device alone, median", is_optional=True)
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
