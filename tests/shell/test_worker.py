"""The copy worker: order and bounds, whatever the transport does, and how it all ends."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest
import structlog
from scripted import ScriptedFence, ScriptedTransport
from serving import (
    ASYNCIO,
    EVERY_BACKEND,
    GUARD_S,
    UVLOOP,
    Engine,
    TagBlocks,
    TensorBlocks,
    assert_at_rest,
    config,
    loading,
    on_the_host_only,
    pinned,
    prompt,
    scripted,
    threaded,
    turns,
    with_bytes,
)

from aoffload import IntegrityError, OffloadRuntime, OutOfBlocks, RequestState, RuntimeClosed
from aoffload._kernel.states import Direction
from aoffload._transfer.copy_queue import Link
from aoffload._transfer.fences import PASSED, Fence
from aoffload.errors import TransferRefused
from aoffload.ledger import Completion, Event, Outcome, WorkerFailed

pytestmark = pytest.mark.anyio

A, B, C, D = (prompt(seed, 9) for seed in range(1, 5))
LONG = prompt(9, 21)
"""Five whole blocks."""

natively = pytest.mark.parametrize("anyio_backend", [ASYNCIO, UVLOOP], indirect=True)


@pytest.fixture(params=EVERY_BACKEND)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


def directions(transport: ScriptedTransport) -> list[str]:
    return [launched.plan.direction.value for launched in transport.launched]


async def land_all_jobs(engine: Engine, transport: ScriptedTransport) -> None:
    transport.auto = True
    while transport.in_flight.keys() - transport.lost:
        transport.land_all()
        await turns()
    await engine.runtime.flush()


# -- order and bounds ---------------------------------------------------------------------------------------------


async def test_loads_go_before_stores() -> None:
    """A load never waits for the room of stores, and of what may be launched at once loads are launched first."""
    async with scripted(max_jobs_in_flight=1) as (engine, transport), anyio.create_task_group() as group:
        await on_the_host_only(engine, A)
        await on_the_host_only(engine, D)
        transport.auto = False
        transport.launched.clear()
        await engine.serve(B)
        await engine.serve(C)
        group.start_soon(engine.serve, A)
        group.start_soon(engine.serve, D)
        await turns()
        assert directions(transport) == ["store", "load"]
        transport.land_all()
        await turns()
        assert directions(transport) == ["store", "load", "load", "store"]
        await land_all_jobs(engine, transport)
        await assert_at_rest(engine.runtime)


async def test_a_hop_that_hangs_stops_only_its_own_copies() -> None:
    """Stores that never end are given up, and none is launched after them; loads go on, and so do stores once the hung
    ones have reported."""
    async with scripted(store_timeout_s=0.05, transfer_timeout_s=1000, load_timeout_s=900) as (engine, transport):
        await on_the_host_only(engine, A)
        transport.auto = False
        transport.launched.clear()
        await engine.serve(B)
        while engine.runtime.statistics().num_jobs:
            await turns(1)
        assert engine.runtime.statistics().host.num_quarantined
        await engine.serve(C)
        async with anyio.create_task_group() as group:
            group.start_soon(engine.serve, A)
            await turns()
            assert directions(transport) == ["store", "load"]
            transport.land(transport.launched[1].plan.job_id)
        transport.land_all()
        await turns()
        assert not engine.runtime.statistics().host.num_quarantined
        transport.auto = True
        await engine.serve(C)
        await engine.runtime.flush()
        assert directions(transport)[2:] == ["store"]
        await assert_at_rest(engine.runtime)


async def test_jobs_in_flight_are_bounded() -> None:
    """Never more than `max_jobs_in_flight`, and all of them in the end."""
    async with scripted(32, num_host_blocks=32, max_jobs_in_flight=2) as (engine, transport):
        transport.auto = False
        for seed in range(10, 16):
            await engine.serve(prompt(seed, 9))
        num_seen = 0
        while transport.in_flight:
            assert len(transport.in_flight) <= 2
            num_seen += 1
            transport.land(next(iter(transport.in_flight)))
            await turns(4)
        assert num_seen == 6
        assert engine.runtime.statistics().host.num_cached == 12
        await assert_at_rest(engine.runtime)


async def test_bytes_in_flight_are_bounded() -> None:
    """Never more than `max_bytes_in_flight`; a single block above the bound goes alone."""
    for bound, expected in ((5000, 2), (1, 1)):
        transport = ScriptedTransport(33, block_bytes=1000)
        made = config(32, max_bytes_in_flight=bound, max_jobs_in_flight=100)
        async with OffloadRuntime(made, transport=transport) as runtime:
            engine = Engine(runtime, TagBlocks(transport))
            for seed in range(10, 14):
                await engine.serve(prompt(seed, 9))
            most = 0
            while transport.in_flight:
                num_blocks = sum(job.plan.num_blocks for job in transport.in_flight.values())
                assert num_blocks * 1000 <= bound or len(transport.in_flight) == 1
                most = max(most, len(transport.in_flight))
                transport.land(next(iter(transport.in_flight)))
                await turns(4)
            assert most == expected
            assert runtime.statistics().host.num_cached == 8
            await assert_at_rest(runtime)


@pytest.mark.parametrize("order", ["in order", "reversed", "inside out"])
async def test_large_transfers_are_split(order: str) -> None:
    """A transfer above `max_job_bytes` is several jobs, whose ends may come in any order."""
    async with scripted(max_job_bytes=2, auto=False) as (engine, transport):

        async def land(direction: Direction) -> None:
            await turns(4)
            plans = [job.plan for job in transport.in_flight.values()]
            assert [plan.direction for plan in plans] == [direction] * 3
            assert [plan.num_blocks for plan in plans] == [2, 2, 1]
            ids = [plan.job_id for plan in plans]
            for job_id in {"in order": ids, "reversed": ids[::-1], "inside out": [ids[1], ids[2], ids[0]]}[order]:
                transport.land(job_id)
                await turns(4)
                engine.runtime.check_integrity()

        await engine.serve(LONG)
        await land(Direction.STORE)
        assert engine.runtime.statistics().host.num_cached == 5
        await engine.evict_device()
        async with anyio.create_task_group() as group:
            group.start_soon(engine.serve, LONG)
            await land(Direction.LOAD)
        await assert_at_rest(engine.runtime)


async def test_a_store_waits_for_the_fence_of_its_commit() -> None:
    """One fence recorded for a whole step stands before every store of that step; an `after=` goes along as given."""
    async with scripted(auto=False) as (engine, transport):
        given = ScriptedFence()
        async with engine.runtime.request(A) as request:
            await request.allocate()
            engine.compute(request, A, 0)
            request.commit(9, after=given)
            (launched,) = transport.launched
            assert launched.after is given
            given.has_passed = True
            transport.land_all()
        await assert_at_rest(engine.runtime)


# -- copies that fail ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_landed", [0, 1, 3, 4])
async def test_a_load_that_fails_is_a_miss(num_landed: int) -> None:
    """What came before the failure counts, the rest is computed again in blocks of its own; `load` never raises."""
    async with scripted() as (engine, transport):
        await on_the_host_only(engine, LONG)
        async with engine.runtime.request(LONG) as request:
            pending = await loading(request, transport)
            (job_id,) = transport.in_flight
            transport.fail(job_id, num_landed=num_landed)
            assert await pending.wait() == num_landed * 4
            table = request.block_ids[0]
            assert len(set(table)) == 6 and 0 not in table
            engine.check(request, LONG, num_landed * 4)
            engine.compute(request, LONG, num_landed * 4)
            request.commit(21)
            assert request.block_ids[0] == table
            engine.check(request, LONG, 20)
            engine.runtime.check_integrity()
        await land_all_jobs(engine, transport)
        assert await engine.serve(LONG) == 20  # the host's copy was never wrong
        await assert_at_rest(engine.runtime)


async def test_a_load_that_is_refused_is_a_miss() -> None:
    """A transport that can't start a load costs a prefill, not the request; the next request loads again."""
    async with scripted() as (engine, transport):
        await on_the_host_only(engine, A)
        transport.refuse_next()
        assert await engine.serve(A) == 0
        await engine.evict_device()
        assert await engine.serve(A) == 8
        await assert_at_rest(engine.runtime)


