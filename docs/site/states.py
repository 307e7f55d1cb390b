"""Draws docs/images/states-*.svg, the diagrams of docs/lifecycle.md: `python docs/site/states.py`.

The tables of moves say what is drawn. `DIAGRAMS` says only where each state is and which way a line takes. The main
path goes straight down, and the other states are beside it. A request may abort from every state that is not final, so
a frame stands around these states, and one arrow leads from the frame to ABORTED. A test checks that the pictures are
current.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aoffload._extensions.overlap import OVERLAP_MOVES
from aoffload._extensions.pins import PIN_MOVES
from aoffload._extensions.transfers import CACHE_TRANSFER_MOVES
from aoffload._kernel.states import JOB_MOVES, REQUEST_MOVES, State

IMAGES = Path(__file__).parents[1] / "images"
STEP, HEIGHT, TOP, RADIUS, MARGIN = 50, 28, 30, 7, 8
Point = tuple[int, int]


@dataclass(frozen=True)
class Diagram:
    moves: Mapping[State, frozenset[State]]
    places: Mapping[str, tuple[int, float]]
    """For each state its column and row. Column 0 is the main path."""
    columns: tuple[int, ...] = (84, 256)
    """Middle of each column."""
    width: int = 344
    box_width: int = 136
    ways: Mapping[tuple[str, str], tuple[str, int | None, str]] = field(default_factory=dict)
    """Moves that are not straight lines from one box to the next: where the line begins and ends, such as "r-6" (the
    right side, 6 above the middle), and the x of the vertical part between two corners. None: one straight line."""
    framed: str = ""
    """The state that is reached from the frame."""

    def middle(self, state: str) -> Point:
        column, row = self.places[state]
        return self.columns[column], int(TOP + row * STEP)

    def port(self, state: str, place: str) -> Point:
        (x, y), side, offset = self.middle(state), place[0], int(place[1:] or 0)
        if side in "tb":
            return x + offset, y + (HEIGHT // 2 if side == "b" else -HEIGHT // 2)
        return x + (self.box_width // 2 if side == "r" else -self.box_width // 2), y + offset

    def frame(self) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of the frame around all states that are not final."""
        last = max(self.middle(state.name)[1] for state, targets in self.moves.items() if targets)
        return MARGIN, TOP - HEIGHT // 2 - MARGIN, self.width - MARGIN, last + HEIGHT // 2 + 14

    def state(self, name: str) -> State:
        return next(state for state in self.moves if state.name == name)

    def lines(self) -> Iterator[str]:
        """The path of each move."""
        for old, targets in self.moves.items():
            for new in sorted(targets, key=list(self.moves).index):
                if new.name != self.framed:
                    yield self.line(old.name, new.name)
        if self.framed:
            x, y = self.port(self.framed, "t")
            yield f"M{x} {self.frame()[3]}L{x} {y}"

    def line(self, old: str, new: str) -> str:
        is_beside = self.places[old][1] == self.places[new][1]
        is_forward = self.places[old] < self.places[new] if is_beside else self.places[old][1] < self.places[new][1]
        sides = "rl" if is_beside else "bt"
        default = sides[0 if is_forward else 1], None, sides[1 if is_forward else 0]
        first, lane, last = self.ways.get((old, new), default)
        (x, y), (to_x, to_y) = self.port(old, first), self.port(new, last)
        if lane is None:
            return f"M{x} {y}L{to_x} {to_y}"
        down = RADIUS if to_y > y else -RADIUS
        out, back = (RADIUS if lane > x else -RADIUS), (RADIUS if to_x > lane else -RADIUS)
        corner = f"L{lane - out} {y}Q{lane} {y} {lane} {y + down}"
        return f"M{x} {y}{corner}L{lane} {to_y - down}Q{lane} {to_y} {lane + back} {to_y}L{to_x} {to_y}"


