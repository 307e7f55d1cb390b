"""A runtime with a disk that is short of threads, disk space or time: typed errors, and no leak."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from clocks import leaping_backend
from serving import GUARD_S, prompt, turns

pytest.importorskip("xxhash", reason="the extra `disk` is not installed")

from disk_serving import Hanging, assert_quiet, on_the_disk_only, simulated, stored, with_disk

from aoffload import OffloadRuntime
from aoffload._config.tiers import ROUNDING_BYTES, SUPERBLOCK_BYTES, record_bytes
from aoffload._tiers.disk.loop import DiskState
from aoffload.transport import Env, TransferRefused
from proof.disk.simulated_disk import IOCall

pytestmark = pytest.mark.anyio

BLOCK_BYTES = 64
A, B = prompt(1, 17), prompt(2, 17)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return leaping_backend(request.param)


class FewThreads(Env):
    """The system gives so many threads, and no more."""

    def __init__(self, num_threads: int = 1000) -> None:
        super().__init__()
        self.num_threads = num_threads
        self.threads: list[threading.Thread] = []
        self.has_workers = True

    def start_thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        if len(self.threads) == self.num_threads:
            raise RuntimeError("can't start new thread")
        self.threads.append(super().start_thread(target, name))
        return self.threads[-1]

    async def run_in_thread(self, function: Callable[[], Any], limiter: Any = None) -> Any:
        if not self.has_workers:
            raise RuntimeError("can't start new thread")
        return await super().run_in_thread(function, limiter)


@pytest.mark.parametrize("num_threads", range(8))
async def test_an_opening_that_is_short_of_a_thread_leaves_nothing(tmp_path: Path, num_threads: int) -> None:
    """Whichever it is: of the copies, the opener, those of the disk, or the reader. The error is typed, no thread goes
    on, and the directory is free for the next one."""
    env = FewThreads(num_threads)
    with pytest.raises(TransferRefused, match=r"aoffload-.* cannot be started: can't start new thread"):
        async with with_disk(tmp_path, env=env):
            raise AssertionError("it was opened without a thread")
    for thread in env.threads:
        await anyio.to_thread.run_sync(thread.join, GUARD_S)
    assert not [thread.name for thread in env.threads if thread.is_alive()]
    async with with_disk(tmp_path, env=FewThreads(8)) as engine:
        await engine.serve(A)


async def test_an_opening_without_a_worker_thread_opens_nothing(tmp_path: Path) -> None:
    """Nor does a runtime fail to close for want of one: it closes in the event loop's thread then."""
    env = FewThreads()
    env.has_workers = False
    with pytest.raises(TransferRefused, match="cannot start a thread to open the transport"):
        async with with_disk(tmp_path, env=env):
            raise AssertionError("it was opened without a thread")
    assert not env.threads
    env.has_workers = True
    async with with_disk(tmp_path, env=env) as engine:
        await engine.serve(A)
        env.has_workers = False
    assert not [thread.name for thread in env.threads if thread.is_alive()]


async def test_a_reset_without_a_thread_ends_the_use_of_the_disk() -> None:
    """A restart may find what was there before: the caller hears of it, and nothing is added. Requests go on."""
    disk, env = simulated(), FewThreads()
    async with with_disk(disk, env=env) as engine:
        await on_the_disk_only(engine, A)
        env.num_threads = len(env.threads)
        with pytest.raises(TransferRefused, match=r"a restart may find blocks from before: .* cannot be started"):
            await engine.runtime.reset()
        num_calls = disk.num_calls
        found = engine.runtime._session.disk
        assert found is not None and found.state is DiskState.OFF
        assert [await engine.serve(A) for _ in range(2)] == [0, 16]
        for seed in range(10, 20):
            await engine.serve(prompt(seed, 17))
            await engine.runtime.flush()
        await assert_quiet(engine.runtime)
        assert disk.num_calls == num_calls
    assert disk.num_calls == num_calls


async def test_a_reset_that_waits_no_longer_than_it_may_does_not_cost_the_disk() -> None:
    """It is told that a restart may find what was there. Until the disk has taken it nothing is stored, since a kill
    would leave that to a generation of before; from then on the disk is used again."""
    disk = simulated()
    async with with_disk(disk) as engine:
        runtime = engine.runtime
        await on_the_disk_only(engine, A)
        hanging = Hanging(disk, _of_resets)
        try:
            with pytest.raises(TransferRefused, match="not over within 0 s"):
                await runtime.reset(timeout_s=0)
            await hanging.wait_for()
            before = runtime.statistics().disk_transfers
            for seed in range(10, 20):
                await engine.serve(prompt(seed, 17))
                await runtime.flush()
            assert runtime.statistics().disk_transfers == before
        finally:
            hanging.resume()
        with anyio.fail_after(GUARD_S):
            while runtime.statistics().disk_transfers == before:  # the turn of the loop that hears of it stores
                await turns(1)
                await runtime.flush()
        await engine.serve(B)
        await stored(engine)
    async with with_disk(disk) as engine:
        await engine.runtime.disk.wait_restored()
        assert [await engine.serve(token_ids) for token_ids in (A, B)] == [0, 16]


def _of_resets(call: IOCall) -> bool:
    return (call.kind, call.name) == ("sync", "table")


@pytest.mark.parametrize(("num_prompts", "num_slots"), [(3, 11), (6, 11), (2, 6)])
async def test_closing_writes_what_fits_once(num_prompts: int, num_slots: int) -> None:
    """Where host memory holds more than the disk, what was used last is written, and nothing in a circle."""
    size = SUPERBLOCK_BYTES + ROUNDING_BYTES + num_slots * (BLOCK_BYTES + record_bytes(4))
    disk, tier = simulated(), {"size": size, "daily_writes": "1GB", "close_flush_s": GUARD_S}
    runtimes: list[OffloadRuntime] = []
    async with with_disk(disk, num_blocks=8, num_host_blocks=200, tier=tier) as engine:
        await engine.runtime.disk.wait_restored()
        runtimes.append(engine.runtime)
        for seed in range(num_prompts):
            await engine.serve(prompt(seed, 17))
            await engine.runtime.flush()
        before = engine.runtime.statistics().disk_transfers
    after = runtimes[0].statistics().disk_transfers
    assert before is not None and after is not None
    assert 0 < after.blocks_stored - before.blocks_stored <= num_slots
    async with with_disk(disk, num_host_blocks=200, tier=tier) as engine:
        assert await engine.runtime.disk.wait_restored() == min(num_slots, 4 * num_prompts)
        assert await engine.serve(prompt(num_prompts - 1, 17)) == 16


class ClockGoingBack(Env):
    """A clock that is set back again and again."""

    seconds = 0.0

    def now(self) -> float:
        self.seconds -= 1.0
        return self.seconds


async def test_a_clock_that_goes_back_costs_no_thread(tmp_path: Path) -> None:
    """Copies go on, of the device and of the disk."""
    async with with_disk(tmp_path, env=ClockGoingBack()) as engine:
        await on_the_disk_only(engine, A)
        assert await engine.serve(A) == 16
        await assert_quiet(engine.runtime)
        found = engine.runtime.statistics()
        assert found.disk_transfers is not None and found.disk_transfers.load_seconds == 0.0
