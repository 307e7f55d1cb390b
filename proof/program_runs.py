"""Random programs of public calls, for two uses: a campaign on the package as it is, and runs with a planted defect.

Both draw the same programs from the same seeds, so the campaign shows that they break no law without a defect.
"""

from __future__ import annotations

import itertools
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs

if TYPE_CHECKING:  # a process that plants defects must not import the package
    from .programs import Broken, ProgramTally

__all__ = [
    "ALL_FACES",
    "ENGINE_FACES",
    "ENGINE_RUNTIME_FACES",
    "FACES",
    "SEAM_FACES",
    "RUNTIME_FACES",
    "STATE_FACES",
    "ProgramPiece",
    "detect",
    "digests",
    "pieces",
    "quarter_of",
    "shares",
    "state_pieces",
]

Face = Literal[
    "ledger", "kernel", "meddled", "engine", "meddled-engine", "asyncio", "trio", "engine-asyncio", "engine-trio",
    "states", "engine-states", "asyncio-states", "trio-states", "engine-asyncio-states", "engine-trio-states",
]  # fmt: skip
RUNTIME_FACES: tuple[Face, ...] = ("asyncio", "trio")
ENGINE_RUNTIME_FACES: tuple[Face, ...] = ("engine-asyncio", "engine-trio")
ENGINE_FACES: tuple[Face, ...] = ("engine", *ENGINE_RUNTIME_FACES)
FACES: tuple[Face, ...] = (
    *("ledger",) * 6, "asyncio", *("engine",) * 2, "engine-asyncio",
    *("ledger",) * 6, "trio", *("engine",) * 2, "engine-trio",
)  # fmt: skip
"""The faces in turn. Most programs are of a ledger, which makes the decisions: a call of a runtime takes twice as
long. Planted defects are shown to these faces."""
SEAM_FACES: tuple[Face, ...] = ("kernel", "meddled", "meddled-engine")
"""The kernel without extensions, and ledgers with an extension that interferes at every hook."""
STATE_FACES: tuple[Face, ...] = (
    "states", "asyncio-states", "engine-states", "engine-asyncio-states",
    "states", "trio-states", "engine-states", "engine-trio-states",
)  # fmt: skip
"""The faces in turn whose model has a recurrent state."""
ALL_FACES: tuple[Face, ...] = (*SEAM_FACES, *dict.fromkeys(FACES), *dict.fromkeys(STATE_FACES))
NUM_CALLS = 48
"""The calls of a program, about."""
PIECE = 200
"""Programs that a worker explores at a time."""
SEAM_PIECE = STATE_PIECE = 100
"""The same for a face of `SEAM_FACES` or `STATE_FACES`. These have one piece for each of their entries in each round of
`FACES`."""
MOST_SECONDS = 20.0
"""CPU seconds of this process for one program, which takes milliseconds."""
MOST_SHORTENINGS = 3000
TOO_LONG = "a hang"


# -- the campaign -----------------------------------------------------------------------------------------------------


@attrs.frozen
class ProgramPiece:
    """Some programs of one face."""

    face: Face
    first_seed: int
    num_programs: int = PIECE

    def explore(self) -> dict[str, Any]:
        from .programs import explore_programs

        return _as_json(self.face, explore_programs(self.face, self.first_seed, self.num_programs, NUM_CALLS))


SIZES: dict[Face, int] = {
    **dict.fromkeys(FACES, PIECE), **dict.fromkeys(SEAM_FACES, SEAM_PIECE), **dict.fromkeys(STATE_FACES, STATE_PIECE)
}  # fmt: skip
"""The programs of a piece, by face."""


def pieces(num_programs: int, first_seed: int = 0) -> list[ProgramPiece]:
    """Pieces of at least `num_programs` programs in all: faces in their shares, seeds of each from `first_seed` on."""
    return _in_turn((*FACES, *SEAM_FACES, *STATE_FACES), num_programs, first_seed)


def state_pieces(num_programs: int, first_seed: int = 0) -> list[ProgramPiece]:
    """As `pieces`, of the faces with a recurrent state alone."""
    return _in_turn(STATE_FACES, num_programs, first_seed)


