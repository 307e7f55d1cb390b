"""A runtime over engine-owned blocks: hits after those of the engine, shared and partial loads, and requests that end
during a copy. In virtual time."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import pytest
import structlog
from clocks import JUMPING, jumping_backend
from engine_serving import OwnEngine, OwnPool, own_engine
from scripted import ScriptedFence, ScriptedTransport
from serving import BLOCK, Checkpoints, at_every_checkpoint, config, prompt, turns

from aoffload import HostCacheRuntime, LazyStore, PrefixMatch, RequestState, RuntimeClosed, Tier, WrongState
from aoffload.errors import CommitError, ConfigError, InvalidArgument
from aoffload.host_cache import EngineRequest
from aoffload.ledger import Direction, PinState
from aoffload.transport import TransferRefused

pytestmark = pytest.mark.anyio

A, B, C = (prompt(seed, 17) for seed in range(1, 4))
"""Four whole blocks and the token that is always computed."""
TIMES: dict[str, Any] = {"load_timeout_s": 30.0, "transfer_timeout_s": 120.0, "pending_timeout_s": 5.0}
S = RequestState


@pytest.fixture(params=JUMPING)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return jumping_backend(request.param)


natively = pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)


def loads(engine: OwnEngine) -> list[int]:
    """How many blocks each load so far has copied."""
    return [one.plan.num_blocks for one in engine.transport.launched if one.plan.direction is Direction.LOAD]


# -- hits ---------------------------------------------------------------------------------------------------------


async def test_a_hit_behind_the_engines_own() -> None:
    """What the engine's cache has is not copied, what host memory has after it is, and the bytes are right."""
    async with own_engine() as engine:
        await engine.stored(A)
        assert await engine.serve(A) == 16 and loads(engine) == [4]
        engine.pool.forget(engine.tables[-1][1:])
        assert await engine.serve(A) == 16 and loads(engine) == [4, 3]
        assert await engine.serve([*A, *B]) == 16 and loads(engine) == [4, 3], "the engine has it all"
        assert await engine.serve(B) == 0
        await engine.assert_at_rest()


async def test_what_is_deferred_is_stored_by_later_steps() -> None:
    """Also after its request has ended, after the fence that is given. A fence that is none is refused, and nothing is
    lost by that; without engine-owned blocks there is nothing to defer."""
    async with own_engine(max_bytes_in_flight=1) as engine:
        runtime, deferred = engine.runtime, engine.runtime.ledger
        names: dict[str, list[int]] = {}

        def find(request_id: str, group: int, start: int, stop: int) -> list[int]:
            keys = (tuple(names[request_id][: (at + 1) * BLOCK]) for at in range(start, stop))
            return [engine.pool.cached.get(key, 0) for key in keys]

        engine.pool.find = find  # type: ignore[attr-defined]
        await engine.serve(C)
        names[engine.asked[-1].request_id] = C
        assert deferred.deferred_requests == (engine.asked[-1].request_id,)
        await runtime.flush()
        with pytest.raises(InvalidArgument, match="after: "):
            runtime.offer_deferred(3)  # type: ignore[arg-type]
        fence = ScriptedFence()
        runtime.offer_deferred(fence)
        assert len(engine.in_flight()) == 1, "it waits for its fence"
        fence.has_passed = True
        engine.transport.land_all()
        while deferred.deferred_requests:
            await runtime.flush()
            runtime.offer_deferred()
        await runtime.flush()
        engine.pool.cached.clear()
        assert await engine.serve(C) == 16


async def test_what_is_declined_is_computed() -> None:
    """`max_tokens` loads less, `num_device_tokens` is what the first offer counts from."""
    async with own_engine() as engine:
        await engine.stored(A)
        table = engine.pool.take(5)
        async with engine.runtime.request(A) as request:
            assert (request.match.num_device_tokens, request.match.num_host_tokens) == (0, 16)
            assert await request.load(9, into=[table]) == 8 and request.num_lost_tokens == 0
            engine.check(A, table, 8)
        async with engine.runtime.request(A, num_device_tokens=8) as request:
            with pytest.raises(CommitError, match="goes back from 8 to 7"):
                request.offer(7, [table])
            request.offer(8, [table])
            assert request.state is S.RUNNING
        engine.pool.release(table)
        await engine.assert_at_rest()


