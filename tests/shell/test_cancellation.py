"""Cancellation at every point: pins are released, and other requests get the right bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import anyio
import pytest
from scripted import ScriptedTransport
from serving import (
    ASYNCIO,
    EVERY_BACKEND,
    GUARD_S,
    UVLOOP,
    Checkpoints,
    Engine,
    assert_at_rest,
    at_every_checkpoint,
    pinned,
    prompt,
    scripted,
    turns,
    with_bytes,
)

from aoffload import InvalidArgument, OutOfBlocks, Request, RequestState, WrongState
from aoffload._kernel.states import Direction

pytestmark = pytest.mark.anyio

A, B, C = (prompt(seed, 9) for seed in range(1, 4))
"""Two whole blocks and the token that is always computed."""


@pytest.fixture(params=EVERY_BACKEND)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


natively = pytest.mark.parametrize("anyio_backend", [ASYNCIO, UVLOOP], indirect=True)


async def stored_on_the_host_only(engine: Engine, *prompts: list[int]) -> None:
    for token_ids in prompts:
        await engine.serve(token_ids)
        await engine.runtime.flush()
        await engine.evict_device()


# -- at every checkpoint ------------------------------------------------------------------------------------------


async def whole_life(engine: Engine, token_ids: list[int], request_id: str | None = None) -> None:
    """Waits for free blocks, loads, computes in a step, grows with another wait, and cleans up with an await of its
    own."""
    async with engine.runtime.request(token_ids, request_id) as request:
        try:
            await request.allocate()
            num_ready = await request.load()
            engine.check(request, token_ids, num_ready)
            with engine.runtime.step([request]):
                engine.compute(request, token_ids, num_ready)
                await anyio.lowlevel.checkpoint()  # the forward
            request.commit(len(token_ids))
            new = [5_000_000 + index for index in range(7)]
            try:
                await request.extend(len(token_ids) + len(new))
            except OutOfBlocks as error:
                if error.retryable:
                    return  # only waiters hold room: one of them has to go
                raise
            longer = token_ids + new
            engine.compute(request, longer, len(token_ids) // 4 * 4)
            request.commit(len(longer), new)
            engine.check(request, longer, len(longer))
        finally:
            await anyio.lowlevel.checkpoint()


async def holds_room(engine: Engine, num_blocks: int, num_turns: int) -> None:
    async with engine.runtime.request(prompt(800 + num_blocks, 1)) as request:
        request.allocate_nowait(num_blocks * 4)
        await turns(num_turns)


class AnyioTasks:
    """Start tasks in an anyio group."""

    async def __aenter__(self) -> AnyioTasks:
        self.group = anyio.create_task_group()
        await self.group.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> bool | None:
        return await self.group.__aexit__(*exc)

    def start(self, function: Callable[[], Awaitable[None]]) -> None:
        self.group.start_soon(function)


class PlainTasks:
    """Start tasks in asyncio's own group: one of them may be cancelled natively."""

    async def __aenter__(self) -> PlainTasks:
        self.group = asyncio.TaskGroup()
        await self.group.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> bool | None:
        return await self.group.__aexit__(*exc)

    def start(self, function: Callable[[], Any]) -> asyncio.Task[None]:
        return self.group.create_task(function())


async def busy(engine: Engine, k: int, how: str) -> bool:
    """A victim, somebody with the same prompt, others for whom there is not enough room; whether k was reached.

    `how` names who cancels, and whether k counts the victim's checkpoints or the turns of the loop.
    """
    native = how.startswith("native")
    scope = anyio.CancelScope()
    tasks: Any = PlainTasks() if native else AnyioTasks()
    victims: list[asyncio.Task[None]] = []
    ends: list[str] = []

    def act() -> None:
        if native:
            victims[0].cancel()
        elif how.startswith("scope"):
            scope.cancel()
        else:
            engine.runtime.cancel("victim", "client gone")

    driver = Checkpoints(NEVER if "turn" in how else k, act, again="twice" in how)

    async def victim() -> None:
        with scope:
            await driver.run(whole_life(engine, A, "victim"))

    async def cancel_at_turn() -> None:
        await turns(k)
        act()

    async def bystander(token_ids: list[int]) -> None:
        await whole_life(engine, token_ids)
        ends.append("bystander")

    async with tasks:
        tasks.start(lambda: holds_room(engine, 4, 6))
        await turns(1)
        victims.append(tasks.start(victim))
        tasks.start(lambda: bystander(A))
        tasks.start(lambda: bystander(B))
        if "turn" in how:
            tasks.start(cancel_at_turn)
    assert ends == ["bystander"] * 2
    return driver.reached if "turn" not in how else k < NUM_TURNS


