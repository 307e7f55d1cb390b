"""`perfetto FILE`: a trace in the Trace Event Format (JSON), which the Perfetto viewer and chrome://tracing open.

A runtime is a process, a lane is a thread. The trace is written while the log is read, so it is not kept in memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

import attrs

from .._common.tiers import TIERS
from .book import ALARMS, DERIVED, MEASURES, Listener, Usage
from .events import Event, Kind
from .output import whole_file
from .scan import Scan
from .timelines import LINKS, JobTimeline, RuntimeLife, Timeline, name_of
from .wording import counted

_STEP_THREADS = 500_000
_JOB_THREADS = {link: number * 1_000_000 for number, link in enumerate(LINKS, 1)}
"""First thread number for the lanes of jobs. Those of requests begin at 1."""


_NOTHING: Usage = dict.fromkeys(MEASURES, 0)


def write_perfetto(log: Path, file: Path, progress: TextIO, until_s: float | None = None) -> str:
    """Read `log`, write `file`. Returns a line about it. Raises `OSError`, or `EmptyLogError`."""
    with whole_file(file, beside=log) as output:
        trace = PerfettoTrace(output)
        scan = Scan.of(log, trace, progress, until_s)
        trace.begin()
        scan.run()
        trace.end({"log": scan.title(), "remarks": " | ".join(scan.remarks()), "occupancy": DERIVED})
    return f"{file}: {counted(trace.num_events, 'trace event')}; open it at ui.perfetto.dev"


@attrs.define(eq=False)
class PerfettoTrace(Listener):
    """Times are whole microseconds since 1970, so that nested slices stay nested."""

    output: TextIO
    num_events: int = 0
    _threads: set[tuple[int, int]] = attrs.field(factory=set)
    _usages: dict[int, Usage] = attrs.field(factory=dict)

    def begin(self) -> None:
        self.output.write('{"displayTimeUnit":"ms","traceEvents":[\n')

    def end(self, about: dict[str, str]) -> None:
        self.output.write(f'\n],"otherData":{json.dumps(about)}}}\n')

    def runtime_opened(self, runtime: RuntimeLife) -> None:
        self._name("process", runtime.number, 0, runtime.title())

    def timeline_over(self, timeline: Timeline) -> None:
        is_step = timeline.kind is Kind.STEP
        thread = timeline.lane + (_STEP_THREADS if is_step else 1)
        self._introduce(timeline.runtime, thread, "steps" if is_step else "requests")
        at = {"pid": timeline.runtime.number, "tid": thread}
        about = {
            "outcome": timeline.outcome,
            **({"reason": timeline.reason} if timeline.reason else {}),
            **timeline.facts,
            **({"request_ids": timeline.members, "kept_blocks": timeline.kept} if is_step else {}),
        }
        self._slice(timeline.title(), timeline.kind.value, timeline.start_s, timeline.stop_s, at, about)
        for interval in timeline.intervals():
            if _micros(interval.stop_s) > _micros(interval.start_s):
                self._slice(interval.state, "state", interval.start_s, interval.stop_s, at, {})
        if timeline.outcome == "aborted":
            mark = {"ph": "i", "s": "t", "name": f"aborted: {timeline.reason}", "cat": "abort"}
            self._write({**mark, "ts": _micros(timeline.stop_s), **at})

    def job_over(self, job: JobTimeline) -> None:
        thread = _JOB_THREADS[job.link] + job.lane
        self._introduce(job.runtime, thread, job.link.name)
        about: dict[str, Any] = {"outcome": job.outcome, "num_blocks": job.num_blocks, "num_bytes": job.num_bytes}
        about |= {"copy_s": job.copy_s, "request_id": job.owner, **({"error": job.error} if job.error else {})}
        at = {"pid": job.runtime.number, "tid": thread}
        self._slice(f"{job.link.name}, {job.job_id}", "job", job.launched_s, job.ended_s, at, about)

    def usage_changed(self, runtime: RuntimeLife, at_s: float, usage: Usage) -> None:
        old = self._usages.get(runtime.number, _NOTHING)
        self._usages[runtime.number] = usage
        for row in TIERS:
            prefix = name_of(row.tier)
            names = [measure for measure in MEASURES if measure.startswith(f"{prefix}_")]
            if any(old[name] != usage[name] for name in names):
                counts = {name.removeprefix(f"{prefix}_"): usage[name] for name in names}
                self._counts(runtime, at_s, f"{prefix} blocks", counts)

    def told(self, event: Event, runtime: RuntimeLife) -> None:
        if event.meaning.kind not in ALARMS:
            return
        error = event.fields.get("error") or event.fields.get("reason", "")
        mark = {"ph": "i", "s": "g", "name": event.name, "cat": "alarm", "ts": _micros(runtime.last_s)}
        self._write({**mark, "pid": runtime.number, "tid": 0, "args": {"error": str(error)}})

    def _counts(self, runtime: RuntimeLife, at_s: float, name: str, counts: dict[str, int]) -> None:
        self._write({"ph": "C", "name": name, "ts": _micros(at_s), "pid": runtime.number, "tid": 0, "args": counts})

    def _slice(
        self, name: str, category: str, start_s: float, stop_s: float, at: dict[str, int], about: dict[str, Any]
    ) -> None:
        start = _micros(start_s)
        length = _micros(stop_s) - start
        event = {"ph": "X", "name": name, "cat": category, "ts": start, "dur": length, **at}
        self._write({**event, "args": about} if about else event)

    def _introduce(self, runtime: RuntimeLife, thread: int, group: str) -> None:
        """Name a thread before its first slice, and keep the lanes of a group together."""
        if (runtime.number, thread) in self._threads:
            return
        self._threads.add((runtime.number, thread))
        self._name("thread", runtime.number, thread, group)
        at = {"pid": runtime.number, "tid": thread}
        self._write({"ph": "M", "name": "thread_sort_index", **at, "args": {"sort_index": thread}})

    def _name(self, what: str, process: int, thread: int, name: str) -> None:
        self._write({"ph": "M", "name": f"{what}_name", "pid": process, "tid": thread, "args": {"name": name}})

    def _write(self, event: dict[str, Any]) -> None:
        self.output.write((",\n" if self.num_events else "") + json.dumps(event, separators=(",", ":")))
        self.num_events += 1


def _micros(at_s: float) -> int:
    return round(at_s * 1e6)
