"""The trace for the Perfetto viewer follows the Trace Event Format."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from real_log import write_real

from aoffload.trace.perfetto import write_perfetto
from benchmarks.synthetic_log import write_synthetic

REQUIRED = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid"},
    "M": {"name", "pid", "tid", "args"},
    "C": {"name", "ts", "pid", "args"},
    "i": {"name", "cat", "ts", "pid", "tid", "s"},
}


def check_format(trace: dict[str, Any]) -> None:
    """The rules of the format for the phases that we use."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert all(isinstance(value, str) for value in trace["otherData"].values())
    for event in trace["traceEvents"]:
        assert REQUIRED[event["ph"]] <= set(event), event
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and event["pid"] > 0
        if event["ph"] != "M":
            assert isinstance(event["ts"], int) and event["ts"] >= 0
        if event["ph"] == "C":
            assert all(type(value) is int and value >= 0 for value in event["args"].values())
        if event["ph"] == "i":
            assert event["s"] in ("t", "p", "g")


def check_nesting(events: list[dict[str, Any]]) -> None:
    """On one thread, a slice lies inside of another one or beside it: what overlaps is drawn wrongly."""
    threads: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            assert type(event["dur"]) is int and event["dur"] >= 0
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for slices in threads.values():
        around: list[int] = []
        for event in sorted(slices, key=lambda one: (one["ts"], -one["dur"])):
            while around and around[-1] <= event["ts"]:
                around.pop()
            stop = event["ts"] + event["dur"]
            assert not around or stop <= around[-1], event
            around.append(stop)


def check_names(events: list[dict[str, Any]]) -> None:
    """Every process and thread that has a slice has a name."""
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    for event in events:
        assert event["pid"] in processes
        if event["ph"] == "X":
            assert (event["pid"], event["tid"]) in named


def traced(log: Path) -> dict[str, Any]:
    file = log.with_suffix(".json")
    write_perfetto(log, file, io.StringIO())
    trace: dict[str, Any] = json.loads(file.read_text())
    check_format(trace)
    check_nesting(trace["traceEvents"])
    check_names(trace["traceEvents"])
    return trace


def test_a_real_log_becomes_a_valid_trace(tmp_path: Path) -> None:
    """Each request, job and transfer is a slice with its facts, an abort is marked, and runtimes are processes."""
    events = write_real(tmp_path / "real.log")
    trace = traced(tmp_path / "real.log")["traceEvents"]
    slices = Counter(event["cat"] for event in trace if event["ph"] == "X")
    names = Counter(event["event"] for event in events)
    assert slices["request"] == names["request_done"] + names["request_aborted"]
    assert slices["job"] == names["job_completed"] and slices["pin"] == names["pin_held"]
    aborts = [event for event in trace if event["ph"] == "i"]
    assert [event["name"] for event in aborts] == ["aborted: the client left"] * 2
    processes = [event["args"]["name"] for event in trace if event["name"] == "process_name"]
    assert processes == [f"runtime {name} (8 device blocks, 9 in host memory)" for name in ("first", "second")]
    waiter = next(event for event in trace if event["name"] == "waiter")
    assert waiter["args"]["reason"] == "the client left" and waiter["args"]["num_tokens"] == 100
    last = {(event["pid"], event["name"]): event["args"] for event in trace if event["ph"] == "C"}
    assert last[1, "device blocks"] == {"tables": 0, "filling": 0}


def test_many_requests_at_once_stay_on_lanes_of_their_own(tmp_path: Path) -> None:
    """Also when hundreds overlap, nothing overlaps on a thread."""
    write_synthetic(tmp_path / "synthetic.log", 10_000)
    trace = traced(tmp_path / "synthetic.log")
    assert sum(event.get("cat") == "request" for event in trace["traceEvents"]) > 800
    assert "10,000 events" in trace["otherData"]["log"]


@pytest.mark.parametrize("num_lines", [3, 50, 77])
def test_a_log_that_was_cut_becomes_a_valid_trace(num_lines: int, tmp_path: Path) -> None:
    """From the middle, and without an end."""
    write_real(tmp_path / "real.log")
    lines = (tmp_path / "real.log").read_text().splitlines(keepends=True)
    (tmp_path / "cut.log").write_text("".join(lines[num_lines : num_lines + 25]))
    traced(tmp_path / "cut.log")
