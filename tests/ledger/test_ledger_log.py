"""The log of a ledger that a program drives by steps: the trace tool reads all of it, and finds what there was."""

from __future__ import annotations

import io
import json
import re
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from engine_driving import EngineDriven
from page_data import column, columns, page_data
from prometheus_client import CollectorRegistry
from step_programs import PROGRAMS, EngineSteps, OwnSteps, Program, Seen

from aoffload import DiskTier, IntegrityError, InvalidArgument, KVCacheGroup, Ledger, OffloadConfig, Tier
from aoffload.demo.logs import make_logger
from aoffload.ledger import (
    Completion,
    CopyQueue,
    JobState,
    LedgerLog,
    Observers,
    Outcome,
    Prefix,
    Root,
    TransferPlan,
)
from aoffload.metrics import Metrics
from aoffload.trace.book import MEASURES, Listener, Usage
from aoffload.trace.command import main
from aoffload.trace.events import ParseError
from aoffload.trace.figures import Figures
from aoffload.trace.scan import Scan
from aoffload.trace.timelines import LINKS, RuntimeLife, Timeline
from aoffload.transport import DeviceGone

ROOT = Path(__file__).parents[2]

each_program = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())


class Timelines(Listener):
    def __init__(self) -> None:
        self.found: list[Timeline] = []
        self.usages: list[Usage] = []

    def timeline_over(self, timeline: Timeline) -> None:
        self.found.append(timeline)

    def usage_changed(self, runtime: RuntimeLife, at_s: float, usage: Usage) -> None:
        self.usages.append(usage)


def logged(path: Path, program: Program, seed: int) -> tuple[Any, Seen]:
    """A run whose log is in `path`, and what another observer has seen of it."""
    seen = Seen()
    with path.open("w") as file:
        log = LedgerLog(make_logger(file))
        steps = program(seed, Observers(log, seen))
        log.ledger_opened(steps.ledger)
        steps.drive()
        log.ledger_closed(steps.ledger)
    assert log.num_lost_events == 0
    return steps, seen


def scanned(path: Path, listener: Listener) -> Scan:
    scan = Scan.of(path, listener, io.StringIO())
    scan.run()
    return scan


@each_program
def test_the_trace_tool_reads_every_line_and_finds_every_request_and_job(program: Program, tmp_path: Path) -> None:
    """No line is left out and nothing is remarked. Requests and jobs by outcome, and blocks that were not stored, are
    those that another observer has seen. When all is over, nothing is on its way."""
    most = dict.fromkeys(MEASURES, 0)
    for seed in range(8):
        path = tmp_path / f"{seed}.log"
        _, seen = logged(path, program, seed)
        timelines, figures = Timelines(), Figures()
        for listener in (timelines, figures):
            scan = scanned(path, listener)
            assert not any(scan.reader.parse_errors.num_lines(kind) for kind in ParseError)
            assert scan.remarks() == []
        requests = [one for one in timelines.found if one.kind.value == "request"]
        assert Counter(one.outcome for one in requests) == Counter(h.state.value for h in seen.records)
        assert len(requests) == len(seen.records) > 4
        for link in LINKS:
            found = figures.jobs[link].outcomes
            for state in (JobState.COMPLETED, JobState.FAILED, JobState.DISCARDED):
                counted = seen.jobs.get((link.direction, state), 0) if link.tier is Tier.HOST else 0
                also = found.count(Outcome.REFUSED.value) if state is JobState.FAILED else 0  # a word of its own there
                assert found.count(state.value) + also == counted
        skipped = figures.skipped_blocks
        assert sum(count for _, count in skipped.highest_first()) == seen.num_skipped_blocks
        assert timelines.usages[-1] == dict.fromkeys(MEASURES, 0)
        most = {name: max(usage[name] for usage in (most, *timelines.usages)) for name in MEASURES}
    assert most["device_filling"] and most["host_filled"] and most["host_filling"]
    assert not (most["disk_filled"] or most["disk_filling"])
    assert bool(most["device_tables"]) is (program is OwnSteps), "what is in an engine's tables only the engine knows"