async def cancelled_everywhere(how: str, open_engine: Callable[[], Any]) -> int:
    async def scenario(k: int) -> bool:
        async with open_engine() as opened:
            engine = opened[0] if isinstance(opened, tuple) else opened
            await stored_on_the_host_only(engine, A, B)
            with anyio.fail_after(GUARD_S):
                reached = await busy(engine, k, how)
            await assert_at_rest(engine.runtime)
            assert await engine.serve(A) == 8  # still cached, still right
            await assert_at_rest(engine.runtime)
            return reached

    return await at_every_checkpoint(scenario)


KINDS = ["scope", "scope, twice", "scope, at a turn", "runtime.cancel", "runtime.cancel, twice"]
NATIVE_KINDS = ["native", "native, twice", "native, at a turn"]
NEVER = 10**9
NUM_TURNS = 24


@pytest.mark.parametrize("how", KINDS)
async def test_cancelled_at_every_checkpoint(how: str) -> None:
    """Wherever a request is cancelled, and cancelled again while it cleans up: nothing of it is left, others finish."""
    assert await cancelled_everywhere(how, lambda: scripted(6, num_host_blocks=8)) >= 3


@natively
@pytest.mark.parametrize("how", NATIVE_KINDS)
async def test_cancelled_natively_at_every_checkpoint(how: str) -> None:
    """The same for asyncio's own `task.cancel()`, which no shield holds back."""
    assert await cancelled_everywhere(how, lambda: scripted(6, num_host_blocks=8)) >= 3


@pytest.mark.parametrize("how", KINDS)
async def test_cancelled_at_every_checkpoint_with_real_bytes(how: str) -> None:
    """The same with the copy threads and tensors of the CPU backend."""
    assert await cancelled_everywhere(how, lambda: with_bytes(6, num_host_blocks=8)) >= 3


@natively
async def test_cancelled_natively_at_every_checkpoint_with_real_bytes() -> None:
    """The same, natively, with real threads."""
    assert await cancelled_everywhere("native", lambda: with_bytes(6, num_host_blocks=8)) >= 3


# -- while waiting for room ---------------------------------------------------------------------------------------


class Waiting:
    """One that holds all room, and three that wait for it."""

    def __init__(self, engine: Engine, group: anyio.abc.TaskGroup) -> None:
        self.engine, self.group = engine, group
        self.scopes: list[anyio.CancelScope] = []
        self.done: list[int] = []
        self.letting_go = anyio.Event()

    async def start(self) -> None:
        self.group.start_soon(self._hold)
        await turns(2)
        for number, token_ids in enumerate((A, B, C)):
            self.scopes.append(anyio.CancelScope())
            self.group.start_soon(self._wait, number, token_ids)
            await turns(2)
        assert self.engine.runtime.statistics().num_waiting == 3

    async def _hold(self) -> None:
        async with self.engine.runtime.request(prompt(800, 1)) as request:
            request.allocate_nowait(6 * 4)
            await self.letting_go.wait()

    async def _wait(self, number: int, token_ids: list[int]) -> None:
        with self.scopes[number]:
            await self.engine.serve(token_ids)
            self.done.append(number)


