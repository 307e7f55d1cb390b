"""Real kills: a serving process is killed repeatedly, and each new process checks the disk of the one before it."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from proof.report_lines import Line

from .server import SIZE_BYTES, Journal, serve_until_killed

__all__ = ["kills"]

BEFORE_S = 1.0
"""What was published so long before the kill has to hit again, most of it."""
MIN_SHARE = 0.9
MOST_OVER = 1.01
LIVES_S = (1.3, 3.0)
START_S = 60.0


@attrs.define
class Totals:
    kills: int = 0
    stored: int = 0
    """Tokens that were on the disk a second before a kill, and still at the last look."""
    found: int = 0
    wrong: list[str] = attrs.field(factory=list)
    most_bytes: int = 0
    compared: int = 0
    problems: list[str] = attrs.field(factory=list)


def kills(num_kills: int, first_seed: int = 0) -> Iterator[Line]:
    """Kill `num_kills` processes, and then look once more."""
    totals = Totals()
    with tempfile.TemporaryDirectory(prefix="aoffload-kills-") as place:
        held: dict[str, int] = {}
        for seed in range(first_seed, first_seed + num_kills + 1):
            notes_read = _one_life(Path(place), seed)
            _judge(totals, notes_read, held)
            held = _held_before(notes_read)
            totals.most_bytes = max(totals.most_bytes, _du(Path(place) / "disk"))
    totals.kills = num_kills
    share = totals.found / totals.stored if totals.stored else 0.0
    yield Line("kills", f"{num_kills:,}", f"{num_kills:,} {totals.problems or ''}", not totals.problems)
    yield Line("wrong bytes after a kill", "0", f"{len(totals.wrong)} {totals.wrong[:3] or ''}", not totals.wrong)
    yield Line("blocks compared", "any", f"{totals.compared:,}", totals.compared > 0)
    about = f"{share:.1%} of {totals.stored:,} tokens"
    yield Line("published a second before a kill, and hits again", f"{MIN_SHARE:.0%}", about, share >= MIN_SHARE)
    most = totals.most_bytes / SIZE_BYTES
    yield Line("space on the disk", f"{MOST_OVER:.0%} of its size", f"{most:.1%}", 0 < most <= MOST_OVER)


def _one_life(place: Path, seed: int) -> list[list[Any]]:
    """Fork a server on `place`, kill it at some time, and return what it wrote down."""
    notes, (reader, writer) = place / "journal", os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.close(reader)
            serve_until_killed(place / "disk", Journal(notes), seed, writer)
        except BaseException as error:  # noqa: BLE001 - a forked process must not go on as if it were the program
            Journal(notes).write("ended", repr(error))
        finally:
            os._exit(status)
    os.close(writer)
    try:
        os.read(reader, 8)  # until it has read its disk, or is over
        time.sleep(random.Random(f"life {seed}").uniform(*LIVES_S))
    finally:
        os.close(reader)
        killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    notes_read = [json.loads(line) for line in notes.read_text().splitlines()]
    return [*notes_read, ["killed", killed_s, None]]


def _judge(totals: Totals, notes_read: list[list[Any]], held: dict[str, int]) -> None:
    by_kind = {kind: what for kind, _, what in notes_read}
    totals.wrong += [what for kind, _, what in notes_read if kind == "wrong"]
    totals.problems += [what for kind, _, what in notes_read if kind == "ended"]
    totals.compared += by_kind.get("compared", 0)
    if "found" not in by_kind:
        totals.problems.append("a process did not come to read its disk")
        return
    for number, num_tokens in held.items():
        totals.stored += num_tokens
        totals.found += min(num_tokens, by_kind["found"][number])


def _held_before(notes_read: list[list[Any]]) -> dict[str, int]:
    """What the disk had a second before the kill and had not evicted at the last look, in tokens by prompt."""
    killed_s = notes_read[-1][1]
    looks = [(when, what) for kind, when, what in notes_read if kind == "held"]
    before = [what for when, what in looks if when <= killed_s - BEFORE_S]
    if not before:
        return {}
    return {number: min(num_tokens, looks[-1][1][number]) for number, num_tokens in before[-1].items()}


def _du(place: Path) -> int:
    return sum(each.stat().st_blocks * 512 for each in (place, *place.iterdir()))