# -- what others bring --------------------------------------------------------------------------------------------


async def test_requests_for_one_prompt_load_it_once() -> None:
    """The others are PENDING until the first has offered, and hit in the engine's own cache then."""
    async with own_engine(auto=False) as engine:
        engine.transport.auto = True
        await engine.stored(A)
        engine.transport.auto = False
        began, ready = anyio.current_time(), list[int]()
        async with anyio.create_task_group() as group:
            for _ in range(6):
                group.start_soon(serve_into, engine, A, ready)
            await turns()
            assert engine.num_pending == 5 and loads(engine) == [4]
            engine.transport.auto = True
            engine.transport.land_all()
        assert ready == [16] * 6 and loads(engine) == [4]
        assert engine.num_pending == 10, "each asked once when it was woken"
        assert anyio.current_time() == began, "nobody waited for a time-out"
        await engine.assert_at_rest()


async def serve_into(engine: OwnEngine, token_ids: list[int], ready: list[int]) -> None:
    ready.append(await engine.serve(token_ids))


async def test_pending_is_bounded() -> None:
    """Behind a load that hangs, everybody waits `pending_timeout_s` from the first answer on, whatever the bounds of
    other waits, and loads itself then."""
    async with own_engine(64, max_jobs_in_flight=8, **TIMES) as engine:
        await engine.stored(A)
        engine.transport.auto = False
        ends: list[float] = []
        ready: list[int] = []
        began = anyio.current_time()

        async def serve(after_s: float) -> None:
            await anyio.sleep(after_s)
            table = engine.pool.take(5)
            async with engine.runtime.request(A) as request:
                while request.match.is_pending:
                    await request.match_again(num_device_tokens=0)
                ends.append(anyio.current_time() - began)
                ready.append(await request.load(into=[table]))
            engine.pool.release(table)

        async with anyio.create_task_group() as group:
            group.start_soon(serve, 0)
            await turns()
            for after_s in (1, 2.5, 4):
                group.start_soon(serve, after_s)
        # The second one loads what the first one hangs with, and so on: each waits for the first of them.
        assert ends == pytest.approx([0, 6, 7.5, 9])
        assert ready == [0] * 4
        engine.transport.land_all()
        await turns()
        await engine.assert_at_rest()


@natively
async def test_a_wait_for_what_others_bring_outlasts_the_copy_worker() -> None:
    """The worker's task is cancelled natively, so no alarm rings any more: who asks again waits all the same, bounded,
    instead of asking without end. An offer still ends the wait."""
    for is_offered in (False, True):
        async with own_engine(**TIMES) as engine:
            await engine.stored(A)
            async with engine.runtime.request(A) as bringer:
                table = engine.pool.take(5)
                await bringer.load(into=[table])
                (worker,) = (task for task in asyncio.all_tasks() if task.get_name() == "aoffload copy worker")
                worker.cancel()
                await turns()
                began = anyio.current_time()
                async with engine.runtime.request(A, "asker") as retried, anyio.create_task_group() as group:
                    assert retried.match.is_pending
                    group.start_soon(partial(retried.match_again, num_device_tokens=0))
                    await anyio.sleep(2)
                    if is_offered:
                        bringer.offer(17, [table])
                waited_s = anyio.current_time() - began
                assert waited_s == pytest.approx(2 if is_offered else TIMES["pending_timeout_s"])
            engine.pool.release(table)
            assert engine.held() == []


