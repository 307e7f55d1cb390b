"""The cost of the tiers: the cycle of `cycle.py` and `api.py` without a disk and with one.

`BEFORE=DIR` names a checkout of the version to compare with. Without it, the disk is compared with none. Each side is a
process of its own, and they take turns. Times are CPU time of the thread that does the bookkeeping.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import attrs
import numpy as np

from .disk_start import directory
from .harness import Rounds, Row, Sample
from .peer import Peer

__all__ = ["run", "tier_rows"]

SIZES = (64, 512, 4096)
RUNTIME_SIZES = (64, 512)
WANTED_OFF, WANTED_ON = 1.03, 1.15
SECONDS = 8.0
SAMPLE_S = 0.01
HERE = Path(__file__).parent.parent


@attrs.frozen
class Side:
    peer: Peer
    disk: str | None

    def cycle(self, kind: str, num_blocks: int) -> Sample:
        more = {"least_s": SAMPLE_S} if kind == "ledger" else {}
        return Sample(**self.peer.ask(kind, num_blocks=num_blocks, **more))


def run(vllm: Peer | None = None) -> Iterator[Row]:
    """Rows for the ledger and for the runtime."""
    before = os.environ.get("BEFORE")
    yield from tier_rows(None if before is None else Path(before))


def tier_rows(before: Path | None, seconds: float = SECONDS) -> Iterator[Row]:
    with ExitStack() as held:
        disk = str(held.enter_context(directory()))

        def side(path: Path, on: str | None) -> Side:
            return Side(held.enter_context(Peer("tiers", Path(sys.executable), path.resolve())), on)

        sides = {"off": side(HERE, None), "on": side(HERE, disk)}
        if before is not None:
            sides["before"] = side(before, None)
        for kind, sizes in (("ledger", SIZES), ("runtime", RUNTIME_SIZES)):
            for size in sizes:
                yield from _rows(kind, size, sides, seconds)


def _rows(kind: str, num_blocks: int, sides: dict[str, Side], seconds: float) -> list[Row]:
    for each in sides.values():
        each.peer.ask(f"prepare_{kind}", num_blocks=num_blocks, disk=each.disk)
    subjects: dict[str, Callable[[], Sample]] = {
        name: partial(each.cycle, kind, num_blocks) for name, each in sides.items()
    }
    rounds = Rounds(subjects, seconds=seconds)
    for name in rounds:
        rounds.add(name, subjects[name]())
    against = "before" if "before" in sides else "off"
    compared = [("off", WANTED_OFF), ("on", WANTED_ON)] if against == "before" else [("on", WANTED_ON)]
    return [_row(kind, num_blocks, rounds, name, against, wanted) for name, wanted in compared]


def _row(kind: str, num_blocks: int, rounds: Rounds, name: str, against: str, wanted: float) -> Row:
    ours, theirs = ([sample.cpu_s for sample in rounds.samples[each]] for each in (name, against))
    return Row(
        name=f"disk {name}: cycle, {kind}, {num_blocks * 16:,} tokens", value=float(np.median(ours)) * 1e6, unit="us",
        spread="{:.3g}-{:.3g}".format(*(np.percentile(ours, (10, 90)) * 1e6)), against=against,
        limit=float(np.median(theirs)) * 1e6, ratio=float(np.median(np.array(ours) / np.array(theirs))), wanted=wanted,
        is_at_most=True,
    )  # fmt: skip
