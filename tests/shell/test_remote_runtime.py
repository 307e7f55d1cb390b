"""A runtime with a remote tier: a process hits the KV of another one, with the right bytes or as a miss."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from clocks import leap, leaping_backend
from serving import GUARD_S, config, prompt, turns

pytest.importorskip("xxhash", reason="the extra `remote` is not installed")
pytest.importorskip("cryptography", reason="the extra `remote` is not installed")

from hanging_calls import goes_on_after, serving_until
from remote_serving import (
    CELL_TOKENS,
    SECRET,
    HangingStore,
    assert_quiet,
    failing,
    forget_locally,
    in_the_store,
    only_in_the_store,
    quiet,
    with_remote,
)
from scripted import ScriptedTransport

from aoffload import ConfigError, DiskTier, OffloadRuntime, RemoteTier
from aoffload._transfer.local import LocalTransport
from aoffload.ledger import WaitsFor
from aoffload.testing import SimulatedStore, StoreFault

pytestmark = pytest.mark.anyio

A, B, C = (prompt(seed, 17) for seed in range(1, 4))


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return leaping_backend(request.param)


# -- what is shared ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [SECRET, None], ids=["with a secret", "without"])
@pytest.mark.parametrize("verify", [False, True], ids=["", "verify"])
async def test_the_next_process_hits_what_the_first_computed(secret: bytes | None, verify: bool) -> None:
    """Each prompt with the bytes of its own prefix."""
    store = SimulatedStore()
    async with with_remote(store, secret=secret, verify=verify) as engine:
        await in_the_store(engine, A, B)
        assert len(store.objects) == 4
    async with with_remote(store, secret=secret, verify=verify) as engine:
        assert [await engine.serve(token_ids) for token_ids in (A, B, C)] == [16, 16, 0]
        statistics = engine.runtime.statistics().remote_transfers
        assert statistics is not None and (statistics.num_loads, statistics.blocks_loaded) == (4, 8)
        await assert_quiet(engine.runtime)


async def test_what_was_asked_for_once_is_not_stored() -> None:
    """The store has room for what comes back, not for everything that was ever computed."""
    store = SimulatedStore()
    async with with_remote(store) as engine:
        await engine.serve(A)
        await quiet(engine.runtime)
        assert not store.num_puts
        await engine.serve(A)
        await quiet(engine.runtime)
        assert len(store.objects) == 2 and store.num_puts == 2
        await engine.serve(A)
        await assert_quiet(engine.runtime)
        assert store.num_puts == 2


@pytest.mark.parametrize(
    "other",
    [
        {"secret": SECRET[::-1]},
        {"secret": None},
        {"namespace": "other"},
        {"block_size": 8},
        {"tier": {"cell_bytes": 64}},
    ],
    ids=["secret", "no secret", "namespace", "block size", "cell size"],
)
async def test_another_identity_hits_nothing(other: dict[str, Any]) -> None:
    """And what it stores is nothing to the first one."""
    store = SimulatedStore()
    async with with_remote(store) as engine:
        await in_the_store(engine, A)
    async with with_remote(store, **other) as engine:
        assert await engine.serve(A) == 0
        await in_the_store(engine, B)
        statistics = engine.runtime.statistics().remote_transfers
        assert statistics is not None and not statistics.num_loads and not statistics.cells_corrupt
    async with with_remote(store) as engine:
        assert [await engine.serve(token_ids) for token_ids in (A, B)] == [16, 0]


async def test_salts_are_kept_apart() -> None:
    """A tenant's prompt is a miss for everybody else."""
    store = SimulatedStore()
    async with with_remote(store) as engine:
        await in_the_store(engine, A, salt="a")
    async with with_remote(store) as engine:
        assert [await engine.serve(A, salt=salt) for salt in ("b", None, "a")] == [0, 0, 16]


