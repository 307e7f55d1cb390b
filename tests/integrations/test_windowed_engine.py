"""The engine with a windowed group: room slice by slice, and what left the window back in the pool."""

from __future__ import annotations

import random
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import numpy as np
import pytest
from windowed import BY_LAYER, KINDS, OPTIONS, Bench, answer, prompt_of, serving

from aoffload._kernel.states import RequestState
from aoffload._reference.engine.batching import EngineOptions
from aoffload._reference.engine.loop import EngineClosed
from aoffload._reference.engine.tries import Ask, Rivals, Try
from aoffload.demo.backends import Tampering
from aoffload.demo.options import Corrupt
from aoffload.errors import OutOfBlocks, RequestAborted

pytestmark = pytest.mark.anyio

each_kind = pytest.mark.parametrize("kind", KINDS)
each_start = pytest.mark.parametrize("start", [OPTIONS, BY_LAYER], ids=["loaded", "by layer"])


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@each_kind
@each_start
@pytest.mark.parametrize("reuse_decoded", [False, True])
async def test_many_at_once_on_few_blocks(kind: str, start: EngineOptions, reuse_decoded: bool) -> None:
    """More requests than places, and more tokens than blocks: each gets its own answer, and nothing is left."""
    options = attrs.evolve(start, reuse_decoded=reuse_decoded)
    async with serving(kind, 34, options=options) as bench, anyio.create_task_group() as clients:
        for number in range(24):
            clients.start_soon(bench.ask, prompt_of(number, 9 + 2 * number), 1 + number % 7)


@each_kind
async def test_a_shared_prefix_is_computed_once(kind: str) -> None:
    """A second prompt with the same beginning hits the device, up to the last point of the grid."""
    async with serving(kind, 80) as bench:
        first = await bench.ask(prompt_of(1, 46))
        second = await bench.ask([*prompt_of(1, 46)[:44], 5, 6, 7])
    assert (first.num_device_tokens, first.num_computed_tokens) == (0, 46)
    assert (second.num_device_tokens, second.num_computed_tokens) == (40, 7)


@each_kind
@each_start
async def test_an_evicted_prefix_comes_back_from_host_memory(kind: str, start: EngineOptions) -> None:
    """What others pushed off the device is loaded, not computed again, and gives the same logits."""
    async with serving(kind, 32, options=start) as bench:
        first = await bench.ask(prompt_of(1, 46))
        for number in range(2, 6):
            await bench.ask(prompt_of(number, 46))
        again = await bench.ask(prompt_of(1, 46))
    assert (again.num_device_tokens + again.num_host_tokens, again.num_computed_tokens) == (40, 6)
    assert again.num_host_tokens > 0
    assert again.logits_digests == first.logits_digests


@each_kind
async def test_who_came_last_makes_way(kind: str) -> None:
    """Two requests that wait for room only the other could give: the older one goes on, the younger begins again; both
    get their answers, and hear each token once."""
    heard: dict[int, list[int]] = {0: [], 1: []}
    # 24 blocks for the larger one, and its own copies of the last slice, which the next try finds cached.
    async with serving(kind, 29) as bench, anyio.create_task_group() as clients:

        async def ask(number: int, num_tokens: int, num_new: int) -> None:
            prompt = prompt_of(number, num_tokens)
            await bench.ask(prompt, num_new, on_token=heard[number].append)
            assert tuple(heard[number]) == answer(prompt, num_new)

        clients.start_soon(ask, 0, 16, 32)
        clients.start_soon(ask, 1, 24, 20)
    assert bench.engine.statistics().num_made_way > 0


@each_kind
@each_start
@pytest.mark.parametrize("seed", [0, 30, 42, 75])
async def test_hardly_more_room_than_the_largest_needs(kind: str, start: EngineOptions, seed: int) -> None:
    """A request that is preempted any number of times gets its answer: none is refused, and none waits for ever."""
    draw = random.Random(seed)
    asks = [(draw.randint(1, 60), draw.randint(1, 30)) for _ in range(draw.randint(3, 9))]
    num_blocks = max(2 * OPTIONS.num_blocks(sum(ask)) for ask in asks) + draw.randint(0, 12)
    options = attrs.evolve(start, reuse_decoded=draw.random() < 0.5, decode_rows=draw.choice([1, 2, 4]))
    async with serving(kind, num_blocks, options=options) as bench:
        with anyio.fail_after(60):
            async with anyio.create_task_group() as clients:
                for number, (num_tokens, num_new) in enumerate(asks):
                    clients.start_soon(bench.ask, prompt_of(number % 4, num_tokens), num_new)


