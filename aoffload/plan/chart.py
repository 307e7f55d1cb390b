"""One chart as SVG: sizes along a logarithmic axis, something else above it."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs

from .forecast import binary_size

__all__ = ["Chart"]

WIDTH, HEIGHT = 1000.0, 320.0
LEFT, RIGHT, TOP, BOTTOM = 70.0, 20.0, 16.0, 34.0
MAX_TICKS = 12
NUM_LEVELS = 5


@attrs.define(eq=False)
class Chart:
    """From `least` to `most` bytes, and from 0 to `top`."""

    least: float
    most: float
    top: float
    write: Callable[[float], str]
    """What stands beside a level."""
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
        for size in _powers(self.least, self.most):
            at = self.x(size)
            yield f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            yield _text(at, HEIGHT - BOTTOM + 18, "middle", binary_size(size))


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _powers(least: float, most: float) -> Sequence[int]:
    """Powers of two between both, at most `MAX_TICKS`, evenly spaced."""
    first, last = math.ceil(math.log2(least)), math.floor(math.log2(most))
    step = max(1, -(-(last - first + 1) // MAX_TICKS))
    return [2**power for power in range(max(0, first), last + 1, step)]
