"""A runtime with a disk: what host memory evicts comes back from it, with the right bytes or as a miss."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog
from clocks import leap, leaping_backend
from serving import GUARD_S, config, prompt, turns
from structlog.testing import capture_logs

pytest.importorskip("xxhash", reason="the extra `disk` is not installed")

from disk_serving import SIZE, Hanging, assert_quiet, of_slab, on_the_disk_only, simulated, stored, with_disk
from scripted import ScriptedTransport

from aoffload import ConfigError, DiskTier, OffloadRuntime, Tier
from proof.disk.simulated_disk import DiskFault, IOCall

pytestmark = pytest.mark.anyio

PATIENCE_S = 10.0
"""For what comes at once, unless it never comes."""
A, B, C, D = (prompt(seed, 17) for seed in range(1, 5))


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return leaping_backend(request.param)


@pytest.fixture(params=["posix", "simulated"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return tmp_path if request.param == "posix" else simulated()


# -- what comes back --------------------------------------------------------------------------------------------------


async def test_what_the_host_evicts_comes_back_from_the_disk(place: Any) -> None:
    """More prompts than host memory holds, asked for again: each hits, with the bytes of its own prefix."""
    prompts = [prompt(seed, 17) for seed in range(1, 9)]
    async with with_disk(place) as engine:
        await engine.runtime.disk.wait_restored()
        for token_ids in prompts:
            await engine.serve(token_ids)
            await engine.runtime.flush()
        found = [await engine.serve(token_ids) for token_ids in prompts]
        assert sum(found) >= 6 * 16, found
        await assert_quiet(engine.runtime)
        statistics = engine.runtime.statistics()
        assert statistics.disk is not None and statistics.disk.num_cached >= 6 * 4
        assert statistics.disk_transfers is not None and statistics.disk_transfers.blocks_loaded >= 4 * 4


@pytest.mark.parametrize("verify", [False, True])
async def test_a_prompt_that_only_the_disk_has_is_hit(place: Any, verify: bool) -> None:
    """`allocate` fetches it and matches again; `match` says so before and after."""
    async with with_disk(place, verify=verify) as engine:
        await on_the_disk_only(engine, A)
        assert engine.runtime.lookup(A).num_lower_tokens == 16
        async with engine.runtime.request(A) as request:
            assert (request.match.num_tokens, request.match.num_lower_tokens) == (0, 16)
            await request.allocate()
            assert (request.match.num_host_tokens, request.match.num_lower_tokens) == (16, 0)
            assert await request.load() == 16
            engine.check(request, A, 16)
        await assert_quiet(engine.runtime)


async def test_a_fetch_without_a_request() -> None:
    """Brings a prompt into host memory; awaited, in the background, or before a request allocates."""
    async with with_disk(simulated()) as engine:
        runtime = engine.runtime
        await on_the_disk_only(engine, A, B)
        assert await runtime.fetches.fetch(A[:9]).wait() == 8
        assert runtime.lookup(A).num_host_tokens == 8
        with pytest.raises(TypeError, match=r"^fetches\.fetch\(\) .* keyword argument 'cache_sault'$"):
            runtime.fetches.fetch(A, cache_sault="tenant-a")  # type: ignore[call-arg]
        pending = runtime.fetches.fetch(B)
        await runtime.flush()
        assert pending.is_over and await pending.wait() == 16
        await runtime.reset(Tier.HOST)
        async with runtime.request(A) as request:
            assert await request.fetch() == 16
            assert request.match.num_host_tokens == 16
            request.allocate_nowait()
            assert await request.load() == 16
        await assert_quiet(runtime)


async def test_requests_of_one_prompt_share_a_fetch() -> None:
    """Whatever their number, each block is read once."""
    async with with_disk(simulated(), num_blocks=16) as engine:
        await on_the_disk_only(engine, A)
        found: list[int] = []

        async def serve() -> None:
            found.append(await engine.serve(A))

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(serve)
        assert found == [16, 16, 16]
        statistics = engine.runtime.statistics().disk_transfers
        assert statistics is not None and statistics.blocks_loaded == 4
        await assert_quiet(engine.runtime)


async def test_a_request_that_wants_less_fetches_less() -> None:
    """`max_hit_tokens` bounds what is read; without the cache nothing is."""
    async with with_disk(simulated()) as engine:
        await on_the_disk_only(engine, A)
        assert await engine.serve(A, reads_cache=False) == 0
        statistics = engine.runtime.statistics().disk_transfers
        assert statistics is not None and statistics.num_loads == 0
        await on_the_disk_only(engine)
        assert await engine.serve(A, max_hit_tokens=9) == 8
        statistics = engine.runtime.statistics().disk_transfers
        assert statistics is not None and statistics.blocks_loaded == 2


# -- over a restart ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", [False, True])
async def test_a_restart_hits_what_was_stored(place: Any, verify: bool) -> None:
    """Also what only host memory had when the runtime closed."""
    async with with_disk(place, verify=verify) as engine:
        for token_ids in (A, B):
            await engine.serve(token_ids)
    async with with_disk(place, verify=verify) as engine:
        assert await engine.runtime.disk.wait_restored() == 8
        assert [await engine.serve(token_ids) for token_ids in (A, B, C)] == [16, 16, 0]
        await assert_quiet(engine.runtime)


@pytest.mark.parametrize(
    "options", [{"namespace": "other"}, {"block_size": 8}], ids=lambda options: next(iter(options))
)
async def test_another_model_starts_empty(place: Any, options: dict[str, Any]) -> None:
    """And so does the first one after it: what it had is gone."""
    async with with_disk(place) as engine:
        await engine.serve(A)
    for changed in (options, {}):
        made = {"namespace": "test", **changed}
        async with with_disk(place, **made) as engine:
            assert await engine.runtime.disk.wait_restored() == 0
            assert await engine.serve(A) == 0
            assert engine.runtime.config.namespace == made["namespace"]


async def test_salts_are_kept_apart_over_a_restart(place: Any) -> None:
    """A tenant's prompt is a miss for everybody else."""
    async with with_disk(place) as engine:
        await engine.serve(A, salt="a")
    async with with_disk(place) as engine:
        await engine.runtime.disk.wait_restored()
        assert [await engine.serve(A, salt=salt) for salt in ("b", None, "a")] == [0, 0, 16]


