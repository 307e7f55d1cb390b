"""Hits and stores of shared prefixes in models with windows.

Users send one shared prefix, each with another question; the device is emptied between them. Limit: the whole prefix,
from the third user on. `TRACE=FILE` and `AGENTS=FILE` add replays of traces with `hash_ids` (one id for 512 tokens).
Their limit is a model with full attention alone and the same host memory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path

import anyio
import attrs
import numpy as np
import torch

from aoffload import ChunkedLocal, HostCache, KVCacheGroup, Ledger, OffloadConfig, OffloadRuntime, SlidingWindow, Tier
from aoffload.ledger import Prefix, Root
from aoffload.plan.replay import land
from aoffload.plan.trace import Blocks, Trace, read_trace

from .harness import Row
from .peer import Peer

__all__ = ["run"]

BLOCK = 16
FULL = KVCacheGroup("full", block_size=BLOCK)
MODELS = {
    "gpt-oss": (4096, KVCacheGroup("window", SlidingWindow(128), BLOCK)),
    "Gemma 3": (4096, KVCacheGroup("window", SlidingWindow(1024), BLOCK)),
    "Llama 4": (12_288, KVCacheGroup("chunk", ChunkedLocal(8192), BLOCK)),
}
"""Tokens of the shared prefix, and the group beside full attention."""
QUESTIONS = (20, 200, 400, 2000)
NUM_USERS, STEP_TOKENS, NUM_ANSWER_TOKENS = 5, 1024, 40
WINDOWS = (128, 1024)
TRACE_TOKENS = 512
HOST_SIZES = {"TRACE": (5000, 20_000), "AGENTS": (10_000,)}
"""Host sizes by trace: full attention and the window group could each hold this many trace blocks of 512 tokens."""

NAMES = {"TRACE": "conversation", "AGENTS": "agents"}
"""The traces as rows name them."""


def run(vllm: Peer | None = None) -> Iterator[Row]:
    for name, (prefix, window) in MODELS.items():
        for question in QUESTIONS:
            for blocks, found in (
                ("blocks of the ledger", anyio.run(hits_of_runtime, [FULL, window], prefix, question)),
                ("an engine's blocks", hits_of_host_cache([FULL, window], prefix, question)),
            ):
                yield Row(
                    name=f"{name}, question of {question:,}, {blocks}: least hit from the third user on",
                    value=min(found[2:]), unit="tokens", against="shared prefix", limit=prefix,
                    ratio=min(found[2:]) / prefix, wanted=1.0,
                )  # fmt: skip
    for variable, sizes in HOST_SIZES.items():
        if (named := os.environ.get(variable)) is None:
            print(f"windows: {variable}=FILE names a trace to replay", file=sys.stderr)
            continue
        trace = read_trace(Path(named))
        for size in sizes:
            yield from _on_trace(trace, NAMES[variable], size)


def _prompts(prefix: int, question: int) -> Iterator[list[int]]:
    for user in range(1, NUM_USERS + 1):
        yield [*range(prefix), *range(100_000 * user, 100_000 * user + question)]


async def hits_of_runtime(groups: Sequence[KVCacheGroup], prefix: int, question: int) -> list[int]:
    """The tokens that each user hits in host memory. A prompt is computed in steps."""
    found: list[int] = []
    num_blocks = 2 * len(groups) * (prefix + question) // BLOCK
    config = OffloadConfig(groups=groups, num_host_blocks=50_000)
    async with OffloadRuntime(config, torch.zeros(num_blocks, 1, dtype=torch.uint8)) as runtime:
        for prompt in _prompts(prefix, question):
            async with runtime.request(prompt) as request:
                await request.allocate()
                found.append(computed := await request.load())
                for stop in _steps(computed, len(prompt)):
                    request.commit(stop)
            await runtime.flush()
            await runtime.reset(Tier.DEVICE)
    return found


def _steps(computed: int, num_tokens: int) -> Iterator[int]:
    """The ends of the steps that compute a prompt."""
    yield from range(computed + STEP_TOKENS, num_tokens, STEP_TOKENS)
    yield num_tokens


@attrs.frozen
class _Blocks:
    """An engine's pool that frees nothing, so it has nothing to hold."""

    def hold(self, block_ids: object) -> None: ...

    def give(self, block_ids: object) -> None: ...


