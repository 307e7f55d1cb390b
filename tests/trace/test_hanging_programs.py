"""Two programs that hang, each found in one step: from `requests()`, the log, metrics, the trace page."""

from __future__ import annotations

import io
import json
import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import pytest
from anyio.abc import TaskGroup, TaskStatus
from hanging_programs import NUM_BLOCKS, START_S, Stuck, a_forward_hangs, a_task_holds_all, jumping, logger_into, stuck
from page_data import column, columns, page_data
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from aoffload import OffloadRuntime, OutOfBlocks, RequestState
from aoffload._extensions.status import Holder, WaitsFor
from aoffload.trace.command import main as trace

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return jumping(request.param)


Written = Callable[[Stuck], Path]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Writes the log as it is."""

    def write(found: Stuck) -> Path:
        path = tmp_path / "log"
        path.write_text(found.log.getvalue())
        return path

    return write


def gauges(found: Stuck) -> dict[str, float]:
    families = text_string_to_metric_families(generate_latest(found.registry).decode())
    return {
        sample.name + "".join(sample.labels.values()): sample.value for family in families for sample in family.samples
    }


def events(found: Stuck, name: str) -> list[dict[str, Any]]:
    read = [json.loads(line) for line in found.log.getvalue().splitlines()]
    return [event for event in read if event["event"] == name]


def same(line: str, words: str) -> bool:
    """Whatever the width of the columns."""
    return line.split() == words.split()


# -- a task holds all blocks and waits for something else -------------------------------------------------------------


async def test_requests_name_the_task_that_holds_all() -> None:
    """Who waits says for what, since when, in which place, and who holds it; who holds it waits for its own program."""
    async with stuck(a_task_holds_all) as found:
        hog, waiter = found.runtime.reports.requests()
        assert (hog.request_id, hog.state, hog.age_s) == ("hog", RequestState.RUNNING, pytest.approx(61))
        assert (hog.num_blocks, hog.waits_for, hog.held_by) == (NUM_BLOCKS, WaitsFor.PROGRAM, ())
        assert (waiter.request_id, waiter.state, waiter.num_blocks) == ("waiter", RequestState.PINNED, 0)
        assert (waiter.waits_for, waiter.num_missing, waiter.place) == (WaitsFor.BLOCKS, 4, 1)
        assert waiter.waited_s == pytest.approx(60)
        (holder,) = waiter.held_by
        assert (holder.kind, holder.name, holder.num_blocks) == ("request", "hog", NUM_BLOCKS)
        assert found.runtime.reports.holders() == (
            attrs.evolve(holder, age_s=found.runtime.reports.holders()[0].age_s),
        )
        assert "held by request hog, running for 61.0 s: 24 blocks" in found.runtime.explain()


async def test_the_log_alone_names_the_task_that_holds_all(
    written: Written, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the level of warnings too; with all events, what is open stands first, the longest first."""
    async with stuck(a_task_holds_all, level=logging.WARNING) as found:
        (event,) = events(found, "slow_wait")
        assert (event["request_id"], event["num_blocks"], event["holder"]) == ("waiter", 4, "request hog")
        assert event["waited_s"] == pytest.approx(30) and event["timestamp"] == pytest.approx(START_S + 31)
    async with stuck(a_task_holds_all) as found:
        assert trace([str(written(found)), "--until", str(START_S + 61)]) == 0
    open_now = capsys.readouterr().out.partition("not over at 08:01:01.000, the longest first\n")[2].splitlines()
    assert same(open_now[0], "61.0 s hog running for 61.0 s, in no step from 08:00:00.000")
    assert same(open_now[1], "60.0 s waiter pinned for 60.0 s, waits for blocks from 08:00:01.000")


async def test_metrics_alone_tell_that_a_task_holds_all() -> None:
    """Somebody waits, somebody has been running for as long, and it is no step that hangs."""
    async with stuck(a_task_holds_all) as found:
        shown = gauges(found)
    assert shown["aoffload_oldest_wait_seconds"] == pytest.approx(60)
    assert shown["aoffload_oldest_request_secondsrunning"] == pytest.approx(61)
    assert shown["aoffload_oldest_request_secondspinned"] == pytest.approx(60)
    assert shown["aoffload_oldest_step_seconds"] == 0


