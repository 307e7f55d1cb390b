"""`make gpu` on any machine: parts of a line each in place of those that need a device."""

from __future__ import annotations

import itertools
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proof.gpu.__main__ import run_parts
from proof.gpu.parts import Figure, Part
from proof.gpu.readings import Reading
from proof.gpu.running import Ended, Ends, ends_within, run_process

ROOT = Path(__file__).parent.parent.parent
GUARD_S = 60.0
"""Never waited for in full unless something hangs that must not."""

WRITES = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
HANGS = """
import signal, subprocess, sys
is_deaf, pipe = sys.argv[1] == "deaf", int(sys.argv[2])
signal.signal(signal.SIGINT, signal.SIG_IGN if is_deaf else signal.SIG_DFL)
signal.signal(signal.SIGABRT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # so that it is heard whenever it comes
subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], pass_fds=[pipe])
with open(pipe, "wb", closefd=False) as told:
    told.write(b"up")
signal.pause() if is_deaf else signal.sigwait([signal.SIGINT])
sys.exit(7)
"""


def as_lines(text: str) -> dict[str, Reading]:
    """`name=figure`, and `!` behind what is missed."""
    pairs = (line.split("=") for line in text.splitlines())
    return {name: Reading(figure.rstrip("!"), "much", not figure.endswith("!")) for name, figure in pairs}


def part(name: str, *words: str, figures: tuple[str, ...] = ("one",), needs: tuple[str, ...] = ()) -> Part:
    rows = tuple(Figure(f"{name}_{source}", f"the {source} of {name}", source) for source in figures)
    return Part(name, ("-c", *words), GUARD_S, as_lines, rows, needs)


def writing(name: str, text: str, **options: Any) -> Part:
    return part(name, WRITES, "{out}", text, **options)


def run(*parts: Part, out: Path, **options: Any) -> tuple[int, dict[str, str], dict[str, str]]:
    """The exit status; and of the report, how each part went, and each figure with its verdict."""
    deadline_s = sum(each.limit_s for each in parts)
    options.setdefault("clock", lambda: 0.0)
    status = run_parts(parts, out, deadline_s, about="a device", **options)
    return status, *tables(out)


def tables(out: Path) -> tuple[dict[str, str], dict[str, str]]:
    text = (out / "report.md").read_text()
    assert text.startswith("# On a device\n\na device\n")
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:2] == "| "]
    heads = [index for index, row in enumerate(rows) if row[0] in ("Part", "Figure")]
    went = {row[0]: row[1] for row in rows[heads[0] + 1 : heads[1]]}
    return went, {row[0].strip("`"): f"{row[2]}: {row[4].strip()}" for row in rows[heads[1] + 1 :]}


