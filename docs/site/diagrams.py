"""State diagrams: Mermaid in the pages, drawings on the site, without a script that would have to be loaded for them.

One column in the order of the table. Moves to the next state go straight down, moves further down bend to the right,
moves back up to the left.
"""

from __future__ import annotations

import re

FENCE = re.compile(r"^```mermaid\n(stateDiagram-v2\n.*?)^```$", re.MULTILINE | re.DOTALL)
MOVE = re.compile(r"(\w+) --> (\S+)")
WIDTH, HEIGHT, STEP, LEFT = 110, 26, 46, 160


def on_page_markdown(markdown: str, **_: object) -> str:
    return FENCE.sub(lambda found: drawing(found[1]), markdown)


def drawing(diagram: str) -> str:
    moves = MOVE.findall(diagram)
    states = list(dict.fromkeys(old for old, _ in moves))
    at = {state: number * STEP + 2 for number, state in enumerate(states)}
    lines = [line(at[old], at[new]) for old, new in moves if new in at]
    boxes = [box(state, at[state]) for state in states]
    size = f'width="{LEFT + WIDTH + 30 * len(states)}" height="{len(states) * STEP}"'
    marker = (
        '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z"/></marker>'
    )
    return f'<div class="states"><svg {size} role="img"><defs>{marker}</defs>{"".join(lines + boxes)}</svg></div>'


def line(top: int, bottom: int) -> str:
    middle = LEFT + WIDTH // 2
    if bottom - top == STEP:
        return path(f"M{middle} {top + HEIGHT}L{middle} {bottom}")
    side = LEFT + WIDTH if bottom > top else LEFT
    bend = side + (bottom - top) // STEP * 26
    start, stop = top + HEIGHT // 2, bottom + HEIGHT // 2
    return path(f"M{side} {start}C{bend} {start} {bend} {stop} {side} {stop}")


def path(way: str) -> str:
    return f'<path class="move" d="{way}" marker-end="url(#tip)"/>'


def box(state: str, top: int) -> str:
    words = f'<text x="{LEFT + WIDTH // 2}" y="{top + 18}">{state}</text>'
    return f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{HEIGHT}" rx="4"/>{words}'
