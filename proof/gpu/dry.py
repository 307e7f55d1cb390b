"""Run every part of `proof.gpu` on a fake GPU, in a minute: `make gpu-dry`.

The parts' own code runs, as small as it can be, over the stub of libcuda and a fake of `torch.cuda`. That shows nothing
about a GPU, and finds what would waste a run on one: a wrong import, name or argument, a part that does not start, a
figure that no part prints. Exit status: 0 if there is nothing of the kind; 1 if there is; 2 if it cannot run, because a
C compiler or a package is missing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from proof.shares import add_share, share_of

from .__main__ import DRY, look, run_parts
from .parts import PARTS, SMALL, Part, limits_of
from .readings import ALL_TESTS
from .report import PartReport
from .results import Results

__all__ = ["build_stub", "fake_environment", "main", "problems"]

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
WORK = Path("build/gpu-dry")
"""Has a folder for each run, by the name of its first part."""
STUB = ROOT / "tests/transfer/stub_libcuda.c"
CAN_FAIL = (
    "test_gpu_with_the_rule_never_and_without_it_sometimes", "test_gpu_how_early_copies_read",
    "test_gpu_soak_without_a_rule", "test_gpu_a_graph_reads_what_was_loaded_and_nothing_that_comes_later",
    "test_gpu_a_load_does_not_wait_behind_a_held_store", "test_gpu_a_lost_device_is_an_outcome",
)  # fmt: skip
"""Tests of orders that a device keeps and this one, which does everything at once, does not; and of an assertion that
fails on a device."""
PROGRAMMING_ERRORS = (
    "AttributeError", "ImportError", "IndentationError", "IndexError", "KeyError", "ModuleNotFoundError", "NameError",
    "NotImplementedError", "SyntaxError", "TypeError", "UnboundLocalError", "ValueError",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m proof.gpu.dry", description=(__doc__ or "").partition("\n")[0])
    known = {part.name: part for part in PARTS}
    parser.add_argument("names", nargs="*", metavar="PART", help=f"{', '.join(known)}; all, if none is named")
    add_share(parser, "third", 3, "the parts")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - set(known):
        parser.error(f"there is no part called {', '.join(sorted(unknown))}")
    if given.names:
        return _run([known[name] for name in given.names])
    third = share_of(given.third, 3, "gpu-dry, parts")
    return _run_all(PARTS if third is None else PARTS[third::3])


def _run_all(parts: Sequence[Part]) -> int:
    """The tests, and everything else, side by side: a core for each."""
    halves = [[part.name for part in parts if ("pytest" in part.words) is is_suite] for is_suite in (True, False)]
    running = [subprocess.Popen([sys.executable, "-m", "proof.gpu.dry", *names]) for names in halves if names]
    return max(process.wait() for process in running)


def _run(parts: Sequence[Part]) -> int:
    work = WORK / parts[0].name
    shutil.rmtree(work, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        if (compiler := shutil.which("cc") or shutil.which("gcc")) is None or sys.platform != "linux":
            print("gpu-dry: not run, since there is no C compiler for the stub of libcuda", file=sys.stderr)
            return 2
        build_stub(compiler, Path(folder))
        os.environ.update(fake_environment(Path(folder)))
        found = look(work)
        # The fake copies small pieces itself, where there is no Triton.
        missing = [name for name in found.get("missing", ()) if name != "triton"]
        if "problem" in found or missing:
            print(f"gpu-dry: not run, since {found.get('problem') or f'{missing} are missing'}", file=sys.stderr)
            return 2
        kept = Results(work, f"{DRY}; {found['about']}", found["environment"])
        patient = [replace(part, limit_s=PATIENCE * part.limit_s) for part in parts]
        run_parts(patient, kept, time.monotonic() + limits_of(patient), is_small=True)
    reports = kept.report().parts
    wrong = [problem for part in reports for problem in problems(part)]
    for problem in wrong:
        print(f"gpu-dry: {problem}", file=sys.stderr)
    num_readings = sum(len(part.readings) for part in reports)
    print(
        f"gpu-dry: {len(parts)} parts, {num_readings} readings, {len(wrong)} problems; figures mean nothing here, and "
        f"{len(CAN_FAIL)} tests need a real device and may fail",
        flush=True,
    )
    return 1 if wrong else 0


PATIENCE = 4.0
"""Times the limit of a part: a busy machine is no mistake of the code."""


def build_stub(compiler: str, folder: Path) -> None:
    """Compile the stub of libcuda into `folder`."""
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([compiler, *options, "-o", str(folder / "libcuda.so.1"), str(STUB), "-ldl"], check=True)


def fake_environment(stub: Path) -> Mapping[str, str]:
    """What a process that believes in a GPU has in its environment."""
    paths = [str(HERE / "fake_device"), *filter(None, [os.environ.get("PYTHONPATH")])]
    libraries = [str(stub), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {SMALL: "1", "PYTHONPATH": os.pathsep.join(paths), "LD_LIBRARY_PATH": os.pathsep.join(libraries)}


def problems(found: PartReport) -> Iterator[str]:
    """What is wrong with a part, apart from its figures."""
    is_suite = "pytest" in found.part.words
    if found.problem and not (is_suite and found.problem == "exit status 1"):  # a test has failed, which is seen below
        yield f"{found.part.name}: {found.problem}"
    for figure, reading in found.figures():
        if reading.is_missing and not _may_fail(figure.source):
            yield f"{found.part.name}: {figure.name}: {reading.text}"
    for name, reading in found.readings.items():
        said = [word for word in PROGRAMMING_ERRORS if word in reading.text]
        if said or (is_suite and reading.is_met is False and name != ALL_TESTS and not _may_fail(name)):
            yield f"{found.part.name}: {name}: {reading.text}"


def _may_fail(test: str) -> bool:
    return test.partition("[")[0] in CAN_FAIL


if __name__ == "__main__":
    sys.exit(main())
