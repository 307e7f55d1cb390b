"""`make gpu` without a GPU: its parts are replaced by one-line programs."""

from __future__ import annotations

import itertools
import os
import select
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proof.gpu.__main__ import _parsed, _warn, run_parts
from proof.gpu.parts import LONG, PARTS, PHASES, Figure, Part, limits_of
from proof.gpu.readings import Reading
from proof.gpu.results import Results, saving
from proof.gpu.running import GRACE_S, LAST_WORDS, Ended, Ends, ends_within, run_process

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
    """`name=figure`, and `!` after what is missed."""
    pairs = (line.split("=") for line in text.splitlines())
    return {name: Reading(figure.rstrip("!"), "much", not figure.endswith("!")) for name, figure in pairs}


def part(name: str, *words: str, figures: tuple[str, ...] = ("one",), needs: tuple[str, ...] = ()) -> Part:
    rows = tuple(Figure(f"{name}_{source}", f"the {source} of {name}", source) for source in figures)
    return Part(name, ("-c", *words), GUARD_S, as_lines, rows, needs)


def writing(name: str, text: str, **options: Any) -> Part:
    return part(name, WRITES, "{out}", text, **options)


def run(
    *parts: Part, out: Path, known: tuple[Part, ...] = (), about: str = "a device", **options: Any
) -> tuple[int, dict[str, str], dict[str, str]]:
    """The exit status; and of the report, how each part went, and each figure with its verdict."""
    kept = Results(out, about, known=known or parts)
    options.setdefault("clock", lambda: 0.0)
    deadline_s = options.pop("deadline_s", sum(each.limit_s for each in parts))
    status = run_parts(parts, kept, deadline_s, **options)
    return status, *tables(out, about)


def tables(out: Path, about: str = "a device") -> tuple[dict[str, str], dict[str, str]]:
    text = (out / "report.md").read_text()
    assert text.startswith(f"# On a device\n\n{about}\n")
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:2] == "| "]
    heads = [index for index, row in enumerate(rows) if row[0] in ("Part", "Figure") or row[1:2] == ["Also found"]]
    went = {row[0]: row[1] for row in rows[heads[0] + 1 : heads[1]]}
    figures = rows[heads[1] + 1 : heads[2] if len(heads) > 2 else None]
    return went, {row[0].strip("`"): f"{row[2]}: {row[4].strip()}" for row in figures}


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
    """Status 1; the parts after it have run, and the figures that it did write are there."""
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
    """The report is written before each part, and after it: the others have their line, too."""
    seen = []

    def look(process: subprocess.Popen[bytes], seconds: float) -> bool:
        seen.append(tables(tmp_path))
        return ends_within(process, seconds)

    parts = (writing("a", "one=1"), writing("b", "one=2"))
    run(*parts, out=tmp_path, ends=look)
    running, waiting = "it has not ended", "its turn has not come"
    assert seen[0] == ({"a": running, "b": waiting}, {"a_one": f"{running}: not run", "b_one": f"{waiting}: not run"})
    assert seen[1] == ({"a": "passed", "b": running}, {"a_one": "1: met", "b_one": f"{running}: not run"})


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


def test_the_first_parts_have_the_time_that_is_too_short_for_all(tmp_path: Path) -> None:
    """In the order given, each its own limit, the next what is left; and one for which nothing is left says so."""
    limits, now_s = [], 0.0

    def take(process: subprocess.Popen[bytes], seconds: float) -> bool:
        nonlocal now_s
        now_s += seconds + GRACE_S
        limits.append(seconds + GRACE_S)
        return ends_within(process, GUARD_S)

    parts = tuple(writing(name, "one=1") for name in "cab")
    status, went, _ = run(*parts, out=tmp_path, ends=take, clock=lambda: now_s, deadline_s=GUARD_S + 20)
    assert limits == [GUARD_S, 20]
    assert status == 1
    assert went == {"c": "passed", "a": "passed", "b": "not run: no time was left"}


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_a_report_has_the_figures_of_earlier_runs(tmp_path: Path) -> None:
    """On the same device: of parts that did not run again, and of those whose turn has not come again. Each run judges
    its own parts only."""
    first, second, third = parts = (writing("a", "one=1!"), writing("b", "one=2"), writing("c", "one=3"))
    assert run(first, out=tmp_path, known=parts)[0] == 1
    seen = []

    def look(process: subprocess.Popen[bytes], seconds: float) -> bool:
        seen.append(tables(tmp_path))
        return ends_within(process, seconds)

    status, went, figures = run(third, second, out=tmp_path, known=parts, ends=look)
    assert seen[0][1] == {
        "a_one": "1: MISSED", "b_one": "its turn has not come: not run", "c_one": "it has not ended: not run"
    }  # fmt: skip
    assert status == 0
    assert went == {"a": "passed", "b": "passed", "c": "passed"}
    assert figures == {"a_one": "1: MISSED", "b_one": "2: met", "c_one": "3: met"}


def test_figures_of_another_device_are_not_shown(tmp_path: Path) -> None:
    """Nor those of other packages, which the line about the device names, too."""
    first, second = parts = (writing("a", "one=1"), writing("b", "one=2"))
    run(first, out=tmp_path, known=parts)
    assert run(second, out=tmp_path, known=parts, about="another")[1] == {"b": "passed"}


def test_a_part_that_finds_no_time_keeps_its_earlier_figures(tmp_path: Path) -> None:
    """It has not run now, so the run has failed, and nothing was lost."""
    run(writing("a", "one=1"), out=tmp_path)
    status, went, figures = run(writing("a", "one=2"), out=tmp_path, deadline_s=0.0)
    assert (status, went, figures) == (1, {"a": "passed"}, {"a_one": "1: met"})


