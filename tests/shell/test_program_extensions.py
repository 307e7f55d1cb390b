"""An extension of a program in a runtime."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest
import torch
from structlog.testing import capture_logs

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime, RequestState
from aoffload.ledger import ExtensionError, LedgerExtension, LedgerRequest

pytestmark = pytest.mark.anyio


class FailsWhenCopiesEnd(LedgerExtension):
    def on_job_settled(self, job: object) -> None:
        raise ValueError("by mistake")


class FailsFor(LedgerExtension):
    def on_matched(self, request: LedgerRequest) -> None:
        if request.request_id == "unlucky":
            raise ValueError("by mistake")


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


async def test_the_request_whose_call_failed_gets_the_error_and_no_other() -> None:
    """A hook that fails for one request fails that request's call, by name."""
    async with opened(FailsFor()) as runtime:
        await serve(runtime, 1, "lucky")
        with pytest.raises(ExtensionError, match=r"FailsFor\.on_matched has raised ValueError"):
            await serve(runtime, 1, "unlucky")
        assert await serve(runtime, 1, "lucky") == 32
        assert runtime.statistics().num_requests == 0


class FailsOnce(LedgerExtension):
    is_on = False

    def on_withdrawn(self) -> None:
        if self.is_on:
            raise ValueError("by mistake")


async def test_readers_of_wrong_kv_are_aborted_even_if_a_hook_fails() -> None:
    """`invalidate` raises the error of the extension, and the requests that have read the KV are aborted all the
    same."""
    extension = FailsOnce()
    async with opened(extension) as runtime:
        async with runtime.request(40 * [1]) as request:
            await request.allocate()
            await request.load()
            request.commit(40)
            async with runtime.request(40 * [1]) as reader:
                assert reader.match.num_device_tokens == 32
                await reader.allocate()
                await reader.load()
                extension.is_on = True
                with pytest.raises(ExtensionError, match=r"FailsOnce\.on_withdrawn"):
                    request.invalidate(16)
                extension.is_on = False
                await anyio.sleep_forever()
            assert (reader.state, reader.reason) == (RequestState.ABORTED, "prefix_invalidated")
        runtime.ledger.check_integrity()