async def test_a_deadline_goes_on_through_all_tries() -> None:
    """Beginning again gives nobody more time: the first try has all of it, the next what is left."""
    ask = Ask(1, np.array([1]), [1], 1, None, {}, 50.0, lambda _: None)
    assert ask.remaining_s() == 50.0
    await anyio.lowlevel.checkpoint()
    left = ask.remaining_s()
    assert left is not None and 0 < left < 50.0
    assert ask.remaining_s() <= left  # type: ignore[operator]


async def test_a_later_try_tells_only_what_is_new() -> None:
    """Who begins again after two tokens hears the third one next."""
    heard: list[int] = []
    ask = Ask(1, np.array([1]), [1], 5, None, {}, None, heard.append)
    for num_tokens in (2, 1, 4):
        tell = ask.listener()
        for token in range(num_tokens):
            tell(token)
    assert heard == [0, 1, 2, 3]
    assert ask.remaining_s() is None


async def test_the_last_token_stays_the_last_one_in_a_later_try() -> None:
    """A request that is preempted right after its last token, and begins again, is not asked for more."""
    asked: list[int] = []

    def until(token: int) -> bool:
        asked.append(token)
        return token == 1

    ask = Ask(1, np.array([1]), [1], 5, None, {}, None, lambda _: None, until)
    answers = []
    for _ in range(2):
        tell = ask.listener()
        answers.append([tell(token) for token in range(2)])
    assert answers == [[False, True], [False, True]]
    assert asked == [0, 1]
    assert ask.max_new_tokens == 2


@each_kind
async def test_a_deadline_ends_a_request(kind: str) -> None:
    """A deadline that is over is an abort; the engine goes on."""
    async with serving(kind, 40) as bench:
        with pytest.raises(RequestAborted, match="deadline"):
            await bench.engine.generate(prompt_of(1, 60), 3, deadline_s=0.0)
        await bench.ask(prompt_of(1))


@each_kind
async def test_a_load_that_fails_half_way_is_tried_with_less(kind: str) -> None:
    """Corrupt blocks are a miss from a grid point on, where every window is whole; the bits are those of the first."""
    tampering = Tampering.of(Corrupt.CHECKSUM)
    async with serving(kind, 44, tampering=tampering) as bench:
        prompt = prompt_of(1, 78)
        first = await bench.ask(prompt)
        for number in range(2, 6):
            await bench.ask(prompt_of(number, 78))
        again = await bench.ask(prompt)
        assert tampering.num_before == 2
        third = await bench.ask(prompt)
    if kind == "stand-in":  # 18 of 36 blocks have landed: 36 tokens, between two grid points
        assert again.num_computed_tokens == 78 - 32
    assert again.num_computed_tokens % OPTIONS.prefill_tokens == 78 % OPTIONS.prefill_tokens
    assert first.logits_digests == again.logits_digests == third.logits_digests


class StubRequest:
    """As much of a request as rivals look at."""

    def __init__(self) -> None:
        self.state, self.reason = RequestState.RUNNING, ""
        self.cancelled = anyio.Event()

    def cancel(self, reason: str) -> None:
        self.reason = reason
        self.cancelled.set()


async def test_who_made_way_stays_away_until_the_other_has_its_room() -> None:
    """It could snatch the room away again before the one that it made way for has run."""
    rivals, order, has_entered = Rivals(), list[str](), anyio.Event()
    requests: list[Any] = [StubRequest(), StubRequest()]
    older, younger = (
        Try(Ask(ticket, np.array([1]), [1], 1, None, {}, None, lambda _: None), request)
        for ticket, request in enumerate(requests)
    )

    async def leave_when_cancelled() -> None:
        with rivals.entered(younger):
            has_entered.set()
            await requests[1].cancelled.wait()
        order.append("younger has left")
        assert younger.is_to_be_repeated
        await younger.wait_to_return()
        order.append("younger returns")

    async with anyio.create_task_group() as tasks:
        with rivals.entered(older):
            tasks.start_soon(leave_when_cancelled)
            await has_entered.wait()
            assert not rivals.is_alone(older)
            await rivals.have_one_make_way(older)
            for _ in range(10):
                await anyio.lowlevel.checkpoint()
            order.append("older has its room")
            older.is_served.set()
    assert order == ["younger has left", "older has its room", "younger returns"]
    assert rivals.num_made_way == 1