def of_records() -> Callable[[IOCall], bool]:
    """The reads of the table but the first, that of the superblock before the runtime is open."""
    reads = itertools.count()
    return lambda call: call.kind == "read" and call.name == "table" and next(reads) > 0


async def test_a_request_may_run_while_the_disk_is_read() -> None:
    """It misses, and hits once the reading is over."""
    disk = simulated()
    async with with_disk(disk) as engine:
        await engine.serve(A)
        await engine.serve(B)
    hanging = Hanging(disk, of_records())
    try:
        async with with_disk(disk) as engine:
            await hanging.wait_for()
            assert await engine.serve(A) == 0
            hanging.resume()
            assert await engine.runtime.disk.wait_restored() == 8
            assert await engine.serve(B) == 16
            await assert_quiet(engine.runtime)
    finally:
        hanging.resume()


async def test_nothing_is_stored_while_the_disk_is_read() -> None:
    """A slot that counts as free until its record is read would be written to."""
    disk = simulated()
    async with with_disk(disk) as engine:
        await engine.serve(A)
    hanging = Hanging(disk, of_records())
    try:
        async with with_disk(disk) as engine:
            await hanging.wait_for()
            for seed in range(10, 20):
                await engine.serve(prompt(seed, 17))
                await engine.runtime.flush()
            assert engine.runtime.ledger.jobs.num_stored_now(Tier.HOST) == 0
            assert engine.runtime.statistics().disk_transfers.num_stores == 0  # type: ignore[union-attr]
            hanging.resume()
            assert await engine.runtime.disk.wait_restored() == 4
            assert await engine.serve(A) == 16
            await assert_quiet(engine.runtime)
    finally:
        hanging.resume()


async def test_a_reset_while_the_disk_is_read() -> None:
    """What is read afterwards is of before: nobody finds it."""
    disk = simulated()
    async with with_disk(disk) as engine:
        await engine.serve(A)
    hanging = Hanging(disk, of_records())
    try:
        async with with_disk(disk) as engine:
            await hanging.wait_for()
            await engine.runtime.reset()
            hanging.resume()
            assert await engine.runtime.disk.wait_restored() == 0
            assert engine.runtime.statistics().disk.num_cached == 0  # type: ignore[union-attr]
            assert await engine.serve(A) == 0
            await assert_quiet(engine.runtime)
    finally:
        hanging.resume()


async def test_closing_while_the_disk_is_read_that_hangs() -> None:
    """Takes no longer than it may."""
    disk = simulated()
    async with with_disk(disk) as engine:
        await engine.serve(A)
    hanging = Hanging(disk, of_records())
    try:
        with anyio.fail_after(GUARD_S / 2):
            async with with_disk(disk, tier={"close_flush_s": 0.01}, close_timeout_s=0.01):
                await hanging.wait_for()
        assert disk.is_locked
    finally:
        hanging.resume()