class Blocks:
    """An engine's."""

    def hold(self, _: Any) -> None: ...

    give = hold


async def does_not_load(runtime: OffloadRuntime, tasks: TaskGroup) -> None:
    async def live() -> None:
        async with runtime.request(range(16), "idle"):
            await anyio.sleep_forever()

    tasks.start_soon(live)
    await anyio.sleep(1)


@pytest.mark.parametrize(("blocks", "waits"), [(Blocks(), "waits for its program"), (None, "waits for blocks")])
async def test_with_an_engines_blocks_nobody_waits_for_room(
    blocks: Blocks | None, waits: str, written: Written, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log says whose the blocks are: what is pinned waits for the next call of its program."""
    async with stuck(does_not_load, engine_blocks=blocks) as found:
        path, until = written(found), ["--until", str(START_S + 61)]
    whole, one = [str(path), *until], [str(path), "request", "idle", *until]
    assert trace(whole) == trace(one) == 0
    said = capsys.readouterr().out
    assert f"idle  pinned for 61.0 s, {waits}" in said and f"pinned for 61.0 s ({waits})" in said
    assert re.search(rf"^  pinned +{waits} +1 ", said, re.MULTILINE)
    assert ("asks for blocks" in said) is (blocks is None) is ("24 device blocks of its engine" not in said)
    assert trace([str(path), "html", str(path.with_suffix(".html"))]) == 0
    assert page_data(path.with_suffix(".html"))["states"]["pinned"] == waits


# -- a forward hangs, and its client is gone --------------------------------------------------------------------------


async def test_holders_name_the_step_of_a_request_that_is_over() -> None:
    """The request is no longer there; the step that still holds its blocks says whose they are."""
    async with stuck(a_forward_hangs) as found:
        (waiter,) = found.runtime.reports.requests()
        (step,) = waiter.held_by
        assert step == Holder("step", "1", "open", step.age_s, NUM_BLOCKS, ("gone",), ("gone",))
        assert step.age_s == pytest.approx(61)
        assert "step 1 of gone (over), open for 61.0 s: 24 blocks" in found.runtime.explain()


async def test_the_log_alone_names_the_step_that_hangs(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    """With the level of warnings too. A request whose step still holds its blocks is told so."""
    async with stuck(a_forward_hangs, level=logging.WARNING) as found:
        (step,), (wait,) = events(found, "slow_step"), events(found, "slow_wait")
        assert (step["step_id"], step["num_blocks"], step["over"]) == (1, NUM_BLOCKS, ["gone"])
        assert step["open_s"] == pytest.approx(30) and wait["holder"] == "step 1"
    async with stuck(a_forward_hangs) as found:
        log = str(written(found))
        assert trace([log, "--until", str(START_S + 61)]) == 0
    open_now = capsys.readouterr().out.partition("not over at 08:01:01.000, the longest first\n")[2].splitlines()
    assert same(open_now[0], "61.0 s step 1 holds 24 blocks of gone, which is over from 08:00:00.000")
    assert trace([log, "--until", str(START_S + 61), "request", "gone"]) == 0
    output = capsys.readouterr().out
    assert "aborted while running: the client left" in output
    assert (
        "Step 1 holds its blocks for 61.0 s and has not ended: the request is over, but its blocks are not free"
        in output
    )


async def test_metrics_alone_tell_that_a_step_hangs() -> None:
    """The oldest step is as old as the wait, and no request runs."""
    async with stuck(a_forward_hangs) as found:
        shown = gauges(found)
    assert shown["aoffload_oldest_step_seconds"] == pytest.approx(61)
    assert shown["aoffload_oldest_wait_seconds"] == pytest.approx(60)
    assert shown["aoffload_oldest_request_secondsrunning"] == 0


# -- a request is cancelled, and its task waits for a thread ----------------------------------------------------------


@pytest.mark.parametrize("by", ["cancel", "deadline"])
async def test_a_cancelled_request_that_waits_for_its_thread_says_so(
    by: str, written: Written, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `requests()`, by an event at once, and by the trace as long as its task has not left the block. Only then the
    request is over."""
    may_end, reasons = threading.Event(), {"cancel": "the client left", "deadline": "deadline"}

    async def a_thread_hangs(runtime: Any, tasks: Any) -> None:
        async def serve(*, task_status: TaskStatus[None]) -> None:
            async with runtime.request(range(96), "gone", deadline_s=1 if by == "deadline" else None) as request:
                await request.allocate()
                await request.load()
                task_status.started()
                await runtime.run_step([request], lambda: may_end.wait(60))

        await tasks.start(serve)
        await anyio.sleep(2)
        if by == "cancel":
            runtime.cancel("gone", reasons[by])
            runtime.cancel("gone", "again")

    async with stuck(a_thread_hangs) as found:
        (status,) = found.runtime.reports.requests()
        log = str(written(found))
        (event,) = events(found, "request_cancelled")
        over = events(found, "request_aborted")
        explained = found.runtime.explain()
        may_end.set()
    assert (status.state, status.cancelled, status.waits_for) == (RequestState.RUNNING, reasons[by], WaitsFor.STEP)
    assert (
        f"its task to leave its `async with` block, cancelled ({reasons[by]}); a step: step 1 of gone, open for"
        in explained
    )
    assert (event["reason"], event["timestamp"]) == (reasons[by], pytest.approx(START_S + 1 + (by == "cancel")))
    assert over == []
    assert [event["reason"] for event in events(found, "request_aborted")] == [reasons[by]]
    assert trace([log, "--until", str(START_S + 62)]) == 0
    assert f"running for 62.0 s, cancelled ({reasons[by]}), in step 1" in capsys.readouterr().out
    assert trace([log, "request", "gone"]) == 0
    assert f"  cancelled: {reasons[by]}" in capsys.readouterr().out


async def test_a_request_without_a_scope_is_over_when_it_is_cancelled() -> None:
    """In an async generator nothing has to be left first, so nothing is said but that."""

    async def generates(runtime: Any, tasks: Any) -> None:
        async def serve() -> Any:
            async with runtime.request(range(96), "gone") as request:
                await request.allocate()
                yield None

        async for _ in serve():
            runtime.cancel("gone")

    async with stuck(generates) as found:
        assert events(found, "request_cancelled") == []
        assert len(events(found, "request_aborted")) == 1


# -- the page ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "first"), [(a_task_holds_all, ("hog", "request")), (a_forward_hangs, ("1 of gone (over)", "step"))]
)
async def test_the_page_has_what_hangs_first(program: Any, first: tuple[str, str], written: Written) -> None:
    """What is not over lasts until the end of the page, steps too, and the longest of it is what hangs."""
    async with stuck(program) as found:
        log = written(found)
    page = log.with_name("page.html")
    assert trace([str(log), "html", str(page), "--until", str(START_S + 61)]) == 0
    data = page_data(page)
    timelines, names = columns({**data["timelines"], "name": data["moves"]["state"]}), column(data["timelines"]["name"])
    times = columns(data["moves"])["at_s"]
    found_open, at = [], 0
    for number, num_moves in enumerate(timelines["moves"]):
        start_s, stop_s = times[at], times[at + num_moves - 1]
        at += num_moves
        if data["words"][timelines["outcome"][number]] == "unfinished":
            assert stop_s == pytest.approx(START_S + 61)
            found_open.append((stop_s - start_s, names[number], data["kinds"][timelines["kind"][number]]))
    assert max(found_open) == (pytest.approx(61), *first)
    assert data["last_s"] == pytest.approx(START_S + 61)
    assert (data["kinds"].index("step") in timelines["kind"]) == (program is a_forward_hangs)


