"""Prompts that start before their load is over: the answers are the same and come sooner."""

from __future__ import annotations

import random
import threading
from typing import Any

import anyio
import attrs
import pytest
import torch
from layered import GUARD_S, NUM_LAYERS, OPTIONS, PATIENT, Bench, WatchedDecoder, prompt_of, serving

from aoffload._reference.engine.batching import LineUp, Step
from aoffload._reference.engine.loop import EngineClosed, Forward, StepFailed
from aoffload._transfer.fences import LoadedRegion, RegionFences
from aoffload._transfer.region import regions_of
from aoffload.errors import RegionError, RegionNotLoaded
from aoffload.integrations import LayerFences, SequenceSlice, layer_regions

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def num_begun(bench: Bench) -> tuple[int, int]:
    """Head starts, and those that were good for something."""
    statistics = bench.engine.statistics()
    return statistics.num_head_starts, statistics.num_head_starts_used


async def reached(event: threading.Event) -> None:
    """Wait until another thread has set `event`."""
    assert await anyio.to_thread.run_sync(event.wait, GUARD_S)


async def test_a_layer_is_computed_before_the_next_one_is_loaded() -> None:
    """The forward is at layer `i` when region `i + 1` has not been copied yet; the answer is the same, bit for bit."""
    async with serving() as bench:
        await bench.push_out(prompt_of(1))
        backend = bench.staged
        backend.events.clear()
        backend.may_copy = threading.Semaphore(1)

        def on_layer(layer: int) -> None:
            if layer:
                backend.events.append(f"computed {layer - 1}")
                assert backend.may_copy is not None
                backend.may_copy.release()

        bench.model.on_layer = on_layer
        generation = await bench.ask(prompt_of(1))
    assert backend.events == ["copied 0", "computed 0", "copied 1", "computed 1", "copied 2", "engine closed"]
    assert (generation.num_host_tokens, generation.num_computed_tokens) == (40, 6)
    assert num_begun(bench) == (1, 1)


async def test_without_the_option_nothing_begins_early() -> None:
    """By default a prompt is computed when its prefix is there."""
    async with serving(options=PATIENT) as bench:
        await bench.push_out(prompt_of(1))
        await bench.ask(prompt_of(1))
    assert num_begun(bench) == (0, 0)


async def test_one_region_for_all_layers_is_waited_for_by_each() -> None:
    """A KV tensor that was handed over as one region: no layer is early, and nothing is wrong."""
    async with serving(regions=lambda kv_cache: [kv_cache]) as bench:
        await bench.push_out(prompt_of(1))
        bench.hold_until_forward()
        generation = await bench.ask(prompt_of(1))
    assert generation.num_host_tokens == 40
    assert num_begun(bench) == (1, 1)


async def test_regions_that_are_no_layers_are_all_waited_for() -> None:
    """Keys and values of a layer as two regions: which one belongs to which layer nobody has said."""

    def halves(kv_cache: torch.Tensor) -> list[torch.Tensor]:
        return [kv_cache[:, layer, which] for layer in range(NUM_LAYERS) for which in (0, 1)]

    async with serving(regions=halves) as bench:
        await bench.push_out(prompt_of(1))
        bench.staged.events.clear()
        bench.hold_until_forward()
        seen: list[int] = []
        begun = bench.model.on_layer

        def on_layer(layer: int) -> None:
            begun(layer)
            seen.append(len(bench.staged.events))

        bench.model.on_layer = on_layer
        await bench.ask(prompt_of(1))
    assert seen[1:] == [2 * NUM_LAYERS] * 2
    assert num_begun(bench) == (1, 1)


@pytest.mark.parametrize("failing", range(NUM_LAYERS))
async def test_a_load_that_fails_half_way_costs_only_time(failing: int) -> None:
    """The layers before it were computed; all is computed again from what is there, and the answer is the same."""
    async with serving() as bench:
        await bench.push_out(prompt_of(1))
        bench.hold_until_forward()
        bench.staged.fails = lambda index: index == failing
        generation = await bench.ask(prompt_of(1))
        assert num_begun(bench) == (1, 0)
        bench.staged.fails = lambda index: False
        await bench.ask(prompt_of(1))
    assert (generation.num_device_tokens, generation.num_host_tokens) == (0, 0)


async def test_blocks_that_turn_out_corrupt_are_computed_again() -> None:
    """A region's fence comes before anything is verified: what was computed on it is thrown away."""
    async with serving() as bench:
        await bench.push_out(prompt_of(1))
        bench.hold_until_forward()
        bench.staged.exchanges = True
        generation = await bench.ask(prompt_of(1))
    assert generation.num_computed_tokens == 46
    assert num_begun(bench) == (1, 0)


async def test_a_client_that_leaves_while_its_forward_waits() -> None:
    """The forward ends at once, everything it held is released, and the next request is served."""
    async with serving() as bench:
        await bench.push_out(prompt_of(1))
        backend = bench.staged
        backend.holds_at = 1
        async with anyio.create_task_group() as clients:
            clients.start_soon(bench.ask, prompt_of(1))
            await reached(backend.is_held)
            clients.cancel_scope.cancel()
        with anyio.fail_after(GUARD_S):
            await bench.ask(prompt_of(7))
        backend.may_go_on.set()
        backend.holds_at = None
        await bench.ask(prompt_of(1))
    assert bench.engine.statistics().num_head_starts_used <= 1