@pytest.mark.parametrize("number", [0, 1, 2])
async def test_cancelled_in_line(number: int) -> None:
    """The head of the wait queue or somebody after it leaves: the others keep their order, and only the head keeps
    pins."""
    async with scripted(6) as (engine, _), anyio.create_task_group() as group:
        waiting = Waiting(engine, group)
        await waiting.start()
        waiting.scopes[number].cancel()
        await turns(4)
        engine.runtime.check_integrity()
        assert engine.runtime.statistics().num_waiting == 2
        assert waiting.done == []
        waiting.letting_go.set()
        with anyio.fail_after(GUARD_S):
            while len(waiting.done) < 2:
                await turns(1)
        assert sorted(waiting.done) == [other for other in range(3) if other != number]
        await turns()
        await assert_at_rest(engine.runtime)


async def test_cancelled_when_granted_but_not_resumed() -> None:
    """A grant whose owner is cancelled before it runs again goes to the next in the wait queue, not into nothing."""
    async with scripted(6) as (engine, _), anyio.create_task_group() as group:
        waiting = Waiting(engine, group)
        await waiting.start()
        # The pump grants inside this call; nobody has run since when the head is cancelled.
        runtime = engine.runtime
        entered = runtime._session.requests.values()
        holder = next(request for request in entered if request.state is RequestState.ALLOCATED)
        holder.cancel("preempted")
        holder._session.release(holder._record, "preempted")
        assert runtime.statistics().num_waiting == 1  # two were granted 3 blocks each
        waiting.scopes[0].cancel()
        with anyio.fail_after(GUARD_S):
            while len(waiting.done) < 2:
                await turns(1)
        assert sorted(waiting.done) == [1, 2]
        await turns()
        await assert_at_rest(runtime)


@natively
async def test_cancelled_natively_when_granted_but_not_resumed() -> None:
    """On asyncio `cancel()` after `set()` still raises in the winner: its grant must come back."""
    async with scripted(6) as (engine, _):
        runtime = engine.runtime
        async with runtime.request(prompt(800, 1)) as holder:
            holder.allocate_nowait(6 * 4)
            tasks = [asyncio.create_task(engine.serve(token_ids)) for token_ids in (A, B, C)]
            await turns(2)
            assert runtime.statistics().num_waiting == 3
        assert runtime.statistics().num_waiting == 1
        tasks[0].cancel()
        with anyio.fail_after(GUARD_S):
            found = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert found[1:] == [0, 0]
        await assert_at_rest(runtime)


async def test_a_cancelled_allocate_may_be_tried_again() -> None:
    """After a cancelled `allocate` the request is PINNED as before, with its match, and may try again."""
    async with scripted(6, num_host_blocks=8) as (engine, _):
        await stored_on_the_host_only(engine, A)
        async with engine.runtime.request(prompt(800, 1)) as holder:
            holder.allocate_nowait(6 * 4)
            async with engine.runtime.request(A) as request:
                for _ in range(3):
                    with anyio.move_on_after(0):
                        await request.allocate()
                    assert request.state is RequestState.PINNED
                    assert request.match.num_host_tokens == 8
                    engine.runtime.check_integrity()
                holder._session.release(holder._record, "preempted")
                assert await engine.prefill(request, A) == 8
        await assert_at_rest(engine.runtime)


async def test_cancelled_while_extending() -> None:
    """A cancelled `extend` changes nothing: the block table is what it was, and it may be tried again."""
    async with scripted(6) as (engine, _):
        async with engine.runtime.request(prompt(800, 1)) as holder, engine.runtime.request(A) as request:
            holder.allocate_nowait(3 * 4)
            await engine.prefill(request, A)
            before = request.block_ids
            with anyio.move_on_after(0):
                await request.extend(24)
            assert request.block_ids == before
            engine.runtime.check_integrity()
            holder._session.release(holder._record, "preempted")
            added = await request.extend(24)
            assert request.block_ids[0] == before[0] + added.added[0]
        await assert_at_rest(engine.runtime)