# -- when it is said --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", [a_task_holds_all, a_forward_hangs])
async def test_what_is_slow_is_said_once(program: Any) -> None:
    """However long it lasts."""
    async with stuck(program) as found:
        await anyio.sleep(1000)
        assert len(events(found, "slow_wait")) == 1
        assert len(events(found, "slow_step")) == (program is a_forward_hangs)


async def test_a_step_behind_another_one_is_said_in_time() -> None:
    """Steps that end have no alarm to take back: each that is open has its own time, however it follows others."""

    async def steps(runtime: Any, tasks: Any) -> None:
        async def serve(*, task_status: TaskStatus[None]) -> None:
            async with runtime.request(range(8), "one") as request:
                await request.allocate()
                await request.load()
                task_status.started()
                for seconds in (1, 9, 100):
                    with runtime.step([request]):
                        await anyio.sleep(seconds)
                request.commit(8)

        await tasks.start(serve)

    async with stuck(steps) as found:
        (event,) = events(found, "slow_step")
    assert (event["step_id"], event["timestamp"]) == (3, pytest.approx(START_S + 40))
    assert event["open_s"] == pytest.approx(30)


async def test_nothing_is_said_before_its_time_or_where_it_is_off() -> None:
    """A bound of 60.5 seconds is over for the step alone, which is a second older; None is for ever."""
    async with stuck(a_forward_hangs, slow_wait_s=60.5, slow_step_s=60.5) as found:
        assert events(found, "slow_wait") == []
        assert len(events(found, "slow_step")) == 1
    async with stuck(a_forward_hangs, slow_wait_s=None, slow_step_s=None) as found:
        await anyio.sleep(1000)
        assert events(found, "slow_wait") == events(found, "slow_step") == []
        assert len(found.runtime.reports.requests()) == 1


