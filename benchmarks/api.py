"""The cycle of `cycle.py` through the public async API: 64 requests at a time, token ids as arrays, real copies.

Blocks have 64 bytes, so that bookkeeping and hand-over are measured. Two sets of prompts take turns on a device pool
that holds one of them. A batch is one task for each prompt of a set. The peer serves one request after the other, with
the digests that it needs, because its cost per request does not depend on the number of waiting requests.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import anyio
import torch

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime

from .cycle import BLOCK_SIZE, SIZES, PerBlock, Tokens, prompts_of
from .harness import SAMPLE_S, Rounds, Row, Sample, Subject, timed
from .peer import Peer

__all__ = ["FLOATS_PER_BLOCK", "NUM_AT_A_TIME", "batch", "run"]

WANTED = (4.0, 25.0, 120.0, 180.0)
NUM_AT_A_TIME = 64
SECONDS_PER_ROW = 4.0
BACKENDS = ("asyncio", "trio")
FLOATS_PER_BLOCK = 16


def run(vllm: Peer | None) -> Iterator[Row]:
    """A row for each length of the prompt and each event loop."""
    for num_blocks, wanted in zip(SIZES, WANTED, strict=True):
        for backend in BACKENDS:
            yield anyio.run(measure, num_blocks, wanted, backend, vllm, backend=backend)


async def measure(num_blocks: int, wanted: float, backend: str, vllm: Peer | None) -> Row:
    """Time of one request of a batch, and its ratio to the peer's time for one."""
    prompts = prompts_of(num_blocks, 2 * NUM_AT_A_TIME)
    sets = itertools.cycle((prompts[:NUM_AT_A_TIME], prompts[NUM_AT_A_TIME:]))
    groups = [KVCacheGroup("full", block_size=BLOCK_SIZE)]
    config = OffloadConfig(groups=groups, num_host_blocks=len(prompts) * num_blocks)
    kv_cache = torch.zeros(NUM_AT_A_TIME * (num_blocks + 1) + 1, FLOATS_PER_BLOCK)
    against, other = _other(num_blocks, vllm)
    async with OffloadRuntime(config, kv_cache) as runtime:
        for _ in range(2):
            await batch(runtime, next(sets))
            await runtime.flush()
        rounds = Rounds(("ours", against), seconds=SECONDS_PER_ROW)
        for name in rounds:
            rounds.add(name, await _sample(runtime, next(sets)) if name == "ours" else other())
        num_loaded = runtime.statistics().transfers.blocks_loaded
        assert num_loaded >= len(rounds.samples["ours"]) * NUM_AT_A_TIME * num_blocks, num_loaded
    measured = rounds.measured()
    return Row.faster(
        f"async API, {NUM_AT_A_TIME} at a time, {num_blocks * BLOCK_SIZE:,} tokens, {backend}",
        measured["ours"], against, measured[against], None if vllm is None else wanted,
    )  # fmt: skip


def _other(num_blocks: int, vllm: Peer | None) -> tuple[str, Subject]:
    if vllm is None:
        prompt = prompts_of(num_blocks, 1)
        by_blocks = PerBlock(num_blocks + 1, prompt)
        return "block by block", lambda: timed(lambda: by_blocks.cycle(prompt[0]), SAMPLE_S)
    vllm.ask("prepare_cycle", num_blocks=num_blocks)
    return "vLLM with its hashing", vllm.cycles(num_blocks, hashes=True)


async def _sample(runtime: OffloadRuntime, prompts: list[Tokens]) -> Sample:
    """One request's share of a batch."""
    cpu, wall = time.thread_time(), time.perf_counter()
    await batch(runtime, prompts)
    number = len(prompts)
    return Sample((time.perf_counter() - wall) / number, (time.thread_time() - cpu) / number)


async def batch(runtime: OffloadRuntime, prompts: list[Tokens]) -> None:
    """Serve all `prompts` at once, a task for each."""
    async with anyio.create_task_group() as clients:
        for prompt in prompts:
            clients.start_soon(_serve, runtime, prompt)


async def _serve(runtime: OffloadRuntime, prompt: Tokens) -> None:
    async with runtime.request(prompt) as request:
        await request.allocate()
        await request.load()
        request.commit(len(prompt))