async def test_a_driver_that_raises_is_a_miss() -> None:
    """An error that nobody foresaw, in `launch` or while a fence is recorded, stays behind the transport."""
    async with scripted() as (engine, transport):
        await on_the_host_only(engine, A)

        def broken(*_: object) -> Any:
            raise OSError("device lost")

        transport.launch = broken  # type: ignore[method-assign]
        assert await engine.serve(A) == 0
        await turns()
        engine.runtime.check_integrity()
        found = engine.runtime.statistics()
        assert found.device.num_quarantined == 2  # nobody knows what had been started
        assert pinned(engine.runtime) == (0, 0)
        del transport.launch  # type: ignore[method-assign]
        assert await engine.serve(B) == 0
        await assert_at_rest(engine.runtime)


async def test_corrupt_blocks_are_forgotten() -> None:
    """A block that came back with other bytes is a miss from now on, for everybody; what is around it is not."""
    async with scripted() as (engine, transport):
        await on_the_host_only(engine, LONG, A)
        async with engine.runtime.request(LONG) as request:
            pending = await loading(request, transport)
            (job_id,) = transport.in_flight
            transport.corrupt(job_id, 2)
            assert await pending.wait() == 8
            engine.check(request, LONG, 8)
        await land_all_jobs(engine, transport)
        assert engine.runtime.lookup(LONG).num_tokens == 8
        assert engine.runtime.lookup(A).num_host_tokens == 8
        assert await engine.serve(LONG) == 8
        await engine.runtime.flush()
        await engine.evict_device()
        assert await engine.serve(LONG) == 20  # stored again
        await assert_at_rest(engine.runtime)


