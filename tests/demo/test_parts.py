"""The demo's smaller parts: comparing runs, going away, the progress line."""

from __future__ import annotations

import io

import anyio
import anyio.lowlevel
import attrs
import pytest

from aoffload._common.commands import ProgressLine
from aoffload._reference.engine.sequence import Generation
from aoffload.demo.interrupt import Progress
from aoffload.demo.logs import make_logger
from aoffload.demo.options import DemoOptions
from aoffload.demo.outcome import DemoOutcome, RunKind, RunOutcome, find_differences
from aoffload.demo.report import as_table
from aoffload.demo.runner import MAX_STEPS, Departures

pytestmark = pytest.mark.anyio

GENERATION = Generation(
    request_id="r",
    token_ids=(1, 2),
    logits_digests=(b"a", b"b"),
    num_prompt_tokens=10,
    num_device_tokens=0,
    num_host_tokens=0,
    num_computed_tokens=10,
    arrived_s=0.0,
    admitted_s=1.0,
    first_token_s=2.0,
    finished_s=3.0,
)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_layered_run_counts_as_the_others_do() -> None:
    """A wrong answer there is a failure, and so is a run that never came; where nobody asked for it, neither."""

    def outcome(*answers: tuple[int, ...], layered: bool = True) -> DemoOutcome:
        runs = [
            RunOutcome(RunKind("run", 1, 0, "off"), {"t": attrs.evolve(GENERATION, token_ids=answer)})
            for answer in answers
        ]
        return DemoOutcome(DemoOptions(layered=layered), runs=runs)

    right = [(1, 2)] * 3
    assert outcome(*right, (1, 2)).exit_status == 0
    assert outcome(*right, (1, 9)).exit_status == 1
    assert outcome(*right).exit_status == 1
    assert outcome(*right, layered=False).exit_status == 0


@pytest.mark.parametrize(
    ("loaded", "stored", "failures", "words"),
    [
        (0, 7, 0, ("no blocks were loaded from it, as in a first run", "the run wrote 7 blocks to it: run this")),
        (3, 0, 0, ("loaded 3 blocks (3.0 MiB) from it instead of computing them",)),
        (0, 0, 2, ("no blocks were loaded from it\n", "2 of its calls failed", "Does the store run")),
    ],
)
def test_what_a_remote_store_was_good_for_is_said_in_words(
    loaded: int, stored: int, failures: int, words: tuple[str, ...]
) -> None:
    """Nothing at first, then what it saved; and one that is not there is not taken for an empty one."""
    run = RunOutcome(RunKind("with offload", 1, 1, "eager"), {"t": GENERATION}, is_over=True, block_bytes=1 << 20)
    run.remote_transfers = {"blocks_loaded": loaded, "blocks_stored": stored, "num_failures": failures}
    outcome = DemoOutcome(DemoOptions(remote="redis://there"), runs=[run, run, run])
    table = as_table(outcome)
    assert all(word in table for word in words)


def test_a_slow_link_has_a_speed_too() -> None:
    """In a unit that suits it, and none where nothing was measured."""
    run = RunOutcome(RunKind("with offload", 1, 1, "eager"), {"t": GENERATION}, is_over=True, block_bytes=1 << 20)
    run.transfers = {"blocks_loaded": 1_000, "bytes_loaded": 2_500_000, "load_seconds": 1.0}
    table = as_table(DemoOutcome(DemoOptions(), runs=[run, run, run]))
    assert "loaded 1,000 blocks at 2.50 MB/s, stored 0; verified" in table


def test_equal_runs_do_not_differ() -> None:
    """Times and sources of the KV may differ; tokens and logits decide."""
    other = attrs.evolve(GENERATION, num_host_tokens=8, num_computed_tokens=2, first_token_s=1.5)
    assert find_differences({"t": GENERATION}, {"t": other}) == ()


def test_logits_alone_make_a_difference() -> None:
    """The same tokens from other logits is a difference: tokens alone prove little."""
    (found,) = find_differences({"t": GENERATION}, {"t": attrs.evolve(GENERATION, logits_digests=(b"a", b"x"))})
    assert (found.num_tokens, found.num_logits, found.prompt_logits_differ) == (0, 1, False)
    (found,) = find_differences({"t": GENERATION}, {"t": attrs.evolve(GENERATION, logits_digests=(b"x", b"b"))})
    assert found.prompt_logits_differ


def test_only_completed_requests_are_compared() -> None:
    """A request that the other run did not complete says nothing."""
    assert find_differences({"t": GENERATION, "u": GENERATION}, {"t": GENERATION}) == ()


@pytest.mark.parametrize("rate", [0.0, 1.0])
async def test_clients_go_away_as_often_as_asked(rate: float) -> None:
    """With rate 1 every client goes away sooner or later, with rate 0 none does."""
    scopes = [anyio.CancelScope() for _ in range(20)]
    async with anyio.create_task_group() as tasks:
        departures = Departures.seeded(rate, 0, tasks)
        for scope in scopes:
            departures.arrange(scope)
        departures.step_done(MAX_STEPS)
    assert [scope.cancel_called for scope in scopes] == [rate == 1.0] * 20


async def test_a_client_that_is_done_is_left_alone() -> None:
    """Who has its answer isn't cancelled by an engine step that comes later."""
    async with anyio.create_task_group() as tasks:
        departures = Departures.seeded(1.0, 0, tasks)
        scopes = [anyio.CancelScope() for _ in range(20)]
        for scope in scopes:
            departures.arrange(scope)
            departures.forget(scope)
        tasks.cancel_scope.cancel()
    departures.step_done(10 * MAX_STEPS)
    assert not any(scope.cancel_called for scope in scopes)


def test_a_pipe_gets_a_few_plain_lines() -> None:
    """Without a terminal there are no control characters, and at most a line for each quarter."""
    stream = io.StringIO()
    progress = Progress(ProgressLine(stream))
    progress.start("with offload", 40)
    for done in range(41):
        progress.update(done, "x")
    progress.line.clear()
    lines = stream.getvalue().splitlines()
    assert [line.split(":")[1].split()[0] for line in lines] == ["10/40", "20/40", "30/40", "40/40"]
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_one_line_that_is_cleared() -> None:
    """On a terminal the line is rewritten in place and gone before anything else is printed."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    progress = Progress(ProgressLine(stream))
    progress.start("with offload", 40)
    progress.update(20, "x")
    progress.line.clear()
    assert "20/40" in stream.getvalue()
    assert "\n" not in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_events_are_json_lines_or_nothing() -> None:
    """With a file every event is a line of JSON; without one nothing is written anywhere."""
    file = io.StringIO()
    make_logger(file).bind(run="x").info("request_matched", request_id="r1")
    (line,) = file.getvalue().splitlines()
    assert '"event": "request_matched"' in line
    assert '"request_id": "r1"' in line
    make_logger(None).critical("request_matched")