async def test_what_ends_in_time_is_not_slow() -> None:
    """Waits and steps shorter than the bound, however many one after the other."""

    async def busy(runtime: Any, tasks: Any) -> None:
        async def serve(name: int) -> None:
            async with runtime.request(range(1000 * name, 1000 * name + 96), f"r{name}") as request:
                await request.allocate()
                await request.load()
                for _ in range(3):
                    with runtime.step([request]):
                        await anyio.sleep(2.1)
                request.commit(96)

        for name in range(6):
            tasks.start_soon(serve, name)

    async with stuck(busy) as found:
        await anyio.sleep(60)
        assert not found.runtime.reports.requests()
        assert events(found, "slow_step") == []
        waits = [event["waited_s"] for event in events(found, "slow_wait")]
        assert waits == [pytest.approx(30)], "the sixth alone has waited for five times 6.3 seconds"
        assert len(events(found, "step_begun")) == len(events(found, "step_ended")) == 18


async def test_a_refused_extension_is_an_event() -> None:
    """With what it needed; nothing of it is a warning, as an engine may ask at every step."""

    async def ask(runtime: Any, tasks: Any) -> None:
        async with runtime.request(range(96), "one") as request:
            await request.allocate()
            await request.load()
            with pytest.raises(OutOfBlocks, match="25 blocks needed"):
                request.extend_nowait(100)

    async with stuck(ask) as found:
        (event,) = events(found, "extension_refused")
    assert (event["request_id"], event["num_needed"], event["level"]) == ("one", 25, "debug")