async def wait_that_ends(end: Callable[[OwnEngine, EngineRequest], Awaitable[object]]) -> PrefixMatch:
    """A request waits for the load of another one, and `end` has to end its wait before the timeout. Returns its next
    match."""
    async with own_engine(**TIMES) as engine:
        await engine.stored(A)
        engine.transport.auto = False
        table = engine.pool.take(5)
        async with engine.runtime.request(A) as bringer:
            bringer.load_nowait(into=[table])
            async with engine.runtime.request(A, "asker") as asker:
                with anyio.fail_after(TIMES["pending_timeout_s"] / 2):
                    async with anyio.create_task_group() as group:
                        group.start_soon(partial(asker.match_again, num_device_tokens=0))
                        await turns()
                        assert asker.match.is_pending
                        await end(engine, asker)
                match = asker.match_again_nowait(num_device_tokens=0)
            engine.transport.land_all()
        engine.pool.release(table)
        await engine.assert_at_rest()
    return match


async def test_an_answer_to_one_task_ends_the_wait_of_another_one() -> None:
    """Two tasks match the same request again. The engine's own cache has more tokens when the second task asks, so its
    answer is not PENDING, and the first task does not wait for its timeout."""

    async def match(_: OwnEngine, asker: EngineRequest) -> None:
        assert not (await asker.match_again(num_device_tokens=16)).is_pending

    await wait_that_ends(match)


async def test_a_change_of_weights_ends_the_wait_for_a_load_of_others() -> None:
    """The load under way brings KV of the old epoch, so a request of the new epoch does not wait for it."""

    async def change(engine: OwnEngine, _: EngineRequest) -> None:
        engine.runtime.weights.set("new")

    match = await wait_that_ends(change)
    assert (match.num_host_tokens, match.is_pending) == (0, False)


async def test_a_wait_for_what_others_bring_may_be_cancelled() -> None:
    """Nothing is left of the question, and the one that brings it is not disturbed."""
    async with own_engine(**TIMES) as engine:
        await engine.stored(A)
        engine.transport.auto = False
        ready: list[int] = []
        async with anyio.create_task_group() as group:
            group.start_soon(serve_into, engine, A, ready)
            await turns()
            with anyio.move_on_after(1) as scope:
                await engine.serve(A, request_id="leaver")
            assert scope.cancelled_caught and engine.asked[-1].state is S.ABORTED
            assert await engine.serve(A, deadline_s=1) == -1
            assert engine.asked[-1].reason == "deadline"
            engine.transport.land_all()
            engine.transport.auto = True
        assert ready == [16]
        await engine.assert_at_rest()


async def test_an_abandoned_request_that_waits_for_another_is_noticed() -> None:
    """The ledger does not keep it alive: it is collected while it is PENDING, with a warning, and released."""
    async with own_engine() as engine:
        await engine.stored(A)
        engine.transport.auto = False
        table = engine.pool.take(5)
        async with engine.runtime.request(A) as bringer:
            bringer.load_nowait(into=[table])
            left = engine.runtime.request(A, "left")
            await left.__aenter__()
            assert left.match_again_nowait(num_device_tokens=0).is_pending
            assert left._scope is not None
            left._scope.__exit__(None, None, None)
            requests = [left]
            del left
            with pytest.warns(ResourceWarning, match="'left' MATCHED> was abandoned"):
                requests.clear()
            gc.collect()
            await turns()
            assert list(engine.runtime.ledger.live_requests) == [bringer.request_id]
        engine.transport.land_all()
        await turns()
        engine.pool.release(table)
        await engine.assert_at_rest()


# -- loads that fall short ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["fail", "corrupt", "lose", "hang", "refuse"])
async def test_a_load_that_falls_short(end: str) -> None:
    """However a copy ends, the request has a definite number of tokens, computes the rest into other blocks, and its
    bytes are right. Blocks that the copy may still write to are held until it is over."""
    async with own_engine(**TIMES) as engine:
        await engine.stored(A)
        engine.transport.auto = False
        if end == "refuse":
            engine.transport.refuse_next()
        ready: list[int] = []
        async with anyio.create_task_group() as group:
            group.start_soon(serve_into, engine, A, ready)
            await turns()
            copies = engine.in_flight()
            first = list(engine.tables[-1])
            for job_id in copies:
                if end == "fail":
                    engine.transport.fail(job_id, 2)
                elif end == "corrupt":
                    engine.transport.corrupt(job_id, 1, 3)
                elif end == "lose":
                    engine.transport.lose(job_id)
            if end == "hang":
                await anyio.sleep(29)
                assert ready == []
                await anyio.sleep(2)
            engine.transport.auto = True
        expected = {"fail": 8, "corrupt": 4}.get(end, 0)
        request = engine.asked[-1]
        assert ready == [expected] and (request.state, request.num_lost_tokens) == (S.DONE, 16 - expected)
        assert request.retry_max_hit_tokens == expected
        is_in_doubt = end in ("lose", "hang")
        await turns()
        assert engine.held() == (sorted(first[:4]) if is_in_doubt else [])
        assert set(first[:4]).isdisjoint(engine.pool.free) == is_in_doubt
        if is_in_doubt:
            engine.transport.land(copies[0])  # late, over bytes that nobody reads
            await turns()
        engine.pool.cached.clear()
        assert await engine.serve(A) == 16
        await engine.assert_at_rest()