async def test_the_youngest_extension_yields() -> None:
    """When only waiters hold room, one of them gets a retryable `OutOfBlocks`, and the other goes on."""
    async with scripted(6) as (engine, _):
        ends: list[str] = []

        async def grow(name: str, token_ids: list[int]) -> None:
            async with engine.runtime.request(token_ids, name) as request:
                await engine.prefill(request, token_ids)
                await anyio.lowlevel.checkpoint()
                try:
                    await request.extend(16)
                    ends.append(f"{name} grew")
                except OutOfBlocks as error:
                    ends.append(f"{name} yields" if error.retryable else f"{name} fails")

        with anyio.fail_after(GUARD_S):
            async with anyio.create_task_group() as group:
                group.start_soon(grow, "old", A)
                group.start_soon(grow, "young", B)
        assert sorted(end.split()[1] for end in ends) == ["grew", "yields"]
        await assert_at_rest(engine.runtime)


# -- while loading ------------------------------------------------------------------------------------------------


def loads(transport: ScriptedTransport) -> list[int]:
    return [job_id for job_id, job in transport.in_flight.items() if job.plan.direction is Direction.LOAD]


async def loading(engine: Engine, transport: ScriptedTransport, group: anyio.abc.TaskGroup) -> dict[str, Any]:
    """A leader and a sharer wait for one load of A, and another request for its own load of B after it."""
    transport.auto = False
    found: dict[str, Any] = {"done": {}}

    async def serve(name: str, token_ids: list[int]) -> None:
        found[name] = scope = anyio.CancelScope()
        with scope:
            found["done"][name] = await engine.serve(token_ids, request_id=name)

    for name, token_ids in (("leader", A), ("sharer", A), ("behind", B)):
        group.start_soon(serve, name, token_ids)
        await turns(2)
    return found


@pytest.mark.parametrize("victims", [["leader"], ["sharer"], ["leader", "sharer"], ["behind"]])
@pytest.mark.parametrize("lands", ["before", "after"])
async def test_cancelled_while_a_load_is_launched(victims: list[str], lands: str) -> None:
    """A launched load can't be recalled: a request that still waits for it gets its bytes, and no other blocks are
    overwritten."""
    async with scripted(12, num_host_blocks=8) as (engine, transport), anyio.create_task_group() as group:
        await stored_on_the_host_only(engine, A, B)
        found = await loading(engine, transport, group)
        assert len(loads(transport)) == 2  # one for A, one for B
        if lands == "before":
            transport.land_all()  # delivered, but nobody has run since
        for victim in victims:
            found[victim].cancel()
        await turns(4)
        engine.runtime.check_integrity()
        if lands == "after":
            assert pinned(engine.runtime) != (0, 0)
            async with engine.runtime.request(C) as other:  # gets none of the destinations
                other.allocate_nowait()
                engine.compute(other, C, 0)
                transport.land_all()
                await turns()
                other.commit(9)
                engine.check(other, C, 9)
        await turns()
        transport.auto = True
        transport.land_all()
        await turns()
        assert found["done"] == {name: 8 for name in ("leader", "sharer", "behind") if name not in victims}
        await assert_at_rest(engine.runtime)
        assert await engine.serve(A) == 8
        await assert_at_rest(engine.runtime)


@pytest.mark.parametrize("victims", [["leader"], ["sharer"], ["leader", "sharer"]])
async def test_cancelled_while_a_load_is_queued(victims: list[str]) -> None:
    """A queued load lives as long as one waiter does; without any it is dropped, and never launched."""
    options: dict[str, Any] = {"num_host_blocks": 8, "max_jobs_in_flight": 1}
    async with scripted(12, **options) as (engine, transport), anyio.create_task_group() as group:
        await stored_on_the_host_only(engine, A, B, C)
        transport.auto = False
        group.start_soon(engine.serve, C)  # its load is in flight: every other load queues
        await turns(4)
        found = await loading(engine, transport, group)
        assert len(loads(transport)) == 1
        for victim in victims:
            found[victim].cancel()
        await turns(4)
        engine.runtime.check_integrity()
        launched_before = len(transport.launched)
        while transport.in_flight:
            transport.land_all()
            await turns()
        assert found["done"] == {name: 8 for name in ("leader", "sharer", "behind") if name not in victims}
        loaded = [one.plan for one in transport.launched[launched_before:] if one.plan.direction is Direction.LOAD]
        assert len(loaded) == (1 if len(victims) == 2 else 2)
        transport.auto = True
        await assert_at_rest(engine.runtime)