async def test_completions_that_come_twice_and_late() -> None:
    """A second end of a job, and one after its request was aborted, change nothing but a counter."""
    async with scripted() as (engine, transport):
        await on_the_host_only(engine, A, B)
        transport.auto = False
        async with engine.runtime.request(A) as request:
            await request.allocate()
            request.load_nowait()
        assert request.state is RequestState.ABORTED
        (job_id,) = transport.in_flight
        transport.land(job_id)
        await turns()
        engine.runtime.check_integrity()
        assert engine.runtime.lookup(A).num_device_tokens == 8  # its request is gone, its bytes are right
        for _ in range(3):
            transport.deliver_again(job_id)
        engine.runtime.worker.copies.deliver(Completion(job_id, Outcome.UNPROVEN))
        engine.runtime.worker.copies.deliver(Completion(987_654, Outcome.LANDED, 3))
        await turns()
        assert engine.runtime.statistics().num_late_completions == 5
        await land_all_jobs(engine, transport)
        assert await engine.serve(A) == 8
        assert await engine.serve(B) == 8
        await assert_at_rest(engine.runtime)


async def test_completions_from_foreign_threads() -> None:
    """Many threads report at once, some of them twice: every job is settled, once."""
    async with scripted(64, num_host_blocks=64, max_jobs_in_flight=64, auto=False) as (engine, transport):
        for seed in range(10, 40):
            await engine.serve(prompt(seed, 9))
        jobs = list(transport.in_flight)
        assert len(jobs) == 30
        start = threading.Barrier(6)

        def report(share: list[int]) -> None:
            start.wait(GUARD_S)
            for job_id in share:
                completion = Completion(job_id, Outcome.LANDED, 2)
                engine.runtime.worker.copies.deliver(completion)
                engine.runtime.worker.copies.deliver(completion)

        threads = [threading.Thread(target=report, args=(jobs[first::6],)) for first in range(6)]
        for thread in threads:
            thread.start()
        with anyio.fail_after(GUARD_S):
            await engine.runtime.flush()
        for thread in threads:
            thread.join(GUARD_S)
        await turns()
        found = engine.runtime.statistics()
        assert (found.host.num_cached, found.num_late_completions) == (60, 30)
        transport.in_flight.clear()
        await assert_at_rest(engine.runtime)


# -- the copy thread ----------------------------------------------------------------------------------------------


class BrokenCopies:
    """Takes the place of a backend's `copy`."""

    def __init__(self, engine: Engine) -> None:
        self.backend: Any = engine.runtime.transport.backend  # type: ignore[attr-defined]
        self.copy = self.backend.copy
        self.go_on = threading.Event()
        self.entered = threading.Event()

    def hang(self) -> None:
        def copy(plan: Any) -> Any:
            self.entered.set()
            self.go_on.wait(GUARD_S)
            return self.copy(plan)

        self.backend.copy = copy

    def die(self) -> None:
        def copy(plan: Any) -> Any:
            raise SystemExit  # what a thread may die of without a word

        self.backend.copy = copy


async def test_a_copy_thread_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job in its hands is quarantined, what is asked of it later is a miss, and requests are served as before."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    async with with_bytes(in_threads=True) as engine:
        await on_the_host_only(engine, A, B)
        broken = BrokenCopies(engine)
        broken.die()
        with anyio.fail_after(GUARD_S):
            assert await engine.serve(A) == 0
            broken.backend.copy = broken.copy
            assert await engine.serve(B) == 0  # the thread is gone for good
            await engine.serve(C)  # and so is that of stores, by now or not
        await engine.runtime.flush()
        engine.runtime.check_integrity()
        found = engine.runtime.statistics()
        assert found.device.num_quarantined == 2
        assert pinned(engine.runtime) == (0, 0)
    engine.runtime.check_integrity()


async def test_shared_load_with_real_bytes() -> None:
    """Many requests want the same blocks at once: one load brings them, and each reads the right bytes."""
    async with with_bytes(64) as engine:
        await on_the_host_only(engine, LONG)
        found: list[int] = []

        async def serve(tail: int) -> None:
            found.append(await engine.serve([*LONG[:20], tail]))

        async with anyio.create_task_group() as group:
            for tail in range(7):
                group.start_soon(serve, tail)
        assert found == [20] * 7
        loaded = engine.runtime.transport.statistics()  # type: ignore[attr-defined]
        assert (loaded.num_loads, loaded.blocks_loaded) == (1, 5)
        await assert_at_rest(engine.runtime)