def _in_turn(faces: Sequence[Face], num_programs: int, first_seed: int) -> list[ProgramPiece]:
    num_rounds = -(-num_programs // sum(SIZES[face] for face in faces))
    seeds = {face: itertools.count(first_seed, SIZES[face]) for face in faces}
    found = [ProgramPiece(face, next(seeds[face]), SIZES[face]) for _ in range(num_rounds) for face in faces]
    return sorted(found, key=lambda piece: piece.face == "ledger")  # runtime programs take longest: first


def quarter_of(found: Sequence[ProgramPiece], quarter: int) -> list[ProgramPiece]:
    """A quarter of the pieces of each face. The four quarters have every piece once."""
    numbers: dict[Face, Iterator[int]] = {piece.face: itertools.count() for piece in found}
    return [piece for piece in found if next(numbers[piece.face]) % 4 == quarter]


def shares() -> dict[Face, int]:
    """By face, its programs in each round of the campaign."""
    return {face: SIZES[face] * number for face, number in Counter((*SEAM_FACES, *FACES, *STATE_FACES)).items()}


def _as_json(face: Face, found: ProgramTally) -> dict[str, Any]:
    """A tally as JSON. Of the broken programs only the first is shortened."""
    return {
        "face": face,
        "programs": found.num_programs,
        "calls": found.num_calls,
        "layouts": sorted(map(str, found.layouts)),
        "pairs": [[*pair, count] for pair, count in sorted(found.pairs.items())],
        "violations": [
            [one.line, one.violation, _as_test(one) if one is found.broken[0] else ""] for one in found.broken
        ],
        "digest": found.digest,
    }


def _as_test(broken: Broken) -> str:
    """A test that can be pasted."""
    from .programs import as_test

    return as_test(broken.shortest(MOST_SHORTENINGS), "what_a_program_found", broken.violation)


def digests(num_programs: int) -> dict[str, str]:
    """Digests of what a few programs of each face show: equal in every process, or seeds do not replay programs."""
    from .programs import explore_programs

    return {
        f"{num_programs} programs of {face}": explore_programs(face, 0, num_programs, NUM_CALLS).digest
        for face in ALL_FACES
    }


# -- planted defects --------------------------------------------------------------------------------------------------


def detect(argument: Any) -> dict[str, Any]:
    """The first violation within `argument["programs"]` programs of `argument["faces"]` in turn, each from
    `argument["first_seed"]` on: in which program, after how many calls in all, and how few calls suffice for it."""
    num_programs = num_calls = 0
    for found in _watched(_one_by_one(argument["faces"], argument["first_seed"], argument["programs"])):
        num_programs += 1
        num_calls += found.num_calls
        for broken in found.broken:
            return _caught(broken) | {"runs": num_programs, "calls": num_calls}
    return {"violation": None, "oracle": None, "runs": num_programs, "calls": num_calls}


def _one_by_one(faces: Sequence[Face], first_seed: int, num_programs: int) -> Iterator[ProgramTally]:
    from .programs import explore_programs

    seeds = {face: itertools.count(first_seed) for face in faces}
    for face in itertools.islice(itertools.cycle(faces), num_programs):
        yield explore_programs(face, next(seeds[face]), 1, NUM_CALLS)


def _caught(broken: Broken) -> dict[str, Any]:
    oracle = broken.violation.partition(": ")[0]
    shortest = None if oracle == TOO_LONG else len(broken.shortest(MOST_SHORTENINGS).calls)
    return {"violation": broken.violation, "oracle": oracle, "plan": broken.line, "shortest": shortest}


def _watched(tallies: Iterator[ProgramTally]) -> Iterator[ProgramTally]:
    """Limit each program to `MOST_SECONDS`: an endless loop inside one call is a violation like any other."""
    from aoffload.testing import Violation

    def out_of_time(signal_number: int, frame: object) -> None:
        raise Violation(TOO_LONG, f"one program took more than {MOST_SECONDS} s")

    signal.signal(signal.SIGPROF, out_of_time)
    while True:
        # Again every second: a handler that swallows every exception may swallow the first violation.
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS, 1.0)
        try:
            found = next(tallies, None)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        if found is None:
            return
        yield found
