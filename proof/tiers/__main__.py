"""`python -m proof.tiers`: the crash model, planted defects in it, real kills, each call of the disk failed, and
late puts to a remote store.

Exit status: 0 if every line is met. The table is in build/tiers/report.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs

from proof.report_lines import Line, table
from proof.workers import share_out

__all__ = ["PARTS", "main"]

REPORT = Path("build/tiers/report.md")


@attrs.frozen
class Size:
    """How much of each part."""

    seeds: int = 10_000
    lives: int = 10_000
    """Lives of the crash model in which erasures fail."""
    swept: int = 4
    kills: int = 100
    storm: int = 500
    """Invalidations of cells whose puts arrive late."""
    step: int = 1
    """Each so many-th call of the disk is failed."""
    workers: int = 2


SHORT = Size(seeds=400, lives=2_000, swept=0, kills=8, storm=40, step=9)


def model(size: Size) -> Iterator[Line]:
    """The crash model of slab and slot table."""
    from proof.disk.__main__ import explored

    return explored(size.seeds, 0, size.lives, size.swept, size.workers)


def defects(size: Size) -> Iterator[Line]:
    """Planted defects, which stories of the crash model have to meet. Only in long."""
    from proof.disk.__main__ import planted

    return planted("", 0, size.workers) if size != SHORT else iter(())


def killed(size: Size) -> Iterator[Line]:
    """Real kills under load."""
    from .kills import kills

    return kills(size.kills)


def failed(size: Size) -> Iterator[Line]:
    """Each call of the disk, failed in each way, under a whole runtime."""
    from .failing_calls import each_call_failed

    return each_call_failed(step=size.step)


def late(size: Size) -> Iterator[Line]:
    """Puts to a real Redis that arrive after they have failed. A long run repeats this without the protection."""
    from .late_puts import storm

    return storm(size.storm, shows=size != SHORT)


PARTS: dict[str, Callable[[Size], Iterator[Line]]] = {
    "model": model, "defects": defects, "kills": killed, "calls": failed, "storm": late,
}  # fmt: skip


def _made(name: str, size: Size) -> list[dict[str, object]]:
    """The lines of a part, made in a process of its own: it may start threads, and the parts that fork may not."""

    def make(_: int) -> list[dict[str, object]]:
        return [attrs.asdict(line) for line in PARTS[name](size)]

    (found,) = share_out(make, 1, 1)
    return list(found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.tiers", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all, if none is named")
    parser.add_argument("--short", action="store_true", help="run the part that each change must pass (two minutes)")
    given = parser.parse_args(arguments)
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"there is no part called {', '.join(sorted(unknown))}")
    lines, began_s = list[Line](), time.monotonic()
    for name in given.parts or PARTS:
        since_s = time.monotonic()
        found = [Line(**one) for one in _made(name, SHORT if given.short else Size())]  # type: ignore[arg-type]
        lines += found
        print(*found, f"      {name}: {time.monotonic() - since_s:.0f} s", sep="\n", flush=True)
    rows = [("ok" if line.is_met else "FAIL", line.what, line.found, line.target) for line in lines]
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(f"# Tiers\n\n{table(('', 'what', 'found', 'wanted'), rows)}\n")
    print(f"{time.monotonic() - began_s:.0f} s; the table is in {REPORT}")
    return 0 if all(line.is_met for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
