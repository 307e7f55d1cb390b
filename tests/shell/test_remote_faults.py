"""A runtime over a store with wrong answers, a failed node, or without threads: it goes on, and stays idle without
requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from clocks import leaping_backend
from serving import GUARD_S, Engine, TensorBlocks, config, prompt, turns

pytest.importorskip("xxhash", reason="the extra `remote` is not installed")
pytest.importorskip("cryptography", reason="the extra `remote` is not installed")

from remote_serving import CELL_TOKENS, assert_quiet, forget_locally, only_in_the_store, quiet, with_remote

from aoffload import OffloadRuntime, RemoteTier
from aoffload.errors import TransferRefused
from aoffload.testing import SimulatedStore, StoreFault
from aoffload.transport import Env

pytestmark = pytest.mark.anyio

A = prompt(1, 17)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return leaping_backend(request.param)


class Panic(BaseException):
    """What a library in Rust raises."""


@pytest.mark.parametrize("what", [5, "abc", Panic()], ids=["int", "text", "panic"])
@pytest.mark.parametrize("kind", ["exist", "get"])
async def test_a_store_that_is_wrong_keeps_nobody(kind: str, what: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request goes on at once, with a miss. When the store is right again it is used again."""

    def wrong(*_: object) -> object:
        if isinstance(what, BaseException):
            raise what
        return what

    store, later_s = SimulatedStore(), 0.0
    monkeypatch.setattr(Env, "now", lambda self: time.monotonic() + later_s)
    async with with_remote(store) as engine:
        await only_in_the_store(engine, A)
        with monkeypatch.context() as patched, anyio.fail_after(GUARD_S):
            patched.setattr(store, kind, wrong)
            for _ in range(6):
                assert await engine.serve(A, store="none") == 0
                await quiet(engine.runtime)
                await forget_locally(engine)
        later_s = 60.0
        found = await engine.serve(A, store="none")
        assert found in (CELL_TOKENS, 16)  # it is on trial: what is asked for beside its first cell may be refused
        await quiet(engine.runtime)
        await forget_locally(engine)
        assert await engine.serve(A) == 16
        await assert_quiet(engine.runtime)


def _num_stores(engine: Engine) -> int:
    found = engine.runtime.statistics().remote_transfers
    assert found is not None
    return found.num_stores


async def test_a_node_that_is_down_costs_nothing_while_nobody_asks() -> None:
    """More prompts that came twice than one look takes, of which the host lacks the end: each cell is tried once, and
    then nothing is planned any more. The cells of the other nodes are all there."""
    store = SimulatedStore(num_nodes=3)
    async with with_remote(store, 16, num_host_blocks=64) as engine:
        store.fault = lambda call: StoreFault.ERROR if call.node == "node-0" else None
        for seed in range(20):
            for _ in range(2):
                await engine.serve(prompt(seed, 33), max_store_tokens=CELL_TOKENS)
        with anyio.fail_after(GUARD_S):
            await quiet(engine.runtime)
        before = _num_stores(engine)
        await turns(100)
        assert _num_stores(engine) == before
        assert store.objects and engine.runtime.statistics().host.num_pinned == 0
        await assert_quiet(engine.runtime)


async def test_what_was_not_written_is_not_charged() -> None:
    """A store that refuses before a byte is sent leaves what may be written a second to others."""
    store = SimulatedStore()
    async with with_remote(store, 16, tier={"max_write_rate": 300}) as engine:
        store.fault = lambda call: StoreFault.ERROR if call.kind == "exist" else None
        for seed in (1, 2):
            for _ in range(2):
                await engine.serve(prompt(seed, 17))
                await quiet(engine.runtime)
        assert not store.objects
        store.fault = lambda call: None
        remote = engine.runtime._session.remote
        assert remote is not None
        assert remote._num_storable() == 2 * remote.cell_blocks
        await assert_quiet(engine.runtime)


@pytest.mark.parametrize("name", ["load-0", "load-3", "store-0", "ask-1"])
async def test_a_runtime_without_its_threads_leaves_none(name: str) -> None:
    """It does not open, says why, and can be opened once there are threads again."""
    started: list[threading.Thread] = []

    class Few(Env):
        def start_thread(self, target: Callable[[], None], name_of_it: str) -> threading.Thread:
            if name_of_it == f"aoffload-remote-{name}":
                raise RuntimeError("can't start new thread")
            started.append(super().start_thread(target, name_of_it))
            return started[-1]

    made = config(remote=RemoteTier(SimulatedStore(), b"sixteen or more bytes", cell_bytes=256))
    with pytest.raises(TransferRefused, match=name):
        async with OffloadRuntime(made, TensorBlocks(9).tensors, env=Few()):
            raise AssertionError("it has opened")
    assert started and not [thread for thread in started if thread.is_alive()]
