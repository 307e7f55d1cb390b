"""Two builds of the core in lockstep: `python -m proof.lockstep --beside build/compiled/bin/python`.

Both builds run the same programs from the same seeds, side by side, each in a process of its own. After each call, the
answer and the whole state of the ledger and of its plans must be the same in both. For the first three programs that
differ, the first call with a difference is printed.

`--base TREE` compares with the source of another commit, in place of another build. Names of fields and the words of
errors may differ between commits, so only answers, plans and statistics are compared then. With `--beside`, the other
commit is run by that interpreter, which has its compiled core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from .program_runs import ALL_FACES, ProgramPiece, shares

ROOT = Path(__file__).parent.parent
WALK = ROOT / "proof" / "program_digests.py"
MOST = 1000
"""Programs that a process runs at most: to start one takes some seconds."""


class Build:
    """A build of the core: the pure one of a source tree, or the one that is installed beside another interpreter. With
    the latter, the modules of the proof come from the folder of `share_packages.py`, which has no `aoffload`."""

    def __init__(
        self, python: Path | None = None, script: Path = WALK, tree: Path = ROOT, *, answers: bool = False
    ) -> None:
        self.is_compiled = python is not None
        self.command = [str(python or sys.executable), "-P", "-W", "ignore", str(script)]
        self.options = ["--answers"] if answers else []
        path = tree if python is None else python.parent.parent / "tree"
        self.environment = {**os.environ, "PYTHONPATH": str(path)}

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.command, *words, *self.options], stdout=subprocess.PIPE, text=True, env=self.environment
        )

    def read(self, process: subprocess.Popen[str]) -> Iterator[Any]:
        """What it prints. `SystemExit` if it is not the build that it should be, or fails."""
        assert process.stdout is not None
        lines = map(json.loads, process.stdout)
        about = next(lines, None)
        if about != {"is_compiled": self.is_compiled}:
            raise SystemExit(f"{self.command[0]} has another core than it should: {about}")
        yield from lines
        if process.wait():
            raise SystemExit(f"{process.args!r} ended with status {process.returncode}")


def compare(one: Build, other: Build, pieces: Sequence[ProgramPiece]) -> tuple[int, list[tuple[str, int]]]:
    """The calls of some pieces, which share a process of each build; and the programs that differ, by face and seed."""
    words = [word for piece in pieces for word in (piece.face, str(piece.first_seed), str(piece.num_programs))]
    builds = [(build, build.start(*words)) for build in (one, other)]
    num_calls, differing = 0, list[tuple[str, int]]()
    for mine, theirs in zip(*(build.read(process) for build, process in builds), strict=True):
        face, seed, calls, _ = mine
        num_calls += calls
        if mine != theirs:
            differing.append((face, seed))
    return num_calls, differing


def first_difference(one: Build, other: Build, face: str, seed: int) -> str:
    """The first call of a program after which the builds differ."""
    steps = [build.read(build.start(face, str(seed), "1", "--each")) for build in (one, other)]
    for number, (mine, theirs) in enumerate(itertools.zip_longest(*steps)):
        if mine != theirs:
            return f"{face} seed={seed}, call {number}:\n  {mine}\n  {theirs}"
    return f"{face} seed={seed}: alike when it is run alone"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.lockstep", description=__doc__)
    parser.add_argument("--beside", type=Path, metavar="PYTHON", help="the interpreter with the compiled core")
    parser.add_argument(
        "--base", type=Path, metavar="TREE", help="a source tree of another commit; only answers are compared"
    )
    parser.add_argument("--programs", type=int, default=20_000, help="the smallest number of programs")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="the number of pairs of processes that run at a time")
    given = parser.parse_args()
    if given.beside is None and given.base is None:
        parser.error("give --beside, --base, or both")
    beside = None if given.beside is None else given.beside.absolute()
    pure = Build(answers=given.base is not None)
    other = Build(beside, tree=(given.base or ROOT).absolute(), answers=given.base is not None)
    began_s, num_programs, num_calls, broken = time.monotonic(), 0, 0, list[tuple[str, int]]()
    found = _groups(_pieces(given.programs, given.first_seed, _faces(other)))
    for group, (calls, differing) in zip(found, _compared(pure, other, found, given.jobs), strict=True):
        num_programs, num_calls = num_programs + sum(piece.num_programs for piece in group), num_calls + calls
        broken += differing
        about = f"{num_programs:,} programs, {num_calls:,} calls compared, {len(broken)} programs differ"
        print(f"{time.monotonic() - began_s:5.0f} s  {about}; last {group[-1]}", flush=True)
    if broken:
        print("differ: " + ", ".join(f"{face} {seed}" for face, seed in broken))
    for face, seed in broken[:3]:
        print(first_difference(pure, other, face, seed))
    return bool(broken)


def _compared(
    one: Build, other: Build, found: list[list[ProgramPiece]], num_jobs: int
) -> Iterator[tuple[int, list[tuple[str, int]]]]:
    with ThreadPoolExecutor(num_jobs) as threads:
        yield from threads.map(partial(compare, one, other), found)


def _faces(build: Build) -> list[str]:
    """The faces of its programs. Another commit may have fewer."""
    (found,) = build.read(build.start("--faces"))
    return list(found)


def _pieces(num_programs: int, first_seed: int, faces: Container[str] = ALL_FACES) -> list[ProgramPiece]:
    """Faces in their shares, and those whose programs take longest first."""
    found, of_faces = list[ProgramPiece](), shares()
    for face, share in sorted(of_faces.items(), key=lambda item: item[1]):
        num = -(-num_programs * share // sum(of_faces.values())) if face in faces else 0
        found += [ProgramPiece(face, first_seed + at, min(MOST, num - at)) for at in range(0, num, MOST)]
    return found


def _groups(found: list[ProgramPiece]) -> list[list[ProgramPiece]]:
    """The pieces of each process, in order."""
    groups, num_programs = list[list[ProgramPiece]](), MOST
    for piece in found:
        if num_programs + piece.num_programs > MOST:
            groups.append([])
            num_programs = 0
        groups[-1].append(piece)
        num_programs += piece.num_programs
    return groups


if __name__ == "__main__":
    raise SystemExit(main())