async def test_a_load_given_up_in_part() -> None:
    """Of several copies those that landed count; one that was not launched yet gives its blocks back at once."""
    async with own_engine(max_job_bytes=1, max_jobs_in_flight=2, **TIMES) as engine:
        await engine.stored(A)
        engine.transport.auto = False
        ready: list[int] = []
        async with anyio.create_task_group() as group:
            group.start_soon(serve_into, engine, A, ready)
            await turns()
            first = list(engine.tables[-1])
            engine.transport.land(engine.in_flight()[0])
            await anyio.sleep(31)
            assert engine.held() == sorted(first[1:3]), "two copies hang, and one was never launched"
            engine.transport.land_all()
            engine.transport.auto = True
        assert ready == [4]
        await engine.assert_at_rest()


async def test_a_next_request_does_not_load_what_was_lost() -> None:
    """An engine that preempts and comes again, with the limit that the request before it names, comes to an end."""
    async with own_engine(**TIMES) as engine:
        await engine.stored(A)
        engine.transport.auto = False
        limit: int | None = None
        tried: list[int] = []
        while not tried or tried[-1]:
            table = engine.pool.take(5)
            async with engine.runtime.request(A, max_hit_tokens=limit) as request:
                tried.append(request.match.num_host_tokens)
                pending = request.load_nowait(into=[table])
                for job_id in engine.in_flight():
                    engine.transport.fail(job_id, engine.transport.in_flight[job_id].plan.num_blocks - 1)
                assert await pending.wait() == max(0, tried[-1] - 4)
                limit = request.retry_max_hit_tokens
            engine.pool.release(table)
        assert tried == [16, 12, 8, 4, 0]
        await engine.assert_at_rest()


async def test_quarantine_above_the_share_pauses_loads() -> None:
    """Said once in the log and in the statistics; hits are misses until late proof, then they are hits again."""
    with structlog.testing.capture_logs() as logs:
        async with own_engine(40, max_quarantined_share=0.1, logger=structlog.get_logger(), **TIMES) as engine:
            await engine.stored(A, B, C)
            engine.transport.auto = False
            for token_ids in (A, B):
                async with anyio.create_task_group() as group:
                    group.start_soon(engine.serve, token_ids)
                    await turns()
                    engine.transport.lose(engine.in_flight()[-1])
            assert engine.runtime.statistics().loads_paused
            engine.transport.auto = True
            engine.pool.cached.clear()
            assert await engine.serve(C) == 0 and engine.runtime.lookup(C).num_tokens == 0
            for job_id in engine.in_flight():
                engine.transport.land(job_id)
            await turns()
            assert not engine.runtime.statistics().loads_paused
            engine.pool.cached.clear()
            assert [await engine.serve(token_ids) for token_ids in (A, B, C)] == [16, 16, 16]
            await engine.assert_at_rest()
    said = [(log["event"], log["num_quarantined"]) for log in logs if log["event"].startswith("loads_")]
    assert said == [("loads_paused", 8), ("loads_resumed", 4)]


# -- ends in the middle -------------------------------------------------------------------------------------------


