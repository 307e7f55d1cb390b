"""Compares the behaviour of two builds of the core.

    python -m proof.compare_builds --beside build/compiled/bin/python

Both builds run `proof/core_answers.py`. Each difference between their outputs is printed, except for expected
differences, which are counted with the reason.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path

from .lockstep import ROOT, Build
from .shares import add_share, share_of

EXPECTED = (
    ("a compiled class has no text of its own, and its signature names classes", r"values .* (doc|signature)"),
    ("a field of a compiled class cannot be deleted", r"values \S+ deleted"),
    ("a field of a compiled class refuses what is of another type", r"values \S+ = .*"),
    (
        "a request, its load and its waiter cannot be copied, and say so otherwise where they are made of nothing",
        r"values (LedgerRequest|Load|Waiter) (equals itself|copied|made of nothing)",
    ),
    ("what cannot be copied deeply says so in other words", r"values \w+ deep"),
    ("a pool that counts in another class than when it was given", r"plug-ins pool num_\w+ gives .*"),
)

LINE = re.compile(r"(?<=\.py):\d+")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.compare_builds", description=__doc__)
    parser.add_argument(
        "--beside", type=Path, required=True, metavar="PYTHON", help="the interpreter with the compiled core"
    )
    parser.add_argument("--parts", nargs="*", default=[], help="arguments, rooms, values or plug-ins (default: all)")
    add_share(parser, "third", 3, "the situations in which arguments are invalid")
    given = parser.parse_args()
    third = share_of(given.third, 3, "situations")
    script = ROOT / "proof" / "core_answers.py"
    builds = Build(script=script), Build(given.beside.absolute(), script)
    words = [*given.parts, *([] if third is None else [f"--third={third}"])]
    num_asked, num_unlike, expected = Counter[str](), 0, Counter[str]()
    for mine, theirs in zip(*(build.read(build.start(*words)) for build in builds), strict=True):
        part, question, answer = mine
        num_asked[part] += 1
        if mine == theirs:
            continue
        if LINE.sub("", str(mine)) == LINE.sub("", str(theirs)):
            expected["a traceback names another line of the same statement"] += 1
            continue
        reasons = [reason for reason, pattern in EXPECTED if re.fullmatch(pattern, f"{part} {question}")]
        if reasons:
            expected[reasons[0]] += 1
            continue
        num_unlike += 1
        print(f"{part}: {question}\n  {answer}\n  {theirs[1:]}", flush=True)
    for reason, number in expected.items():
        print(f"{number:,} times otherwise, as expected: {reason}")
    print(", ".join(f"{part} {number:,}" for part, number in num_asked.items()), f"asked; {num_unlike} unlike")
    return bool(num_unlike)


if __name__ == "__main__":
    raise SystemExit(main())
