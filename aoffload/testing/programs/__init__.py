"""Random programs of public calls, checked by oracles: explored, shortened, and replayed from one line.

A program is a world (layout, pools, policy) and calls, as plain data. `explore_programs` draws programs from seeds and
checks every law; a program that breaks one can be shortened (`Broken.shortest`) and printed as a test (`as_test`).
"""

from __future__ import annotations

from .explore import (
    Broken,
    ProgramTally,
    call,
    check_program,
    explore_programs,
    program_of,
    replay_program,
    run_program,
)
from .outcome import Outcome
from .program import Call, Face, GroupShape, Program, World, draw_world
from .shortening import as_test
from .vocabulary import calls_of

__all__ = [
    "Broken",
    "Call",
    "Face",
    "GroupShape",
    "Outcome",
    "Program",
    "ProgramTally",
    "World",
    "as_test",
    "call",
    "calls_of",
    "check_program",
    "draw_world",
    "explore_programs",
    "program_of",
    "replay_program",
    "run_program",
]
