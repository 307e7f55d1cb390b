"""Observers beside the telemetry: told of everything, able to harm nothing, and free where there are none."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import anyio
import pytest
from scraping import BACKENDS, measured, prompt, serve

from aoffload import InvalidArgument, KVCacheGroup, Ledger, OffloadConfig, WrongState
from aoffload.ledger import (
    CompletionDelivered,
    Event,
    JobMoved,
    JobState,
    Observers,
    Prefix,
    RequestMoved,
    Root,
    WaitedForBlocks,
)

pytestmark = pytest.mark.anyio


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


class Recorder:
    def __init__(self) -> None:
        self.moves: list[str] = []
        self.jobs: list[JobState] = []
        self.threads: set[int] = set()
        self.waits: list[float] = []

    def observe(self, event: Event) -> None:
        match event:
            case RequestMoved():
                self.moves.append(event.new.value)
            case JobMoved():
                self.jobs.append(event.new)
            case CompletionDelivered():
                self.threads.add(threading.get_ident())
            case WaitedForBlocks():
                self.waits.append(event.seconds)


def test_an_observer_that_is_asked_for_its_wishes_must_not_call_the_ledger() -> None:
    """It is asked in the middle of a change. So each verb is refused then, and the call of the ledger goes on."""

    class Meddles(Recorder):
        num_refused = 0

        def wants_move(self, kind: type[Event], state: object) -> bool:
            for record in tuple(ledger.live_requests.values()):
                with pytest.raises(WrongState, match="must not call the ledger"):
                    ledger.release(record)
                self.num_refused += 1
            return True

    observer = Meddles()
    config = OffloadConfig(groups=[KVCacheGroup("all", block_size=4)], num_host_blocks=4)
    ledger = Ledger(config, 5, observer=observer)
    record = ledger.admit(Prefix.of(Root("test"), prompt(1, 8)))
    ledger.allocate_nowait(record)
    ledger.plan_load(record)
    ledger.commit(record, 8)
    ledger.release(record)
    assert observer.num_refused >= 4 and observer.moves[-1] == "done"
    ledger.check_integrity()


class Broken:
    """Raises at every event."""

    def observe(self, event: Event) -> None:
        raise OSError("a full disk")


class Fails(Recorder):
    """Raises when it is asked whether it wants a move."""

    def wants_move(self, kind: type[Event], state: object) -> bool:
        raise OSError("a full disk")


class WantsNothing(Recorder):
    def wants_move(self, kind: type[Event], state: object) -> bool:
        return False


async def test_observers_get_the_moves_that_one_of_them_wants() -> None:
    """An observer alone gets no move that it does not want. Beside another one that wants all, or that cannot say, it
    gets all."""
    for others, is_wanted in (((), False), ((Recorder(),), True), ((Fails(),), True)):
        quiet = WantsNothing()
        async with measured(4, others=(quiet, *others)) as found:
            moves = found.runtime.ledger.moves
            moves.observer = Observers(quiet, *others)
            moves.__post_init__()
            await serve(found.runtime, prompt(1, 8))
            await found.runtime.flush()
        assert bool(quiet.moves) is bool(quiet.jobs) is is_wanted


async def test_an_observer_is_told_of_moves_reports_and_waits() -> None:
    """Moves in the loop's thread, reports where they are made, waits when they are over."""
    recorder = Recorder()
    async with measured(4, others=(recorder,)) as found, anyio.create_task_group() as group:
        async with found.runtime.request(prompt(1, 16)) as request:
            await request.allocate()
            group.start_soon(serve, found.runtime, prompt(2, 8))
            await anyio.wait_all_tasks_blocked()
            request.commit(16)
        await anyio.wait_all_tasks_blocked()
        await found.runtime.flush()
    assert recorder.moves[:4] == ["matched", "pinned", "allocated", "matched"]
    assert recorder.moves.count("done") == 2
    assert recorder.jobs.count(JobState.COMPLETED) == 2
    assert recorder.threads == {threading.get_ident()}, "small copies are reported by the thread that launches them"
    assert len(recorder.waits) == 1


async def test_an_observer_that_raises_breaks_nothing() -> None:
    """What one observer raises is counted, and the other observers receive the event all the same."""
    recorder = Recorder()
    async with measured(4, others=(Broken(), recorder)) as found:
        await serve(found.runtime, prompt(1, 16))
        await found.runtime.flush()
        await serve(found.runtime, prompt(2, 16))
        await found.runtime.flush()
        assert await serve(found.runtime, prompt(1, 16)) == 12
        await found.runtime.flush()
        found.runtime.check_integrity()
        assert found.scrape().sum("aoffload_observer_failures_total") == found.runtime.observers.num_failures > 0
    assert recorder.moves.count("done") == 3


async def test_without_observers_nothing_stands_between() -> None:
    """The ledger tells the telemetry itself, and the transport reports to the worker itself."""
    async with measured() as found:
        assert found.runtime.ledger.moves.observer is found.runtime.observers
    plain = type(found.runtime)(found.runtime.config, found.runtime.transport.backend.regions[0].tensor)
    assert plain.ledger.moves.observer is plain.telemetry
    assert plain.observers.hearing(plain.worker.copies.deliver) == plain.worker.copies.deliver


async def test_what_is_no_observer_is_refused_by_name() -> None:
    """A half observer would be noticed in the middle of a change: it is refused before there is anything."""
    with pytest.raises(InvalidArgument, match="observers"):
        async with measured(others=(object(),)):  # type: ignore[arg-type]
            pass


def test_without_metrics_nothing_of_them_is_imported() -> None:
    """The extra is for those who ask for it: the package and its runtime don't import it."""
    program = (
        "import sys; from aoffload import OffloadRuntime;"
        "extras = {'prometheus_client', 'aoffload.metrics', 'zmq', 'msgspec', 'aoffload.kv_events'};"
        "assert not extras & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