def test_what_no_page_names_is_in_the_report(tmp_path: Path) -> None:
    """A table of its own has every reading that is no figure."""
    run(writing("a", "one=1\nother=2 GB/s!"), out=tmp_path)
    assert "| a | other | 2 GB/s | MISSED |" in (tmp_path / "report.md").read_text().splitlines()


def test_a_run_that_is_ended_keeps_the_rows_of_its_part(tmp_path: Path) -> None:
    """If the whole run is ended in the middle of a part, the report has what this part has written by then."""
    writes_and_hangs = WRITES + "; import signal; print('up', flush=True); signal.pause()"

    def ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
        while not (tmp_path / "a.log").read_text():
            assert not ends_within(process, 0.01)
        raise KeyboardInterrupt

    parts = (part("a", writes_and_hangs, "{out}", "one=1"), writing("b", "one=2"))
    with pytest.raises(KeyboardInterrupt):
        run(*parts, out=tmp_path, ends=ended)
    went, figures = tables(tmp_path)
    assert went == {"a": "the run was ended while it ran", "b": "its turn has not come"}
    assert figures["a_one"] == "1: met"


def test_few_files_go_elsewhere_and_have_everything(tmp_path: Path) -> None:
    """The report, and one archive of all: also while a part runs, so that a machine that goes away leaves them."""
    work, out, calls = tmp_path / "work", tmp_path / "out", []
    kept = Results(work, "a device", {"driver": "1.2"}, out, known=(each := part("a", "pass"),))

    def hangs_for(process: subprocess.Popen[bytes], seconds: float) -> bool:
        calls.append((seconds, (out / "report.md").read_text()))
        (work / "a.json").write_text(f"one={len(calls)}")
        return len(calls) == 3 and ends_within(process, GUARD_S)

    ends = saving(kept.keep, hangs_for, every_s=10.0)
    assert run_parts([each], kept, 25.0 + GRACE_S, ends=ends, clock=lambda: 0.0) == 0
    assert [seconds for seconds, _ in calls] == [10.0, 10.0, 5.0]
    rows = [[line for line in text.splitlines() if line.startswith("| `a_one`")] for _, text in calls]
    assert rows == [[f"| `a_one` | the one of a | {found} |"] for found in (
        "it has not ended |  | not run", "1 | much | met", "2 | much | met"
    )]  # fmt: skip
    assert sorted(file.name for file in out.iterdir()) == ["gpu.tgz", "report.md"]
    assert "| driver | 1.2 |" in (out / "report.md").read_text()
    with tarfile.open(out / "gpu.tgz") as archive:
        assert sorted(archive.getnames()) == ["gpu/a.json", "gpu/a.log", "gpu/report.md", "gpu/runs.json"]
        found = archive.extractfile("gpu/report.md")
        assert found is not None and found.read() == (out / "report.md").read_bytes()


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


def test_a_part_that_takes_too_long_is_ended_and_the_next_one_runs(tmp_path: Path) -> None:
    """Its line says so, and the run has failed. It reacts to no signal in time, as an ignored SIGINT has it."""
    now_s, waited = iter([0.0, 1000.0, 1007.0]), []

    def clock() -> float:
        return next(now_s, 0.0)

    def never_first(process: subprocess.Popen[bytes], seconds: float) -> bool:
        waited.append(seconds)
        return len(waited) > 1 + len(LAST_WORDS) and ends_within(process, GUARD_S)

    hanging = part("hangs", "import signal; signal.pause()")
    status, went, figures = run(hanging, writing("next", "one=5"), out=tmp_path, clock=clock, ends=never_first)
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


def test_two_calls_have_their_parts_and_their_time() -> None:
    """Each with the look for a device within 4 and 6.5 minutes; and both together are all parts but the long ones."""
    known = {each.name: each for each in PARTS}
    for (names, seconds), most_s in zip(PHASES.values(), (240, 390), strict=True):
        assert limits_of(known[name] for name in names) <= seconds <= most_s - 25
    both = [name for names, _ in PHASES.values() for name in names]
    assert sorted([*both, *(each.name for each in LONG)]) == sorted(known)
    assert both[-1] == "cuda_stress"


def test_parts_run_in_the_order_in_which_they_are_named() -> None:
    """With the time that is given, or what they may take; a phase has its own parts and its own time."""
    given = _parsed(["soak", "rules", "--seconds", "100", "--out", "there"])
    assert [each.name for each in given.parts] == ["soak", "rules"]
    assert (given.seconds, given.out) == (100.0, Path("there"))
    assert _parsed(["soak"]).seconds is None
    for number, (names, seconds) in PHASES.items():
        phase = _parsed(["--phase", str(number)])
        assert ([each.name for each in phase.parts], phase.seconds) == (list(names), seconds)
    assert [each.name for each in _parsed([]).parts] == [each.name for each in PARTS]


def test_a_phase_has_no_other_parts(capsys: pytest.CaptureFixture[str]) -> None:
    """Names beside it are refused."""
    with pytest.raises(SystemExit):
        _parsed(["--phase", "1", "soak"])
    assert "--phase: not with names of parts" in capsys.readouterr().err


def test_what_will_be_missing_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A package that some parts need, and a setting that has copies and compute wait for each other."""
    _warn({"missing": ["triton"], "environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}})
    assert capsys.readouterr().err.splitlines() == [
        "gpu: triton is missing: cuda_choice will not run",
        "gpu: CUDA_DEVICE_MAX_CONNECTIONS is 1: copies and compute wait for each other in one queue",
    ]