async def test_leaving_in_the_middle_of_a_copy() -> None:
    """The engine has its other blocks back at once, and those of the copy when it is over."""
    async with own_engine(num_blocks=5) as engine:
        await engine.stored(A)
        engine.transport.auto = False
        table = engine.pool.take(5)
        async with engine.runtime.request(A) as request:
            request.load_nowait(into=[table])
            await turns()
        assert (request.state, request.reason) == (S.ABORTED, "closed_early")
        engine.pool.release(table)
        assert list(engine.pool.free) == [table[4]] and engine.held() == sorted(table[:4])
        engine.runtime.check_integrity()
        engine.transport.land_all()
        await turns()
        engine.transport.auto = True
        await engine.assert_at_rest()
        assert await engine.serve(A) == 16


async def busy(engine: OwnEngine, k: int, act: Callable[[Any], Callable[[], object]], *, again: bool = False) -> bool:
    """Two requests for one prompt and one for another, of which the first is cancelled at its k-th checkpoint."""
    ready: list[int] = []
    steps: list[Checkpoints] = []

    async def victim() -> None:
        with anyio.CancelScope() as scope:
            steps.append(Checkpoints(k, act(scope), again))
            await steps[0].run(engine.serve(A))

    async with asyncio.TaskGroup() if again else anyio.create_task_group() as group:  # type: ignore[attr-defined]
        start: Callable[[Callable[[], Awaitable[None]]], object] = getattr(
            group, "start_soon", lambda function: group.create_task(function())
        )
        start(victim)
        start(lambda: serve_into(engine, A, ready))
        start(lambda: serve_into(engine, B, ready))
        for _ in range(40):
            await anyio.lowlevel.checkpoint()
            if len(engine.in_flight()) and not engine.transport.auto:
                engine.transport.land(engine.in_flight()[0])
    assert sorted(ready) == [16, 16], "nobody else notices"
    return steps[0].reached


@pytest.mark.parametrize("is_second", [False, True], ids=["brings", "waits"])
async def test_a_cancellation_at_each_checkpoint(is_second: bool) -> None:
    """Whether it is the one that brings the load or the one that waits for it: the blocks are the engine's again, and
    the others get the right bytes."""

    async def scenario(k: int) -> bool:
        async with own_engine(48) as engine:
            await engine.stored(A, B)
            engine.transport.auto = False
            if is_second:
                async with anyio.create_task_group() as group:
                    group.start_soon(engine.serve, A)
                    await anyio.lowlevel.checkpoint()
                    reached = await busy(engine, k, lambda scope: scope.cancel)
                    engine.transport.auto = True
                    engine.transport.land_all()
            else:
                reached = await busy(engine, k, lambda scope: scope.cancel)
            engine.transport.auto = True
            engine.transport.land_all()
            await turns()
            await engine.assert_at_rest()
            return reached

    assert await at_every_checkpoint(scenario) >= 2


async def test_run_is_cancelled_at_each_checkpoint() -> None:
    """The task that `run` starts ends with its caller, and the blocks are the engine's again."""

    async def scenario(k: int) -> bool:
        async with own_engine() as engine:
            await engine.stored(A)
            table: list[int] = []

            async def life(request: EngineRequest) -> int:
                try:
                    return await engine.prepare(request, A, table)
                finally:
                    engine.pool.release(reversed(table))

            with anyio.CancelScope() as scope:
                steps = Checkpoints(k, scope.cancel)
                assert await steps.run(engine.runtime.run(life, A, num_device_tokens=0)) == 16
            assert scope.cancelled_caught == steps.reached
            await engine.assert_at_rest()
            return steps.reached

    assert await at_every_checkpoint(scenario) >= 1


@natively
async def test_a_native_cancellation_at_each_checkpoint() -> None:
    """`asyncio.Task.cancel`, and once more while the task cleans up."""

    async def scenario(k: int) -> bool:
        async with own_engine(48) as engine:
            await engine.stored(A, B)
            engine.transport.auto = False

            def cancel_me(_: Any) -> Callable[[], object]:
                task = asyncio.current_task()
                assert task is not None
                return task.cancel

            reached = await busy(engine, k, cancel_me, again=True)
            engine.transport.auto = True
            engine.transport.land_all()
            await turns()
            await engine.assert_at_rest()
            return reached

    assert await at_every_checkpoint(scenario) >= 2