@natively
async def test_a_commit_from_a_callback_of_the_loop() -> None:
    """`commit` and `cancel` are synchronous: plain asyncio callbacks, outside of any task, may call them."""
    async with with_bytes() as engine:
        async with engine.runtime.request(A) as request:
            await request.allocate()
            engine.compute(request, A, 0)
            done = anyio.Event()
            errors: list[BaseException] = []

            def callback() -> None:
                try:
                    request.commit(9)
                except BaseException as error:  # noqa: BLE001 - looked at below
                    errors.append(error)
                done.set()

            asyncio.get_running_loop().call_soon(callback)
            await done.wait()
            assert errors == []
            asyncio.get_running_loop().call_soon(request.cancel, "client gone")
            await anyio.sleep_forever()
        assert request.reason == "client gone"
        await engine.runtime.flush()
        assert engine.runtime.statistics().host.num_cached == 2
        await assert_at_rest(engine.runtime)


# -- the worker itself --------------------------------------------------------------------------------------------


async def test_a_ledger_that_fails_turns_the_cache_off() -> None:
    """A bug in settling ends neither the worker nor the engine: requests are served, as misses; closing is quick."""
    options: dict[str, Any] = {"load_timeout_s": 0.05, "close_timeout_s": 10 * GUARD_S}
    with anyio.fail_after(GUARD_S):
        async with scripted(**options) as (engine, transport):
            await ledger_fails(engine, transport)


