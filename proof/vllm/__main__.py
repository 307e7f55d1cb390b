"""Run scenarios inside vLLM's engine, each part in a process of its own, and keep the table in build/vllm.

Exit status: 0 every scenario has run and is met; 1 something is missing or missed; 2 vLLM is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from proof.gpu.running import run_process
from proof.shares import add_share, share_of

from .parts import NEWER, PARTS, TOTAL_S, Part
from .rows import Row, read, table

__all__ = ["main", "run_parts", "short_of"]

OUT = Path("build/vllm")
OUT_OF_NEWER = Path("build/vllm33")
REPORT = "report.md"
NOT_INSTALLED = 2


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m proof.vllm", description=(__doc__ or "").partition("\n")[0])
    names = list(dict.fromkeys(part.name for part in (*PARTS, *NEWER)))
    parser.add_argument("names", nargs="*", metavar="PART", help=f"{', '.join(names)}; all, if none is named")
    parser.add_argument("--short", action="store_true", help="run the parts and scenarios that each change must pass")
    parser.add_argument("--newer", action="store_true", help="run the parts of `make vllm33`")
    add_share(parser, "third", 3, "the parts, beside the first one")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - set(names):
        parser.error(f"there is no part called {', '.join(sorted(unknown))}")
    if importlib.util.find_spec("vllm") is None:
        print("vllm: not run, since vLLM is not installed here", file=sys.stderr)
        return NOT_INSTALLED
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the running part, too
    parts, out = (NEWER, OUT_OF_NEWER) if given.newer else (PARTS, OUT)
    third = share_of(given.third, 3, "vllm, parts beside the first one")
    chosen = (
        [part for part in parts if part.name in given.names] if given.names else short_of(parts, given.short, third)
    )
    out.mkdir(parents=True, exist_ok=True)
    return run_parts(chosen, out, time.monotonic() + TOTAL_S, given.short)


def short_of(parts: Sequence[Part], is_short: bool, third: int | None) -> list[Part]:
    """The parts of the short form, or all; with `third`, the first one and a third of the others."""
    found = [part for part in parts if part.is_short or not is_short]
    return found if third is None else [*found[:1], *found[1:][third::3]]


def run_parts(parts: Sequence[Part], out: Path, deadline_s: float, is_short: bool = False) -> int:
    """Run the parts in turn until `deadline_s` of the monotonic clock; print and keep the table. The exit status."""
    rows: list[Row] = []
    began_s = time.monotonic()
    for number, part in enumerate(parts):
        reserved_s = sum(later.limit_s for later in parts[number + 1 :])
        limit_s = max(part.limit_s, deadline_s - time.monotonic() - reserved_s)
        print(f"{part.name}: {part.about}", flush=True)
        rows += _run(part, out, limit_s, is_short)
        (out / REPORT).write_text(f"# Inside vLLM\n\n{table(rows)}\n")
    print(table(rows), f"{time.monotonic() - began_s:.0f} s; the table is in {out / REPORT}", sep="\n")
    return 0 if rows and all(row.is_met for row in rows) else 1


def _run(part: Part, out: Path, limit_s: float, is_short: bool) -> list[Row]:
    """The rows that the process of `part` has written, and one that says what went wrong with it."""
    file, log = out / f"{part.name}.json", out / f"{part.name}.log"
    file.unlink(missing_ok=True)  # no row of an earlier run
    words = ["--short"] if is_short else []
    ended = run_process([sys.executable, "-m", f"proof.vllm.{part.name}", "--json", str(file), *words], limit_s, log)
    rows, problem = [], ended.problem
    try:
        rows = read(file)
    except (OSError, ValueError) as error:
        problem = problem or f"no rows: {error}"
    if problem or not rows:
        rows.append(Row(part.name, took_s=ended.took_s, problems=(f"{problem or 'no rows'}, see {log}",)))
    return rows


if __name__ == "__main__":
    sys.exit(main())
