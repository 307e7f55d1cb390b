"""A small decoder served with head starts, and a backend whose copies a test can watch, hold and break."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import anyio
import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from aoffload import OffloadConfig, OffloadRuntime
from aoffload._kernel.plans import TransferPlan
from aoffload._kernel.states import Direction
from aoffload._reference.engine.batching import EngineOptions, PrefillStart
from aoffload._reference.engine.engine import PagedEngine
from aoffload._reference.engine.loop import Forward
from aoffload._reference.engine.paged import SequenceSlice
from aoffload._transfer.backends.base import CopyBackend
from aoffload._transfer.backends.cpu import CpuBackend
from aoffload._transfer.local import LocalTransport
from aoffload._transfer.region import KVRegion
from aoffload.integrations import Decoder, DecoderConfig, kv_cache_groups, layer_regions

GUARD_S = 60.0
SIZES = DecoderConfig(
    vocab_size=997, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=16,
    max_positions=256,
)  # fmt: skip
NUM_LAYERS = SIZES.num_layers
OPTIONS = EngineOptions(
    block_size=4, prefill_tokens=8, decode_rows=4, max_running=8, prefill_start=PrefillStart.BY_LAYER
)
PATIENT = attrs.evolve(OPTIONS, prefill_start=PrefillStart.LOADED)


class StagedBackend(CpuBackend):
    """Notes each region that it copies; may wait for leave before each, or fail at one."""

    def __init__(self, regions: tuple[KVRegion, ...]) -> None:
        super().__init__(regions)
        self.events: list[str] = []
        self.may_copy: threading.Semaphore | None = None
        self.holds_at: int | None = None
        self.is_held = threading.Event()
        self.may_go_on = threading.Event()
        self.fails: Callable[[int], bool] = lambda index: False
        self.exchanges = False

    def after_copy(self, plan: TransferPlan) -> None:
        if self.exchanges and plan.direction is Direction.LOAD:
            one, other = plan.destination_ids[:2]
            blocks = self.device_block(one), self.device_block(other)
            self.write_device_block(one, blocks[1])
            self.write_device_block(other, blocks[0])

    def copy_region(self, index: int, on_device: NDArray[np.int64], on_host: NDArray[np.int64]) -> None:
        if self.may_copy is not None:
            assert self.may_copy.acquire(timeout=GUARD_S)
        if index == self.holds_at:
            self.is_held.set()
            assert self.may_go_on.wait(GUARD_S)
        if self.fails(index):
            raise OSError("the cable fell out")
        super().copy_region(index, on_device, on_host)
        self.events.append(f"copied {index}")


class WatchedDecoder(Decoder):
    """Says which layer it comes to in a forward that has something to wait for."""

    def __init__(self) -> None:
        super().__init__(SIZES, seed=3)
        self.on_layer: Callable[[int], None] = lambda layer: None
        self.error: Exception | None = None

    def _attention(self, *inputs: Any) -> Any:
        *_, batch, place = inputs
        if batch.fences.slots:
            self.on_layer(place.slot)
            if self.error is not None:
                raise self.error
        return super()._attention(*inputs)


@attrs.frozen
class Bench:
    model: WatchedDecoder
    runtime: OffloadRuntime
    engine: PagedEngine
    backend: CopyBackend

    @property
    def staged(self) -> StagedBackend:
        assert isinstance(self.backend, StagedBackend)
        return self.backend

    async def ask(self, prompt: Sequence[int], num_tokens: int = 3, **options: Any) -> Any:
        """Generate, and check that it is what a model gives that computes everything."""
        generation = await self.engine.generate(prompt, num_tokens, **options)
        expected = expected_of(tuple(prompt), num_tokens)
        assert (generation.token_ids, generation.logits_digests) == expected
        return generation

    def hold_until_forward(self) -> None:
        """The next loads wait for a forward that waits for them."""
        backend = self.staged
        backend.holds_at = 0
        self.model.on_layer = lambda layer: backend.may_go_on.set()

    async def push_out(self, *prompts: Sequence[int]) -> None:
        """Compute `prompts`, then others, until what is known of them is in host memory only."""
        for prompt in prompts:
            await self.ask(prompt)
        for number in range(100, 104):
            await self.ask(prompt_of(number, 44))
        await self.runtime.flush()

    async def check_no_pins(self) -> None:
        await self.runtime.flush()
        await anyio.wait_all_tasks_blocked()  # clients that a load's end has just woken
        self.runtime.check_integrity()
        statistics = self.runtime.statistics()
        assert (statistics.device.num_pinned, statistics.host.num_pinned) == (0, 0)
        engine = self.engine.statistics()
        assert (engine.num_waiting, engine.num_prefilling, engine.num_decoding) == (0, 0, 0)
        assert not self.engine._line_up.head_starts


@asynccontextmanager
async def serving(
    num_blocks: int = 30,
    options: EngineOptions = OPTIONS,
    backend: Callable[[tuple[KVRegion, ...]], CopyBackend] = StagedBackend,
    regions: Callable[[torch.Tensor], Any] = layer_regions,
    load_timeout_s: float = 30.0,
) -> AsyncIterator[Bench]:
    model = WatchedDecoder()
    kv_cache = model.new_kv_cache(num_blocks + 1 + options.num_scratch_blocks, options.block_size)
    config = OffloadConfig(
        groups=kv_cache_groups(model.groups, options.block_size),
        num_host_blocks=400,
        verify=True,
        load_timeout_s=load_timeout_s,
    )
    transport = LocalTransport(regions(kv_cache[: num_blocks + 1]), backend)
    async with OffloadRuntime(config, transport=transport) as runtime:
        async with PagedEngine(model, runtime, kv_cache, options) as engine:
            bench = Bench(model, runtime, engine, transport.backend)
            yield bench
        bench.staged.events.append("engine closed")
        bench.staged.may_go_on.set()
        await bench.check_no_pins()


@cache
def expected_of(prompt: tuple[int, ...], num_tokens: int) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
    """Tokens and digests, on a device that nothing comes to and nothing leaves."""
    model, tokens, digests, start = WatchedDecoder(), list(prompt), list[bytes](), 0
    kv_cache, table = model.new_kv_cache(67, OPTIONS.block_size), [list(range(1, 66))]
    dummies = [SequenceSlice([0], 0, [[66]])] * (OPTIONS.decode_rows - 1)
    while len(digests) < num_tokens:
        is_decoding = start >= len(prompt)
        stop = start + 1 if is_decoding else min(start + OPTIONS.prefill_tokens, len(prompt))
        slices = [SequenceSlice(tokens[start:stop], start, table), *(dummies if is_decoding else ())]
        forward = Forward(model, kv_cache, OPTIONS.block_size, slices, 1)
        forward.run()
        start = stop
        if start >= len(prompt):
            tokens.append(forward.outputs[0].token_id)
            digests.append(forward.outputs[0].logits_digest)
    return tuple(tokens[len(prompt) :]), tuple(digests)


def prompt_of(number: int, num_tokens: int = 46) -> list[int]:
    return [(number * 31 + index * 7) % SIZES.vocab_size for index in range(num_tokens)]
