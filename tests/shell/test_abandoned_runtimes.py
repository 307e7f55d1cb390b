"""Runtimes that are never closed: their threads end and their directories are released."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from aoffload import DiskTier, HostCacheRuntime, KVCacheGroup, OffloadConfig, OffloadRuntime, RuntimeClosed, WrongThread

pytestmark = pytest.mark.filterwarnings("default::ResourceWarning", "default::RuntimeWarning")
GUARD_S = 30.0


def opened(path: Path | None) -> OffloadRuntime:
    disk = None if path is None else DiskTier(path, "1MiB", close_flush_s=0.5)
    group = KVCacheGroup("all", block_size=4)
    config = OffloadConfig(groups=[group], num_host_blocks=8, namespace="test", disk=disk, close_timeout_s=5)
    return OffloadRuntime(config, torch.zeros(17, 4, 16))


async def serve(runtime: OffloadRuntime) -> None:
    async with runtime.request(range(30)) as request:
        await request.allocate()
        await request.load()
        request.commit(30)


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("aoffload")}


def ended(before: set[threading.Thread]) -> bool:
    """Whether all threads that were not there before end. They are joined, so nothing depends on timing."""
    for thread in threads() - before:
        thread.join(GUARD_S)
    return threads() <= before


def collected(make: Callable[[], object]) -> list[warnings.WarningMessage]:
    """The warnings while what `make` leaves behind is collected."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        make()
        gc.collect()
    return found


def is_said(found: list[warnings.WarningMessage]) -> bool:
    return any(one.category is ResourceWarning and "was abandoned" in str(one.message) for one in found)


def test_an_abandoned_runtime_ends_its_threads_and_frees_its_directory(tmp_path: Path) -> None:
    """A runtime entered by hand whose loop is over, and which nobody left: its threads end, a new runtime opens its
    directory, and a warning says so. It has served, with a disk."""
    before = threads()

    async def enter() -> None:
        runtime = opened(tmp_path / "kv")
        await runtime.__aenter__()
        await serve(runtime)

    assert is_said(collected(lambda: asyncio.run(enter())))
    assert ended(before)

    async def again() -> None:
        async with opened(tmp_path / "kv") as runtime:
            await serve(runtime)

    asyncio.run(again())
    assert ended(before)


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_runtime_is_abandoned_while_its_loop_goes_on(is_kept: bool) -> None:
    """Its threads and its task end then, too, but not while a request of it is still there."""
    before = threads()

    async def live() -> None:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            runtime = opened(None)
            await runtime.__aenter__()
            request = runtime.request(range(9)) if is_kept else None
            del runtime
            gc.collect()
            assert is_said(found) != is_kept
            if request is not None:
                async with request:
                    await request.allocate()
                del request
                gc.collect()
                assert is_said(found)
        for _ in range(20):  # turns of the loop
            await asyncio.sleep(0)
        assert "aoffload copy worker" not in [task.get_name() for task in asyncio.all_tasks()]

    asyncio.run(live())
    assert ended(before)


@pytest.mark.parametrize("kept", ["handle", "pin"])
def test_a_handle_keeps_its_runtime_open_and_so_does_a_pin(kept: str) -> None:
    """A program may keep `runtime.pins`, or a pin, in place of the runtime: the runtime is abandoned after both."""
    before = threads()

    async def live() -> None:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            runtime = opened(None)
            await runtime.__aenter__()
            handle = runtime.pins
            assert handle == runtime.pins and repr(runtime) in repr(handle)
            pin = handle.hold(range(9), 60).__enter__()
            held = [handle] if kept == "handle" else [pin]
            pin.__exit__(None, None, None)
            del runtime, handle, pin
            gc.collect()
            assert not is_said(found)
            held.clear()
            gc.collect()
            assert is_said(found)

    asyncio.run(live())
    assert ended(before)


def test_a_runtime_that_was_left_is_no_longer_there_and_says_nothing() -> None:
    """There is no warning if the block is left, or if it was never entered."""
    before = threads()

    async def live() -> None:
        async with opened(None) as runtime:
            await serve(runtime)

    assert not is_said(collected(lambda: asyncio.run(live())))
    assert not is_said(collected(lambda: opened(None)))
    assert ended(before)


