"""Checkpoints through a runtime, with real bytes: what a request continues from is the state of its own tokens."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from aoffload import (
    CommitError,
    Computed,
    DiskTier,
    HostCacheRuntime,
    InvalidArgument,
    KVCacheGroup,
    OffloadConfig,
    OffloadRuntime,
    RecurrentState,
    Request,
)

pytestmark = pytest.mark.anyio

BLOCK, ROWS, NUM_BLOCKS = 4, 3, 64
GROUPS = [KVCacheGroup("full", block_size=BLOCK), KVCacheGroup("state", RecurrentState(), BLOCK, num_rows=ROWS)]
A = list(range(100, 121))
B = A[:12] + list(range(300, 320))
C = A[:12] + list(range(400, 420))


def state_of(tokens: Sequence[int]) -> torch.Tensor:
    """The state after `tokens`: every byte depends on all of them."""
    seed = zlib.crc32(bytes(str([*tokens]), "ascii"))
    return torch.randint(0, 256, (ROWS, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class Engine:
    """Keeps the running state of a request in a slot, and checks it whenever a request continues."""

    def __init__(self, runtime: OffloadRuntime, blocks: torch.Tensor) -> None:
        self.runtime, self.blocks = runtime, blocks

    async def serve(self, tokens: list[int], num_new: int = 0) -> tuple[int, list[int]]:
        """Returns where the request continued, and where it wrote checkpoints."""
        async with self.runtime.request(tokens) as request:
            await request.allocate(len(tokens) + num_new)
            await request.load()
            start = self.check(request, tokens)
            written = self.compute(request, tokens, len(tokens))
            return start, written

    def check(self, request: Request, tokens: list[int]) -> int:
        """The checkpoint of the hit is the state of the tokens before it."""
        found, start = request.resume_checkpoint, request.num_computed_tokens
        if found is None:
            assert start == 0
        else:
            assert found.num_tokens == start
            assert torch.equal(self.blocks[found.block_ids], state_of(tokens[:start]))
        return start

    def compute(self, request: Request, tokens: list[int], stop: int) -> list[int]:
        planned = {one.num_tokens: one.block_ids for one in request.planned_checkpoints if one.num_tokens <= stop}
        for start, end in itertools.pairwise(sorted({request.num_computed_tokens, *planned, stop})):
            assert start < end
            with self.runtime.step([request]):
                if end in planned:
                    self.blocks[planned[end]] = state_of(tokens[:end])
            self.runtime.commit_step([Computed(request, end, checkpoints=[end] if end in planned else [])])
        return sorted(planned)


def config(**options: object) -> OffloadConfig:
    return OffloadConfig(groups=GROUPS, num_host_blocks=NUM_BLOCKS, **options)  # type: ignore[arg-type]


async def evict(engine: Engine) -> None:
    """Wait for the stores, and take all device blocks once."""
    await engine.runtime.flush()
    async with engine.runtime.request([7] * BLOCK * (NUM_BLOCKS - 1), max_hit_tokens=0) as request:
        await request.allocate()


async def test_a_hit_continues_from_the_state_of_its_tokens() -> None:
    """From the device, from host memory, and at a branch that the second prompt has written."""
    blocks = torch.zeros(NUM_BLOCKS, 8, dtype=torch.uint8)
    async with OffloadRuntime(config(), blocks) as runtime:
        engine = Engine(runtime, blocks)
        assert await engine.serve(A) == (0, [20])
        assert await engine.serve(A) == (20, [])
        assert await engine.serve(B) == (0, [12, 28])
        assert await engine.serve(C) == (12, [28])
        await evict(engine)
        for tokens, stop in ((A, 20), (B, 28), (C, 28), ([*A[:12], 1, 2, 3, 4, 5], 12)):
            assert (await engine.serve(tokens))[0] == stop
        runtime.check_integrity()


async def test_a_preempted_request_continues_from_its_last_checkpoint() -> None:
    """`resume` loads up to the last checkpoint, and the request computes the rest again."""
    blocks = torch.zeros(NUM_BLOCKS, 8, dtype=torch.uint8)
    async with OffloadRuntime(config(), blocks) as runtime:
        engine = Engine(runtime, blocks)
        async with runtime.request(A) as request:
            await request.allocate(40)
            engine.compute(request, A, 21)
            tokens = A + list(range(900, 910))
            request.commit(30, tokens[21:])
            await request.preempt()
            await evict(engine)
            assert await request.resume() == 20
            assert engine.check(request, tokens) == 20
            assert engine.compute(request, tokens, 31) == [28]
        assert (await engine.serve(tokens))[0] == 28


async def test_a_checkpoint_survives_on_the_disk(tmp_path: Path) -> None:
    """A second process finds KV and checkpoint on the disk, and continues from the right bytes."""
    pytest.importorskip("xxhash", reason="the extra `disk` is not installed")
    settings = config(disk=DiskTier(tmp_path / "disk", "1MiB", close_flush_s=60.0), namespace="m")
    for is_first in (True, False):
        blocks = torch.zeros(NUM_BLOCKS, 8, dtype=torch.uint8)
        async with OffloadRuntime(settings, blocks) as runtime:
            engine = Engine(runtime, blocks)
            assert runtime.disk is not None
            await runtime.disk.wait_restored()
            if is_first:
                await engine.serve(A)
                await runtime.flush()
            else:
                assert runtime.lookup(A).num_lower_tokens == 20
                assert await engine.serve(A) == (20, [])


async def test_commit_step_names_the_request_of_a_wrong_checkpoint() -> None:
    """A position that is not planned is refused for the whole step, and nothing is committed."""
    blocks = torch.zeros(NUM_BLOCKS, 8, dtype=torch.uint8)
    async with OffloadRuntime(config(), blocks) as runtime, runtime.request(A, "mine") as request:
        await request.allocate()
        with pytest.raises(CommitError, match=r"checkpoints: names 16, which is not planned.*mine"):
            runtime.commit_step([Computed(request, 21, checkpoints=[16])])
        with pytest.raises(CommitError, match=r"checkpoints: must be a sequence of int, got 3"):
            runtime.commit_step([Computed(request, 21, checkpoints=3)])  # type: ignore[arg-type]
        assert request.num_computed_tokens == 0
        runtime.commit_step([Computed(request, 21, checkpoints=iter([20]))])


async def test_an_engine_with_states_alone_is_served() -> None:
    """Two groups of recurrent layers and no KV: a hit is a checkpoint."""
    groups = [KVCacheGroup(name, RecurrentState(), BLOCK) for name in "ab"]
    blocks = torch.zeros(NUM_BLOCKS, 8, dtype=torch.uint8)
    settings = OffloadConfig(groups=groups, num_host_blocks=NUM_BLOCKS)
    async with HostCacheRuntime(settings, blocks, engine_blocks=Pool()) as runtime:
        async with runtime.request(A) as request:
            blocks[[20, 21]] = state_of(A[:20])[:2]
            request.offer(20, [[], []], checkpoints={20: [20, 21]})
        await runtime.flush()
        async with runtime.request(A) as request:
            assert await request.load(into=[[], []], into_checkpoint=[40, 41]) == 20
            assert torch.equal(blocks[[40, 41]], state_of(A[:20])[:2])


class Pool:
    def hold(self, block_ids: object) -> None: ...
    def give(self, block_ids: object) -> None: ...


async def test_an_engine_with_its_own_blocks_offers_and_loads_checkpoints() -> None:
    """`offer` stores the checkpoint that it names; `load` brings it into the blocks of `into_checkpoint`."""
    blocks = torch.zeros(NUM_BLOCKS, 8, dtype=torch.uint8)
    async with HostCacheRuntime(config(), blocks, engine_blocks=Pool()) as runtime:
        async with runtime.request(A) as request:
            assert request.planned_checkpoints == (20,)
            blocks[[20, 21, 22]] = state_of(A[:20])
            tables = [list(range(1, 6)), []]
            for wrong, says in (
                ({16: [20, 21, 22], 20: [20, 21, 23]}, "names a block twice"),
                ({18: [20, 21, 22]}, "names 18, which is not a multiple of 4 up to the 20 tokens"),
                ({20: [20, 21]}, "must hold 3 different block ids"),
                ({20: [0, 21, 22]}, r"must lie in \[1, 64\)"),
                ({20: "abc"}, "must be block ids"),
                ([20], "must map numbers of tokens to block ids"),
            ):
                with pytest.raises(InvalidArgument, match=f"checkpoints: {says}"):
                    request.offer(20, tables, checkpoints=wrong)  # type: ignore[arg-type]
            request.offer(20, tables, checkpoints={20: [20, 21, 22]})
        await runtime.flush()
        async with runtime.request(A) as request:
            assert request.match.num_host_tokens == 20 and request.planned_checkpoints == ()
            assert await request.load(into=[list(range(31, 36)), []], into_checkpoint=[40, 42, 44]) == 20
            assert torch.equal(blocks[[40, 42, 44]], state_of(A[:20]))
        async with runtime.request(B) as request:
            assert request.match.num_host_tokens == 0 and request.planned_checkpoints == (12, 28)
