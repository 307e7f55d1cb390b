"""Curves drawn by matplotlib, which only pictures need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from .harness import Measured

__all__ = ["Curve", "MissingPlotterError", "Point", "draw"]

NUM_COLUMNS = 2
PANEL_INCHES = (5.0, 3.0)
DOTS_PER_INCH = 72
STEEP = 10.0
"""If the cost grows by more than this, its axis is logarithmic. Otherwise it begins at zero, so that a flat curve looks
flat."""


class MissingPlotterError(Exception):
    """matplotlib is not installed."""


@attrs.frozen
class Point:
    """Time of one request, and its ratio to that at the first point of the curve."""

    took: Measured
    ratio: float


@attrs.frozen
class Curve:
    """Times of one request: curves by name, points by the quantity that grows. The first point of a curve is its
    base."""

    title: str
    x_label: str
    lines: Mapping[str, Mapping[int, Point]]
    most: Mapping[int, float] = attrs.field(factory=dict)
    """The largest ratio to the base that a point may have."""


def draw(curves: Sequence[Curve], path: Path) -> None:
    """One picture, with a panel for each curve: medians, with a band from the tenth to the ninetieth percentile."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise MissingPlotterError("no picture without matplotlib: pip install --group bench") from None
    num_rows = -(-len(curves) // NUM_COLUMNS)
    width, height = PANEL_INCHES
    figure = Figure((width * NUM_COLUMNS, height * num_rows), dpi=DOTS_PER_INCH, layout="constrained")
    panels = figure.subplots(num_rows, NUM_COLUMNS, squeeze=False).flat
    for panel in panels[len(curves) :]:
        panel.remove()
    for panel, curve in zip(panels, curves, strict=False):
        _draw_panel(panel, curve)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_panel(panel: Any, curve: Curve) -> None:
    for name, points in curve.lines.items():
        xs = sorted(points)
        panel.plot(xs, [points[x].took.median_s * 1e6 for x in xs], marker="o", label=name)
        lows, highs = [points[x].took.low_s * 1e6 for x in xs], [points[x].took.high_s * 1e6 for x in xs]
        panel.fill_between(xs, lows, highs, alpha=0.15)
    costs = [one.took.median_s for points in curve.lines.values() for one in points.values()]
    if max(costs) > STEEP * min(costs):
        panel.set_yscale("log")
    else:
        panel.set_ylim(bottom=0)
    if max(xs) > STEEP:
        panel.set_xscale("log")
    else:
        panel.set_xticks(xs)
    panel.set(title=curve.title, xlabel=curve.x_label, ylabel="µs per request")
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")