async def test_others_go_on_while_a_load_is_held() -> None:
    """A forward waits for a load at most until its client gives that up."""
    async with serving(load_timeout_s=0.05) as bench:
        await bench.push_out(prompt_of(1))
        backend = bench.staged
        backend.holds_at = 1
        with anyio.fail_after(GUARD_S):
            async with anyio.create_task_group() as clients:
                clients.start_soon(bench.ask, prompt_of(1))
                await reached(backend.is_held)
                clients.start_soon(bench.ask, prompt_of(7))
        backend.may_go_on.set()
    assert num_begun(bench) == (1, 0)


async def test_a_forward_that_fails_early_is_its_own_clients_error() -> None:
    """As a step that fails: this request gets it, and the engine goes on."""
    async with serving() as bench:
        await bench.push_out(prompt_of(1), prompt_of(2))
        bench.hold_until_forward()
        bench.model.error = ArithmeticError("the device is on fire")
        with pytest.raises(StepFailed, match="on fire"):
            await bench.ask(prompt_of(1), request_id="burning")
        bench.model.error = None
        await bench.ask(prompt_of(2))


async def test_closing_the_engine_does_not_wait_for_a_load() -> None:
    """A request that still generates gets `EngineClosed`, though its layers are not there."""

    async def ask(bench: Bench) -> None:
        with pytest.raises(EngineClosed):
            await bench.ask(prompt_of(1))

    async with anyio.create_task_group() as clients:
        async with serving() as bench:
            await bench.push_out(prompt_of(1))
            bench.staged.events.clear()
            bench.staged.holds_at = 1
            clients.start_soon(ask, bench)
            await reached(bench.staged.is_held)
    assert bench.staged.events == ["copied 0", "engine closed", "copied 1", "copied 2"]


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_fails_the_answers_are_the_same(seed: int) -> None:
    """Few blocks, shared prefixes, loads that fail at any region, clients that leave: every answer bit for bit."""
    draw = random.Random(seed)
    fault = random.Random(seed + 1)  # of the copy thread alone
    async with serving(num_blocks=draw.choice([30, 40])) as bench:
        if seed % 3:
            bench.staged.fails = lambda index: fault.random() < 0.1

        async def converse(number: int) -> None:
            prompt = prompt_of(number % 5, draw.randint(20, 60))
            for _ in range(4):
                with anyio.CancelScope() as scope:
                    leave = scope.cancel if draw.random() < 0.2 else lambda: None
                    await bench.ask(prompt, draw.randint(2, 4), on_token=lambda _, leave=leave: leave())
                prompt = [*prompt, *prompt_of(draw.randint(0, 9), draw.randint(1, 6))]

        with anyio.fail_after(60):
            async with anyio.create_task_group() as clients:
                for number in range(8):
                    clients.start_soon(converse, number)


def test_the_end_of_a_step_does_not_wait_for_a_load() -> None:
    """Where a task is cancelled natively, the loop's thread waits for the forward, and the load's end may need it."""
    model, came = WatchedDecoder(), threading.Event()
    model.on_layer = lambda layer: came.set()
    fences = LayerFences.of([LoadedRegion((RegionFences(1)[0],))], NUM_LAYERS)
    part = SequenceSlice([1, 2], 0, [[1]])
    forward = Forward(model, model.new_kv_cache(3, 4), 4, [part], 1, fences)
    thread = threading.Thread(target=forward.run, daemon=True)
    thread.start()
    assert came.wait(GUARD_S)
    finishing = threading.Thread(target=forward.finish, daemon=True)
    finishing.start()
    for each in (finishing, thread):
        each.join(GUARD_S)
        assert not each.is_alive()
    assert isinstance(forward.error, RegionNotLoaded)


# -- who goes first ---------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Head:
    name: str
    can_begin: bool = True
    is_arriving: bool = False


@attrs.define(eq=False)
class Sequence:
    name: str
    is_ready: bool = True

    def next_slice(self) -> SequenceSlice:
        return SequenceSlice([1], 0, [[1]])


def next_of(line_up: LineUp) -> Any:
    step: Any = line_up.next_step()
    return step and (step.sequences[0] if isinstance(step, Step) else step).name


def test_whoever_has_its_prefix_goes_first() -> None:
    """A forward that may have to wait holds nobody up who needs not: ready prompts come first, decoding before loads of
    which nothing has come, and after those whose copy has begun."""
    line_up: Any = LineUp(OPTIONS, SequenceSlice([0], 0, [[9]]))
    assert next_of(line_up) is None
    line_up.head_starts += [Head("over", can_begin=False, is_arriving=True), Head("coming"), Head("later")]
    assert next_of(line_up) == "coming"
    line_up.decoding += [Sequence("decodes")]
    assert next_of(line_up) == "decodes"
    line_up.head_starts += [Head("there", is_arriving=True)]
    assert next_of(line_up) == "there"
    line_up.prefilling += [Sequence("waits", is_ready=False)]
    assert next_of(line_up) == "there"
    line_up.prefilling += [Sequence("ready")]
    assert next_of(line_up) == "ready"


def test_the_regions_of_a_kv_tensor_are_its_slots() -> None:
    """A block of region `i` is slot `i` of its row, and all of them together are the row."""
    model = WatchedDecoder()
    kv_cache = model.new_kv_cache(5, 4)
    regions = regions_of(layer_regions(kv_cache[:4]))
    assert [region.num_blocks for region in regions] == [4] * NUM_LAYERS
    assert sum(region.block_bytes for region in regions) == kv_cache[0].nbytes
    for layer, region in enumerate(regions):
        assert region.address == kv_cache[0, layer].data_ptr()
        assert region.block_stride_bytes == kv_cache[0].nbytes
    with pytest.raises(RegionError, match="contiguous"):
        layer_regions(kv_cache[..., ::2])