def test_an_engine_s_pending_matches_and_lost_loads_are_in_the_trace(tmp_path: Path) -> None:
    """Who was told to ask again is one timeline from its first match on, also where it asks with other tokens of its
    engine's meanwhile. What a load has not brought is where the request goes on."""
    num_pending = num_lost = 0
    for seed in range(8):
        steps, seen = logged(tmp_path / "log", EngineSteps, seed)
        timelines = Timelines()
        scanned(tmp_path / "log", timelines)
        pending = [one for one in timelines.found if "num_pending" in one.facts]
        assert len(pending) == len(steps.told_pending)
        assert all(one.states[0] == "matched" for one in timelines.found)
        ran = [one for one in timelines.found if "running" in one.states]
        lost = sum(one.facts["num_lost_tokens"] for one in ran)
        assert lost == sum(request.num_lost_tokens for request in seen.records)
        num_pending, num_lost = num_pending + len(pending), num_lost + lost
    assert num_pending > 10 and num_lost > 10


def test_what_a_request_found_pending_is_told_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The narrative and the summary name the engine's blocks, the PENDING answer and the load that fell short."""
    path, text = tmp_path / "log", ""
    for seed in range(8):
        logged(path, EngineSteps, seed)
        assert main([str(path)]) == 0
        text += capsys.readouterr().out
        events = [json.loads(line) for line in path.read_text().splitlines()]
        wanted = [e for e in events if e.get("answer") == "pending" or e.get("num_lost_tokens")]
        for name in {event["request_id"] for event in wanted}:
            assert main([str(path), "request", name]) == 0
            text += capsys.readouterr().out
    assert "ledger 1 (device of its engine, " in text
    assert "may have to ask again" in text
    assert "another request loads what follows: asks again" in text
    assert "its load has not brought" in text
    assert "was given blocks of its engine; matched in that step" in text
    assert "was given 0 blocks" not in text


