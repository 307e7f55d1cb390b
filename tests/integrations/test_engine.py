"""The engine on the real runtime, with a model whose every answer depends on every byte it reads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import attrs
import pytest
import torch

from aoffload import FullAttention, KVCacheGroup, OffloadConfig, OffloadRuntime
from aoffload._reference.engine.batching import EngineOptions
from aoffload._reference.engine.engine import PagedEngine
from aoffload._reference.engine.layers import LayerGroup
from aoffload._reference.engine.loop import EngineClosed, StepFailed
from aoffload._reference.engine.paged import PagedBatch
from aoffload._transfer.local import LocalTransport
from aoffload.demo.backends import Tampering
from aoffload.demo.options import Corrupt
from aoffload.errors import InvalidArgument, OutOfBlocks, RequestAborted

pytestmark = pytest.mark.anyio

VOCABULARY = 997
OPTIONS = EngineOptions(block_size=4, prefill_tokens=8, decode_rows=4, max_running=8)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def continuation(tokens: Sequence[int]) -> int:
    """What the model says next: a function of every token and its position."""
    return sum((index + 1) * (token + 1) for index, token in enumerate(tokens)) % VOCABULARY


def answer(prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(continuation(tokens))
    return tuple(tokens[len(prompt) :])


class AddingModel:
    """Keeps each token and its position as its KV, and adds up what it finds: one wrong block is a wrong answer."""

    vocab_size = VOCABULARY
    groups = (LayerGroup("full", (0,)),)

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.may_end.set()
        self.began = threading.Event()
        self.fails_on: int | None = None

    def new_kv_cache(self, num_blocks: int, block_size: int) -> torch.Tensor:
        return torch.full((num_blocks, 1, 2, block_size, 1, 1), -1.0)

    def forward(self, batch: PagedBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        self.began.set()
        assert self.may_end.wait(60)
        if self.fails_on is not None and self.fails_on in batch.input_ids:
            raise ArithmeticError("the device is on fire")
        flat = kv_cache[:, 0, :, :, 0, 0]
        flat[batch.slot_blocks[0], 0, batch.slot_offsets] = batch.input_ids.float()
        flat[batch.slot_blocks[0], 1, batch.slot_offsets] = batch.positions.float()
        logits = torch.zeros(batch.num_sequences, VOCABULARY)
        for row, span in enumerate(batch.spans):
            tokens, positions = (flat[span.tables[0], which].reshape(-1)[: span.kv_len] for which in (0, 1))
            total = int(((positions.long() + 1) * (tokens.long() + 1)).sum())
            logits[row, total % VOCABULARY] = 1.0
        return logits


@attrs.frozen
class Bench:
    model: AddingModel
    runtime: OffloadRuntime
    engine: PagedEngine

    async def ask(self, prompt: Sequence[int], num_tokens: int = 3, **options: Any) -> Any:
        """Generate, and check the answer."""
        generation = await self.engine.generate(prompt, num_tokens, **options)
        assert generation.token_ids == answer(prompt, num_tokens)
        sources = generation.num_device_tokens, generation.num_host_tokens, generation.num_computed_tokens
        assert sum(sources) == generation.num_prompt_tokens == len(prompt)
        return generation

    async def check_no_pins(self) -> None:
        await self.runtime.flush()
        self.runtime.check_integrity()
        statistics = self.runtime.statistics()
        assert (statistics.device.num_pinned, statistics.host.num_pinned) == (0, 0)
        engine = self.engine.statistics()
        assert (engine.num_waiting, engine.num_prefilling, engine.num_decoding) == (0, 0, 0)


@asynccontextmanager
async def serving(
    num_blocks: int = 40,
    options: EngineOptions = OPTIONS,
    tampering: Tampering | None = None,
    on_step: Callable[[int], None] = lambda _: None,
) -> AsyncIterator[Bench]:
    model = AddingModel()
    kv_cache = model.new_kv_cache(num_blocks + 1 + options.num_scratch_blocks, options.block_size)
    owned = kv_cache[: num_blocks + 1]
    config = OffloadConfig(
        groups=[KVCacheGroup("full", attention=FullAttention(), block_size=options.block_size)],
        num_host_blocks=200,
        verify=True,
    )
    transport = LocalTransport([owned], backend=tampering.make_backend if tampering is not None else None)
    async with OffloadRuntime(config, transport=transport) as runtime:
        async with PagedEngine(model, runtime, kv_cache, options, on_step=on_step) as engine:
            bench = Bench(model, runtime, engine)
            yield bench
        # Only now: a forward that still runs holds what it touches, though its clients have gone.
        await bench.check_no_pins()


def prompt_of(number: int, num_tokens: int = 22) -> list[int]:
    return [(number * 31 + index * 7) % VOCABULARY for index in range(num_tokens)]


async def reached(event: threading.Event) -> None:
    """Wait until another thread has set `event`."""
    await anyio.to_thread.run_sync(event.wait, 60)
    assert event.is_set()


async def test_many_at_once_on_few_blocks() -> None:
    """More requests than places, and more tokens than blocks: each gets its own answer, and nothing is left."""
    async with serving(num_blocks=16) as bench, anyio.create_task_group() as clients:
        for number in range(24):
            clients.start_soon(bench.ask, prompt_of(number, 9 + number), 1 + number % 5)


async def test_a_shared_prefix_is_computed_once() -> None:
    """A second prompt with the same beginning hits the device, up to the last point of the grid."""
    async with serving() as bench:
        first = await bench.ask(prompt_of(1))
        second = await bench.ask([*prompt_of(1)[:20], 5, 6, 7])
    assert (first.num_device_tokens, first.num_computed_tokens) == (0, 22)
    assert (second.num_device_tokens, second.num_computed_tokens) == (16, 7)
    assert first.logits_digests[0] != second.logits_digests[0]


async def test_an_evicted_prefix_comes_back_from_host_memory() -> None:
    """What others pushed off the device is loaded, not computed again, and gives the same logits."""
    async with serving(num_blocks=16) as bench:
        first = await bench.ask(prompt_of(1, 40))
        for number in (2, 3):
            await bench.ask(prompt_of(number, 40))
        again = await bench.ask(prompt_of(1, 40))
    assert (again.num_device_tokens, again.num_host_tokens, again.num_computed_tokens) == (0, 32, 8)
    assert again.logits_digests == first.logits_digests


@pytest.mark.parametrize("reuse_decoded", [False, True])
async def test_decoded_blocks_are_reused_only_on_request(reuse_decoded: bool) -> None:
    """By default the next turn computes the answer again, on the grid; `reuse_decoded` makes it a hit."""
    async with serving(options=attrs.evolve(OPTIONS, reuse_decoded=reuse_decoded)) as bench:
        prompt = prompt_of(1, 17)
        first = await bench.ask(prompt, 16)
        second = await bench.ask([*prompt, *first.token_ids, 5, 6])
    assert second.num_device_tokens == (32 if reuse_decoded else 16)


@pytest.mark.parametrize("reuse_decoded", [False, True])
async def test_only_whole_slices_are_cached(reuse_decoded: bool) -> None:
    """The shorter slice at a prompt's end is not committed: a longer prompt would find its blocks, and have other bits
    than where it came first."""
    async with serving(options=attrs.evolve(OPTIONS, reuse_decoded=reuse_decoded)) as bench:
        await bench.ask(prompt_of(1, 22), 1)
        found = bench.runtime.lookup([*prompt_of(1, 22), *range(8)])
    assert found.num_device_tokens == (20 if reuse_decoded else 16)


async def test_a_load_that_fails_half_way_is_a_miss_from_there_on() -> None:
    """Corrupt blocks are computed again from the grid, with the same bits; what is cached stays untouched."""
    tampering = Tampering.of(Corrupt.CHECKSUM)
    async with serving(num_blocks=24, tampering=tampering) as bench:
        prompt = prompt_of(1, 70)
        first = await bench.ask(prompt)
        for number in (2, 3):
            await bench.ask(prompt_of(number, 70))
        again = await bench.ask(prompt)
        assert tampering.num_before == 2
        assert 0 < again.num_host_tokens < 64
        third = await bench.ask(prompt)
    assert first.logits_digests == again.logits_digests == third.logits_digests


@pytest.mark.parametrize("num_passes", range(0, 60, 3))
async def test_a_client_may_leave_at_any_time(num_passes: int) -> None:
    """Wherever a client is cancelled, its blocks come back, and the others get their answers."""
    async with serving(num_blocks=16) as bench, anyio.create_task_group() as clients:
        for number in range(4):
            clients.start_soon(bench.ask, prompt_of(number))
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as pair:

                async def leave() -> None:
                    for _ in range(num_passes):
                        await anyio.lowlevel.checkpoint()
                    scope.cancel()

                pair.start_soon(bench.ask, prompt_of(9), 4)
                pair.start_soon(leave)


@pytest.mark.parametrize("num_steps", range(1, 14))
async def test_a_client_may_leave_after_any_step(num_steps: int) -> None:
    """The same between any two steps of the engine."""
    scope = anyio.CancelScope()

    def on_step(done: int) -> None:
        if done == num_steps:
            scope.cancel()

    async with serving(num_blocks=16, on_step=on_step) as bench, anyio.create_task_group() as clients:
        for number in range(3):
            clients.start_soon(bench.ask, prompt_of(number))
        with scope:
            await bench.ask(prompt_of(9), 4)


async def test_a_step_keeps_the_blocks_of_who_has_left() -> None:
    """While a forward runs nobody else is given its blocks, though its request is gone; afterwards they are free."""
    async with serving() as bench, anyio.create_task_group() as clients:
        bench.model.may_end.clear()
        bench.model.began.clear()
        clients.start_soon(bench.ask, prompt_of(1))
        await reached(bench.model.began)
        held = bench.runtime.statistics().device.num_free
        clients.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            assert bench.runtime.statistics().device.num_free == held
            bench.model.may_end.set()
            await bench.ask(prompt_of(2))


async def test_a_failed_forward_aborts_its_step_and_nothing_else() -> None:
    """The request in it gets a typed error with the cause; the engine goes on, and the next one is served."""
    async with serving() as bench, anyio.create_task_group() as clients:
        clients.start_soon(bench.ask, prompt_of(1), 9)
        bench.model.fails_on = 996
        with pytest.raises(StepFailed, match="the device is on fire") as failure:
            await bench.engine.generate([996, 1, 2], 3, request_id="bad")
        assert failure.value.request_ids == ("bad",)
        assert isinstance(failure.value.__cause__, ArithmeticError)
        await bench.ask(prompt_of(2))


async def test_an_error_in_on_token_is_the_client_s_own() -> None:
    """A callback that raises ends its request and no other."""

    def on_token(_: int) -> None:
        raise KeyError("mine")

    async with serving() as bench, anyio.create_task_group() as clients:
        clients.start_soon(bench.ask, prompt_of(1), 9)
        with pytest.raises(KeyError, match="mine"):
            await bench.engine.generate(prompt_of(2), 3, on_token=on_token)


async def test_who_has_left_hears_nothing_any_more() -> None:
    """A step that was running when its client left tells nobody."""
    seen: list[int] = []
    async with serving() as bench, anyio.create_task_group() as clients:
        heard = anyio.Event()

        def on_token(token: int) -> None:
            seen.append(token)
            heard.set()
            bench.model.may_end.clear()
            bench.model.began.clear()

        async def ask() -> None:
            await bench.engine.generate(prompt_of(1), 9, on_token=on_token)

        clients.start_soon(ask)
        await heard.wait()
        await reached(bench.model.began)  # the second token is being computed
        clients.cancel_scope.cancel()
        bench.model.may_end.set()
    assert len(seen) == 1


async def test_tokens_come_one_by_one() -> None:
    """`on_token` sees each token of the answer, in order, before `generate` returns."""
    seen: list[int] = []
    async with serving() as bench:
        generation = await bench.ask(prompt_of(1), 5, on_token=seen.append)
    assert tuple(seen) == generation.token_ids


async def test_an_answer_ends_where_its_client_has_enough() -> None:
    """`until` ends the answer with the token it says True to, as a request that is done: its prompt was committed."""
    prompt = prompt_of(1)
    third = answer(prompt, 3)[-1]
    async with serving() as bench:
        generation = await bench.engine.generate(prompt, 9, until=lambda token: token == third)
        assert generation.token_ids == answer(prompt, 3)
        again = await bench.ask(prompt)
        assert again.num_device_tokens == 16


@pytest.mark.parametrize(
    ("options", "found"), [({"reads_cache": False}, (0, 0)), ({"store": "none"}, (0, 0)), ({}, (0, 32))]
)
async def test_a_request_says_what_it_reads_and_what_is_stored_of_it(options: Any, found: tuple[int, int]) -> None:
    """`reads_cache=False` computes what is cached; what `store="none"` has computed is not in host memory."""
    reads = {name: value for name, value in options.items() if name == "reads_cache"}
    async with serving(num_blocks=16) as bench:
        await bench.ask(prompt_of(1, 40), **{name: options[name] for name in options if name not in reads})
        for number in (2, 3):
            await bench.ask(prompt_of(number, 40))
        again = await bench.ask(prompt_of(1, 40), **reads)
    assert (again.num_device_tokens, again.num_host_tokens) == found


async def test_the_runtime_may_cancel_a_request() -> None:
    """`runtime.cancel` reaches a client that waits for the engine: `RequestAborted` with the reason."""
    async with serving() as bench:

        def cancel(_: int) -> None:
            bench.runtime.cancel("r", "the operator said so")

        with pytest.raises(RequestAborted, match="the operator said so"):
            await bench.engine.generate(prompt_of(1), 3, request_id="r", on_token=cancel)
        await bench.ask(prompt_of(1))


async def test_a_deadline_ends_a_request() -> None:
    """A deadline that is over is an abort, wherever the request is; the engine goes on."""
    async with serving() as bench:
        bench.model.may_end.clear()
        with pytest.raises(RequestAborted, match="deadline"):
            await bench.engine.generate(prompt_of(1), 3, deadline_s=0.01)
        bench.model.may_end.set()
        await bench.ask(prompt_of(1))


async def test_a_prompt_larger_than_the_pool_is_refused() -> None:
    """It gets `OutOfBlocks` and nobody else notices."""
    async with serving(num_blocks=16) as bench:
        with pytest.raises(OutOfBlocks):
            await bench.engine.generate(prompt_of(1, 70), 3)
        await bench.ask(prompt_of(1))


@pytest.mark.parametrize("value", [0, -1, True, 1.5])
async def test_bad_lengths_are_named(value: Any) -> None:
    """A number of tokens that makes no sense is refused at the door."""
    async with serving() as bench:
        with pytest.raises(InvalidArgument, match="max_new_tokens"):
            await bench.engine.generate(prompt_of(1), value)


@pytest.mark.parametrize("token_ids", [[], [-1], [[1, 2]], ["a"], [1.5], [VOCABULARY], [2**40]])
async def test_bad_token_ids_are_named(token_ids: Any) -> None:
    """Ids that are none, or that the model doesn't have, are refused at the door, and the engine goes on."""
    async with serving() as bench:
        with pytest.raises(InvalidArgument, match="token_ids"):
            await bench.engine.generate(token_ids, 3)
        await bench.ask(prompt_of(1))


