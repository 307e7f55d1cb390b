"""Runs programs on this process's build of the core, and prints a digest of the calls of each program.

Run `python -P proof/program_digests.py FACE FIRST_SEED NUM_PROGRAMS ...` with a folder in `PYTHONPATH` that contains
`proof.programs`. The three words may be repeated, for programs of several faces. If the folder contains `aoffload` as
well, its core runs the programs, otherwise the installed one.
`--each` prints every call instead of a digest. `--answers` covers only answers, plans and statistics, because two
versions of the source may differ in the names of fields and arguments and in the texts of errors. `--faces` prints the
names of the faces.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from typing import Any, get_args

from aoffload import errors
from aoffload.ledger import is_compiled

try:
    from proof.programs import Face, machine, runtime_stage
    from proof.programs.explore import steps_of
except ImportError:  # a commit that has them in the package
    from aoffload.testing.programs import Face, machine, runtime_stage  # type: ignore[import-not-found, no-redef]
    from aoffload.testing.programs.explore import steps_of  # type: ignore[import-not-found, no-redef]

NUM_CALLS = 48
"""The calls of a program, about: as many as of those of `proof.program_runs`."""


def main(*words: str) -> None:
    print(json.dumps({"is_compiled": is_compiled}))
    options = {word for word in words if word.startswith("--")}
    if "--faces" in options:
        print(json.dumps(get_args(Face)))
        return
    if "--answers" in options:
        for module in (machine, runtime_stage):
            module.state_digest = answers  # type: ignore[attr-defined]
    given = iter(word for word in words if word not in options)
    for face_name, first, number in zip(given, given, given, strict=True):
        (face,) = (face for face in get_args(Face) if face == face_name)
        for seed in range(int(first), int(first) + int(number)):
            steps = steps_of(face, seed, NUM_CALLS)
            if "--answers" in options:
                steps = [without_words(step) for step in steps]
            if "--each" in options:
                print("\n".join(json.dumps(step) for step in steps))
            else:
                found = hashlib.sha256("\n".join(steps).encode()).hexdigest()
                print(json.dumps([face, seed, len(steps) - 1, found]))


MARK = " | "


def answers(ledger: Any, plans: Any = ()) -> str:
    """What a program sees of a ledger after a call: its statistics, and the plans that are not over."""
    each = plans.values() if isinstance(plans, dict) else plans
    about = [
        (one.job_id, one.source.name, one.destination.name, [*one.source_ids], [*one.destination_ids], planned_in(one))
        for one in each
    ]
    return f"{MARK}{ledger.statistics()!r} {about}"


def planned_in(plan: Any) -> int:
    """The generation of the disk that a plan names; 0 for any other plan. Earlier versions have it in the plan."""
    return int(getattr(getattr(plan, "payload", plan), "generation", 0))


ERROR = re.compile(rf"(?<=')({'|'.join(errors.__all__)})', .*")
"""An error as the runtime's programs note it: its name and its text."""

RENAMED = re.compile(r"(?<=call\('wrong', )'[\w.]+', |(?<=')Engine(?=Request'|PendingLoad')")
"""The name of a call that a program makes at the wrong time, and what tells the classes of the two runtimes apart."""


def without_words(step: str) -> str:
    """A step without the text of an error that it ended with, the names of arguments and fields, and the digest of all
    that was said."""
    call, arrow, said = step.partition(" -> ")
    call = RENAMED.sub("", re.sub(r"\b\w+=", "", call))
    if not arrow:
        noted, mark, seen = call.rpartition(",")[0].partition(MARK)
        return ERROR.sub(r"\1", noted) + mark + seen
    answer, mark, seen = said.partition(MARK)
    answer = re.sub(r"\b\w+=", "", answer)
    first = answer.split(" ")[0]
    answer = first if hasattr(errors, first) else re.sub(r"(?<=\w): [^\"\]]*", "", answer)
    return f"{call}{arrow}{answer}{mark}{seen}"


if __name__ == "__main__":
    main(*sys.argv[1:])
