"""The runtime over rank processes: one plan for all, and one of them killed in the middle of a load."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from multiprocessing.connection import Connection, Pipe
from typing import Any

import anyio
import attrs
import pytest
import stalled_ranks
import structlog
import torch
from clocks import JUMPING, leap, leaping_backend
from scripted import ScriptedTransport
from serving import GUARD_S, Engine, assert_at_rest, config, prompt, turns

from aoffload import OffloadRuntime, RequestState
from aoffload.ranks import LocalRank, ProcessRank, RankTransport

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("forked_ranks")]

NUM_BLOCKS = 40
START_S = 120.0
"""A process imports torch, which takes seconds on an idle machine."""
WARM = [prompt(seed, 9) for seed in range(1, 5)]
"""In host memory only when the test begins, two blocks each."""
COLD = [prompt(seed, 9) for seed in range(5, 9)]


@pytest.fixture(params=JUMPING)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return leaping_backend(request.param)


@attrs.define(eq=False)
class RankBlocks:
    """The blocks of all ranks at once: each has its own part, so its own bytes."""

    tensors: list[list[torch.Tensor]]

    def write(self, block_id: int, value: int) -> None:
        for rank, layers in enumerate(self.tensors):
            for tensor in layers:
                tensor[block_id] = value + rank

    def read(self, block_id: int) -> int:
        """What every rank was told, or -1 if one of them holds something else."""
        parts = [(rank, tensor[block_id]) for rank, layers in enumerate(self.tensors) for tensor in layers]
        found = {int(word) - rank for rank, part in parts for word in part}
        return found.pop() if len(found) == 1 else -1


@attrs.define(eq=False)
class Served:
    """An engine over two rank processes, of which rank 1 stops in the middle of its first load."""

    engine: Engine
    ranks: tuple[ProcessRank, ...]
    gate: Connection
    num_ready: dict[int, int] = attrs.field(factory=dict)
    """By the first token of the prompt: what it found ready, when it was through."""

    async def serve(self, token_ids: list[int]) -> None:
        async with self.engine.runtime.request(token_ids, request_id=f"r{token_ids[0]}") as request:
            self.num_ready[token_ids[0]] = await self.engine.prefill(request, token_ids)

    async def wait_half_way(self) -> None:
        assert await anyio.to_thread.run_sync(self.gate.poll, GUARD_S), "no load has begun"
        await turns()


@asynccontextmanager
async def two_ranks(**options: Any) -> AsyncIterator[Served]:
    tensors = [[torch.zeros(NUM_BLOCKS + 1, 4, dtype=torch.int64).share_memory_() for _ in "kv"] for _ in "01"]
    gate, theirs = Pipe()
    with gate, theirs:
        transport = RankTransport.spawn(partial(stalled_ranks.build, tensors, theirs), len(tensors), timeout_s=START_S)
        try:
            async with OffloadRuntime(config(**options), transport=transport) as runtime:
                yield Served(Engine(runtime, RankBlocks(tensors)), transport.ranks, gate)  # type: ignore[arg-type]
        finally:
            transport.close(0)


async def store_warm(served: Served) -> None:
    for token_ids in WARM:
        await served.serve(token_ids)
    await served.engine.runtime.flush()
    await served.engine.evict_device()


async def test_a_rank_killed_in_the_middle_of_a_load_harms_nobody() -> None:
    """Eight requests, four of which load; one rank is killed half-way through a load. Whoever waits for it computes
    instead, or aborts, and waits for no time to be up; the others go on; in the end nothing is pinned, nothing
    quarantined."""
    never: dict[str, Any] = {"load_timeout_s": 1e6, "transfer_timeout_s": 1e6}
    with structlog.testing.capture_logs(), anyio.fail_after(START_S):
        async with two_ranks(max_jobs_in_flight=2, **never) as served:
            runtime = served.engine.runtime
            await store_warm(served)
            served.num_ready.clear()
            async with anyio.create_task_group() as group:
                for token_ids in WARM + COLD:
                    group.start_soon(served.serve, token_ids)
                await served.wait_half_way()
                cold = [token_ids[0] for token_ids in COLD]
                assert sorted(served.num_ready) == cold, "who loads nothing does not wait for who does"
                os.kill(served.ranks[stalled_ranks.HELD_RANK].pid, signal.SIGKILL)
                runtime.cancel(f"r{WARM[3][0]}")
            assert served.num_ready == dict.fromkeys([token_ids[0] for token_ids in WARM[:3] + COLD], 0)
            await assert_at_rest(runtime)
            found = runtime.statistics()
            assert (found.device.num_quarantined, found.host.num_quarantined) == (0, 0)
            # The engine may go on with what it has: nothing is loaded or stored, everything else works.
            assert await served.engine.serve(prompt(20, 9)) == 0
            assert await served.engine.serve(COLD[0]) == 8
            await assert_at_rest(runtime)
            assert runtime.statistics().transfers == found.transfers


async def test_a_hung_rank_is_given_up_and_its_death_ends_the_quarantine() -> None:
    """A rank that is alive and does nothing is a matter of `transfer_timeout_s`: the blocks it may still write are
    quarantined until it is killed, which proves that it doesn't."""
    with structlog.testing.capture_logs() as logs:
        async with two_ranks(transfer_timeout_s=3600, load_timeout_s=600) as served:
            runtime = served.engine.runtime
            await store_warm(served)
            served.num_ready.clear()
            async with anyio.create_task_group() as group:
                group.start_soon(served.serve, WARM[0])
                await served.wait_half_way()
                leap(601)
            assert served.num_ready == {WARM[0][0]: 0}
            leap(3000)
            await runtime.flush()
            assert runtime.statistics().device.num_quarantined == 2
            runtime.check_integrity()
            os.kill(served.ranks[stalled_ranks.HELD_RANK].pid, signal.SIGKILL)
            with anyio.fail_after(GUARD_S):
                while runtime.statistics().device.num_quarantined:
                    await runtime.worker.wait_settled()
            await assert_at_rest(runtime)
    assert {"transport_stalled", "transport_recovered"} <= {entry["event"] for entry in logs}