@pytest.mark.parametrize("when", ["before it is stored there", "after"])
async def test_what_a_failed_forward_wrote_is_found_by_nobody(when: str) -> None:
    """Neither by this process nor by the next one, though it had reached the disk."""
    disk = simulated()
    async with with_disk(disk) as engine:
        runtime = engine.runtime
        await runtime.disk.wait_restored()
        async with runtime.request(A) as request:
            await request.allocate()
            await request.load()
            engine.compute(request, B, 0)  # the bytes of another prompt
            request.commit(len(A))
            await runtime.flush()
            if when == "after":
                await stored(engine)
                assert runtime.statistics().disk.num_cached == 4  # type: ignore[union-attr]
            request.invalidate(0)
    async with with_disk(disk) as engine:
        assert await engine.runtime.disk.wait_restored() == 0
        assert await engine.serve(A) == 0


@pytest.mark.parametrize(
    ("num_failing", "events"),
    [(2, []), (3, ["disk_records_dropped"]), (1000, ["disk_turned_off"])],
    ids=["erasures at first", "all erasures", "all writes"],
)
async def test_what_a_failed_forward_wrote_is_found_by_nobody_whatever_fails(
    num_failing: int, events: list[str]
) -> None:
    """Its record is erased again. If that cannot be, the next process finds nothing that was there, which the log says;
    and where no record can be written at all, the disk is used no more."""
    disk, calls = simulated(), itertools.count()
    with capture_logs() as logs:
        async with with_disk(disk, logger=structlog.get_logger()) as engine:
            runtime = engine.runtime
            await runtime.disk.wait_restored()
            async with runtime.request(A) as request:
                await request.allocate()
                await request.load()
                engine.compute(request, B, 0)
                request.commit(len(A))
                await stored(engine)
                disk.fault = lambda call: (
                    DiskFault.SHORT
                    if (call.kind, call.name) == ("write", "table") and next(calls) < num_failing
                    else None
                )
                request.invalidate(0)
            await engine.serve(A)
    found = [log["event"] for log in logs if log["event"] in ("disk_records_dropped", "disk_turned_off")]
    assert found == events
    disk.fault = lambda call: None
    async with with_disk(disk) as engine:
        await engine.runtime.disk.wait_restored()
        await engine.serve(A)  # compares every byte that hits
        await assert_quiet(engine.runtime)


async def test_what_is_being_stored_while_it_is_taken_back_is_found_by_nobody() -> None:
    """The store is under way when the forward turns out to have failed: it records nothing, also if the process is
    killed as soon as it has ended."""
    disk = simulated()
    async with with_disk(disk) as engine:
        runtime = engine.runtime
        await runtime.disk.wait_restored()
        hanging = Hanging(disk, of_slab("write"))
        async with runtime.request(A) as request:
            await request.allocate()
            await request.load()
            engine.compute(request, B, 0)
            request.commit(len(A))
            await runtime.flush()
            runtime.worker.submit(runtime.ledger.disk.plan_flush(1000))
            await hanging.wait_for()
            written: list[bool] = []
            disk.wrote = lambda name, offset, data: written.append(any(data)) if name == "table" else None
            request.invalidate(0)
            hanging.resume()
            await runtime.flush()
    assert written and not any(written)  # no record of it was ever there


# -- a disk that fails ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [DiskFault.ERROR, DiskFault.PART_ERROR, DiskFault.SHORT, DiskFault.NO_SPACE])
@pytest.mark.parametrize("kind", ["read", "write"])
async def test_a_call_that_fails_is_a_miss_at_most(kind: str, fault: DiskFault) -> None:
    """Every k-th call fails, for every small k: right bytes or a miss, and nothing leaks."""
    for k in (1, 2, 3):
        disk = simulated(k)
        async with with_disk(disk, num_blocks=6, num_host_blocks=6) as engine:
            await engine.runtime.disk.wait_restored()
            disk.fault = lambda call, k=k: fault if call.kind == kind and not call.number % k else None
            for _ in range(2):
                for token_ids in (A, B, C, D):
                    await engine.serve(token_ids)
                    await engine.runtime.flush()
            await assert_quiet(engine.runtime)
            disk.fault = lambda call: None


async def test_a_disk_that_rots_is_a_miss_once() -> None:
    """The block is forgotten, computed, and stored anew."""
    disk = simulated()
    async with with_disk(disk) as engine:
        await on_the_disk_only(engine, A)
        content = disk.files["slab"].now
        content[:] = bytes(byte ^ 255 for byte in content)
        assert await engine.serve(A) == 0
        await stored(engine)
        assert engine.runtime.lookup(A).num_tokens == 16
        await on_the_disk_only(engine, A)
        assert await engine.serve(A) == 16
        statistics = engine.runtime.statistics().disk_transfers
        assert statistics is not None and statistics.blocks_corrupt == 4
        await assert_quiet(engine.runtime)