@each_kind
@pytest.mark.parametrize("num_passes", range(0, 60, 6))
async def test_a_client_may_leave_at_any_time(kind: str, num_passes: int) -> None:
    """Wherever a client is cancelled, in the line for its next slice too, its blocks come back."""
    # 24 blocks for the larger one, and its own copies of the last slice, which the next try finds cached.
    async with serving(kind, 29) as bench, anyio.create_task_group() as clients:
        for number in range(4):
            clients.start_soon(bench.ask, prompt_of(number), 8)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as pair:

                async def leave() -> None:
                    for _ in range(num_passes):
                        await anyio.lowlevel.checkpoint()
                    scope.cancel()

                pair.start_soon(bench.ask, prompt_of(9), 4)
                pair.start_soon(leave)


@each_kind
@pytest.mark.parametrize("num_steps", range(1, 20, 3))
async def test_a_client_may_leave_after_any_step(kind: str, num_steps: int) -> None:
    """The same between any two steps of the engine."""
    scope = anyio.CancelScope()

    def on_step(done: int) -> None:
        if done == num_steps:
            scope.cancel()

    async with serving(kind, 26, on_step=on_step) as bench, anyio.create_task_group() as clients:
        for number in range(3):
            clients.start_soon(bench.ask, prompt_of(number), 8)
        with scope:
            await bench.ask(prompt_of(9), 4)


@each_kind
async def test_a_request_that_can_never_fit_is_refused(kind: str) -> None:
    """It gets `OutOfBlocks`, though its first slices had room, and nobody else notices."""
    async with serving(kind, 16) as bench:
        with pytest.raises(OutOfBlocks):
            await bench.engine.generate(prompt_of(1, 120), 3)
        await bench.ask(prompt_of(1, 12))


@each_kind
async def test_closing_ends_who_waits_for_room(kind: str) -> None:
    """Leaving the engine with requests inside ends them with `EngineClosed`, in the wait queue too."""
    num_closed = 0

    async def ask(bench: Bench, number: int) -> None:
        nonlocal num_closed
        try:
            await bench.ask(prompt_of(number, 16), 32)
        except EngineClosed:
            num_closed += 1

    closing = anyio.Event()
    async with anyio.create_task_group() as outside:
        async with serving(kind, 26, on_step=lambda done: closing.set() if done == 20 else None) as bench:
            for number in range(3):
                outside.start_soon(ask, bench, number)
            await closing.wait()
            await bench.engine.__aexit__(None, None, None)
            while bench.runtime.statistics().num_requests:
                await anyio.lowlevel.checkpoint()
            await bench.engine.__aenter__()
    assert num_closed > 0


@each_kind
async def test_what_the_device_held_is_counted(kind: str) -> None:
    """The most blocks in use at once, and the most that were null; none are where nothing leaves a window."""
    async with serving(kind, 80, store_policy="off") as bench:
        await bench.ask(prompt_of(1, 100))
    found = bench.engine.statistics()
    if kind == "stand-in":
        assert (found.peak_null_blocks, found.num_blocks_at_peak) == (0, 0)
        assert found.peak_pinned_blocks == 2 * 26
    else:
        # Before the last slice: position 96 reads from 87 on, so 21 of 24 whole blocks have left the window.
        assert (found.peak_null_blocks, found.num_blocks_at_peak) == (21, 2 * 26)
        assert found.peak_pinned_blocks <= 26 + 3 + 2 * OPTIONS.num_scratch_blocks


async def test_a_prompt_larger_than_the_pool_without_windows() -> None:
    """Blocks that leave the window during prefill are used again, so 200 tokens of two groups (51 blocks each) fit into
    60 blocks, on the device and when they come back from host memory."""
    async with serving("windows", 60) as bench:
        first = await bench.ask(prompt_of(1, 200))
        await bench.ask(prompt_of(2, 200))
        again = await bench.ask(prompt_of(1, 200))
    assert bench.engine.statistics().peak_pinned_blocks <= 60
    assert again.num_host_tokens > 0
    assert again.logits_digests == first.logits_digests


async def test_windows_change_no_answer() -> None:
    """The same conversation on a runtime with windows and on one with full groups: the same tokens and logits."""
    found = []
    for kind in ("stand-in", "windows"):
        async with serving(kind, 120) as bench:
            prompt = prompt_of(1, 50)
            for number in range(4):
                generation = await bench.ask(prompt, 9)
                found.append(generation.logits_digests)
                prompt = [*prompt, *generation.token_ids, *prompt_of(number, 30)]
    assert found[:4] == found[4:]