@attrs.define(eq=False)
class ScriptedBlocks:
    """The tags of several scripted ranks."""

    scripts: list[ScriptedTransport]

    def write(self, block_id: int, value: int) -> None:
        for rank, script in enumerate(self.scripts):
            script.device_content[block_id] = value + rank

    def read(self, block_id: int) -> int:
        found = {script.device_content[block_id] - rank for rank, script in enumerate(self.scripts)}
        return found.pop() if len(found) == 1 else -1


@pytest.mark.parametrize("end", ["fail", "corrupt", "lose"])
async def test_blocks_stay_with_the_job_until_the_last_rank_has_reported(end: str) -> None:
    """A load that is lost on one rank still writes on the other: its request waits, and nobody is given its blocks."""
    scripts = [ScriptedTransport(NUM_BLOCKS + 1, auto=True) for _ in "01"]
    with structlog.testing.capture_logs():
        async with OffloadRuntime(config(), transport=RankTransport([LocalRank(one) for one in scripts])) as runtime:
            engine = Engine(runtime, ScriptedBlocks(scripts))
            await engine.serve(WARM[0])
            await runtime.flush()
            await engine.evict_device()
            for script in scripts:
                script.auto = False
            async with anyio.create_task_group() as group:
                group.start_soon(engine.serve, WARM[0])
                await turns()
                job_id = scripts[0].launched[-1].plan.job_id
                getattr(scripts[1], end)(job_id, *([1] if end == "corrupt" else []))
                await turns()
                found = runtime.statistics()
                assert (found.num_jobs, found.num_requests, found.device.num_quarantined) == (1, 1, 0)
                scripts[0].land(job_id)
                for script in scripts:
                    script.auto = True
            assert runtime.statistics().device.num_quarantined == (2 if end == "lose" else 0)
            if end == "lose":
                scripts[1].land(job_id)
                await turns()
            await assert_at_rest(runtime)
            assert runtime.statistics().device.num_quarantined == 0


async def test_everything_is_right_on_both_ranks_while_both_live() -> None:
    """What is loaded has the bytes that each rank computed for that prefix; the held copy goes on at a word."""
    async with two_ranks(verify=True) as served:
        await store_warm(served)
        async with anyio.create_task_group() as group:
            for token_ids in WARM + COLD:
                group.start_soon(served.serve, token_ids)
            await served.wait_half_way()
            served.gate.recv_bytes()
            served.gate.send_bytes(b"go on")
        assert served.num_ready == {token_ids[0]: 8 if token_ids in WARM else 0 for token_ids in WARM + COLD}
        await assert_at_rest(served.engine.runtime)
        found = served.engine.runtime.statistics().transfers
        assert (found.blocks_loaded, found.blocks_verified, found.blocks_corrupt) == (8, 8, 0)
    assert [rank._process.exitcode for rank in served.ranks] == [0, 0]


async def test_doubt_is_over_when_the_runtime_has_closed() -> None:
    """Closing kills the rank that hangs, so the copy is over and nothing stays quarantined."""
    with structlog.testing.capture_logs() as logs:
        async with two_ranks(close_timeout_s=0.2) as served:
            await store_warm(served)
            async with served.engine.runtime.request(WARM[0]) as request:
                await request.allocate()
                pending = request.load_nowait()
                await served.wait_half_way()
        assert request.state is RequestState.ABORTED
        assert pending is not None
        assert served.engine.runtime.statistics().device.num_quarantined == 0
        served.engine.runtime.check_integrity()
    assert "runtime_closed" in {entry["event"] for entry in logs}
