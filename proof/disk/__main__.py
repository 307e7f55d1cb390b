"""`python -m proof.disk`: stories of the crash model, stories in which erasures fail, and each call failed in each way.
`python -m proof.disk mutants`: planted defects.

Exits with 0 if no law was broken, and with `mutants` if every defect was met."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from proof.mutants_disk import DISK_MUTANTS
from proof.planting import Ending, in_child, preload
from proof.report_lines import Line
from proof.workers import share_out

FEWEST_LIVES = 2
"""The lives of a story, at least."""
PIECE = 100
"""Stories that a worker tells before it takes others."""
MUTANT_SEEDS = 2000
MOST_ERASES = 4
"""In a fourth of the stories with failing erasures each erasure fails, in another fourth each second one, and so on."""
TIMEOUT_S = 3600.0


def stories(argument: Any) -> dict[str, Any]:
    """Tell the stories of seeds `[first, stop)`; of `until_broken`, up to the first that breaks a law."""
    from .story import run_story

    counts, broken = Counter[str](), []
    for seed in range(argument["first"], argument["stop"]):
        story, law = run_story(seed, erases=1 + seed % MOST_ERASES if argument.get("erases") else 0)
        counts += story.counts
        counts["stories"] += 1
        if law is not None:
            broken.append(f"seed {seed}: {law}")
            if argument.get("until_broken"):
                break
    return {"counts": dict(counts), "broken": broken}


def calls(argument: Any) -> dict[str, Any]:
    """Fail every call of the stories of some seeds, in each way."""
    from .story import every_call

    num_stories, law = every_call(argument["first"])
    return {"counts": {"stories": num_stories}, "broken": [] if law is None else [str(law)]}


def explored(num_seeds: int, first: int, num_lives: int, num_swept: int, num_workers: int) -> Iterator[Line]:
    """Run the stories of `num_seeds` seeds, stories of at least `num_lives` lives in which erasures fail, and the first
    `num_swept` stories with each of their calls failed."""
    yield _line("crash model, stories", _run_stories(first, num_seeds, num_workers))
    if num_lives:
        parts = _run_stories(first, -(-num_lives // FEWEST_LIVES), num_workers, erases=True)
        yield _line("crash model, each k-th erasure of invalidated KV failed or short", parts)
    if num_swept:
        swept = share_out(lambda number: calls({"first": first + number}), num_swept, num_workers)
        yield _line("crash model, every call failed in each way", swept)


def _run_stories(first: int, num_seeds: int, num_workers: int, **options: bool) -> list[dict[str, Any]]:
    stop = first + num_seeds
    starts = range(first, stop, PIECE)

    def tell(number: int) -> dict[str, Any]:
        return stories({"first": starts[number], "stop": min(starts[number] + PIECE, stop), **options})

    return list(share_out(tell, len(starts), num_workers))


def _line(what: str, parts: Sequence[dict[str, Any]]) -> Line:
    counts, broken = Counter[str](), []
    for part in parts:
        counts.update(part["counts"])
        broken += part["broken"]
    about = f"{counts.pop('stories', 0):,}, {len(broken)} broken laws {broken[:3] or ''}"
    met = ", ".join(f"{number:,} {name}" for name, number in counts.most_common())
    return Line(what, "no broken law", f"{about}{f' ({met})' if met else ''}", not broken)


def planted(only: str, first: int, num_workers: int) -> Iterator[Line]:
    """Plant each defect with `only` in its name, and tell stories until one meets it."""
    chosen = [mutant for mutant in DISK_MUTANTS if only in mutant.name]
    rows = share_out(lambda number: _judged(chosen[number], first), len(chosen), num_workers)
    for mutant, row in zip(chosen, rows, strict=True):
        yield Line(mutant.name, f"met within {MUTANT_SEEDS:,} stories", row, row.startswith("met"))


def _judged(mutant: Any, first: int) -> str:
    argument = {"first": first, "stop": first + MUTANT_SEEDS, "until_broken": True}
    found = in_child("proof.disk.__main__:stories", argument, mutant, TIMEOUT_S)
    if found.ending is not Ending.RETURNED:
        return f"no verdict: {found.ending.value} {found.detail}"
    if not found.value["broken"]:
        return "not met"
    return f"met by story {found.value['counts']['stories']}: {found.value['broken'][0][:110]}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.disk", description=__doc__)
    parser.add_argument("part", nargs="?", choices=["explore", "mutants"], default="explore")
    parser.add_argument("--seeds", type=int, default=10_000, help="the number of histories")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--lives", type=int, default=10_000, help="the smallest number of process lives in which erasures fail"
    )
    parser.add_argument(
        "--swept", type=int, default=4, help="the number of histories in which each call fails in each way"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="", metavar="TEXT", help="plant only mutants with TEXT in their name")
    given = parser.parse_args()
    preload(("numpy", "attrs", "torch", "xxhash"))
    began_s = time.monotonic()
    is_met = True
    found = explored(given.seeds, given.first, given.lives, given.swept, given.workers)
    for line in planted(given.only, given.first, given.workers) if given.part == "mutants" else found:
        print(line, flush=True)
        is_met &= line.is_met
    print(f"{time.monotonic() - began_s:.0f} s")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