async def ledger_fails(engine: Engine, transport: ScriptedTransport) -> None:
    await on_the_host_only(engine, A)
    settle = engine.runtime.ledger.settle
    calls: list[int] = []

    def broken(completion: Completion) -> None:
        calls.append(completion.job_id)
        raise IntegrityError("planted")

    engine.runtime.ledger.settle = broken  # type: ignore[method-assign]
    assert await engine.serve(A) == 0  # gives up after load_timeout_s
    assert len(calls) == 1
    await engine.serve(B)
    await engine.serve(C)
    await engine.runtime.flush()
    assert len(calls) == 1  # nothing is launched any more
    engine.runtime.ledger.settle = settle  # type: ignore[method-assign]
    transport.deliver_again(calls[0])
    await turns()
    engine.runtime.check_integrity()


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_bug_where_completions_arrive_turns_the_cache_off(
    is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Completions are settled in the task that loads, or, if they come later, in a callback of the loop, which trio
    does not survive raising. Whatever goes wrong there is logged, waiting requests compute, and the engine goes on."""
    errors: list[BaseException] = []
    ready: list[int] = []
    with anyio.fail_after(GUARD_S):
        async with scripted() as (engine, transport):
            await on_the_host_only(engine, A)
            end = Link.end

            def fails_once(link: Link, completion: Completion, now: float) -> None:
                monkeypatch.setattr(Link, "end", end)
                raise IntegrityError("planted")

            monkeypatch.setattr(Link, "end", fails_once)
            observe = engine.runtime.telemetry.observe

            def heard(event: Event) -> None:
                observe(event)
                if isinstance(event, WorkerFailed):
                    errors.append(event.error)

            monkeypatch.setattr(engine.runtime.telemetry, "observe", heard)
            transport.auto = not is_late

            async def serve() -> None:
                ready.append(await engine.serve(A))

            async with anyio.create_task_group() as group:
                group.start_soon(serve)
                await turns()
                transport.land_all()
            assert ready == [0]
            assert [str(error) for error in errors] == ["planted"]
            assert await engine.serve(B) == 0
            assert len(transport.launched) == 2  # the store of A and its load: nothing since
            engine.runtime.check_integrity()


async def test_what_is_settled_is_logged_in_the_context_of_the_program() -> None:
    """What a program binds to structlog before it opens the runtime is in its events, whichever thread reported."""
    events: list[Any] = []

    def keep(_: Any, __: str, event: Any) -> Any:
        events.append(event)
        raise structlog.DropEvent

    logger = structlog.wrap_logger(None, processors=[structlog.contextvars.merge_contextvars, keep])
    with structlog.contextvars.bound_contextvars(engine="first"):
        async with with_bytes(logger=logger) as engine:
            await engine.serve(A)
            await engine.runtime.flush()
    (completed,) = (event for event in events if event["event"] == "job_completed")
    assert completed["engine"] == "first"


@pytest.mark.parametrize("broken", ["launch", "discard", "settle"])
async def test_a_request_does_not_hear_of_a_bug_in_the_ledger(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever call happens to dispatch or drop jobs: what goes wrong in there turns the cache off and is logged."""

    def fails(*_: object) -> None:
        raise IntegrityError("planted")

    with anyio.fail_after(GUARD_S):
        async with scripted(load_timeout_s=0.05, close_timeout_s=0.1, max_jobs_in_flight=1) as (engine, transport):
            await on_the_host_only(engine, A, B)
            transport.auto = False
            monkeypatch.setattr(type(engine.runtime.ledger), broken, fails)
            await engine.serve(C)  # its store stays in flight
            assert await engine.serve(A) == 0
            if broken != "launch":
                transport.land_all()
            await turns()
            assert await engine.serve(B) == 0
            monkeypatch.undo()


@natively
async def test_a_worker_that_is_cancelled_natively() -> None:
    """`task.cancel()` on every task but ours, as shutdown code does it: the cache turns off, the requests go on."""
    async with scripted(load_timeout_s=0.05) as (engine, transport):
        await on_the_host_only(engine, A)
        called: list[bool] = []
        (worker,) = (task for task in asyncio.all_tasks() if task.get_name() == "aoffload copy worker")
        async with engine.runtime.request(A) as request:
            pending = await loading(request, transport)
            worker.cancel()
            await turns()
            assert await pending.wait() == 0
            engine.compute(request, A, 0)
            request.commit(9)
        assert request.state is RequestState.DONE
        assert await engine.serve(B) == 0
        engine.runtime.check_integrity()
        assert pinned(engine.runtime) == (0, 0)
        assert engine.runtime.statistics().device.num_quarantined == 2
        transport.land_all()
        await turns()
        assert engine.runtime.statistics().device.num_quarantined == 0  # late ends still count
        engine.runtime.worker.call_soon(lambda: called.append(True))
        await turns()
        assert called == [True]  # and so do calls of other threads
        with anyio.fail_after(GUARD_S):
            await engine.runtime.flush()
        await assert_at_rest(engine.runtime)


@pytest.mark.parametrize("is_left", [True, False])
def test_a_loop_that_is_torn_down_is_no_failure_of_the_worker(anyio_backend: Any, is_left: bool) -> None:
    """An engine that fails ends its loop, and with it the worker's task: the log has the engine's error alone, also if
    nobody has left the runtime's block."""
    name, options = anyio_backend
    if name == "trio" and not is_left:
        return  # trio itself demands that a block is left in the task that entered it

    async def fails() -> None:
        async with scripted(8):
            raise ZeroDivisionError

    kept: list[OffloadRuntime] = []

    async def fails_by_hand() -> None:
        kept.append(OffloadRuntime(config(), transport=ScriptedTransport(9)))
        await kept[0].__aenter__()
        raise ZeroDivisionError

    with structlog.testing.capture_logs() as logs, pytest.raises(ZeroDivisionError):
        anyio.run(fails if is_left else fails_by_hand, backend=name, backend_options=options)
    events = [entry["event"] for entry in logs]
    assert "worker_failed" not in events and not any("traceback" in entry for entry in logs)
    reasons = [entry["reason"] for entry in logs if entry["event"] == "cache_turned_off"]
    assert reasons == ([] if is_left else ["the worker was cancelled"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # nobody has left it
        kept.clear()
        gc.collect()


# -- flush and reset ----------------------------------------------------------------------------------------------


async def test_flush_waits_for_what_was_offered_and_no_more() -> None:
    """Several may flush at once; stores offered later don't delay them."""
    async with scripted(32, num_host_blocks=32, auto=False) as (engine, transport):
        flushed: list[str] = []

        async def flush(name: str) -> None:
            await engine.runtime.flush()
            flushed.append(name)

        with anyio.fail_after(GUARD_S):
            async with anyio.create_task_group() as group:
                await engine.serve(A)
                group.start_soon(flush, "first")
                group.start_soon(flush, "also first")
                await turns()
                await engine.serve(B)
                group.start_soon(flush, "second")
                await turns()
                assert flushed == []
                first, second = transport.in_flight
                transport.land(first)
                await turns()
                assert sorted(flushed) == ["also first", "first"]
                transport.land(second)
        assert flushed[-1] == "second"
        await assert_at_rest(engine.runtime)


async def test_reset_with_transfers_in_flight() -> None:
    """After a reset nothing is findable; what lands late is published nowhere, and live requests keep their blocks."""
    async with scripted(32, num_host_blocks=8, max_jobs_in_flight=2) as (engine, transport):
        await on_the_host_only(engine, A)
        transport.auto = False
        with anyio.fail_after(GUARD_S):
            async with engine.runtime.request(A) as loading, engine.runtime.request(B) as running:
                await loading.allocate()
                pending = loading.load_nowait()
                await engine.prefill(running, B)
                await engine.serve(C)  # queued behind the two
                async with anyio.create_task_group() as group:
                    group.start_soon(engine.runtime.reset)
                    await turns()
                    assert all(engine.runtime.lookup(one).num_tokens == 0 for one in (A, B, C))
                    transport.land_all()
                assert all(engine.runtime.lookup(one).num_tokens == 0 for one in (A, B, C))
                engine.runtime.check_integrity()
                num_ready = await pending.wait()
                engine.check(loading, A, num_ready)
                engine.compute(loading, A, num_ready)
                loading.commit(9)
                engine.check(running, B, 9)
                engine.runtime.check_integrity()
            assert all(engine.runtime.lookup(one).num_tokens == 0 for one in (A, B, C))
            found = engine.runtime.statistics()
            assert (found.device.num_free, found.host.num_free) == (32, 8)
            transport.auto = True
            await engine.serve(A)
            assert await engine.serve(A) == 8
        await assert_at_rest(engine.runtime)


# -- the line for room --------------------------------------------------------------------------------------------


async def test_room_is_granted_first_come_first_served() -> None:
    """Those who wait for free blocks get them in the order they came, small ones after large ones included."""
    async with scripted(6) as (engine, _):
        got: list[int] = []

        async def take(number: int, num_blocks: int) -> None:
            async with engine.runtime.request(prompt(50 + number, 1)) as request:
                await request.allocate(num_blocks * 4)
                got.append(number)
                await turns(2)

        async with anyio.create_task_group() as group:
            async with engine.runtime.request(prompt(49, 1)) as holder:
                holder.allocate_nowait(24)
                for number, num_blocks in enumerate((6, 4, 5, 3, 6)):
                    group.start_soon(take, number, num_blocks)
                    await turns(2)
                    assert got == []
        assert got == [0, 1, 2, 3, 4]
        await assert_at_rest(engine.runtime)


async def test_who_grows_goes_before_who_begins() -> None:
    """`extend` is served before `allocate`, though it came later."""
    async with scripted(6) as (engine, _):
        got: list[str] = []

        async def begin() -> None:
            async with engine.runtime.request(prompt(50, 1)) as request:
                await request.allocate(12)
                got.append("begins")

        async def grow() -> None:
            async with engine.runtime.request(prompt(51, 1)) as request:
                await request.allocate(12)
                await started.wait()
                await request.extend(24)
                got.append("grows")

        started = anyio.Event()
        async with anyio.create_task_group() as group:
            async with engine.runtime.request(prompt(49, 1)) as holder:
                holder.allocate_nowait(12)
                group.start_soon(grow)
                await turns(2)
                group.start_soon(begin)
                await turns(2)
                started.set()
                await turns(2)
                assert got == []
        assert got == ["grows", "begins"]
        await assert_at_rest(engine.runtime)


async def test_nobody_overtakes_the_line() -> None:
    """A request that needs little can't take, without waiting, what somebody waits for."""
    async with scripted(6) as (engine, _), anyio.create_task_group() as group:
        async with engine.runtime.request(prompt(49, 1)) as holder:
            holder.allocate_nowait(12)
            group.start_soon(engine.serve, prompt(50, 24))
            await turns(2)
            async with engine.runtime.request(prompt(51, 1)) as small:
                with pytest.raises(OutOfBlocks, match="retry"):
                    small.allocate_nowait()
        await turns()
        await assert_at_rest(engine.runtime)


# -- closing ------------------------------------------------------------------------------------------------------


async def test_closing_waits_for_what_is_in_flight() -> None:
    """Closing drops what is queued, waits for what is launched, and leaves nothing pinned."""
    transport = ScriptedTransport(17)
    runtime = OffloadRuntime(config(max_jobs_in_flight=1), transport=transport)
    closed: list[bool] = []

    async def live() -> None:
        async with runtime:
            engine = Engine(runtime, TagBlocks(transport))
            await engine.serve(A)
            await engine.serve(B)
        closed.append(True)

    async with anyio.create_task_group() as group:
        group.start_soon(live)
        await turns()
        assert closed == []
        assert len(transport.in_flight) == 1
        transport.land_all()
    assert len(transport.launched) == 1
    assert transport.is_closed
    runtime.check_integrity()
    found = runtime.statistics()
    assert (found.num_jobs, found.host.num_cached, *pinned(runtime)) == (0, 2, 0, 0)


async def test_closing_when_cancelled_still_waits_for_copies() -> None:
    """Cancelled around its block, the runtime goes on settling: what is in flight lands, and closing isn't delayed."""
    transport = ScriptedTransport(17)
    runtime = OffloadRuntime(config(close_timeout_s=10 * GUARD_S), transport=transport)
    scope = anyio.CancelScope()

    async def live() -> None:
        with scope:
            async with runtime:
                await Engine(runtime, TagBlocks(transport)).serve(A)
                await anyio.sleep_forever()

    with anyio.fail_after(GUARD_S):
        async with anyio.create_task_group() as group:
            group.start_soon(live)
            await turns()
            scope.cancel()
            await turns()
            transport.land_all()
    found = runtime.statistics()
    assert (found.num_jobs, found.host.num_cached, found.host.num_quarantined) == (0, 2, 0)
    runtime.check_integrity()


@pytest.fixture
def hanging() -> Iterator[list[BrokenCopies]]:
    """Let the threads go when the test is over, whatever happened."""
    found: list[BrokenCopies] = []
    yield found
    for broken in found:
        broken.go_on.set()


async def test_closing_with_a_copy_that_hangs(hanging: list[BrokenCopies]) -> None:
    """The runtime closes while a thread is still in the middle of a copy, whose blocks are quarantined."""
    blocks = TensorBlocks(17)
    runtime = OffloadRuntime(config(close_timeout_s=0.1), transport=threaded(blocks.tensors))
    with anyio.fail_after(GUARD_S):
        async with runtime:
            engine = Engine(runtime, blocks)
            await on_the_host_only(engine, A)
            broken = BrokenCopies(engine)
            hanging.append(broken)
            broken.hang()
            async with runtime.request(A) as request:
                await request.allocate()
                request.load_nowait()
                assert await anyio.to_thread.run_sync(broken.entered.wait, GUARD_S)
    runtime.check_integrity()
    found = runtime.statistics()
    assert (found.num_jobs, found.device.num_quarantined, *pinned(runtime)) == (0, 2, 0, 0)


async def test_closing_with_live_requests() -> None:
    """A waiting request is woken with `RuntimeClosed`, and a computing one gets it at the next call; no pin is left."""
    ends: dict[str, str] = {}
    transport = ScriptedTransport(7, auto=True)
    runtime = OffloadRuntime(config(8, close_timeout_s=0.1), transport=transport)
    engine = Engine(runtime, TagBlocks(transport))
    closed = anyio.Event()

    async def live(name: str, function: Callable[[Any], Any], token_ids: list[int]) -> None:
        request = runtime.request(token_ids, name)
        try:
            async with request:
                await function(request)
        except RuntimeClosed:
            ends[name] = request.reason
        else:
            ends[name] = "went on"

    async def waits_for_room(request: Any) -> None:
        await request.allocate(24)

    async def loads(request: Any) -> None:
        await request.allocate()
        await request.load()

    async def computes(request: Any) -> None:
        await request.allocate()
        with runtime.step([request]):
            await closed.wait()
        request.commit(1)

    async def grows(request: Any) -> None:
        await request.allocate()
        await request.extend(24)

    with anyio.fail_after(GUARD_S):
        async with anyio.create_task_group() as group:
            async with runtime:
                await on_the_host_only(engine, A)
                transport.auto = False
                group.start_soon(live, "loads", loads, A)
                await turns(4)
                group.start_soon(live, "computes", computes, prompt(50, 1))
                await turns(4)
                group.start_soon(live, "waits for room", waits_for_room, prompt(51, 1))
                await turns(4)
                group.start_soon(live, "grows", grows, prompt(52, 1))
                await turns(4)
            assert pinned(runtime) == (1, 0)  # what the forward still touches
            closed.set()
    assert ends == dict.fromkeys(("loads", "computes", "waits for room", "grows"), "runtime_closed")
    runtime.check_integrity()
    assert pinned(runtime) == (0, 0)


async def test_closing_tells_who_waits_to_preempt() -> None:
    """At once, not when the forward ends that it waited for: that one may hang."""
    runtime = OffloadRuntime(config(8, close_timeout_s=0.1), transport=ScriptedTransport(7, auto=True))
    has_closed, errors = anyio.Event(), []

    async def preempts(request: Any) -> None:
        try:
            await request.preempt()
        except RuntimeClosed as error:
            errors.append(error)
            has_closed.set()

    async def computes() -> None:
        async with runtime.request(prompt(50, 1)) as request:
            await request.allocate()
            with runtime.step([request]):
                group.start_soon(preempts, request)
                await has_closed.wait()

    with anyio.fail_after(GUARD_S):
        async with anyio.create_task_group() as group:
            async with runtime:
                group.start_soon(computes)
                await turns(8)
    assert len(errors) == 1
    assert pinned(runtime) == (0, 0)


@pytest.mark.parametrize("backend", [param.values[0] for param in EVERY_BACKEND], ids=["asyncio", "uvloop", "trio"])
def test_a_copy_that_ends_when_the_loop_is_gone(
    backend: tuple[str, dict[str, Any]], hanging: list[BrokenCopies], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy thread outlives the event loop: reporting to a closed loop is no error, and no memory was unmapped."""
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    blocks = TensorBlocks(17)

    async def live() -> None:
        async with OffloadRuntime(config(close_timeout_s=0.01), transport=threaded(blocks.tensors)) as runtime:
            broken = BrokenCopies(Engine(runtime, blocks))
            hanging.append(broken)
            broken.hang()
            await Engine(runtime, blocks).serve(A)
            assert await anyio.to_thread.run_sync(broken.entered.wait, GUARD_S)

    anyio.run(live, backend=backend[0], backend_options=backend[1])
    (broken,) = hanging
    copying = [thread for thread in threading.enumerate() if thread.name == "aoffload-store"]
    broken.go_on.set()
    for thread in copying:
        thread.join(GUARD_S)
        assert not thread.is_alive()
    assert raised == []


@natively
async def test_closing_when_cancelled_natively(hanging: list[BrokenCopies]) -> None:
    """`task.cancel()` on the task that closes, again and again: it ends with CancelledError, and nothing is pinned."""
    blocks = TensorBlocks(17)
    runtime = OffloadRuntime(config(close_timeout_s=10 * GUARD_S), transport=threaded(blocks.tensors))
    opened = anyio.Event()

    async def live() -> None:
        async with runtime:
            broken = BrokenCopies(Engine(runtime, blocks))
            hanging.append(broken)
            broken.hang()
            await Engine(runtime, blocks).serve(A)
            # A copy that had not begun would be proven over by the closing transport.
            assert await anyio.to_thread.run_sync(broken.entered.wait, GUARD_S)
            opened.set()

    task = asyncio.create_task(live())
    await opened.wait()
    with anyio.fail_after(GUARD_S):
        while not task.done():
            task.cancel()
            await turns(3)
    assert task.cancelled()
    runtime.check_integrity()
    found = runtime.statistics()
    assert (found.num_jobs, found.host.num_quarantined, *pinned(runtime)) == (0, 2, 0, 0)
    assert not [task for task in asyncio.all_tasks() if "aoffload" in task.get_name()]


async def test_an_error_in_the_block_passes_through() -> None:
    """The body's own exception leaves the runtime's block as it is, not in a group, and everything is closed."""
    transport = ScriptedTransport(17, auto=True)
    runtime = OffloadRuntime(config(), transport=transport)
    with pytest.raises(KeyError):
        async with runtime:
            raise KeyError
    assert transport.is_closed


async def test_a_transport_that_fails_to_close() -> None:
    """Whatever closing the transport raises is told, and the engine ends all the same."""
    transport, log = ScriptedTransport(17, auto=True), structlog.testing.CapturingLogger()

    def broken(_: float) -> bool:
        raise OSError("device lost")

    transport.close = broken  # type: ignore[method-assign]
    runtime = OffloadRuntime(config(), transport=transport, logger=structlog.wrap_logger(log, processors=[]))
    with anyio.fail_after(GUARD_S):
        async with runtime:
            await Engine(runtime, TagBlocks(transport)).serve(A)
    assert "OSError('device lost')" in [call.kwargs.get("error") for call in log.calls]
    runtime.check_integrity()


async def test_what_is_committed_without_a_fence_is_not_stored() -> None:
    """A device that records no fence makes no store; the commit counts, and the next one stores both."""
    async with scripted() as (engine, transport):
        refuses = True

        def record_fence() -> Fence:
            if refuses:
                raise TransferRefused("no fence")
            return PASSED

        transport.record_fence = record_fence  # type: ignore[method-assign]
        await engine.serve(A)
        assert engine.runtime.lookup(A).num_device_tokens and not engine.runtime.statistics().host.num_cached
        await engine.runtime.flush()  # what leaving has offered was refused as well, and is over now
        refuses = False
        await engine.serve(A)
        await engine.runtime.flush()
        assert engine.runtime.statistics().host.num_cached


@natively
async def test_a_small_load_gives_others_one_turn() -> None:
    """A load that its launch has copied itself waits for no event: its task gives other tasks one turn of the loop, and
    goes on with the loaded tokens. Not on trio, where the order of tasks in a turn is random."""
    turns_of_others: list[str] = []

    async def other() -> None:
        turns_of_others.append("one")
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        turns_of_others.append("three")

    async with with_bytes(6) as engine, anyio.create_task_group() as group:
        await on_the_host_only(engine, A)
        async with engine.runtime.request(A) as request:
            await request.allocate()
            group.start_soon(other)
            num_ready = await request.load()
            assert num_ready == 8 and turns_of_others == ["one"]
            assert request._waiting is None
            engine.check(request, A, num_ready)
    await anyio.lowlevel.checkpoint()
