"""The drawing of the package in docs/architecture.md: its packages by layer, with lines of code.

    python -m proof.architecture                                prints the drawing
    python -m proof.architecture --write docs/architecture.md   replaces the drawing in that page

The layers are the floors of `tests/test_layers.py`, which checks the imports. A line of code is neither empty, nor a
comment, nor part of a docstring. Numbers of lines are rounded to two digits.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import attrs

from tests.test_layers import FACES, FLOORS, MODULES, PACKAGE, dotted, is_in

__all__ = ["BEGIN", "END", "PAGE", "Package", "drawing", "is_current", "page_with", "packages"]

PAGE = Path(__file__).parents[1] / "docs/architecture.md"
BEGIN, END = (
    "<!-- drawing: python -m proof.architecture --write docs/architecture.md -->\n",
    "<!-- end of drawing -->\n",
)
TOLERANCE = 0.1
"""The share by which the lines of a package may differ from those in the page before the page is out of date."""
FACE = "public names"
BESIDE = ("kv_events", "metrics")
"""Further modules with public names that are defined elsewhere."""
PHRASES = {
    "assembly": "`Ledger`",
    "clients": "clients of stores",
    "common": "clock, threads, checks",
    "config": "settings",
    "demo": "`aoffload demo`",
    "errors": "exceptions",
    "eviction": "learned eviction",
    "extensions": "features",
    "host_cache": "`HostCache`",
    "kernel": "decides which block holds which KV",
    "kv_events": "KV events",
    "loop": "work in the event loop",
    "main": "the command `aoffload`",
    "metrics": "metrics",
    "observe": "log, observers",
    "otel": "spans for OpenTelemetry",
    "plan": "`aoffload plan`",
    "reference": "reference engine, HTTP server",
    "rules": "rules of copies",
    "runtime": "async runtimes",
    "testing": "simulator",
    "tiers": "copies in threads",
    "top": "`aoffload top`",
    "trace": "`aoffload trace`",
    "transfer": "copy queue and transports",
    "vllm": "vLLM connector",
}
"""The contents of a package, by the last part of its name without underscores."""


@attrs.frozen
class Package:
    floor: int
    name: str
    phrase: str
    num_lines: int


@cache
def packages() -> tuple[Package, ...]:
    """All packages, the highest floor first. Modules of one floor are one entry if they are in one folder, or if all
    define public names."""
    return tuple(entry for number in reversed(range(len(FLOORS))) for entry in _packages_of(number))


def _packages_of(floor: int) -> Iterator[Package]:
    grouped: dict[str, list[str]] = {}
    for name in FLOORS[floor].split():
        grouped.setdefault(FACE if name in (*FACES, *BESIDE) else name.partition(".")[0], []).append(name)
    for title, names in grouped.items():
        paths = [path for path in MODULES if _place(dotted(path)) in {(floor, name) for name in names}]
        lines = sum(len(_code_lines(PACKAGE / path)) for path in paths)
        name = names[0].replace(".", "/") if len(names) == 1 else title
        yield Package(floor, name, _phrase(title, names), lines)


def _place(module: str) -> tuple[int, str]:
    """The floor of a module, and the name in `FLOORS` that it belongs to: the longest. (-1, "") if there is none."""
    found = [(name, floor) for floor, names in enumerate(FLOORS) for name in names.split() if is_in(module, name)]
    name, floor = max(found, key=lambda one: len(one[0]), default=("", -1))
    return floor, name


def _phrase(title: str, names: list[str]) -> str:
    if title == FACE:
        return " ".join(sorted(names))
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
    """A line for each package, the highest layer first."""
    rows = [("layer", "package", "lines", "contents")]
    rows += [(str(each.floor), each.name, f"{_rounded(each.num_lines):,}", each.phrase) for each in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines, floor = list[str](), ""
    for number, *cells in rows:
        shown = zip(["" if number == floor else number, *cells], "><><", widths, strict=True)
        lines.append("  ".join(f"{cell:{side}{width}}" for cell, side, width in shown).rstrip())
        floor = number
    return "\n".join([*lines, ""])


def _rounded(number: int) -> int:
    """`number` with two digits, and zeros after them."""
    return int(float(f"{number:.1e}"))


def page_with(text: str, shown: str) -> str:
    """The text of a page, with the drawing `shown` in place of the old one."""
    return f"{text.split(BEGIN)[0]}{BEGIN}```text\n{shown}```\n{END}{text.split(END)[1]}"


LINES = re.compile(r"^( *\d* +[\w/]+(?: names)?) +([\d,]+)(?=  )", re.MULTILINE)


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