async def test_a_cancelled_load_may_be_awaited_again() -> None:
    """After a cancelled `load` only `load` or leaving is legal; loading again waits for the same copy."""
    async with scripted(12, num_host_blocks=8) as (engine, transport):
        await stored_on_the_host_only(engine, A)
        transport.auto = False
        async with engine.runtime.request(A) as request:
            await request.allocate()
            request.load_nowait()
            for _ in range(3):
                with anyio.move_on_after(0):
                    await request.load()
                assert request.state is RequestState.LOADING
                for call in (lambda: request.commit(9), request.allocate_nowait, lambda: request.extend_nowait(16)):
                    with pytest.raises(WrongState):
                        call()
                with pytest.raises(WrongState), engine.runtime.step([request]):
                    pass
                engine.runtime.check_integrity()
            assert len(loads(transport)) == 1
            transport.land_all()
            assert await request.load() == 8
            engine.check(request, A, 8)
        transport.auto = True
        await assert_at_rest(engine.runtime)


async def test_two_tasks_may_wait_for_one_load() -> None:
    """Each request that waits for a load hears of its end, however many wait, and however late they came."""
    async with scripted(12, num_host_blocks=8) as (engine, transport):
        await stored_on_the_host_only(engine, A)
        transport.auto = False
        found: list[int] = []

        async def wait_for(load: Callable[[], Awaitable[int]]) -> None:
            found.append(await load())

        with anyio.fail_after(GUARD_S):
            async with engine.runtime.request(A) as request:
                await request.allocate()
                pending = request.load_nowait()
                assert not pending.is_over
                async with anyio.create_task_group() as group:
                    group.start_soon(wait_for, pending.wait)
                    await turns(2)
                    group.start_soon(wait_for, request.load)
                    await turns(2)
                    transport.land_all()
                assert found == [8, 8]
                assert pending.is_over
        transport.auto = True
        await assert_at_rest(engine.runtime)


# -- by name, twice, by the clock ---------------------------------------------------------------------------------


async def test_cancelling_by_id() -> None:
    """`runtime.cancel` reaches a live request by its id, swallowed by that request alone, and says whether it did."""
    async with scripted() as (engine, _):
        went_on = False
        async with engine.runtime.request(A, "victim") as request:
            assert engine.runtime.cancel("somebody else") is False
            assert engine.runtime.cancel("victim", "client gone") is True
            await anyio.lowlevel.checkpoint()
            went_on = True
        assert not went_on
        assert (request.state, request.reason) == (RequestState.ABORTED, "client gone")
        assert engine.runtime.cancel("victim") is False
        await assert_at_rest(engine.runtime)


async def test_cancelling_twice_keeps_the_first_reason() -> None:
    """The second `cancel` of a request adds nothing, before or after it is over."""
    async with scripted() as (engine, _):
        async with engine.runtime.request(A) as request:
            request.cancel("first")
            request.cancel("second")
            await request.allocate()
            await anyio.lowlevel.checkpoint()
        request.cancel("third")
        assert (request.state, request.reason) == (RequestState.ABORTED, "first")
        await assert_at_rest(engine.runtime)


async def test_cancelled_without_another_checkpoint_is_aborted() -> None:
    """Cancelling means cancelled, also where the request ran to its end without hearing of it."""
    async with scripted() as (engine, _):
        async with engine.runtime.request(A) as request:
            await engine.prefill(request, A)
            request.cancel("client gone")
        assert (request.state, request.reason) == (RequestState.ABORTED, "client gone")
        await assert_at_rest(engine.runtime)


@pytest.mark.parametrize("deadline_s", [0, -1.0, -1e9])
async def test_a_deadline_that_is_over_on_entry(deadline_s: float) -> None:
    """A request whose time was up before it began does no work: it is aborted at its first step. A negative time is a
    warning: it may be meant as none."""
    async with scripted() as (engine, _):
        got: list[str] = []
        with pytest.warns(UserWarning, match="deadline_s") if deadline_s else nullcontext():
            late = engine.runtime.request(A, deadline_s=deadline_s)
        async with late as request:
            got.append("entered")
            await request.allocate()
            got.append("allocated")
        assert got == ["entered"]
        assert (request.state, request.reason) == (RequestState.ABORTED, "deadline")
        await assert_at_rest(engine.runtime)