async def test_a_load_whose_wait_was_cancelled_goes_on() -> None:
    """The next `load` waits for the same copies, without tables; its blocks stay held meanwhile."""
    async with own_engine() as engine:
        await engine.stored(A)
        engine.transport.auto = False
        table = engine.pool.take(5)
        async with engine.runtime.request(A) as request:
            with anyio.move_on_after(1) as scope:
                await request.load(into=[table])
            assert scope.cancelled_caught and request.state is S.LOADING and engine.held() == sorted(table[:4])
            with pytest.raises(WrongState, match="offer: "):
                request.offer(17, [table])
            engine.transport.land_all()
            assert await request.load() == 16
            engine.check(A, table, 16)
        engine.pool.release(table)
        await engine.assert_at_rest()


async def test_the_runtime_closes_under_its_requests() -> None:
    """Requests that wait for a load of another one, or for a copy, are woken; a copy without an end keeps its
    blocks."""
    errors: list[str] = []

    async def fails(engine: OwnEngine) -> None:
        with pytest.raises(RuntimeClosed):
            await engine.serve(A)
        errors.append("told")

    async with anyio.create_task_group() as group:
        async with own_engine(close_timeout_s=1.0) as engine:
            await engine.stored(A)
            engine.transport.auto = False
            group.start_soon(fails, engine)
            group.start_soon(fails, engine)
            await turns()
            assert engine.num_pending == 1
    assert errors == ["told", "told"]
    assert engine.held() == sorted(set(range(1, 33)) - set(engine.pool.free)), "the engine has all others back"
    (job_id,) = engine.in_flight()
    assert engine.held() == sorted(engine.transport.in_flight[job_id].plan.destination_ids)


# -- offers and what is taken back --------------------------------------------------------------------------------


async def test_an_offer_waits_for_its_forward() -> None:
    """The copy starts after the fence, and holds its blocks from the offer on, also when the request has left."""
    async with own_engine() as engine:
        fence = ScriptedFence()
        table = engine.pool.take(5)
        async with engine.runtime.request(A) as request:
            request.offer(17, [table], after=fence)
        engine.pool.release(table)
        (copy,) = engine.transport.in_flight.values()
        assert not copy.may_start and engine.held() == sorted(table[:4])
        engine.compute(A, table, 0)
        fence.has_passed = True
        engine.transport.land_all()
        await turns()
        assert await engine.serve(A) == 16
        await engine.assert_at_rest()


async def test_without_a_fence_nothing_is_stored() -> None:
    """What is not known to be computed is not copied; the next offer tries again."""
    async with own_engine() as engine:

        def no_fence() -> Any:
            raise TransferRefused("no fence")

        recorded, engine.transport.record_fence = engine.transport.record_fence, no_fence  # type: ignore[method-assign]
        table = engine.pool.take(5)
        engine.compute(A, table, 0)
        async with engine.runtime.request(A) as request:
            request.offer(17, [table])
            assert engine.held() == [] and not engine.transport.launched
            engine.transport.record_fence = recorded  # type: ignore[method-assign]
            request.offer(17, [table])
        await engine.assert_stored_from(table, A)


async def test_what_a_failed_forward_offered_is_taken_back() -> None:
    """Queued copies are dropped, and who may have read it is aborted; the request goes on from there."""
    async with own_engine(max_jobs_in_flight=1) as engine:
        await engine.stored(B)
        engine.transport.auto = False
        fence = ScriptedFence()
        table = engine.pool.take(5)
        async with engine.runtime.request(A) as request:
            request.offer(8, [table], after=fence)
            request.offer(17, [table], after=fence)
            async with engine.runtime.request(A, "reader", num_device_tokens=16) as reader:
                request.invalidate(4)
                await anyio.sleep(1)
                raise AssertionError("not aborted")
            assert (reader.state, reader.reason) == (S.ABORTED, "prefix_invalidated")
            assert request.num_computed_tokens == 4 and engine.held() == sorted(table[:2]), "one copy was launched"
            fence.has_passed = True
            engine.transport.land_all()
            await turns()
            assert engine.held() == [] and engine.runtime.lookup(A).num_tokens == 0
            engine.transport.auto = True
            engine.compute(A, table, 0)
            request.offer(17, [table])
        await engine.assert_stored_from(table, A)