REQUEST = Diagram(
    REQUEST_MOVES,
    {
        "QUEUED": (0, 0), "MATCHED": (0, 1), "PINNED": (0, 2), "ALLOCATED": (0, 3), "LOADING": (0, 4),
        "RUNNING": (0, 6), "DONE": (0, 7.4), "PREEMPTED": (1, 1), "STRANDED": (1, 3), "REQUEUED": (1, 4),
        "DRAINING": (1, 5), "ABORTED": (1, 7.4),
    },
    columns=(114, 282),
    width=400,
    box_width=108,
    ways={
        ("PINNED", "MATCHED"): ("l-6", 42, "l6"),
        ("ALLOCATED", "RUNNING"): ("l", 34, "l"),
        ("ALLOCATED", "PREEMPTED"): ("r-6", None, "b-36"),
        ("LOADING", "REQUEUED"): ("r", None, "l"),
        ("LOADING", "DRAINING"): ("r8", None, "l-6"),
        ("DRAINING", "RUNNING"): ("l6", None, "r-8"),
        ("REQUEUED", "ALLOCATED"): ("l-8", None, "r6"),
        ("REQUEUED", "PREEMPTED"): ("r-6", 376, "r"),
        ("RUNNING", "REQUEUED"): ("r0", 358, "r6"),
        ("RUNNING", "PREEMPTED"): ("r8", 376, "r"),
    },
    framed="ABORTED",
)  # fmt: skip
DIAGRAMS = {
    "request": REQUEST,
    "job": Diagram(
        JOB_MOVES,
        {"QUEUED": (0, 0), "LAUNCHED": (0, 1), "COMPLETED": (0, 2), "DISCARDED": (1, 0), "FAILED": (1, 1)},
    ),
    "pin": Diagram(
        PIN_MOVES,
        {"NEW": (0, 0), "HELD": (0, 1), "RELEASED": (0, 2), "LAPSED": (1, 0), "YIELDED": (1, 1), "DROPPED": (1, 2)},
        ways={("HELD", "LAPSED"): ("r", 170, "l"), ("HELD", "DROPPED"): ("r", 170, "l")},
    ),
    "cache-transfer": Diagram(
        CACHE_TRANSFER_MOVES,
        {"NEW": (0, 0), "MOVING": (0, 1), "DONE": (0, 2), "CANCELLED": (1, 1)},
        columns=(92, 256),
        box_width=112,
        ways={("NEW", "DONE"): ("l", 18, "l")},
    ),
    "load-overlap": Diagram(
        OVERLAP_MOVES,
        {"NEW": (0, 0), "SPECULATIVE": (0, 1), "CONFIRMED": (0, 2), "INVALID": (1, 1), "ACKNOWLEDGED": (1, 2)},
    ),
}

STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; text-anchor: middle; }
.state { fill: #e8f0fb; stroke: #4a76b0; } .beside { fill: #f1f3f5; stroke: #7a8590; } .name { fill: #1c2733; }
.move { fill: none; stroke: #7a8590; stroke-width: 1.3; } #tip path { fill: #7a8590; }
.note { fill: #7a8590; text-anchor: start; }
.frame { fill: none; stroke: #7a8590; stroke-dasharray: 4 4; }
@media (prefers-color-scheme: dark) {
  .state { fill: #1d3350; stroke: #6f9fdc; } .beside { fill: #2a3038; stroke: #8b96a2; } .name { fill: #e6edf3; }
  .move, .frame { stroke: #8b96a2; } #tip path, .note { fill: #8b96a2; }
}
"""
"""Lines have a grey that is readable on white and on black."""


def drawing(kind: str) -> str:
    """The picture of the states of `kind`, as SVG. Final states have round ends."""
    diagram = DIAGRAMS[kind]
    if {state.name for state in diagram.moves} != diagram.places.keys():
        raise ValueError(f"DIAGRAMS[{kind!r}].places and the table have different states")
    height = max(diagram.middle(state)[1] for state in diagram.places) + HEIGHT // 2 + MARGIN
    parts = []
    if diagram.framed:
        left, top, right, bottom = diagram.frame()
        size = f'width="{right - left}" height="{bottom - top}"'
        parts.append(f'<rect class="frame" x="{left}" y="{top}" {size} rx="10"/>')
        parts.append(f'<text class="note" x="{diagram.columns[1] + 10}" y="{bottom + 19}">from any state</text>')
    parts += [f'<path class="move" d="{line}" marker-end="url(#tip)"/>' for line in diagram.lines()]
    for state, (column, _) in diagram.places.items():
        x, y = diagram.middle(state)
        ends = HEIGHT // 2 if not diagram.moves[diagram.state(state)] else 5
        size = f'x="{x - diagram.box_width // 2}" y="{y - HEIGHT // 2}" width="{diagram.box_width}" height="{HEIGHT}"'
        parts.append(f'<rect class="{"beside" if column else "state"}" {size} rx="{ends}"/>')
        parts.append(f'<text class="name" x="{x}" y="{y + 4}">{state}</text>')
    marker = (
        '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z"/></marker>'
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {diagram.width} {height}" width="{diagram.width}"'
    title = f"<title>States of a {kind.replace('-', ' ')}</title>"
    lines = [f'{head} height="{height}">', title, f"<style>{STYLE}</style>", f"<defs>{marker}</defs>", *parts, "</svg>"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for kind in DIAGRAMS:
        (IMAGES / f"states-{kind}.svg").write_text(drawing(kind))