def test_a_runtime_whose_loop_was_closed_is_left_without_a_wait(tmp_path: Path) -> None:
    """Leaving it in another loop waits for nothing, because nothing would wake it: its threads end, its directory is
    free, and `RuntimeClosed` says that it was closed early."""
    before, loop = threads(), asyncio.new_event_loop()

    async def enter() -> OffloadRuntime:
        runtime = opened(tmp_path / "kv")
        await runtime.__aenter__()
        await runtime.disk.wait_restored()
        await serve(runtime)
        return runtime

    runtime = loop.run_until_complete(enter())
    loop.close()
    runtime.check_integrity()
    pending = runtime.fetches.fetch(range(9))

    async def leave() -> None:
        for wait in (pending.wait, runtime.disk.wait_restored):
            with pytest.raises(WrongThread, match="event loop"):
                await wait()
        with pytest.raises(WrongThread, match="event loop"):
            async with runtime.request(range(9)):
                raise AssertionError("entered")
        with pytest.raises(WrongThread, match="event loop"):
            await runtime.flush()
        with pytest.raises(RuntimeClosed, match="without waiting"):
            await runtime.__aexit__(None, None, None)
        with pytest.raises(RuntimeClosed):
            runtime.lookup(range(9))

    asyncio.run(leave())
    assert ended(before)

    async def again() -> None:
        async with opened(tmp_path / "kv") as other:
            await serve(other)

    asyncio.run(again())


def test_a_runtime_is_not_left_in_another_thread() -> None:
    """`WrongThread`, and it stays open: it goes on to serve, and is left where it was entered."""

    async def live() -> None:
        async with opened(None) as runtime:
            with pytest.raises(WrongThread, match="stays open"):
                await asyncio.to_thread(lambda: asyncio.run(runtime.__aexit__(None, None, None)))
            await serve(runtime)

    asyncio.run(live())


def test_leaving_what_was_never_entered_is_refused() -> None:
    """It says that it was not entered."""

    async def leave() -> None:
        with pytest.raises(RuntimeClosed, match="not entered"):
            await opened(None).__aexit__(None, None, None)

    asyncio.run(leave())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_leaves_all_blocks_and_harms_nobody(tmp_path: Path) -> None:
    """A child that leaves by the normal way leaves the blocks of the runtime, of a request, of a pin and of a step:
    none of them raises or touches what its parent goes on to use."""

    async def live() -> None:
        async with opened(tmp_path / "kv") as runtime:
            await serve(runtime)
            child = -1
            try:
                async with runtime.request(range(30)) as request:
                    await request.allocate()
                    await request.load()
                    with runtime.pins.hold(range(30), 60), runtime.step([request]):
                        with warnings.catch_warnings():
                            warnings.simplefilter("ignore", DeprecationWarning)
                            child = os.fork()
                        if not child:
                            signal.alarm(int(GUARD_S))  # a lock of a thread that the fork left behind may be held
                            raise KeyError
            except KeyError:
                try:
                    await runtime.__aexit__(None, None, None)
                    os._exit(7)
                finally:
                    os._exit(1)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])  # noqa: ASYNC222 - it has nothing to wait for
            assert status == 7
            await serve(runtime)
            await runtime.flush()
            runtime.check_integrity()
            assert runtime.statistics().num_pins == 0

    asyncio.run(live())


class Owned:
    """The blocks of an engine."""

    def hold(self, block_ids: object) -> None: ...
    def give(self, block_ids: object) -> None: ...


def test_an_abandoned_runtime_over_an_engines_blocks_is_collected() -> None:
    """Its ledger reads the clock of the loop, and the threads deliver to its ledger: that does not keep it alive."""
    before = threads()

    async def enter() -> None:
        group = KVCacheGroup("all", block_size=4)
        config = OffloadConfig(groups=[group], num_host_blocks=8)
        runtime = HostCacheRuntime(config, torch.zeros(17, 4, 16), engine_blocks=Owned())
        await runtime.__aenter__()
        async with runtime.request(range(30)) as request:
            assert request.match.num_tokens == 0

    assert is_said(collected(lambda: asyncio.run(enter())))
    assert ended(before)