async def test_a_pin_keeps_what_host_memory_holds() -> None:
    """Others do not evict it; it has nothing on the device."""
    async with own_engine(num_host_blocks=8) as engine:
        await engine.stored(A)
        with engine.runtime.pins.hold(A, 100) as pin:
            assert (pin.match.num_device_tokens, pin.match.num_host_tokens) == (0, 16)
            await engine.stored(B, C)
            assert await engine.serve(A) == 16
        assert pin.state is PinState.RELEASED
        await engine.assert_at_rest()


async def test_a_reset_forgets_host_memory() -> None:
    async with own_engine() as engine:
        await engine.stored(A)
        await engine.runtime.reset(Tier.HOST)
        assert await engine.serve(A) == 0
        await engine.runtime.reset()
        engine.pool.cached.clear()
        assert await engine.serve(A) == 0
        await engine.assert_at_rest()


# -- what may not be called ---------------------------------------------------------------------------------------


async def test_the_device_blocks_of_an_engine_are_not_reset() -> None:
    """Only the engine can forget what they hold."""
    async with own_engine() as engine:
        await engine.stored(A)
        with pytest.raises(InvalidArgument, match=r"tier: must be a tier that this cache can forget: HOST"):
            await engine.runtime.reset(Tier.DEVICE)
        assert await engine.serve(A) == 16
        await engine.assert_at_rest()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"engine_blocks": [1, 2, 3]}, "engine_blocks: "),
        ({"engine_blocks": OwnPool}, "engine_blocks: "),
        ({"engine_blocks": OwnPool(9), "store_policy": "lazy"}, "store_policy: "),
        ({"engine_blocks": OwnPool(9), "store_policy": LazyStore(4)}, "store_policy: "),
    ],
)
async def test_what_a_runtime_is_made_with(options: dict[str, Any], says: str) -> None:
    """As with a `HostCache`, but for the clock: that is the event loop's."""
    policy = options.get("store_policy", "eager")
    given = {name: value for name, value in options.items() if name != "store_policy"}
    with pytest.raises(ConfigError, match=says):
        HostCacheRuntime(config(store_policy=policy), transport=ScriptedTransport(9), **given)


async def test_wrong_arguments_are_refused_by_name() -> None:
    """And nothing is lost: the right ones are taken afterwards."""
    async with own_engine() as engine:
        await engine.stored(A)
        for wrong in (-1, 17, 1.0, None):
            with pytest.raises(InvalidArgument, match="num_device_tokens: "):
                async with engine.runtime.request(A, num_device_tokens=wrong):  # type: ignore[arg-type]
                    pass
        table = engine.pool.take(5)
        async with engine.runtime.request(A) as request:
            with pytest.raises(InvalidArgument, match="num_device_tokens: "):
                await request.match_again(num_device_tokens=17)
            for into in (None, [], [table[:3]], [[0, *table]], [[table[0]] * 5], 7):
                with pytest.raises(InvalidArgument, match="into: "):
                    await request.load(into=into)  # type: ignore[arg-type]
            assert request.state is S.PINNED
            assert await request.load(into=[table]) == 16
            for ids in (None, [], [table[:3]], 7):
                with pytest.raises(InvalidArgument, match="block_ids: "):
                    request.offer(17, ids)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument, match="after: "):
                request.offer(17, [table], after=7)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument, match="is_last: "):
                request.offer(17, [table], is_last=1)  # type: ignore[arg-type]
            request.offer(17, [table])
        engine.pool.release(table)
        await engine.assert_at_rest()


def test_a_block_here_is_as_long_as_the_runtimes() -> None:
    assert config().groups[0].block_size == BLOCK
