"""The drawing of the package in docs/architecture.md: its packages by floor, with lines of code and imports.

    python -m proof.architecture                                prints the drawing
    python -m proof.architecture --write docs/architecture.md   replaces the drawing in that page

The floors are those of `tests/test_layers.py`, and the imports are read from the source. A line of code is neither
empty, nor a comment, nor part of a docstring. Numbers of lines are rounded to two digits.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import attrs

from tests.test_layers import FACES, FLOORS, MODULES, PACKAGE, dotted, imports, is_in

__all__ = ["BEGIN", "END", "PAGE", "Package", "drawing", "is_current", "page_with", "packages"]

PAGE = Path(__file__).parents[1] / "docs/architecture.md"
BEGIN, END = (
    "<!-- drawing: python -m proof.architecture --write docs/architecture.md -->\n",
    "<!-- end of drawing -->\n",
)
TOLERANCE = 0.1
"""The share by which the lines of a package may differ from those in the page before the page is out of date."""
PHRASE_WIDTH = 46
FACE = "public names"
PHRASES = {
    FACE: "{}: names that are defined further down",
    "arguments": "checks of arguments",
    "assembly": "`Ledger`: the kernel with its features",
    "clients": "clients of stores, such as Redis",
    "cli": "the command `aoffload`",
    "commands": "what commands share",
    "common": "checks of arguments, extras, clock, randomness, threads",
    "config": "settings: groups, tiers, sizes",
    "demo": "a real model over a device pool that is too small",
    "env": "clock, randomness, threads, event loop",
    "errors": "the typed errors",
    "eviction": "learned eviction and hints",
    "extensions": "features: pins, forks, preemption, store policies, ...",
    "extras": "optional dependencies",
    "host_cache": "`HostCache`: for an engine that owns its device blocks",
    "integrations": "reference engine and models, HTTP server, vLLM",
    "kernel": "decides which block holds which KV",
    "kv_events": "KV events for cache-aware routers",
    "loop": "the loop side of each tier",
    "main": "`python -m aoffload`",
    "metrics": "metrics for Prometheus",
    "observe": "the log, observers",
    "otel": "spans for OpenTelemetry",
    "plan": "how much host memory is worth buying",
    "reference": "reference engine and models, HTTP server",
    "rules": "what each tier stores and fetches",
    "runtime": "the async shell: runtime, request, session, worker",
    "testing": "a simulated device, faults, schedules",
    "tiers": "the byte side of each tier below the host",
    "top": "a live view of a running process",
    "trace": "reports on a log",
    "transfer": "moves bytes: copy queue, lanes, backends, ranks",
    "vllm": "the connector for vLLM",
}
"""The contents of a package, by the last part of its name without underscores."""


@attrs.frozen
class Package:
    floor: int
    name: str
    phrase: str
    num_lines: int
    below: frozenset[int]
    """The floors that it imports from, its own included."""


@cache
def packages() -> tuple[Package, ...]:
    """All packages, the highest floor first. Modules of one floor are one entry if they are in one folder, or if all
    define public names."""
    return tuple(entry for number in reversed(range(len(FLOORS))) for entry in _packages_of(number))


def _packages_of(floor: int) -> Iterator[Package]:
    grouped: dict[str, list[str]] = {}
    for name in FLOORS[floor].split():
        grouped.setdefault(FACE if name in FACES else name.partition(".")[0], []).append(name)
    for title, names in grouped.items():
        paths = [path for path in MODULES if _place(dotted(path)) in {(floor, name) for name in names}]
        places = {_place(module) for path in paths for module in _imported(path)}
        below = {number for number, name in places if name and name not in names}
        lines = sum(len(_code_lines(PACKAGE / path)) for path in paths)
        name = names[0].replace(".", "/") if len(names) == 1 else title
        yield Package(floor, name, _phrase(title, names), lines, frozenset(below))


def _place(module: str) -> tuple[int, str]:
    """The floor of a module, and the name in `FLOORS` that it belongs to: the longest. (-1, "") if there is none."""
    found = [(name, floor) for floor, names in enumerate(FLOORS) for name in names.split() if is_in(module, name)]
    name, floor = max(found, key=lambda one: len(one[0]), default=("", -1))
    return floor, name


def _imported(path: Path) -> Iterator[str]:
    for name, is_for_types in imports(path):
        package, _, module = name.partition(".")
        if package == PACKAGE.name and module and not is_for_types:
            yield module


def _phrase(title: str, names: list[str]) -> str:
    if title == FACE:
        return PHRASES[FACE].format(" ".join(sorted(names)))
    parts = [name.rpartition(".")[2].strip("_") for name in names]
    found = dict.fromkeys(PHRASES[part] for part in parts if part in PHRASES)
    return "; ".join(found) or title


def _code_lines(path: Path) -> set[int]:
    with tokenize.open(path) as file:
        text = file.read()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(iter(text.splitlines(keepends=True)).__next__)
    found = {line for each in tokens if each.type not in skipped for line in range(each.start[0], each.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return found


def drawing(found: Iterable[Package]) -> str:
    """The floors from above. The last column has the numbers of the floors that a package imports from."""
    rows = [("", "package", "lines", "what is there", "imports from floors")]
    for entry in found:
        floors = range(max(entry.below, default=-1) + 1)
        below = " ".join(str(one) if one in entry.below else "·".rjust(len(str(one))) for one in floors)
        first, *more = textwrap.wrap(entry.phrase, PHRASE_WIDTH)
        rows.append((str(entry.floor), entry.name, f"{_rounded(entry.num_lines):,}", first, below))
        rows += [("", "", "", line, "") for line in more]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    bars = ["─" * (width + 2) for width in widths]
    lines, floor = [f"┌{'┬'.join(bars)}┐"], ""
    for number, *cells in rows:
        is_new = number not in ("", floor)
        if is_new:
            floor = number
            lines.append(f"├{'┼'.join(bars)}┤")
        shown = zip([number if is_new else "", *cells], "><><<", widths, strict=True)
        lines.append(f"│ {' │ '.join([f'{cell:{side}{width}}' for cell, side, width in shown])} │")
    return "\n".join([*lines, f"└{'┴'.join(bars)}┘", ""])


def _rounded(number: int) -> int:
    """`number` with two digits, and zeros after them."""
    return int(float(f"{number:.1e}"))


def page_with(text: str, shown: str) -> str:
    """The text of a page, with the drawing `shown` in place of the old one."""
    return f"{text.split(BEGIN)[0]}{BEGIN}```text\n{shown}```\n{END}{text.split(END)[1]}"


LINES = re.compile(r"^(│[^│]*│[^│]*│) +([\d,]+) │", re.MULTILINE)


def is_current(text: str) -> bool:
    """Whether a page has the drawing of the package as it is, but for lines of code that differ by less than
    `TOLERANCE`."""
    found = packages()
    shown = [int(number.replace(",", "")) for _, number in LINES.findall(text.split(BEGIN)[1].split(END)[0])]
    ours = LINES.sub(r"\1", page_with(text, drawing(found)))
    return ours == LINES.sub(r"\1", text) and all(
        abs(entry.num_lines - number) <= max(10, entry.num_lines * TOLERANCE)
        for entry, number in zip(found, shown, strict=True)
    )


def main(arguments: list[str]) -> None:
    shown = drawing(packages())
    match arguments:
        case []:
            print(shown, end="")
        case ["--write", path]:
            page = Path(path)
            page.write_text(page_with(page.read_text(), shown))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
