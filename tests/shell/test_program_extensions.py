"""An extension of a program in a runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from scripted import ScriptedFence, ScriptedTransport
from structlog.testing import capture_logs

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime, RequestState
from aoffload._kernel.extension import HOOKS
from aoffload._kernel.hooks import MAY_RAISE
from aoffload.ledger import LedgerExtension

pytestmark = pytest.mark.anyio


class FailsWhenCopiesEnd(LedgerExtension):
    def on_job_settled(self, job: object) -> None:
        raise ValueError("by mistake")


class FailsAlways(LedgerExtension):
    """Every hook that may not raise raises, or answers wrongly."""

    raised: set[str]


def _failing(name: str) -> Callable[..., object]:
    def hook(self: FailsAlways, *_: object) -> object:
        self.raised.add(name)
        raise ValueError("by mistake")

    return hook


FAILING = [name for name in HOOKS if name not in MAY_RAISE]
for _name in FAILING:
    setattr(FailsAlways, _name, _failing(_name))


async def serve(runtime: OffloadRuntime, token: int, request_id: str | None = None) -> int:
    async with runtime.request(40 * [token], request_id=request_id) as request:
        await request.allocate()
        num_ready = await request.load()
        request.commit(40)
        return num_ready
    return -1


def opened(extension: LedgerExtension) -> OffloadRuntime:
    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=16)], num_host_blocks=64)
    return OffloadRuntime(config, torch.zeros(5, 2, 16, 4), extensions=[extension])


async def test_an_error_at_the_end_of_a_copy_is_reported_and_the_cache_goes_on() -> None:
    """No request made the call in which the hook failed, so none gets the error: it is reported, and hits go on."""
    with capture_logs() as logs:
        async with opened(FailsWhenCopiesEnd()) as runtime:
            for token in (1, 2, 3):
                await serve(runtime, token)
                while runtime.statistics().num_jobs:
                    await anyio.lowlevel.checkpoint()
            assert await serve(runtime, 1) == 32
            runtime.ledger.check_integrity()
    failed = [entry["error"] for entry in logs if entry["event"] == "worker_failed"]
    assert failed and all("FailsWhenCopiesEnd.on_job_settled" in error for error in failed)
    assert "cache_turned_off" not in [entry["event"] for entry in logs]


def failed(logs: list[Any]) -> set[str]:
    """The hooks whose errors were reported."""
    errors = [entry["error"] for entry in logs if entry["event"] == "worker_failed"]
    return {name for name in FAILING if any(f"FailsAlways.{name} has raised ValueError" in error for error in errors)}


async def test_no_call_of_a_runtime_raises_the_error_of_an_extension() -> None:
    """Whatever an extension does, the tasks of the runtime go on, with the right hits: each error is reported. A body's
    own error, such as a cancellation, is not replaced, and the runtime closes."""
    extension = FailsAlways()
    extension.raised = set()
    with capture_logs() as logs:
        async with opened(extension) as runtime:
            await serve(runtime, 1)
            await runtime.flush()
            assert await serve(runtime, 1) == 32
            async with runtime.request(40 * [2]) as request:
                await request.allocate()
                await request.load()
                with anyio.CancelScope() as scope, runtime.step([request]):
                    scope.cancel()
                    await anyio.lowlevel.checkpoint()
                assert scope.cancelled_caught
                request.commit(40)
                async with runtime.request(40 * [2]) as reader:
                    await reader.allocate()
                    await reader.load()
                    request.invalidate(16)
                    await anyio.sleep_forever()
                assert (reader.state, reader.reason) == (RequestState.ABORTED, "prefix_invalidated")
            with runtime.pins.hold(40 * [1], 60):
                await runtime.reset()
            assert await serve(runtime, 1) == 0
            await runtime.flush()
            runtime.ledger.check_integrity()
    assert failed(logs) == extension.raised
    assert extension.raised >= {"on_matched", "on_published", "on_step", "on_withdrawn", "on_reset", "on_released"}
    assert not runtime._session.is_open and runtime.statistics().num_jobs == 0


async def test_a_store_waits_for_its_forward_although_a_hook_failed_at_its_commit() -> None:
    """The fence of the last commit is that of the stores that follow, whatever an extension does."""

    class Fails(LedgerExtension):
        def on_published(self, request: object, first: int) -> None:
            raise ValueError("by mistake")

    transport = ScriptedTransport(9, auto=False)
    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=16)], num_host_blocks=64)
    async with OffloadRuntime(config, None, transport=transport, extensions=[Fails()]) as runtime:
        first, second = ScriptedFence(True), ScriptedFence(False)
        async with runtime.request(80 * [1]) as request:
            await request.allocate()
            await request.load()
            request.commit(32, after=first)
            request.commit(80, after=second)
        assert {launch.after for launch in transport.launched if len(launch.plan.source_ids) == 3} <= {second}
        second.has_passed = True
        transport.land_all()