def hits_of_host_cache(groups: Sequence[KVCacheGroup], prefix: int, question: int) -> list[int]:
    """As `hits_of_runtime`, for an engine that has its own blocks. It offers them after each step, and after the
    answer. In its tables, the blocks that a window has left are null."""
    found: list[int] = []
    config = OffloadConfig(groups=groups, num_host_blocks=50_000)
    cache = HostCache(config, 1_000_000, _Blocks(), clock=lambda: 0.0)
    ids = iter(range(1, 1_000_000))
    for prompt in _prompts(prefix, question):
        request = cache.admit(Prefix.of(Root("windows"), prompt))
        found.append(computed := request.match.num_host_tokens)
        num_blocks = -(-(len(prompt) + NUM_ANSWER_TOKENS) // BLOCK)
        tables = [[next(ids) for _ in range(num_blocks)] for _ in groups]
        land(cache, cache.plan_load(request, into=[table[: -(-len(prompt) // BLOCK)] for table in tables]))
        for stop in _steps(computed, len(prompt)):
            for table, group in zip(tables, groups, strict=True):
                gone = group.attention.required_blocks(computed, BLOCK).start
                table[:gone] = [0] * gone
            land(cache, cache.offer(request, stop, tables))
            computed = stop
        answer = range(NUM_ANSWER_TOKENS)
        land(cache, cache.offer(request, len(prompt) + NUM_ANSWER_TOKENS, tables, answer, is_last=True))
        cache.release(request)
    return found


@attrs.define
class Replayed:
    """Counts of one replay. Host hits are in tokens, blocks are those of all groups."""

    num_hit_tokens: int = 0
    num_stored: int = 0
    num_shared: int = 0
    """Requests whose beginning two earlier prompts share, such as a system prompt."""
    num_shared_hit: int = 0
    """Requests of `num_shared` that hit the whole shared beginning."""


def replay(trace: Trace, groups: Sequence[KVCacheGroup], num_host_blocks: int) -> Replayed:
    """Serve a trace in blocks of 16 tokens, one request after the other, on a device that holds one of them."""
    most = (trace.most_blocks + 1) * TRACE_TOKENS // BLOCK * len(groups) + 2
    ledger = Ledger(OffloadConfig(groups=groups, num_host_blocks=num_host_blocks), most)
    found, nexts = Replayed(), dict[int, set[int]]()
    for each in trace.requests:
        # The trace does not say which tokens of a partly filled block the next turn has, so it is left out.
        blocks = each.blocks[: each.num_tokens // TRACE_TOKENS]
        tokens = np.append(np.repeat(blocks, TRACE_TOKENS), np.int32(trace.num_blocks))
        request = ledger.admit(Prefix.of(Root("windows"), tokens))
        found.num_hit_tokens += request.match.num_tokens
        if shared := _shared(blocks, nexts) * TRACE_TOKENS:
            found.num_shared += 1
            found.num_shared_hit += request.match.num_tokens >= shared
        ledger.allocate_nowait(request)
        land(ledger, ledger.plan_load(request))
        computed = request.sequence.num_tokens
        found.num_stored += land(ledger, chain(ledger.commit(request, computed), ledger.release(request)))
    return found


def _shared(blocks: Blocks, nexts: dict[int, set[int]]) -> int:
    """The last block of a prompt after which two earlier prompts go on differently. `nexts` has the blocks that have
    followed each block, and gets those of this prompt."""
    found = 0
    for number, (block, following) in enumerate(pairwise(blocks.tolist()), 1):
        known = nexts.setdefault(block, set())
        if len(known) > 1:
            found = number
        known.add(following)
    return found


def _on_trace(trace: Trace, name: str, num_host: int) -> Iterator[Row]:
    num_host_blocks = 2 * num_host * TRACE_TOKENS // BLOCK
    full = replay(trace, [FULL], num_host_blocks)
    for window in WINDOWS:
        group = KVCacheGroup("window", SlidingWindow(window), BLOCK)
        found = replay(trace, [FULL, group], num_host_blocks)
        what = f"{name}, {num_host_blocks:,} host blocks of 16 tokens, window of {window:,}"
        yield Row(
            name=f"hits, {what}", value=found.num_hit_tokens, unit="tokens", against="full attention",
            limit=full.num_hit_tokens, ratio=found.num_hit_tokens / full.num_hit_tokens,
        )  # fmt: skip
        yield Row(
            name=f"shared prefixes that hit, {what}", value=found.num_shared_hit, unit="requests",
            against="full attention", limit=full.num_shared_hit, ratio=found.num_shared_hit / full.num_shared_hit,
        )  # fmt: skip
        yield Row(
            name=f"stores, {what}", value=found.num_stored, unit="blocks", against="full attention",
            limit=full.num_stored, ratio=found.num_stored / full.num_stored,
        )  # fmt: skip