async def test_the_caller_may_use_its_list_again() -> None:
    """The prompt is what it was when `generate` was called, whatever its owner does with the list meanwhile."""
    async with serving() as bench, anyio.create_task_group() as clients:
        prompt = prompt_of(1)

        async def ask() -> None:
            generation = await bench.engine.generate(prompt, 3)
            assert generation.token_ids == answer(prompt_of(1), 3)

        bench.model.may_end.clear()
        clients.start_soon(ask)
        await reached(bench.model.began)
        prompt[:] = [5] * 22
        bench.model.may_end.set()


async def test_scratch_blocks_are_asked_for() -> None:
    """A KV tensor without room for the engine's scratch blocks is refused: they must not be the runtime's."""
    async with serving() as bench:
        with pytest.raises(InvalidArgument, match="kv_cache"):
            PagedEngine(bench.model, bench.runtime, bench.engine.kv_cache[:-1], OPTIONS)


async def test_closing_wakes_who_still_waits() -> None:
    """Leaving the engine with requests inside ends them with `EngineClosed`; so does asking a closed engine."""
    async with anyio.create_task_group() as outside:
        async with serving() as bench:
            bench.model.may_end.clear()
            bench.model.began.clear()

            async def ask() -> None:
                with pytest.raises(EngineClosed):
                    await bench.engine.generate(prompt_of(1), 3)

            async def finish() -> None:
                bench.model.may_end.set()

            outside.start_soon(ask)
            await reached(bench.model.began)
            outside.start_soon(finish)
            await bench.engine.__aexit__(None, None, None)
            with pytest.raises(EngineClosed):
                await bench.engine.generate(prompt_of(2), 3)
            await bench.engine.__aenter__()
            await bench.ask(prompt_of(3))


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_a_natively_cancelled_task_is_like_any_other() -> None:
    """`asyncio.Task.cancel()` on a client in the middle of a forward harms nobody."""
    async with serving() as bench:
        bench.model.may_end.clear()
        bench.model.began.clear()
        task = asyncio.create_task(bench.ask(prompt_of(1)))
        await reached(bench.model.began)
        task.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        bench.model.may_end.set()
        await bench.ask(prompt_of(2))