async def test_the_summary_of_a_log_up_to_a_time_leaves_out_the_rest(
    written: Written, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--until` goes back, too, before or after the command: as if the log had ended there."""
    async with stuck(a_forward_hangs) as found:
        log = str(written(found))
    outputs = []
    for arguments in (["--until", "2027-01-15T08:00:00.500"], ["summary", "--until", "2027-01-15T08:00:00.5Z"]):
        assert trace([log, *arguments]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert "  running for 500 ms, in step 1  " in outputs[0] and "waiter" not in outputs[0]
    assert re.search(r"\d events left out: later than --until", outputs[0])
    with pytest.raises(SystemExit):
        trace([log, "--until", "soon"])
    assert "must be a time such as" in capsys.readouterr().err


async def test_a_step_that_ends_frees_what_it_held(written: Written, capsys: pytest.CaptureFixture[str]) -> None:
    """The request's own story says until when its step has held its blocks, and the pool's curve goes down then."""

    async def short(runtime: Any, tasks: Any) -> None:
        async with runtime.request(range(96), "left") as request:
            await request.allocate()
            await request.load()
            step = runtime.step([request])
            step.__enter__()
        await anyio.sleep(5)
        step.__exit__(None, None, None)

    async with stuck(short) as found:
        log = written(found)
    assert trace([str(log), "request", "left"]) == 0
    assert "+5.00 s  step 1 has ended: until then it has held the blocks" in capsys.readouterr().out
    assert trace([str(log), "html", str(log.with_name("page.html"))]) == 0
    tables = page_data(log.with_name("page.html"))["usages"]["1"]["device_tables"]
    curve = list(zip(column(tables["at_s"]), column(tables["value"]), strict=True))
    assert [(round(at_s - START_S), value) for at_s, value in curve if at_s > START_S] == [(5, 0)]
    assert max(value for _, value in curve) == NUM_BLOCKS


def test_the_clock_of_a_long_log_is_its_last_event(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is open is open until the last event of the log, whoever wrote that, not until its own runtime's."""
    from benchmarks.synthetic_log import line

    one, two = io.StringIO(), {"num_device_blocks": 4, "num_host_blocks": 4}
    match = {"num_tokens": 1, "num_device_tokens": 0, "num_host_tokens": 0}
    for at_s, event, fields in (
        (1000.0, "runtime_opened", {**two, "model": "a"}),
        (1000.0, "runtime_opened", {**two, "model": "b"}),
        (1001.0, "request_matched", {"request_id": "r", **match, "model": "a"}),
        (1100.0, "step_begun", {"step_id": 1, "request_ids": [], "num_blocks": 0, "model": "b"}),
    ):  # fmt: skip
        one.write(line(at_s, event, **fields) + "\n")
    (tmp_path / "log").write_text(one.getvalue())
    assert trace([str(tmp_path / "log")]) == 0
    assert re.search(r"\n  99.0 s +r +matched for 99.0 s", capsys.readouterr().out)


# -- docs/howto/it-hangs.md -------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs/howto/it-hangs.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


TRACED = (
    """\
not over at 08:01:01.000, the longest first
  61.0 s  hog     running for 61.0 s, in no step       from 08:00:00.000
  60.0 s  waiter  pinned for 60.0 s, waits for blocks  from 08:00:01.000
""",
    """\
not over at 08:01:01.000, the longest first
  61.0 s  step 1  holds 24 blocks of gone, which is over  from 08:00:00.000
  60.0 s  waiter  pinned for 60.0 s, waits for blocks     from 08:00:01.000
""",
)
"""The trace of either program after a minute."""


def test_the_page_shows_what_its_programs_print(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], anyio_backend: Any
) -> None:
    """The output of both programs is that of the page, and the trace of either log is `TRACED`; a minute passes at
    once."""
    name, _ = anyio_backend
    log, texts = io.StringIO(), list[str]()

    def run(function: Any, program: Any) -> None:
        async def with_log() -> None:
            await function(program, logger_into(log, 10))

        log.truncate(log.seek(0))
        anyio.run(with_log, backend=name, backend_options=jumping(name)[1])

    def show(text: str) -> None:
        texts.append(log.getvalue())  # the log as it is while the program hangs
        print(text)

    (program,) = blocks("python")
    namespace = {"run": run, "print": show, "__name__": "it_hangs"}
    exec(compile(program.replace("anyio.run(", "run("), "it-hangs.md", "exec"), namespace)
    first, second = blocks("text")
    assert capsys.readouterr().out == first + second
    for text, shown in zip(texts, TRACED, strict=True):
        (tmp_path / "log").write_text(text)
        assert trace([str(tmp_path / "log"), "--until", str(START_S + 61)]) == 0
        assert f"\n\n{shown}\n" in capsys.readouterr().out
