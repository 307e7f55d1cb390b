"""Programs of one face, as the core that this process has runs them: for each a line with a digest of all its calls.

`python -P proof/walk.py FACE FIRST_SEED NUM_PROGRAMS`: imports nothing of the clone, so that it is the core of the
environment that runs. `--each` prints every call instead.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import get_args

from aoffload.ledger import is_compiled
from aoffload.testing.programs import Face
from aoffload.testing.programs.explore import steps_of

NUM_CALLS = 48
"""The calls of a program, about: as many as of those of `proof.programs`."""


def main(face_name: str, first: str, number: str, *options: str) -> None:
    (face,) = (face for face in get_args(Face) if face == face_name)
    print(json.dumps({"is_compiled": is_compiled}))
    for seed in range(int(first), int(first) + int(number)):
        steps = steps_of(face, seed, NUM_CALLS)
        if "--each" in options:
            print("\n".join(json.dumps(step) for step in steps))
        else:
            print(json.dumps([seed, len(steps) - 1, hashlib.sha256("\n".join(steps).encode()).hexdigest()]))


if __name__ == "__main__":
    main(*sys.argv[1:])
