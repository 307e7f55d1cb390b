"""Requests that are preempted at random points, on a model of which one wrong block is a wrong answer."""

from __future__ import annotations

import random
from typing import Any

import anyio
import pytest
import torch
from windowed import OPTIONS, WINDOW, WindowedModel, answer

from aoffload import FullAttention, KVCacheGroup, OffloadConfig, OffloadRuntime, OutOfBlocks, Request, SlidingWindow
from aoffload._reference.engine.paged import PagedBatch, SequenceSlice

pytestmark = pytest.mark.anyio

KINDS = {"full": FullAttention(), "windows": SlidingWindow(WINDOW)}
SLICE = OPTIONS.prefill_tokens


class Storm:
    """A loop without batches: each client computes for itself, and gives up its blocks now and then."""

    def __init__(self, seed: int, runtime: OffloadRuntime, kv_cache: torch.Tensor) -> None:
        self.random = random.Random(seed)
        self.runtime, self.kv_cache, self.model = runtime, kv_cache, WindowedModel()
        self.num_preempted = self.num_reloaded = 0

    def forward(self, request: Request, tokens: list[int], start: int, stop: int) -> int:
        part = SequenceSlice(tokens[start:stop], start, request.block_ids)
        with self.runtime.step([request]):
            logits = self.model.forward(PagedBatch.of([part], OPTIONS.block_size), self.kv_cache)
        return int(logits[0].argmax())

    async def generate(self, prompt: list[int], num_tokens: int) -> tuple[int, ...]:
        tokens = list(prompt)
        async with self.runtime.request(tokens) as request:
            await request.allocate()
            ready = await request.load()
            while True:
                try:
                    ready = await self._go_on(request, tokens, ready, len(prompt) + num_tokens)
                except OutOfBlocks as error:
                    if not error.retryable:
                        raise
                    # Only waiters hold room: make way, and come back.
                    ready = await self._preempt(request, len(tokens))
                if len(tokens) == len(prompt) + num_tokens:
                    return tuple(tokens[len(prompt) :])
        raise AssertionError(request.reason)

    async def _go_on(self, request: Request, tokens: list[int], ready: int, num_tokens: int) -> int:
        """One slice, or one token; perhaps a preemption."""
        stop = min(len(tokens), ready + SLICE)
        await request.extend(stop)
        sampled = self.forward(request, tokens, ready, stop)
        is_new = stop == len(tokens)
        if is_new:
            tokens.append(sampled)
        request.commit(stop, [sampled] if is_new else ())
        await anyio.lowlevel.checkpoint()
        if len(tokens) < num_tokens and self.random.random() < 0.2:
            return await self._preempt(request, stop)
        return stop

    async def _preempt(self, request: Request, stop: int) -> int:
        found = await request.preempt()
        self.num_preempted += 1
        assert found.num_freed >= 0 and not any(request.block_ids)
        for _ in range(self.random.randint(0, 5)):
            await anyio.lowlevel.checkpoint()
        ready = await request.resume()
        self.num_reloaded += request.match.num_host_tokens > 0
        return ready


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_host_blocks", [0, 20, 200])
async def test_a_storm_of_preemptions_changes_no_answer(kind: str, num_host_blocks: int, anyio_backend: Any) -> None:
    """Every request is preempted at random points, the device and often the host nearly full: each answer is the one of
    an undisturbed run, and nothing is held when all have ended."""
    groups = [KVCacheGroup("full", block_size=4), KVCacheGroup("other", KINDS[kind], block_size=4)]
    config = OffloadConfig(groups=groups, num_host_blocks=num_host_blocks, verify=True)
    kv_cache = WindowedModel().new_kv_cache(61, OPTIONS.block_size)
    asks = [([seed % 3, *range(seed % 4 * 9, seed % 4 * 9 + 13 + seed)], 12) for seed in range(8)]
    async with OffloadRuntime(config, kv_cache) as runtime:
        storm = Storm(num_host_blocks, runtime, kv_cache)

        async def ask(prompt: list[int], num_tokens: int) -> None:
            assert await storm.generate(prompt, num_tokens) == answer(prompt, num_tokens)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as clients:
                for prompt, num_tokens in asks:
                    clients.start_soon(ask, prompt, num_tokens)
        await runtime.flush()
        runtime.check_integrity()
        found = runtime.statistics()
        assert (found.device.num_pinned, found.host.num_pinned) == (0, 0)
        assert found.transfers.blocks_corrupt == 0
    assert storm.num_preempted > 8 and (storm.num_reloaded > 0 or num_host_blocks < 200)  # a full host keeps little
