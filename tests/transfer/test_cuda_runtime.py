"""A runtime on a simulated device: computed and loaded bytes are right in any order of streams."""

from __future__ import annotations

import random
import threading
import zlib
from array import array
from functools import partial

import anyio
import pytest
import structlog
import torch
from cuda_mutants import Unfenced, Unproven
from simulated_cuda import SimulatedCuda, on

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime
from aoffload._transfer.backends.cuda.backend import CudaBackend
from aoffload._transfer.backends.cuda.events import AdaptivePolling
from aoffload._transfer.local import LocalTransport

BLOCK_SIZE = 4
NUM_DEVICE, NUM_HOST = 20, 200
NUM_REQUESTS = 160
TOKENS = list(range(17))
CONFIG = OffloadConfig(groups=[KVCacheGroup("full", block_size=BLOCK_SIZE)], num_host_blocks=NUM_HOST)

pytestmark = pytest.mark.anyio


def content_of(tokens: list[int], index: int) -> int:
    """What a forward writes into the block at `index`: it depends on everything before."""
    return zlib.crc32(array("i", tokens[: (index + 1) * BLOCK_SIZE]).tobytes()) & 0x7FFF_FFFF


class Engine:
    """Gives forwards to the compute stream and goes on at once, as an engine on a GPU does."""

    def __init__(self, cuda: SimulatedCuda, runtime: OffloadRuntime, pool: torch.Tensor) -> None:
        self.cuda, self.runtime, self.pool = cuda, runtime, pool
        self.num_wrong = self.num_hits = self.num_loaded = 0

    async def serve(self, tokens: list[int]) -> None:
        async with self.runtime.request(tokens) as request:
            await request.allocate()
            num_ready = await request.load()
            self.num_loaded += request.match.num_host_tokens
            with self.runtime.step([request]):
                block_ids = request.block_ids[0]
                for index in range(num_ready // BLOCK_SIZE):
                    self.check(block_ids[index], content_of(tokens, index))
                for index in range(num_ready // BLOCK_SIZE, len(block_ids)):
                    self.compute(block_ids[index], content_of(tokens, index))
            request.commit(len(tokens))

    def check(self, block_id: int, wanted: int) -> None:
        def look() -> None:
            self.num_hits += 1
            self.num_wrong += not bool((self.pool[block_id] == wanted).all())

        self.cuda.compute_on(self.cuda.compute, look)

    def compute(self, block_id: int, content: int) -> None:
        self.cuda.compute_on(self.cuda.compute, lambda: self.pool[block_id].fill_(0))
        self.cuda.compute_on(self.cuda.compute, lambda: self.pool[block_id].fill_(content))


async def worked(backend: type[CudaBackend], seed: int) -> Engine:
    """Conversations that share prefixes, several at a time, on a pool that holds few of them."""
    rng, cuda = random.Random(seed), SimulatedCuda(seed)
    pool = torch.zeros(NUM_DEVICE, 3, dtype=torch.int32)
    transport = LocalTransport(pool, partial(backend, options=on(cuda, waiting=AdaptivePolling())))
    prompts = [[number % 3] * 12 + [number] * rng.randint(1, 16) for number in range(16)]
    async with OffloadRuntime(CONFIG, transport=transport) as runtime:
        engine = Engine(cuda, runtime, pool)
        for _ in range(NUM_REQUESTS // 4):
            async with anyio.create_task_group() as clients:
                for prompt in rng.sample(prompts, 4):
                    clients.start_soon(engine.serve, prompt)
            if rng.random() < 0.2:
                await runtime.flush()
        await runtime.flush()
        runtime.check_integrity()
    cuda.finish()
    return engine


@pytest.mark.parametrize("seed", range(6))
async def test_every_hit_is_what_was_computed(seed: int) -> None:
    """Requests come and go without anybody waiting for the device; no hit reads other bytes than a forward wrote."""
    engine = await worked(CudaBackend, seed)
    assert engine.num_wrong == 0
    assert engine.num_hits > 20 and engine.num_loaded > 0


@pytest.mark.parametrize("mutant", [Unfenced, Unproven])
async def test_without_a_rule_some_hit_is_wrong(mutant: type[CudaBackend]) -> None:
    """The same work notices that copies overtake the compute, or are said to be over too early."""
    for seed in range(30):
        if (await worked(mutant, seed)).num_wrong:
            return
    pytest.fail("thirty rounds without a wrong byte")


async def stored_and_pushed_out(runtime: OffloadRuntime) -> None:
    """`TOKENS` are in host memory, and the device is full of something else."""
    for tokens in (TOKENS, *([number] * 70 for number in range(100, 104))):
        async with runtime.request(tokens) as request:
            await request.allocate()
            request.commit(len(tokens))
        await runtime.flush()


async def test_the_event_loop_goes_on_while_the_device_works() -> None:
    """A load that waits for a long forward holds up its request, not the loop."""
    cuda = SimulatedCuda()
    transport = LocalTransport(torch.zeros(NUM_DEVICE, 3), partial(CudaBackend, options=on(cuda)))
    async with OffloadRuntime(CONFIG, transport=transport) as runtime:
        await stored_and_pushed_out(runtime)
        release = cuda.hold(cuda.compute)
        async with runtime.request(TOKENS) as request:
            await request.allocate()
            assert request.match.num_host_tokens == 16
            pending = request.load_nowait()
            for _ in range(100):
                await anyio.lowlevel.checkpoint()
            assert not pending.is_over
            release()
            assert await pending.wait() == 16
            request.commit(17)


async def test_a_capture_in_progress_costs_a_hit_and_no_more() -> None:
    """What is committed or loaded while a graph is made of the caller's stream is not stored, or computed anew; nothing
    is recorded in the graph, and afterwards everything is as before."""
    cuda = SimulatedCuda()
    transport = LocalTransport(torch.zeros(NUM_DEVICE, 3), partial(CudaBackend, options=on(cuda)))
    async with OffloadRuntime(CONFIG, transport=transport) as runtime:
        await stored_and_pushed_out(runtime)
        cuda.compute.is_captured = True
        async with runtime.request(TOKENS) as request:
            await request.allocate()
            assert await request.load() == 0
            request.commit(17)
        async with runtime.request([200] * 30) as request:
            await request.allocate()
            request.commit(30)
        cuda.compute.is_captured = False
        await stored_and_pushed_out(runtime)
        async with runtime.request(TOKENS) as request:
            await request.allocate()
            assert await request.load() == 16
            request.commit(17)
        await runtime.flush()
        found = runtime.statistics()
        assert found.device.num_quarantined == found.host.num_quarantined == found.device.num_pinned == 0


async def test_an_engine_survives_the_loss_of_its_device() -> None:
    """A request that waits for a load computes instead; later requests are served without a copy, and nothing more is
    quarantined than what was under way. The cache turns itself off once, and says so once; closing raises nothing."""
    cuda, log = SimulatedCuda(), structlog.testing.CapturingLogger()
    transport = LocalTransport(torch.zeros(NUM_DEVICE, 3), partial(CudaBackend, options=on(cuda)))
    logger, threads = structlog.wrap_logger(log, processors=[]), _copy_threads()
    async with OffloadRuntime(CONFIG, transport=transport, logger=logger) as runtime:
        await stored_and_pushed_out(runtime)
        assert runtime.statistics().off_reason == ""
        cuda.hold(cuda.compute)
        num_copies = sum(entry[1] == "copies" for entry in cuda.log)
        async with runtime.request(TOKENS) as request:
            await request.allocate()
            pending = request.load_nowait()
            await anyio.to_thread.run_sync(cuda.wait_given, "copies", num_copies + 1)
            after = transport.record_fence()
            cuda.lose()
            assert await pending.wait() == 0
            request.commit(17, after=after)
        found = runtime.statistics()
        in_doubt = found.device.num_quarantined
        assert 0 < in_doubt <= 4
        assert "ILLEGAL_ADDRESS" in found.off_reason
        for number in range(20):
            async with runtime.request([200 + number % 5] * 30) as request:
                await request.allocate()
                await request.load()
                request.commit(30)
        await runtime.flush()
        found = runtime.statistics()
        assert (found.device.num_quarantined, found.host.num_quarantined) == (in_doubt, 0)
        assert found.device.num_pinned == 0
        runtime.check_integrity()
    events = [call.kwargs["event"] for call in log.calls]
    assert events.count("cache_turned_off") == 1
    assert events.count("job_failed") == 1
    assert "transport_failed" not in events
    assert _copy_threads() == threads


def _copy_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("aoffload-")}
