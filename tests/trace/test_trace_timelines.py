"""Timelines put together from events, also where the log lacks some of them."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import pytest

from aoffload.trace import book
from aoffload.trace.book import Listener, Usage
from aoffload.trace.scan import Scan
from aoffload.trace.timelines import JobTimeline, RuntimeLife, Timeline
from benchmarks.synthetic_log import line

Said = tuple[float, str, dict[str, Any]]
NAMES = ("device_tables", "device_filling", "host_filled", "host_filling")
MATCH = {"num_tokens": 40, "num_device_tokens": 0, "num_host_tokens": 0}
GRANT = {"num_blocks": 4, "num_device_tokens": 16, "num_host_tokens": 0}


@attrs.define(eq=False)
class Recorder(Listener):
    timelines: list[Timeline] = attrs.field(factory=list)
    jobs: list[JobTimeline] = attrs.field(factory=list)
    usages: list[Usage] = attrs.field(factory=list)

    def timeline_over(self, timeline: Timeline) -> None:
        self.timelines.append(timeline)

    def job_over(self, job: JobTimeline) -> None:
        self.jobs.append(job)

    def usage_changed(self, runtime: RuntimeLife, at_s: float, usage: Usage) -> None:
        self.usages.append(usage)


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def read_events(events: Sequence[Said]) -> tuple[Recorder, Scan]:
        path = tmp_path / "events.log"
        path.write_text("".join(line(at_s, name, **fields) + "\n" for at_s, name, fields in events))
        recorder = Recorder()
        scan = Scan.of(path, recorder, io.StringIO())
        scan.run()
        return recorder, scan

    return read_events


def opened(at_s: float, **bound: Any) -> Said:
    return at_s, "runtime_opened", {"num_device_blocks": 10, "num_host_blocks": 20, **bound}


def job(at_s: float, state: str, job_id: int, num_blocks: int, direction: str = "load", **more: Any) -> Said:
    about = {"job_id": job_id, "direction": direction, "num_blocks": num_blocks, "request_id": "a"}
    return at_s, f"job_{state}", {**about, **more}


def test_states_and_times_are_those_of_the_events(read: Any) -> None:
    """Each state lasts until the next event, and the counts are the last ones given."""
    recorder, _ = read(
        [
            (10, "request_matched", {"request_id": "a", **MATCH}),
            (10, "request_pinned", {"request_id": "a"}),
            (13, "request_allocated", {"request_id": "a", **GRANT}),
            (14, "request_running", {"request_id": "a", "num_ready_tokens": 16}),
            (18, "request_done", {"request_id": "a", "num_computed_tokens": 40}),
        ]
    )  # fmt: skip
    (timeline,) = recorder.timelines
    lengths = {interval.state: interval.duration_s for interval in timeline.intervals()}
    assert lengths == {"matched": 0.0, "pinned": 3.0, "allocated": 1.0, "running": 4.0}
    assert timeline.outcome == "done" and timeline.duration_s == 8.0
    assert timeline.facts["num_device_tokens"] == 16 and timeline.facts["num_computed_tokens"] == 40


def test_what_has_no_end_is_unfinished(read: Any) -> None:
    """A program that died leaves timelines that end with its last event; what it opens again is another runtime."""
    recorder, scan = read(
        [
            opened(1),
            (2, "request_matched", {"request_id": "a", **MATCH}),
            job(3, "launched", 1, 2),
            opened(9),
            (10, "request_matched", {"request_id": "a", **MATCH}),
            (11, "request_aborted", {"request_id": "a", "reason": "deadline", "previous": "matched"}),
        ]
    )
    assert [(timeline.outcome, timeline.stop_s) for timeline in recorder.timelines] == [
        ("unfinished", 3.0),
        ("aborted", 11.0),
    ]
    assert [(found.outcome, found.ended_s) for found in recorder.jobs] == [("unfinished", 3.0)]
    assert [life.number for life in scan.runtimes.lives] == [1, 2]
    assert any("opened before the last one had closed" in remark for remark in scan.remarks())


def test_a_log_from_the_middle_is_read_as_far_as_it_goes(read: Any) -> None:
    """Rotated logs begin anywhere: the end of a request is counted, and so is that its beginning is missing."""
    recorder, scan = read(
        [
            (5, "request_running", {"request_id": "a", "num_ready_tokens": 0}),
            (7, "request_done", {"request_id": "a", "num_computed_tokens": 40}),
            (8, "request_aborted", {"request_id": "b", "reason": "cancelled", "previous": "loading"}),
            job(9, "completed", 4, 2, outcome="landed", num_bytes=64, duration_s=0.5),
        ]
    )
    assert [(timeline.name, timeline.duration_s) for timeline in recorder.timelines] == [("a", 2.0), ("b", 0.0)]
    assert recorder.timelines[1].last_state() == "loading"
    assert recorder.jobs[0].num_bytes == 64
    assert scan.book.num_early == 2
    assert "opened before the log begins" in scan.runtimes.lives[0].describe()


def test_two_runtimes_side_by_side_are_told_apart_by_what_is_bound(read: Any) -> None:
    """The same request id and job id in two runtimes are two requests and two jobs."""
    events = [opened(1, worker=0), opened(1, worker=1)]
    for worker in (0, 1):
        events += [
            (2 + worker, "request_matched", {"request_id": "a", **MATCH, "worker": worker}),
            job(3 + worker, "launched", 1, 2, worker=worker),
        ]
    for at_s, worker in ((6, 1), (9, 0)):
        aborted = {"request_id": "a", "reason": "cancelled", "previous": "matched"}
        events += [
            job(at_s, "completed", 1, 2, worker=worker, num_bytes=1, duration_s=0.1),
            (at_s + 1, "request_aborted", {**aborted, "worker": worker}),
            (at_s + 2, "runtime_closed", {"num_quarantined_jobs": 0, "worker": worker}),
        ]
    recorder, scan = read(events)
    assert [(timeline.runtime.name, timeline.start_s) for timeline in recorder.timelines] == [
        ("runtime worker 1", 3.0),
        ("runtime worker 0", 2.0),
    ]
    assert len(recorder.jobs) == 2 and scan.remarks() == []


def test_lanes_are_as_few_as_timelines_at_once(read: Any) -> None:
    """A request that starts after the end of another one takes its row."""
    events: list[Said] = []
    for number in range(30):
        events.append((number, "request_matched", {"request_id": f"r{number}", **MATCH}))
        if number >= 3:
            done = {"request_id": f"r{number - 3}", "num_computed_tokens": 1}
            events.append((number + 0.5, "request_done", done))
    recorder, scan = read(events)
    assert [lanes.num_lanes for lanes in scan.book.lanes.values()] == [4]
    for lane in range(4):
        mine = sorted((s for s in recorder.timelines if s.lane == lane), key=lambda timeline: timeline.start_s)
        assert all(one.stop_s <= other.start_s for one, other in pairwise(mine))


def test_each_runtime_has_lanes_of_its_own(read: Any) -> None:
    """Requests, steps and the jobs of a link begin in the first row of their runtime, whatever another one does."""
    begun: list[Said] = []
    for at_s, model in ((1, "a"), (2, "b")):
        bound = {"model": model}
        begun.append((at_s, "runtime_opened", {"num_device_blocks": 8, "num_host_blocks": 8, **bound}))
        begun.append((at_s, "request_matched", {"request_id": "r", **MATCH, **bound}))
        begun.append((at_s, "step_begun", {"step_id": 1, "request_ids": ["r"], "num_blocks": 1, **bound}))
        name, fields = job(at_s, "launched", 1, 1)[1:]
        begun.append((at_s, name, {**fields, **bound}))
    recorder, _ = read(begun)
    assert len(recorder.timelines) == 4 and len(recorder.jobs) == 2
    assert {found.lane for found in (*recorder.timelines, *recorder.jobs)} == {0}


def test_occupancy_is_what_was_given_loaded_and_stored(read: Any) -> None:
    """Tables fill with grants and empty with every kind of end; stores fill the host, up to its size."""
    recorder, _ = read(
        [
            opened(1),
            (2, "request_matched", {"request_id": "a", **MATCH}),
            (3, "request_allocated", {"request_id": "a", **GRANT}),
            job(4, "launched", 1, 3),
            job(5, "completed", 1, 3, num_bytes=1, duration_s=0.1),
            (6, "request_preempted", {"request_id": "a"}),
            (7, "prefetch_moving", {"request_id": "p", "num_blocks": 2, "num_tokens": 0}),
            job(8, "launched", 2, 15, "store"),
            job(9, "completed", 2, 15, "store", num_bytes=1, duration_s=0.1),
            job(10, "launched", 3, 15, "store"),
            job(11, "completed", 3, 15, "store", num_bytes=1, duration_s=0.1),
            job(12, "launched", 4, 1, "store"),
            job(13, "failed", 4, 1, "store", error="no"),
            (14, "prefetch_cancelled", {"request_id": "p", "num_blocks": 2, "num_tokens": 0}),
        ]
    )  # fmt: skip
    assert [tuple(usage[name] for name in NAMES) for usage in recorder.usages] == [
        (4, 0, 0, 0), (4, 3, 0, 0), (4, 0, 0, 0), (0, 0, 0, 0), (2, 0, 0, 0), (2, 0, 0, 15), (2, 0, 15, 0),
        (2, 0, 15, 15), (2, 0, 20, 0), (2, 0, 20, 1), (2, 0, 20, 0), (0, 0, 20, 0), (0, 0, 0, 0),
    ]  # fmt: skip


def test_timelines_that_never_end_take_bounded_memory(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that lost all ends keeps the newest; the oldest are told as unfinished."""
    monkeypatch.setattr(book, "MAX_OPEN", 10)
    recorder, scan = read([(n, "request_matched", {"request_id": f"r{n}", **MATCH}) for n in range(50)])
    assert len(recorder.timelines) == 50 and {timeline.outcome for timeline in recorder.timelines} == {"unfinished"}
    assert [lanes.num_lanes for lanes in scan.book.lanes.values()] == [11]
    # The first of a plain dict is behind all that went before it, so each event would take longer than the last one.
    assert {type(scan.book._timelines), type(scan.book._jobs)} == {OrderedDict}