def test_all_that_passes_is_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each part and each figure, in the file and, of parts, on the screen."""
    parts = [writing("a", "one=1 GB/s\ntwo=2", figures=("one", "two")), writing("b", "one=3")]
    status, went, figures = run(*parts, out=tmp_path)
    assert status == 0
    assert went == {"a": "passed", "b": "passed"}
    assert figures == {"a_one": "1 GB/s: met", "a_two": "2: met", "b_one": "3: met"}
    assert capsys.readouterr().out.splitlines()[:2] == ["a: passed in 0 s", "b: passed in 0 s"]


@pytest.mark.parametrize(
    ("bad", "went", "figure"),
    [
        (writing("bad", "one=1!"), "passed", "1: MISSED"),
        (writing("bad", ""), "passed", "not in its output: not run"),
        (part("bad", "raise SystemExit(3)"), "exit status 3", "exit status 3: not run"),
        (part("bad", WRITES + "; sys.exit(1)", "{out}", "one=1"), "exit status 1", "1: met"),
        (part("bad", "import os; os.abort()"), "died of SIGABRT", "died of SIGABRT: not run"),
        (writing("bad", "one=1", needs=("triton", "numpy")), "not run: triton is missing",
         "not run: triton is missing: not run"),
    ],
)  # fmt: skip
def test_what_fails_is_said_and_the_others_go_on(bad: Part, went: str, figure: str, tmp_path: Path) -> None:
    """Status 1; the parts behind it have run, and the figures that it did write are there."""
    status, how, figures = run(bad, writing("next", "one=5"), out=tmp_path, missing=["triton"])
    assert status == 1
    assert how == {"bad": went, "next": "passed"}
    assert figures == {"bad_one": figure, "next_one": "5: met"}


def test_output_that_cannot_be_read_is_a_failure(tmp_path: Path) -> None:
    """Of that part alone."""
    status, went, figures = run(writing("odd", "no figure"), writing("next", "one=5"), out=tmp_path)
    assert status == 1
    assert went["odd"].startswith("its output cannot be read: ValueError")
    assert figures["next_one"] == "5: met"


def test_no_figure_of_an_earlier_run_is_told(tmp_path: Path) -> None:
    """A part that writes nothing has none, whatever lies there."""
    run(writing("a", "one=1"), out=tmp_path)
    _, _, figures = run(part("a", "pass"), out=tmp_path)
    assert figures == {"a_one": "not in its output: not run"}


def test_a_run_that_is_cut_off_has_its_figures(tmp_path: Path) -> None:
    """The report is written after each part, and before the first: the others have their line, too."""
    seen = []

    def look(process: subprocess.Popen[bytes], seconds: float) -> bool:
        seen.append(tables(tmp_path))
        return ends_within(process, seconds)

    parts = (writing("a", "one=1"), writing("b", "one=2"))
    run(*parts, out=tmp_path, ends=look)
    waiting = "its turn has not come"
    assert seen[0] == ({"a": waiting, "b": waiting}, {"a_one": f"{waiting}: not run", "b_one": f"{waiting}: not run"})
    assert seen[1] == ({"a": "passed", "b": waiting}, {"a_one": "1: met", "b_one": f"{waiting}: not run"})


def test_what_a_part_prints_is_kept(tmp_path: Path) -> None:
    """Both of its outputs, in a file beside the report."""
    run(part("a", "import sys; print('said'); sys.exit('complained')"), out=tmp_path)
    assert (tmp_path / "a.log").read_text() == "said\ncomplained\n"


def test_time_that_is_left_over_goes_to_who_comes_next(tmp_path: Path) -> None:
    """Each part has its own limit at least, as long as those before it kept theirs."""
    limits, now_s = [], itertools.count(0.0, 10.0)  # each look at the clock takes ten seconds

    def note(process: subprocess.Popen[bytes], seconds: float) -> bool:
        limits.append(seconds)
        return ends_within(process, GUARD_S)

    parts = tuple(writing(name, "one=1") for name in "abc")
    run(*parts, out=tmp_path, ends=note, clock=now_s.__next__)
    shorter = limits[0]
    assert limits == [shorter, shorter + GUARD_S - 30, shorter + 2 * (GUARD_S - 30)]


# -- what hangs -------------------------------------------------------------------------------------------------------


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    os.close(ends[0])


def limit_is_over(pipe: tuple[int, int], is_deaf: bool) -> Ends:
    """As if a limit had passed as soon as the process and its child are there; and each patience, if it is deaf."""
    asked = itertools.count()

    def ends(process: subprocess.Popen[bytes], seconds: float) -> bool:
        if next(asked) == 0:
            assert os.read(pipe[0], 2) == b"up"
            os.close(pipe[1])
            return False
        return not is_deaf and ends_within(process, GUARD_S)

    return ends


@pytest.mark.parametrize("is_deaf", [False, True])
def test_what_hangs_is_ended_with_all_that_it_started(
    is_deaf: bool, pipe: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked first, then killed; reaped; nobody of its session is left; and the run goes on."""
    made, popen = [], subprocess.Popen

    def opened(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        made.append(popen(*args, **kwargs, pass_fds=[pipe[1]]))
        return made[-1]

    monkeypatch.setattr(subprocess, "Popen", opened)
    hanging = part("hangs", HANGS, "deaf" if is_deaf else "hears", str(pipe[1]))
    ended = run_process(
        [sys.executable, *hanging.words], GUARD_S, tmp_path / "log", limit_is_over(pipe, is_deaf), lambda: 0.0
    )
    assert ended == Ended(0.0, "ended after 0 s, its limit")
    (process,) = made
    assert process.returncode == (-signal.SIGKILL if is_deaf else 7)
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)  # reaped
    assert select.select([pipe[0]], [], [], GUARD_S)[0] and os.read(pipe[0], 1) == b""  # nobody holds the other end


def test_a_part_without_any_time_is_ended_and_the_next_one_runs(tmp_path: Path) -> None:
    """Its line says so, and the run has failed."""
    late_s = iter([1000.0, 1000.0, 1007.0, 0.0])

    def clock() -> float:
        return next(late_s, 0.0)

    hanging = part("hangs", "import signal; signal.pause()")
    status, went, figures = run(hanging, writing("next", "one=5"), out=tmp_path, clock=clock)
    assert status == 1
    assert went == {"hangs": "ended after 7 s, its limit", "next": "passed"}
    assert figures == {"hangs_one": "ended after 7 s, its limit: not run", "next_one": "5: met"}


def test_what_is_started_ends_with_who_started_it(
    pipe: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interruption of the run leaves no process behind."""
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: popen(*args, **kwargs, pass_fds=[pipe[1]]))

    def interrupted(process: subprocess.Popen[bytes], seconds: float) -> bool:
        assert os.read(pipe[0], 2) == b"up"
        os.close(pipe[1])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_process([sys.executable, "-c", HANGS, "hears", str(pipe[1])], GUARD_S, tmp_path / "log", interrupted)
    assert select.select([pipe[0]], [], [], GUARD_S)[0] and os.read(pipe[0], 1) == b""


# -- the command ------------------------------------------------------------------------------------------------------


def without_device() -> dict[str, str]:
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def test_without_a_device_it_says_so_and_exits_with_two() -> None:
    """In one line."""
    command = [sys.executable, "-m", "proof.gpu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=without_device(), check=False)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("gpu: not run, since torch ")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_gpu_is_that_command(tmp_path: Path) -> None:
    """With any Python: nothing is installed for it."""
    command = ["make", "gpu", f"PYTHON_GPU={sys.executable}", f"VENV={tmp_path / 'none'}"]
    # What another make, in which these tests may run, tells its children is not meant for this one.
    environment = {name: value for name, value in without_device().items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("gpu: not run, since torch ") and "Error 2" in done.stderr
    assert not (tmp_path / "none").exists()


def test_a_part_that_there_is_not_is_refused() -> None:
    """With the names of none of those that there are."""
    command = [sys.executable, "-m", "proof.gpu", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2 and "there is no part called nothing" in done.stderr


def test_it_runs_where_nothing_is_installed() -> None:
    """The command itself imports nothing but the standard library: it is there to say what is missing."""
    command = [sys.executable, "-S", "-m", "proof.gpu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=without_device(), check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("gpu: not run, since torch ")
