"""`python -m proof.attacks`: runs all attacks and prints their costs. `--tree` attacks another checkout.

Most of an attack is waiting, so two are made at a time, each on a victim of its own; those that measure how long a
client waits come first, alone.

Exit status: 0 every figure is within its limit; 1 one is not, or could not be measured; 2 this is not Linux.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..workers import share_out
from . import answers, bad_http, before_admission, event_peers, hints, operators, stopped_ranks
from .figures import HEAD, Figure, line, table

__all__ = ["ATTACKS", "main"]

Attack = Callable[[Path], Iterator[Figure]]
ATTACKS: dict[str, tuple[Attack, ...]] = {
    "A1": (before_admission.connections,),
    "A2": (before_admission.headers,),
    "A3": (before_admission.bodies,),
    "A4": (before_admission.echoes,),
    "A5": (answers.failures,),
    "A6": (answers.pages,),
    "A7": (answers.redirects,),
    "A8": (answers.probes,),
    "A9": (event_peers.replays, event_peers.subscriptions, event_peers.frames),
    "C1": (operators.mistakes,),
    "C2": (operators.full_disks,),
    "C3": (operators.half_bodies,),
    "C4": (operators.many_signals,),
    "C5": (stopped_ranks.stops,),
    "C6": (stopped_ranks.orphans,),
    "C7": (operators.open_requests,),
    "D": (operators.words, operators.malformed),
    "E1": (bad_http.pipelines,),
    "E2": (bad_http.endless,),
    "E3": (bad_http.smuggled,),
    "H1": (hints.hints,),
}
ALONE = ("A1", "C5")
AT_A_TIME = 2
HERE = Path(__file__).parents[2]
REPORT = Path("build/attacks.md")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m proof.attacks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(ATTACKS)}; all, if none is named")
    parser.add_argument("--tree", type=Path, default=HERE, help="the checkout whose package is attacked")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - set(ATTACKS):
        parser.error(f"there is no attack called {', '.join(sorted(unknown))}")
    if sys.platform != "linux":
        print("attacks: not run, since memory and descriptors of a process are read as Linux has them", file=sys.stderr)
        return 2
    began_s = time.monotonic()
    figures = run(given.names or ATTACKS, given.tree.resolve())
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(f"# Attacks\n\n{table(figures)}\n")
    print(f"{time.monotonic() - began_s:.0f} s; the table is in {REPORT}")
    return 0 if all(figure.is_met for figure in figures) else 1


def run(names: Iterable[str], tree: Path) -> list[Figure]:
    """All figures of these attacks, in their order, each printed when it is there."""
    _say(line(HEAD))
    attacks = [(name, attack) for name in names for attack in ATTACKS[name]]
    alone = [one for one in attacks if one[0] in ALONE]
    others = [one for one in attacks if one not in alone]
    found = {one: _made(*one, tree) for one in alone}

    def of_another(number: int) -> list[dict[str, Any]]:
        return [asdict(figure) for figure in _made(*others[number], tree)]

    for one, figures in zip(others, share_out(of_another, len(others), AT_A_TIME), strict=True):
        found[one] = [Figure(**figure) for figure in figures]
    return [figure for one in attacks for figure in found[one]]


def _made(name: str, attack: Attack, tree: Path) -> list[Figure]:
    found: list[Figure] = []
    for figure in _figures(name, attack, tree):
        found.append(figure)
        _say(line(figure.cells()))
    return found


def _say(text: str) -> None:
    """In one write: two processes say something at a time."""
    os.write(sys.stdout.fileno(), f"{text}\n".encode())


def _figures(name: str, attack: Attack, tree: Path) -> Iterator[Figure]:
    """Those of one attack. One that cannot be made is missed, and the others go on."""
    try:
        yield from attack(tree)
    except Exception as error:  # noqa: BLE001 - whatever a victim that is taken down does to its attacker
        yield Figure(name, (attack.__doc__ or "").strip(), f"not measured: {error!r:.300}", float("inf"), 0)


if __name__ == "__main__":
    sys.exit(main())