async def test_a_deadline_while_waiting_for_room() -> None:
    """A request stops waiting at its deadline, and its block swallows that."""
    async with scripted() as (engine, _):
        async with engine.runtime.request(prompt(800, 1)) as holder:
            holder.allocate_nowait(16 * 4)
            async with engine.runtime.request(A, deadline_s=0.001) as request:
                await request.allocate()
            assert (request.state, request.reason) == (RequestState.ABORTED, "deadline")
            assert engine.runtime.statistics().num_waiting == 0
        await assert_at_rest(engine.runtime)


async def test_an_infinite_deadline_is_none() -> None:
    """`deadline_s=inf` is no deadline; what is no number is refused before anything is pinned."""
    async with scripted() as (engine, _):
        assert await engine.serve(A, deadline_s=float("inf")) == 0
        assert await engine.serve(A, deadline_s=1e300) == 8
        for bad in (float("nan"), "1", 10**400, [1], b"1"):
            with pytest.raises(InvalidArgument, match="deadline_s"):
                await engine.serve(B, deadline_s=bad)
        await assert_at_rest(engine.runtime)


async def test_cancelled_from_outside_passes_through() -> None:
    """A cancellation that the request didn't ask for is not swallowed by it, nested scopes and groups included."""
    async with scripted() as (engine, _):
        reached: list[str] = []
        with anyio.CancelScope() as outer:
            async with engine.runtime.request(A) as request:
                async with anyio.create_task_group() as group:
                    group.start_soon(anyio.sleep_forever)
                    await turns(1)
                    outer.cancel()
            reached.append("behind the request")
        assert reached == []
        assert (request.state, request.reason) == (RequestState.ABORTED, "cancelled")
        await assert_at_rest(engine.runtime)


async def test_cancelled_inside_a_group_of_its_own() -> None:
    """`cancel` reaches the tasks that the request's block has started, and is swallowed once, by the request."""
    async with scripted() as (engine, _):
        async with engine.runtime.request(A, "r") as request:
            async with anyio.create_task_group() as group:
                group.start_soon(anyio.sleep_forever)
                group.start_soon(anyio.sleep_forever)
                await turns(1)
                engine.runtime.cancel("r", "client gone")
        assert (request.state, request.reason) == (RequestState.ABORTED, "client gone")
        await assert_at_rest(engine.runtime)


async def test_an_error_during_cancellation_wins() -> None:
    """What a cancelled request raises while it cleans up is not lost, and its pins are gone."""
    async with scripted() as (engine, _):
        requests: list[Request] = []

        async def fails() -> None:
            async with engine.runtime.request(A) as request:
                requests.append(request)
                request.cancel("client gone")
                try:
                    await request.allocate()
                finally:
                    raise KeyError

        with pytest.raises(KeyError):
            await fails()
        (request,) = requests
        assert (request.state, request.reason) == (RequestState.ABORTED, "client gone")
        await assert_at_rest(engine.runtime)


@natively
async def test_a_native_cancel_is_not_swallowed_with_our_own() -> None:
    """`request.cancel` and `task.cancel` in the same turn: the task is cancelled, not only the request."""
    async with scripted() as (engine, _):
        requests: list[Request] = []

        async def serve() -> None:
            async with engine.runtime.request(A) as request:
                requests.append(request)
                await anyio.sleep_forever()

        for order in ("request first", "task first"):
            task = asyncio.create_task(serve())
            await turns(1)
            cancels = [lambda: requests[-1].cancel("client gone"), task.cancel]
            for cancel in cancels if order == "request first" else reversed(cancels):
                cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert task.cancelled(), order
            assert requests[-1].state is RequestState.ABORTED
        await assert_at_rest(engine.runtime)