async def test_a_disk_that_fails_is_not_fetched_from() -> None:
    """After two failures it is left alone: a request does not even begin to wait for it."""
    disk = simulated()
    async with with_disk(disk) as engine:
        runtime = engine.runtime
        await on_the_disk_only(engine, A)
        disk.fault = lambda call: DiskFault.ERROR if call.kind == "read" else None
        for _ in range(2):
            assert await runtime.fetches.fetch(A).wait() == 0
        num_calls = disk.num_calls
        async with runtime.request(A) as request:
            assert request.match.num_lower_tokens == 16
            await request.allocate()
            assert request.match.num_tokens == 0
        assert disk.num_calls == num_calls
        await assert_quiet(runtime)


async def test_a_fetch_that_hangs_is_waited_for_no_longer_than_said() -> None:
    """The request computes; others hit host memory meanwhile and fetch nothing; a late end is taken in."""
    disk = simulated()
    async with with_disk(disk, num_blocks=16, num_host_blocks=24, fetch_timeout_s=7.0, load_timeout_s=100.0) as engine:
        runtime = engine.runtime
        await on_the_disk_only(engine, A)
        await engine.serve(B)
        await runtime.flush()
        await runtime.reset(Tier.DEVICE)
        hanging, goes_on = Hanging(disk, of_slab("read")), anyio.Event()
        try:
            async with anyio.create_task_group() as group:

                async def serve() -> None:
                    assert await engine.serve(A) == 0
                    goes_on.set()

                group.start_soon(serve)
                await hanging.wait_for()
                assert await engine.serve(B) == 16
                runtime.check_integrity()
                leap(7.0)
                with anyio.fail_after(PATIENCE_S):
                    await goes_on.wait()
        finally:
            hanging.resume()
        await assert_quiet(runtime)


async def test_a_load_from_the_disk_that_is_given_up_leaves_the_others_alone() -> None:
    """Its host blocks are quarantined until it ends; the device's copies go on, and so does the cache."""
    disk = simulated()
    times = {"fetch_timeout_s": 5.0, "transfer_timeout_s": 20.0}
    async with with_disk(disk, num_blocks=16, num_host_blocks=16, **times) as engine:
        runtime = engine.runtime
        await on_the_disk_only(engine, A, B)
        hanging = Hanging(disk, of_slab("read"))
        try:
            with anyio.fail_after(GUARD_S):
                pending = runtime.fetches.fetch(A)
                await hanging.wait_for()
                leap(20.0)
                await pending.wait()
                assert runtime.statistics().host.num_quarantined == 4
                runtime.check_integrity()
                assert await engine.serve(B) == 0  # no fetch is begun on a link that stalls
                assert not runtime.worker.copies.off_reason
                await engine.serve(C)
                await runtime.reset(Tier.DEVICE)
        finally:
            hanging.resume()
        with anyio.fail_after(GUARD_S):
            while runtime.statistics().host.num_quarantined:
                await turns()
        assert await engine.serve(C) == 16
        await assert_quiet(runtime)


async def test_a_store_that_hangs_leaves_the_others_alone() -> None:
    """It is given up before others may write to its blocks; a restart finds none of it."""
    disk = simulated()
    async with with_disk(disk, num_host_blocks=8, store_timeout_s=5.0) as engine:
        runtime = engine.runtime
        await runtime.disk.wait_restored()
        hanging = Hanging(disk, of_slab("write"))
        try:
            with anyio.fail_after(GUARD_S):
                for token_ids in (A, B, C, D):
                    await engine.serve(token_ids)
                await hanging.wait_for()
                leap(5.0)
                await runtime.flush()
                assert runtime.statistics().disk.num_quarantined > 0  # type: ignore[union-attr]
                runtime.check_integrity()
                for seed in range(20, 26):
                    await engine.serve(prompt(seed, 17))
        finally:
            hanging.resume()
        await runtime.flush()
    async with with_disk(disk, num_host_blocks=32, num_blocks=32) as engine:
        await engine.runtime.disk.wait_restored()
        for token_ids in (A, B, C, D, *(prompt(seed, 17) for seed in range(20, 26))):
            await engine.serve(token_ids)  # the bytes of its own prefix, or a miss
        await assert_quiet(engine.runtime)