async def test_poison_without_a_secret_is_a_miss() -> None:
    """Whatever bytes of it were changed; it is overwritten then, and not asked for before."""
    store = SimulatedStore()
    async with with_remote(store, secret=None) as engine:
        await in_the_store(engine, A)
    for key in list(store.objects):
        store.poison(key, len(store.objects[key]) // 2)
    async with with_remote(store, secret=None) as engine:
        assert await engine.serve(A) == 0
        statistics = engine.runtime.statistics().remote_transfers
        assert statistics is not None and 1 <= statistics.cells_corrupt <= 2
        await in_the_store(engine, A)
        await assert_quiet(engine.runtime)
    async with with_remote(store, secret=None) as engine:
        assert await engine.serve(A) == 16


async def test_whole_cells_hit() -> None:
    """Of a prompt that goes on differently, those before it does; a hit on the device is not loaded again."""
    store = SimulatedStore()
    long, other = prompt(7, 33), prompt(8, 40)
    async with with_remote(store, 16) as engine:
        await in_the_store(engine, long)
    async with with_remote(store, 16) as engine:
        assert await engine.serve([*long[:20], *other]) == 2 * CELL_TOKENS
        assert await engine.serve(long) == 32
        statistics = engine.runtime.statistics().remote_transfers
        assert statistics is not None and statistics.blocks_loaded == 4 + 3  # of the third cell the second half
        await assert_quiet(engine.runtime)


@pytest.mark.parametrize("most", [0, 7, 9, 16])
async def test_a_request_that_wants_less_fetches_less(most: int) -> None:
    """`max_hit_tokens` bounds what is loaded; without the cache nothing is even asked."""
    store = SimulatedStore()
    async with with_remote(store) as engine:
        await only_in_the_store(engine, A)
        num_calls = store.num_calls
        assert await engine.serve(A, reads_cache=False) == 0
        await forget_locally(engine)
        assert store.num_calls == num_calls
        assert await engine.serve(A, max_hit_tokens=most) == most // CELL_TOKENS * CELL_TOKENS
        await assert_quiet(engine.runtime)


async def test_a_fetch_without_a_request() -> None:
    """Brings a prompt into host memory; awaited, in the background, or before a request allocates."""
    async with with_remote(SimulatedStore()) as engine:
        runtime = engine.runtime
        await only_in_the_store(engine, A, B)
        assert await runtime.fetches.fetch(A[:9]).wait() == 8
        assert runtime.lookup(A).num_host_tokens == 8
        pending = runtime.fetches.fetch(B)
        assert await pending.wait() == 16 and pending.is_over
        await runtime.flush()
        await forget_locally(engine)
        with runtime.fetches.fetch(A):
            pass
        async with runtime.request(A) as request:
            assert await request.fetch() == 16
            assert request.match.num_host_tokens == 16
            request.allocate_nowait()
            assert await request.load() == 16
        assert await runtime.fetches.fetch(C).wait() == 0
        await assert_quiet(runtime)


async def test_requests_of_one_prompt_share_a_fetch() -> None:
    """Whatever their number, each cell is read once."""
    async with with_remote(SimulatedStore(), num_blocks=16) as engine:
        await only_in_the_store(engine, A)
        found: list[int] = []

        async def serve() -> None:
            found.append(await engine.serve(A))

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(serve)
        assert found == [16, 16, 16]
        statistics = engine.runtime.statistics().remote_transfers
        assert statistics is not None and statistics.blocks_loaded == 4
        await assert_quiet(engine.runtime)


async def test_behind_a_disk(tmp_path: Any) -> None:
    """What the disk has is read there, and the part after it comes from the store."""
    store = SimulatedStore()
    long = prompt(7, 33)
    async with with_remote(store, 16) as engine:
        await in_the_store(engine, long)
    disk = DiskTier(tmp_path / "disk", 1 << 18)
    async with with_remote(store, 16, disk=disk) as engine:
        await engine.runtime.disk.wait_restored()
        await engine.serve(long[:17], reads_cache=False)
        await engine.runtime.flush()
        while plans := engine.runtime.ledger.disk.plan_flush(1000):
            engine.runtime.worker.submit(plans)
            await engine.runtime.flush()
        await forget_locally(engine)
        assert await engine.serve(long) == 32
        statistics = engine.runtime.statistics()
        assert statistics.disk_transfers is not None and statistics.disk_transfers.blocks_loaded == 4
        assert statistics.remote_transfers is not None and statistics.remote_transfers.blocks_loaded == 4
        await assert_quiet(engine.runtime)


# -- a store that fails -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [StoreFault.ERROR, StoreFault.LATE_ERROR, StoreFault.GONE, StoreFault.LOST])
@pytest.mark.parametrize("kind", ["exist", "get", "put"])
async def test_a_call_that_fails_is_a_miss_at_most(kind: str, fault: StoreFault) -> None:
    """Every k-th call fails, for every small k: right bytes or a miss, and nothing leaks."""
    for k in (1, 2, 3):
        store = SimulatedStore()
        store.fault = lambda call, k=k: fault if call.kind == kind and not call.number % k else None
        async with with_remote(store, num_host_blocks=16) as engine:
            for _ in range(3):
                for token_ids in (A, B, C):
                    await engine.serve(token_ids)
                    await quiet(engine.runtime)
                await forget_locally(engine)
            await assert_quiet(engine.runtime)


async def test_yes_and_then_gone_is_a_miss() -> None:
    """The question is a guess, and the load the truth: the hit ends at the first cell that is gone."""
    store = SimulatedStore()
    long = prompt(7, 33)
    async with with_remote(store, 16) as engine:
        await only_in_the_store(engine, long)
        remote = engine.runtime._session.remote
        assert remote is not None
        cells = remote.labels_nowait(engine.runtime._session.prefix("prefix", long, {}), 0)
        transport = engine.runtime.transport
        assert isinstance(transport, LocalTransport) and transport._remote is not None
        lanes = transport._remote._lanes
        assert lanes is not None
        gone = lanes.calls.name(cells[2])
        store.fault = lambda call: StoreFault.GONE if call.kind == "get" and call.key == gone else None
        assert await engine.serve(long) == 2 * CELL_TOKENS
        await assert_quiet(engine.runtime)


async def test_a_store_that_fails_is_left_alone() -> None:
    """After a few failures a request does not even ask."""
    store = SimulatedStore()
    async with with_remote(store) as engine:
        await only_in_the_store(engine, A)
        store.fault = failing("get")
        for _ in range(2):
            assert await engine.serve(A, store="none") == 0
            await engine.runtime.flush()
            await forget_locally(engine)
        num_calls = store.num_calls
        assert await engine.serve(A, store="none") == 0
        assert store.num_calls == num_calls
        await assert_quiet(engine.runtime)


async def test_a_question_that_hangs_is_waited_for_no_longer_than_said() -> None:
    """The request computes; the answer, when it comes, is nobody's."""
    store = SimulatedStore()
    async with with_remote(store, tier={"ask_timeout_s": 100.0}) as engine:
        await only_in_the_store(engine, A)
        async with serving_until(HangingStore(store, "exist"), engine, A) as found:
            leap(10.0)
            (status,) = engine.runtime.reports.requests()
            assert status.waits_for is WaitsFor.ANSWER
            assert "an answer of the remote store for 10.0 s" in engine.runtime.explain(), "and not for its program"
            leap(80.0)
            await turns(20)
            assert not found
            await goes_on_after(10.0, found)
        assert found == [0] and not engine.runtime.ledger.reports.asking
        await assert_quiet(engine.runtime)


@pytest.mark.parametrize("num_waits", range(3))
async def test_who_is_cancelled_while_it_asks_leaves_nothing(num_waits: int) -> None:
    """Before the question, while it is out, and when its answer has come: the request ends, its pins are gone, and the
    next one hits."""
    store = SimulatedStore()
    async with with_remote(store, tier={"ask_timeout_s": 100.0}) as engine:
        await only_in_the_store(engine, A)
        hanging = HangingStore(store, "exist")
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(engine.serve, A)
                if num_waits:
                    await hanging.wait_for()
                if num_waits == 2:
                    hanging.resume()
                group.cancel_scope.cancel()
        finally:
            hanging.resume()
        await assert_quiet(engine.runtime)
        assert not engine.runtime.ledger.reports.asking
        assert await engine.serve(A) > 0
        await assert_quiet(engine.runtime)


async def test_a_load_that_hangs_is_waited_for_as_long_as_computing_takes() -> None:
    """Its host blocks are free at once when it is given up, and what it brings later goes nowhere."""
    store = SimulatedStore()
    tier = {"load_timeout_s": 60.0}  # given up after twice as long
    async with with_remote(store, tier=tier, prefill_tokens_per_s=0.16, load_timeout_s=1e4) as engine:
        await only_in_the_store(engine, A)
        hanging = HangingStore(store, "get")
        found: list[int] = []

        async def serve() -> None:
            found.append(await engine.serve(A))

        try:
            async with anyio.create_task_group() as group:
                group.start_soon(serve)
                await hanging.wait_for()
                leap(90.0)
                await turns(20)
                assert not found
                leap(10.05)
                with anyio.fail_after(GUARD_S):
                    while not found:
                        await turns(1)
            assert found == [0]
            leap(50.0)
            with anyio.fail_after(GUARD_S):
                await quiet(engine.runtime)
                assert not engine.runtime.statistics().host.num_quarantined
                for seed in range(20, 30):
                    await engine.serve(prompt(seed, 17))
        finally:
            hanging.resume()
        await assert_quiet(engine.runtime)


async def test_a_store_that_hangs_keeps_nobody() -> None:
    """Requests go on, host memory is evicted once it is given up, and closing takes no longer than it may."""
    store = SimulatedStore()
    hanging = HangingStore(store, "put", "exist")
    try:
        with anyio.fail_after(GUARD_S + 100):
            tier = {"ask_timeout_s": 0.05, "load_timeout_s": 0.05, "store_timeout_s": 2.5}
            async with with_remote(store, num_host_blocks=8, tier=tier, close_timeout_s=0.01) as engine:
                hanging.resume()
                for _ in range(2):
                    await engine.serve(A)
                hanging = HangingStore(store, "put", "exist")
                await engine.serve(A)
                await engine.serve(B)
                await engine.serve(B)
                await turns(20)
                leap(5.0)
                for seed in range(20, 26):
                    await engine.serve(prompt(seed, 17))
                engine.runtime.check_integrity()
    finally:
        hanging.resume()


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_a_store_does(seed: int) -> None:
    """Two runtimes share one that fails in every way, and keeps the first object of a key: right bytes or a miss."""
    import random

    rng = random.Random(seed)
    store = SimulatedStore(rng, num_nodes=3, capacity=12, keeps_first=bool(seed % 2))
    faults = [fault for fault in StoreFault if fault is not StoreFault.FOREIGN]
    store.fault = lambda call: rng.choice(faults) if rng.random() < 0.3 else None
    prompts = [prompt(number, 33) for number in range(1, 5)]
    async with with_remote(store, 16, tier={"ask_timeout_s": 1.0}) as one, with_remote(store, 16) as other:
        for _ in range(4):
            for engine in (one, other):
                for token_ids in prompts:
                    await engine.serve(token_ids)
                    await quiet(engine.runtime)
                if rng.random() < 0.5:
                    await forget_locally(engine)
        for engine in (one, other):
            await assert_quiet(engine.runtime)


# -- what is wrong ----------------------------------------------------------------------------------------------------


async def test_what_a_failed_forward_wrote_is_removed_from_the_store() -> None:
    """Nobody hits it: neither this process nor another one."""
    store = SimulatedStore()
    async with with_remote(store) as engine:
        runtime = engine.runtime
        async with runtime.request(A) as request:
            await request.allocate()
            await request.load()
            engine.compute(request, B, 0)  # the bytes of another prompt
            request.commit(len(A))
            async with runtime.request(A) as second:
                await second.allocate()
                await second.load()
                second.commit(len(A))
                await quiet(runtime)
            assert len(store.objects) == 2
            request.invalidate(0)
        with anyio.fail_after(GUARD_S):
            while store.objects:
                await turns(1)
        await assert_quiet(runtime)
    async with with_remote(store) as engine:
        assert await engine.serve(A) == 0


async def test_a_reset_ends_the_use_of_the_store() -> None:
    """Its namespace is of before: another one finds nothing of it. A reset of a tier above is none of the store's."""
    store = SimulatedStore()
    async with with_remote(store) as engine:
        await only_in_the_store(engine, A)
        assert await engine.serve(A) == 16
        await engine.runtime.reset()
        num_calls = store.num_calls
        for _ in range(3):
            await engine.serve(A)
            await quiet(engine.runtime)
        assert store.num_calls == num_calls
        await assert_quiet(engine.runtime)


# -- the rate ---------------------------------------------------------------------------------------------------------


async def test_no_more_is_written_a_second_than_said() -> None:
    """What is left comes with later requests."""
    store = SimulatedStore()
    async with with_remote(store, 16, tier={"max_write_rate": 200}) as engine:
        await in_the_store(engine, prompt(7, 33))
        assert 1 <= len(store.objects) <= 3
        for _ in range(8):
            leap(1.0)
            await engine.serve(A)
            await quiet(engine.runtime)
        assert len(store.objects) >= 4
        await assert_quiet(engine.runtime)


# -- what is refused --------------------------------------------------------------------------------------------------


async def test_a_transport_without_that_tier_is_refused() -> None:
    """By the name of the setting."""
    with pytest.raises(ConfigError) as refusal:
        OffloadRuntime(config(remote=RemoteTier(SimulatedStore())), transport=ScriptedTransport(8))
    assert refusal.value.argument == "remote"
