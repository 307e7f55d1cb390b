"""The command line of the trace tool: its output and its errors."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from real_log import write_real

from aoffload._common.commands import ProgressLine
from aoffload.trace.command import main
from aoffload.trace.output import Progress
from benchmarks.synthetic_log import line

Real = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Real:
    path = tmp_path_factory.mktemp("trace") / "real.log"
    return path, write_real(path)


def test_the_summary_counts_what_the_log_says(real: Real, capsys: pytest.CaptureFixture[str]) -> None:
    """Requests, aborts with their reasons, jobs and transfers of a real log: the same numbers as counting its lines."""
    path, events = real
    assert main([str(path), "summary"]) == 0
    text = capsys.readouterr().out
    names = Counter(event["event"] for event in events)
    ended = names["request_done"] + names["request_aborted"]
    counts = f"{names['request_done']} done, {names['request_aborted']} aborted, 0 unfinished"
    assert f"{ended} requests: {counts}" in text
    assert "2  the client left while pinned" in text
    assert f"{names['pin_released']} pins: {names['pin_released']} released" in text
    assert f"{names['demotion_done']} demotions" in text and f"{names['prefetch_done']} prefetches" in text
    blocks = sum(event["num_blocks"] for event in events if event["event"] == "job_completed")
    jobs = [line.split() for line in text.splitlines() if line.split()[:1] in (["load"], ["store"])]
    assert sum(int(words[6]) for words in jobs) == blocks
    assert sum(int(words[3]) for words in jobs) == names["job_completed"]
    assert "runtime first (8 device blocks, 9 in host memory)" in text
    assert f"{names['sampled']} lines left out: an event of another logger" in text


def test_the_summary_has_each_state_and_says_what_its_columns_are(
    real: Real, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every state that `aoffload trace LOG request ID` prints is a row of the first table, `matched` included. Both
    tables have a title and a name for each column."""
    path, events = real
    assert main([str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = lines.index("how long requests were in each state")
    table = [line.split() for line in lines[first + 1 : lines.index("", first)]]
    assert table[0] == ["state", "meaning", "times", "p50", "p90", "p99", "longest", "share"]
    states = {event["event"].removeprefix("request_") for event in events if event["event"].startswith("request_")}
    rows = {row[0]: row for row in table[1:]}
    assert rows.keys() >= states - {"done", "aborted", "cancelled"} >= {"matched"}
    assert "was looked up in the cache" in " ".join(rows["matched"]) and rows["total"][-1] == "100%"
    copies = lines.index("copy jobs (copy: time of the copy alone; job: time from job_launched to job_completed)")
    assert lines[copies + 1].endswith("  copy p50  copy p99  job p50  job p99")


def test_the_summary_is_what_comes_without_a_command(real: Real, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m aoffload.trace LOG` is of use by itself."""
    assert main([str(real[0])]) == 0
    alone = capsys.readouterr().out
    main([str(real[0]), "summary"])
    assert alone == capsys.readouterr().out


def test_the_summary_of_one_runtime_is_a_part_of_the_whole(real: Real, capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs in one log are not mixed up, unless wanted; a name that nobody has is refused."""
    path, events = real
    for name in ("first", "runtime first", "1"):
        assert main([str(path), "summary", "--runtime", name]) == 0
        text = capsys.readouterr().out
        mine = Counter(event["event"] for event in events if event["run"] == "first")
        counts = f"{mine['request_done']} done, {mine['request_aborted']} aborted, 0 unfinished"
        assert f"6 requests: {counts}" in text and "1 pin: 1 released" in text
    problem = refused([str(path), "summary", "--runtime", "third"], capsys)
    assert "no runtime 'third'" in problem and "runtime first, runtime second" in problem


def test_a_request_is_told_from_its_match_to_its_end(real: Real, capsys: pytest.CaptureFixture[str]) -> None:
    """The timeline says what was found, what it waited for, and how it ended, in the order of the log."""
    assert main([str(real[0]), "request", "waiter"]) == 0
    text = capsys.readouterr().out
    assert "2 requests had the id waiter" in text
    assert "runtime first" in text and "runtime second" in text
    steps = [
        "looked up 100 prompt tokens",
        "asks for blocks",
        "aborted while pinned: the client left",
        "in all: pinned",
    ]
    at = [text.index(step) for step in steps]
    assert at == sorted(at)


def test_a_request_that_came_twice_is_told_twice(real: Real, capsys: pytest.CaptureFixture[str]) -> None:
    """Two requests of one id in one runtime are two timelines; the note of the program stands in its place."""
    assert main([str(real[0]), "request", "talk-0"]) == 0
    text = capsys.readouterr().out
    assert "4 requests had the id talk-0" in text
    assert text.count("your program: sampled run=first, token=7") == 2
    assert text.count("in all:") == 4
    assert (
        len(re.findall(r"load of \d blocks? from host memory: launched", text)) == 2
    )  # in the second turn of each run


def test_a_preempted_request_is_one_timeline(real: Real, capsys: pytest.CaptureFixture[str]) -> None:
    """The match after a preemption begins no other request."""
    assert main([str(real[0]), "request", "aside"]) == 0
    text = capsys.readouterr().out
    assert "2 requests had the id aside" in text and text.count("preempted: gives its device blocks away") == 2


@pytest.mark.parametrize("command", [["html"], ["perfetto"]])
def test_a_file_is_written_whole(
    real: Real, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file, named in the output, and nothing beside it."""
    file = tmp_path / "out"
    assert main([str(real[0]), *command, str(file)]) == 0
    assert capsys.readouterr().out.startswith(f"{file}: ")
    assert list(tmp_path.iterdir()) == [file] and file.stat().st_size > 1000


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Exit status 2, nothing on stdout, one line on stderr: that line."""
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize("command", [["summary"], ["request", "a"], ["html", "x.html"], ["perfetto", "x.json"]])
def test_a_missing_log_is_one_line(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No traceback and no half-written file where there is no log."""
    monkeypatch.chdir(tmp_path)
    assert "nowhere.log: No such file or directory" in refused(["nowhere.log", *command], capsys)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_request_is_one_line_and_names_similar_ones(real: Real, capsys: pytest.CaptureFixture[str]) -> None:
    """Who types part of an id is told which ids have it."""
    assert "no request 'alk-1' in 108 events" in (line := refused([str(real[0]), "request", "alk-1"], capsys))
    assert "similar: talk-100" in line
    assert "similar" not in refused([str(real[0]), "request", "nobody"], capsys)


@pytest.mark.parametrize(("number", "more"), [(50, ""), (52, " and 2 more"), (10_001, " and at least 9,950 more")])
def test_part_of_an_id_names_all_that_have_it(
    number: int, more: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order of the log, each once; of very many the first, and how many more there are."""
    path = tmp_path / "log"
    path.write_text("\n".join(line(at, "request_pinned", request_id=f"c06-{at}") for at in range(number)) + "\n")
    names = ", ".join(f"c06-{at}" for at in range(50))
    assert refused([str(path), "request", "c06"], capsys).partition("similar: ")[2].strip() == names + more


def test_no_escape_sequence_of_a_file_name_reaches_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not of the log's name, of the written file's name or of a missing file's name, on either stream."""
    log, empty, file = (tmp_path / f"\x1b[31m{name}" for name in ("log", "empty", "file"))
    log.write_text(line(1, "request_aborted", request_id="r", reason="x", previous="running") + "\n")
    empty.write_text("{}\n")
    for number, arguments in enumerate(([], ["html", str(file)], ["perfetto", str(file)])):
        assert main([str(log), *arguments]) == 0
        assert main([str(empty), *arguments]) == main([str(tmp_path / "\x1b"), *arguments]) == 2
        captured = capsys.readouterr()
        assert "\\x1b[31m" in captured.out and captured.err.count("\n") == 2, number
        assert "\x1b" not in captured.out + captured.err


def test_a_closed_standard_error_does_not_matter(tmp_path: Path) -> None:
    """Progress and errors are not shown then, and the status is the same."""
    log = tmp_path / "log"
    log.write_text(line(1, "request_aborted", request_id="r", reason="x", previous="running") + "\n")
    for path, status in ((log, 0), (tmp_path / "none", 2)):
        run = f"{sys.executable} -m aoffload trace {path} 2>&-"
        found = subprocess.run(["sh", "-c", run], stdout=subprocess.PIPE, timeout=120)
        assert found.returncode == status and bool(found.stdout) is not bool(status)


@pytest.mark.parametrize("command", [["summary"], ["html", "out"], ["perfetto", "out"]])
def test_a_file_without_events_is_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log of somebody else's, or an empty one, makes no empty page. The error says how many lines are JSON, whether
    they lack the keys of an event, and which page shows how to write a log."""
    monkeypatch.chdir(tmp_path)
    renamed = json.dumps({"message": "request_pinned", "timestamp": 1000.0, "request_id": "a"}) + "\n"
    untimed = json.dumps({"event": "request_pinned", "time": 1000.0, "request_id": "a"}) + "\n"
    lacks = ", none with the keys `event` and `timestamp` (ISO 8601 or seconds since 1970)"
    for text, found in (
        ("", "0 lines, 0 of them JSON"),
        ("not one of ours\n" * 5, "5 lines, 0 of them JSON"),
        (renamed, f"1 line, 1 of them JSON{lacks}"),
        (f"INFO\n{renamed * 2}{untimed}", f"4 lines, 3 of them JSON{lacks}"),
        (f"{line(1000, 'sampled')}\n{renamed}", "2 lines, 2 of them JSON"),
    ):
        Path("other.log").write_text(text)
        error = refused(["other.log", *command], capsys)
        assert f"no event of aoffload in it: {found}; docs/howto/logs-and-spans.md shows how to write a log" in error
    assert [path.name for path in tmp_path.iterdir()] == ["other.log"]


@pytest.mark.parametrize("command", ["html", "perfetto"])
def test_the_log_is_never_written_over(real: Real, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`html LOG` by mistake leaves the log as it was; so does a directory that is not there."""
    before = real[0].read_bytes()
    assert "is the input file" in refused([str(real[0]), command, str(real[0])], capsys)
    assert "no such directory" in refused([str(real[0]), command, "nowhere/at/all"], capsys)
    assert "directory" in refused([str(real[0]), command, str(real[0].parent)], capsys)
    assert real[0].read_bytes() == before


@pytest.mark.parametrize("command", ["html", "perfetto"])
def test_what_is_no_plain_file_is_written_to_and_not_replaced(real: Real, command: str, tmp_path: Path) -> None:
    """A pipe stays a pipe, as a device would stay one; a link stays a link, and what it leads to is replaced."""
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        assert main([str(real[0]), command, str(pipe)]) == 0
        piped, _ = reader.communicate(timeout=30)
    assert pipe.is_fifo() and len(piped) > 1000
    target.write_text("the old one")
    link.symlink_to(target)
    assert main([str(real[0]), command, str(link)]) == 0
    assert link.is_symlink() and len(target.read_text()) > 1000
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "link", "target"}


def test_a_log_next_to_the_file_is_left_alone(real: Real, tmp_path: Path) -> None:
    """Whatever it is called: the name that is written under first is nobody else's."""
    for name in ("out.part", ".out.part", "out.tmp"):
        log = tmp_path / name
        log.write_bytes(real[0].read_bytes())
        assert main([str(log), "html", str(tmp_path / "out")]) == 0
        assert log.read_bytes() == real[0].read_bytes()


def test_what_was_written_before_stays_when_the_log_is_bad(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A page is replaced by a whole one, or not at all."""
    log, page = tmp_path / "bad.log", tmp_path / "page.html"
    log.write_text("nothing\n")
    page.write_text("the old one")
    refused([str(log), "html", str(page)], capsys)
    assert page.read_text() == "the old one"


def test_the_progress_bar_is_for_terminals(real: Real, capsys: pytest.CaptureFixture[str]) -> None:
    """In a pipe there is none; on a terminal it says how much is read, and leaves an empty line."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    main([str(real[0])])
    assert capsys.readouterr().err == ""
    terminal = Terminal()
    progress = Progress(ProgressLine(terminal), total_bytes=1000)
    progress.update(500, 20)
    assert " 50%  20 lines" in terminal.getvalue()
    progress.line.clear()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_it_runs_as_a_module_without_torch_and_reads_standard_input(real: Real) -> None:
    """Looking at a log must not take the seconds that torch takes; `-` is what another program prints."""
    program = (
        "import sys; from aoffload.trace.command import main; status = main(['-', 'summary']);"
        "assert 'torch' not in sys.modules; raise SystemExit(status)"
    )
    done = subprocess.run([sys.executable, "-c", program], input=real[0].read_bytes(), capture_output=True, check=True)
    assert b"12 requests: 10 done" in done.stdout
    module = [sys.executable, "-m", "aoffload.trace", str(real[0]), "request", "holder"]
    assert b"holder" in subprocess.run(module, capture_output=True, check=True).stdout


def test_a_compressed_log_is_read_as_it_is(real: Real, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever its name; one that breaks off is read as far as it goes, and says so."""
    packed = gzip.compress(real[0].read_bytes())
    said = []
    half, spoiled = packed[: len(packed) // 2], packed[:-8] + bytes(8)
    for name, data in (("a.log.gz", packed), ("b.log", packed), ("c.gz", half), ("e.gz", spoiled)):
        (tmp_path / name).write_bytes(data)
        assert main([str(tmp_path / name)]) == 0
        said.append(capsys.readouterr().out.replace(name, real[0].name))
    assert main([str(real[0])]) == 0
    assert said[0] == said[1] == capsys.readouterr().out
    assert all("1 line left out: cut off" in text and "the compressed log" in text for text in said[2:])


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    """`| head` ends the output, and nothing is said about it."""
    log = tmp_path / "long.log"
    stamp = "2026-01-01T00:00:00Z"
    notes = [{"event": "request_matched", "num_tokens": 1, "num_device_tokens": 0, "num_host_tokens": 0}]
    notes += [{"event": "note", "text": "x" * 100}] * 5000
    log.write_text("".join(json.dumps({"request_id": "a", "timestamp": stamp, **note}) + "\n" for note in notes))
    command = f"'{sys.executable}' -m aoffload.trace '{log}' request a | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, check=True, text=True)
    assert done.stderr == "" and done.stdout.startswith("a, 2026-01-01")