async def test_closing_takes_no_longer_than_it_may_on_a_disk_that_hangs() -> None:
    """`close_flush_s`, and then `close_timeout_s` for what is in flight."""
    disk = simulated()
    hangings: list[Hanging] = []

    async def leap_when_it_hangs() -> None:
        await hangings[0].wait_for()
        leap(3.0)

    try:
        async with anyio.create_task_group() as group:
            async with with_disk(disk, tier={"close_flush_s": 3.0}, close_timeout_s=0.01) as engine:
                await engine.serve(A)
                await engine.runtime.disk.wait_restored()
                hangings.append(Hanging(disk, of_slab("write")))
                group.start_soon(leap_when_it_hangs)
        assert disk.is_locked
    finally:
        for hanging in hangings:
            hanging.resume()


# -- a cap for writes -------------------------------------------------------------------------------------------------


async def test_the_day_has_a_cap(place: Any) -> None:
    """Whatever is served and however it closes, not a block more is written."""
    async with with_disk(place, tier={"daily_writes": 640}) as engine:
        await engine.runtime.disk.wait_restored()
        for seed in range(20):
            await engine.serve(prompt(seed, 17))
            await engine.runtime.flush()
        statistics = engine.runtime.statistics().disk_transfers
        assert statistics is not None and 0 < statistics.bytes_stored <= 640
    async with with_disk(place) as engine:
        assert 0 < await engine.runtime.disk.wait_restored() <= 640 // 64


async def test_no_flush_if_it_is_to_take_no_time(place: Any) -> None:
    """What was not stored before is lost."""
    async with with_disk(place, tier={"close_flush_s": 0}) as engine:
        await engine.serve(A)
        await engine.runtime.disk.wait_restored()
    async with with_disk(place) as engine:
        assert await engine.runtime.disk.wait_restored() == 0


# -- reset ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", [None, Tier.DISK])
async def test_a_reset_outlives_the_process(place: Any, tier: Tier | None) -> None:
    """What was there before is found neither now nor after a restart; what comes later is."""
    async with with_disk(place) as engine:
        await on_the_disk_only(engine, A)
        assert await engine.runtime.reset(tier) == ()
        assert engine.runtime.lookup(A).num_lower_tokens == 0
        await engine.serve(B)
    async with with_disk(place) as engine:
        assert await engine.runtime.disk.wait_restored() == 4
        assert [await engine.serve(token_ids) for token_ids in (A, B)] == [0, 16]


async def test_a_reset_that_the_disk_refuses_is_said() -> None:
    """It is used no more; requests go on."""
    disk = simulated()
    async with with_disk(disk) as engine:
        await on_the_disk_only(engine, A)
        disk.fault = lambda call: DiskFault.ERROR if call.kind == "sync" else None
        with pytest.raises(Exception, match="a restart may find") as refusal:
            await engine.runtime.reset()
        assert type(refusal.value).__name__ == "TransferRefused"
        assert await engine.serve(A) == 0
        assert await engine.serve(A) == 16
        await assert_quiet(engine.runtime)


# -- what is refused --------------------------------------------------------------------------------------------------


async def test_a_transport_without_that_disk_is_refused(tmp_path: Path) -> None:
    """By the name of the setting."""
    with pytest.raises(ConfigError) as refusal:
        OffloadRuntime(config(disk=DiskTier(tmp_path / "disk", SIZE)), transport=ScriptedTransport(8))
    assert refusal.value.argument == "disk"


async def test_a_disk_that_cannot_be_had_is_named_at_the_start(tmp_path: Path) -> None:
    """A path that is taken, or a size that is not there; nothing stays open."""
    async with with_disk(tmp_path):
        with pytest.raises(ConfigError, match="in use") as refusal:
            async with with_disk(tmp_path):
                raise AssertionError("it was opened twice")
        assert refusal.value.argument == "path"
    full = simulated()
    full.num_bytes = 1000
    with pytest.raises(ConfigError) as refusal:
        async with with_disk(full):
            raise AssertionError("it was opened without room")
    assert refusal.value.argument == "size" and not full.is_locked and not full.num_open


async def test_a_runtime_without_a_disk_fetches_nothing() -> None:
    """It has no handles for that; a request's own `fetch` only matches."""
    async with OffloadRuntime(config(), transport=ScriptedTransport(8)) as runtime:
        for handle in ("fetches", "disk"):
            with pytest.raises(ConfigError, match="disk: is not configured"):
                getattr(runtime, handle)
        async with runtime.request(A) as request:
            assert await request.fetch() == 0
        assert runtime.statistics().disk is None