@each_program
def test_a_page_and_a_perfetto_trace_are_drawn(
    program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every request and every launched job is on the page, in a ledger with the sizes of its pools."""
    path, page, trace = tmp_path / "log", tmp_path / "page.html", tmp_path / "trace.json"
    steps, seen = logged(path, program, 6)
    assert main([str(path), "html", str(page)]) == main([str(path), "perfetto", str(trace)]) == 0
    capsys.readouterr()
    data = page_data(page)
    timelines, jobs = columns(data["timelines"]), columns(data["jobs"])
    num_requests = sum(data["kinds"][kind] == "request" for kind in timelines["kind"])
    assert num_requests == len(seen.records)
    num_launched = seen.num_jobs(JobState.LAUNCHED)
    assert len(jobs["job_id"]) == num_launched + seen.num_jobs(JobState.DISCARDED)
    (life,) = data["runtimes"]
    device, host = (tier.pool.num_blocks for tier in steps.ledger.cache.tiers)
    assert life["name"] == "ledger 1" and life["num_host_blocks"] == host
    assert life["num_device_blocks"] == (device if program is OwnSteps else 0)
    stored = column(data["usages"]["1"]["host_filled"]["value"])
    assert 0 < max(stored) <= host
    names = {
        event["args"]["name"]
        for event in json.loads(trace.read_text())["traceEvents"]
        if event["ph"] == "M" and "name" in event["args"]
    }
    assert any(name.startswith("ledger 1 (") for name in names)


def test_two_ledgers_side_by_side_are_told_apart_by_what_is_bound(tmp_path: Path) -> None:
    """As runtimes are: by the fields of their loggers."""
    path = tmp_path / "log"
    with path.open("w") as file:
        logs = [LedgerLog(make_logger(file).bind(engine=number)) for number in (0, 1)]
        both = [EngineSteps(number, log) for number, log in enumerate(logs)]
        for log, steps in zip(logs, both, strict=True):
            log.ledger_opened(steps.ledger)
        for _ in range(60):
            for steps in both:
                steps.arrive()
                steps.step()
        for log, steps in zip(logs, both, strict=True):
            steps.drive(0)
            log.ledger_closed(steps.ledger)
    scan = scanned(path, Timelines())
    assert [life.name for life in scan.runtimes.lives] == ["ledger engine 0", "ledger engine 1"]
    assert scan.remarks() == [] and scan.runtimes.lives[0].is_called("engine 0")


class Hanging:
    """A transport whose copies end when they are told to, or whose device is lost."""

    is_lost = False

    def launch(self, plan: TransferPlan, after: object) -> None:
        if self.is_lost:
            raise DeviceGone("no answer")


def fails(completion: Completion) -> None:
    raise IntegrityError("planted")


@pytest.mark.parametrize("has_others", [False, True])
def test_a_copy_queue_reports_to_the_log_and_the_metrics(
    tmp_path: Path, has_others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stall, its end, a ledger that fails and a device that is lost are alarms, as they are of a runtime; with others
    beside the log, too. The metrics hear that the cache is off."""
    path, now, metrics = tmp_path / "log", 0.0, Metrics()
    with path.open("w") as file:
        log = LedgerLog(make_logger(file))
        observers = Observers(Seen(), log, metrics) if has_others else log
        driven = EngineDriven(observer=observers)
        log.ledger_opened(driven.ledger)
        config, transport = driven.ledger.config, Hanging()
        queue = CopyQueue(driven.ledger, transport, config, clock=lambda: now, block_bytes=1, observer=observers)
        request, tables = driven.computed(range(16))
        (plan,) = driven.offer(request, 16, tables)
        queue.submit([plan])
        now = 1e6
        queue.advance()
        queue.deliver(Completion(plan.job_id, Outcome.LANDED, plan.num_blocks))
        queue.advance()
        with monkeypatch.context() as patched:
            patched.setattr(driven.ledger, "settle", fails)
            queue.deliver(Completion(99, Outcome.LANDED))
            queue.advance()
        assert not queue.is_accepting
        lost = CopyQueue(driven.ledger, transport, config, clock=lambda: now, block_bytes=1, observer=observers)
        transport.is_lost = True
        driven.release(request)
        other, tables = driven.computed(range(100, 116))
        lost.submit(driven.offer(other, 16, tables))
        lost.advance()
        driven.release(other)
        log.ledger_closed(driven.ledger)
    events = [json.loads(line) for line in path.read_text().splitlines()]
    told_of = [(event["event"], event["level"]) for event in events if event["level"] in ("warning", "error")]
    assert told_of == [
        ("transport_stalled", "error"), ("job_failed", "warning"), ("transport_recovered", "warning"),
        ("worker_failed", "error"), ("cache_turned_off", "error"), ("cache_turned_off", "error"),
        ("job_failed", "warning"),
    ]  # fmt: skip
    figures = Figures()
    assert scanned(path, figures).remarks() == []
    assert figures.alarms.count("cache_turned_off: no answer") == figures.alarms.count("transport_stalled") == 1
    assert metrics.is_cache_off is has_others


@pytest.mark.parametrize(("outcome", "level"), [(Outcome.REFUSED, "debug"), (Outcome.FAILED, "warning")])
def test_a_job_that_a_disabled_storage_refuses_is_no_warning(tmp_path: Path, outcome: Outcome, level: str) -> None:
    """`storage_left_alone` has said why, once. A failure of the job's own is a warning."""
    path = tmp_path / "log"
    with path.open("w") as file:
        driven = EngineDriven(observer=LedgerLog(make_logger(file)))
        request, tables = driven.computed(range(16))
        (plan,) = driven.offer(request, 16, tables)
        driven.ledger.launch(plan.job_id)
        driven.ledger.settle(Completion(plan.job_id, outcome, error="the storage is left alone"))
    events = [json.loads(line) for line in path.read_text().splitlines()]
    (failed,) = [event for event in events if event["event"] == "job_failed"]
    assert (failed["level"], failed["outcome"]) == (level, outcome.value)


def test_a_request_that_asks_with_other_tokens_of_its_engine_s_is_one_timeline(tmp_path: Path) -> None:
    """Its pins move, so it is matched again; nothing of it is over."""
    path = tmp_path / "log"
    with path.open("w") as file:
        driven = EngineDriven(observer=LedgerLog(make_logger(file)))
        driven.serve(range(16))
        request = driven.admit(range(17), request_id="asker")
        assert driven.ask(request, 8) == (8, 8, "hit")
        driven.release(request, "left")
    timelines = Timelines()
    scanned(path, timelines)
    (retried,) = [one for one in timelines.found if one.name == "asker"]
    assert retried.states == ["matched", "pinned", "matched", "pinned", "aborted"]
    assert (retried.facts["num_device_tokens"], retried.facts["num_host_tokens"]) == (8, 8)


def test_a_logger_that_raises_costs_its_event_and_nothing_else(tmp_path: Path) -> None:
    """The ledger reports in the middle of a change: a full disk must not reach it. Each lost event is counted."""

    class Full(Seen):
        def bind(self) -> Any:
            return self

        def debug(self, *args: Any, **fields: Any) -> None:
            raise OSError("no space left")

        info = warning = error = debug

    log, seen = LedgerLog(Full()), Seen()
    steps = EngineSteps(0, Observers(log, seen))
    log.ledger_opened(steps.ledger)
    steps.drive(40)
    log.ledger_closed(steps.ledger)
    events = 2 + sum(seen.jobs.values()) + 3 * len(seen.records)
    assert log.num_lost_events > events > 20
    steps.ledger.check_integrity()


@pytest.mark.parametrize("wrong", [3, "log", print, OwnSteps])
def test_what_is_no_logger_or_ledger_is_refused_by_name(wrong: Any) -> None:
    """Before anything is observed."""
    with pytest.raises(InvalidArgument, match="logger"):
        LedgerLog(wrong)
    log = LedgerLog(make_logger(io.StringIO()))
    for call in (log.ledger_opened, log.ledger_closed):
        with pytest.raises(InvalidArgument, match="ledger"):
            call(wrong)
    with pytest.raises(InvalidArgument, match="observers"):
        Observers(log, wrong)


SERVED = """
request = ledger.admit(Prefix.of(Root("toy"), range(40)), request_id="one")
ledger.allocate_nowait(request)
ledger.plan_load(request)
for plan in ledger.commit(request, 40) + ledger.release(request):
    ledger.launch(plan.job_id)
    ledger.settle(Completion(plan.job_id, Outcome.LANDED, plan.num_blocks, num_bytes=plan.num_blocks * 4096))
"""
"""What a loop does where the page says that it calls the ledger."""


def test_the_program_of_the_page_runs_and_its_log_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program in docs/metrics.md about the log and the metrics of a ledger is whole: what its ledger does is in the
    registry, and the trace tool finds its request in the log."""
    page = (ROOT / "docs/metrics.md").read_text().partition("### With a ledger of your own")[2]
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    served = textwrap.indent(SERVED, " " * 4).strip()
    whole, num_places = re.subn(r"\.\.\.  # calls of the ledger.*", served, code)
    assert num_places == 1
    whole = whole.replace("LedgerLog()", "LedgerLog(logger)")
    file = io.StringIO()
    registry = CollectorRegistry()
    monkeypatch.setattr("prometheus_client.REGISTRY", registry)
    names = {"Completion": Completion, "Outcome": Outcome, "Prefix": Prefix, "Root": Root, "logger": make_logger(file)}
    exec(compile(whole, "metrics.md", "exec"), names)
    (tmp_path / "ledger.log").write_text(file.getvalue())
    assert registry.get_sample_value("aoffload_requests_finished_total", {"outcome": "done", "reason": ""}) == 1
    labels = {"direction": "store", "tier": "host", "outcome": "landed"}
    assert registry.get_sample_value("aoffload_copied_bytes_total", labels) == 8192
    assert registry.get_sample_value("aoffload_pool_blocks", {"tier": "device"}) == 8
    assert main([str(tmp_path / "ledger.log"), "request", "one"]) == 0
    assert "done; committed as far as token 40" in capsys.readouterr().out
    scan = scanned(tmp_path / "ledger.log", Timelines())
    assert scan.remarks() == [] and [life.title() for life in scan.runtimes.lives] == [
        "ledger 1 (8 device blocks, 8 in host memory)"
    ]


def test_a_ledger_with_a_disk_opens_its_log() -> None:
    """With the sizes of device and host, as one without a disk."""
    file = io.StringIO()
    config = OffloadConfig(
        groups=[KVCacheGroup("full")], num_host_blocks=7, namespace="m", disk=DiskTier("unused", "1MiB")
    )
    LedgerLog(make_logger(file)).ledger_opened(Ledger(config, 9, block_bytes=4096))
    found = json.loads(file.getvalue())
    assert (found["event"], found["num_device_blocks"], found["num_host_blocks"]) == ("ledger_opened", 8, 7)
