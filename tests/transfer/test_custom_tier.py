"""A tier of the program's own, by the example's directory: the right bytes or a miss, and nothing leaks."""

from __future__ import annotations

import errno
import gc
import math
import os
import runpy
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest
import torch

from aoffload import ConfigError, DiskTier, InvalidArgument, KVCacheGroup, Ledger, OffloadConfig, OffloadRuntime, Tier
from aoffload.ledger import Build, LowerTier, Outcome
from aoffload.transport import LocalTransport, TransportTier

pytestmark = pytest.mark.anyio

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples/directory_tier.py"))
PROMPT, OTHER = list(range(90)), list(range(500, 590))
GUARD_S = 20.0


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@attrs.define
class Served:
    """A runtime over a directory, and the KV that the prompts have."""

    runtime: OffloadRuntime
    directory: Any
    right: dict[int, torch.Tensor] = attrs.field(factory=dict)
    """By the first token of the prompt: the KV of its first five blocks."""
    num_others: int = 0

    async def serve(self, token_ids: list[int]) -> int:
        """Returns how many tokens were loaded. Whatever was: the bytes are right."""
        num_loaded, found = await EXAMPLE["serve"](self.runtime, token_ids)
        assert torch.equal(self.right.setdefault(token_ids[0], found), found)
        return int(num_loaded)

    async def only_in_the_directory(self, *prompts: list[int]) -> None:
        """Compute the prompts, and let the device and the host evict them."""
        for token_ids in prompts:
            await self.serve(token_ids)
        await self.fill_host()
        for token_ids in prompts:
            match = self.runtime.lookup(token_ids)
            assert (match.num_tokens, match.num_lower_tokens) == (0, 80)

    async def fill_host(self) -> None:
        """Ten prompts that nobody has served before."""
        for _ in range(10):
            self.num_others += 1
            await self.serve(list(range(1000 * self.num_others, 1000 * self.num_others + 120)))
        await self.at_rest()

    async def at_rest(self) -> None:
        """Every block has an owner, and none is pinned."""
        with anyio.fail_after(GUARD_S):
            await self.runtime.flush()
        self.runtime.check_integrity()
        found = self.runtime.statistics()
        assert found.custom is not None
        for tier in (found.device, found.host, found.custom):
            assert (tier.num_pinned, tier.num_quarantined) == (0, 0)
        assert found.num_jobs == found.num_requests == 0

    def files(self) -> list[Path]:
        return sorted(self.directory.path.iterdir())


@asynccontextmanager
async def served(
    path: Path,
    num_blocks: int = 256,
    *,
    disk: DiskTier | None = None,
    timeouts_s: tuple[float, float] | None = None,
    **options: Any,
) -> AsyncIterator[Served]:
    EXAMPLE["kv_cache"].zero_()
    config = OffloadConfig(
        groups=[KVCacheGroup("full", block_size=EXAMPLE["BLOCK_SIZE"])],
        **{"num_host_blocks": 64, "prefill_tokens_per_s": 1.0, "disk": disk, "namespace": "test", **options},
    )
    directory = EXAMPLE["Directory"](str(path / "kv"), num_blocks)
    transport = LocalTransport(EXAMPLE["kv_cache"], disk=disk, tiers={Tier.CUSTOM: directory})
    tier = LowerTier(num_blocks, timeouts_s=timeouts_s)
    async with OffloadRuntime(config, transport=transport, extensions=[tier]) as runtime:
        yield Served(runtime, directory)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    before = set(threading.enumerate())
    yield partial(served, tmp_path)
    gc.collect()
    assert [one.name for one in threading.enumerate() if one not in before and one.name.startswith("directory")] == []


# -- what comes back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", [False, True])
async def test_what_the_host_evicts_comes_back(opened: Any, verify: bool) -> None:
    async with opened(verify=verify) as engine:
        await engine.only_in_the_directory(PROMPT, OTHER)
        assert (await engine.serve(PROMPT), await engine.serve(OTHER)) == (80, 80)
        assert engine.runtime.statistics().transfers.blocks_corrupt == 0
        await engine.at_rest()


def damaged(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def of_another_block(file: Path) -> None:
    """A whole file of this tier, with the wrong KV."""
    shutil.copy(next(one for one in file.parent.iterdir() if one.read_bytes() != file.read_bytes()), file)


def a_directory_in_its_place(file: Path) -> None:
    """Reading it is an error, not a missing file."""
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("harm", [damaged, cut_short, of_another_block, Path.unlink, a_directory_in_its_place])
async def test_a_bad_file_is_a_miss(opened: Any, harm: Callable[[Path], None]) -> None:
    """And never wrong KV: what is loaded ends before it, and the rest is computed."""
    async with opened() as engine:
        await engine.only_in_the_directory(PROMPT)
        for file in engine.files():
            harm(file)
        assert await engine.serve(PROMPT) == 0
        await engine.at_rest()
        for file in engine.files():
            if file.is_dir():
                file.rmdir()
        await engine.only_in_the_directory(PROMPT)  # it is stored again
        assert await engine.serve(PROMPT) == 80
        await engine.at_rest()


async def test_what_lies_before_a_bad_file_hits(opened: Any) -> None:
    async with opened() as engine:
        await engine.only_in_the_directory(PROMPT)
        part = next(iter(engine.runtime.ledger.cache.index.walk(sequence_of(engine, PROMPT), 5)))[0].parts[Tier.CUSTOM]
        damaged(engine.directory.path / f"{part.blocks[2]}.kv")
        assert await engine.serve(PROMPT) == 32
        assert await engine.serve(PROMPT) == 80  # on the device by now
        await engine.at_rest()


def sequence_of(engine: Served, token_ids: list[int]) -> Any:
    return engine.runtime.ledger.sequence_of(engine.runtime._session.prefix("prefix", token_ids, {}))


async def test_a_write_that_fails_is_a_miss(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full: nothing is findable that was not written, and nothing half-written is left."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with opened() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", full)
            await engine.serve(PROMPT)
            await engine.fill_host()
            assert engine.runtime.lookup(PROMPT).num_lower_tokens == 0
            assert engine.files() == []
        assert await engine.serve(PROMPT) == 0
        await engine.only_in_the_directory(OTHER)
        assert await engine.serve(OTHER) == 80


@pytest.mark.parametrize("eviction", ["lru", "learned"])
async def test_a_small_tier_evicts(opened: Any, eviction: str) -> None:
    """It holds what was stored last, within its blocks, and its files are those blocks."""
    async with opened(16, eviction=eviction) as engine:
        for first in range(0, 3000, 100):
            await engine.serve(list(range(first, first + 90)))
        await engine.at_rest()
        assert len(engine.files()) <= 16
        found = engine.runtime.statistics()
        assert found.custom is not None and found.custom.num_cached == 16
        for first in range(0, 3000, 100):  # whatever is found of them
            await engine.serve(list(range(first, first + 90)))
        await engine.at_rest()


# -- who leaves, hangs, and resets ------------------------------------------------------------------------------------


@attrs.define
class HeldLoads:
    """Holds the loads of a directory until it is released."""

    has_begun: threading.Event = attrs.field(factory=threading.Event)
    may_end: threading.Event = attrs.field(factory=threading.Event)

    @classmethod
    def loads_of(cls, directory: Any) -> HeldLoads:
        held, load = cls(), directory._load

        def hold(*args: int) -> bool:
            held.has_begun.set()
            assert held.may_end.wait(GUARD_S)
            return bool(load(*args))

        directory._load = hold
        return held

    async def begun(self) -> None:
        assert await anyio.to_thread.run_sync(self.has_begun.wait, GUARD_S)


@pytest.mark.parametrize("how", ["scope", "runtime", "leaves"])
async def test_a_request_that_is_cancelled_during_its_fetch_leaks_nothing(opened: Any, how: str) -> None:
    async with opened() as engine:
        await engine.only_in_the_directory(PROMPT)
        held = HeldLoads.loads_of(engine.directory)

        async def ask() -> None:
            async with engine.runtime.request(PROMPT, "gone") as request:
                await request.allocate()

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await held.begun()
            assert engine.runtime.statistics().num_jobs == 1
            if how == "scope":
                group.cancel_scope.cancel()
            elif how == "runtime":
                engine.runtime.cancel("gone")
            else:
                held.may_end.set()
        held.may_end.set()
        await engine.at_rest()
        assert await engine.serve(PROMPT) == 80  # by the copy that went on
        await engine.at_rest()


async def test_a_load_that_hangs_is_given_up(opened: Any) -> None:
    """Its request computes, its destination is quarantined until the thread is done, and stores go on meanwhile."""
    async with opened(timeouts_s=(0.05, 10.0), fetch_timeout_s=10.0) as engine:
        await engine.only_in_the_directory(PROMPT)
        held = HeldLoads.loads_of(engine.directory)
        assert await engine.serve(PROMPT) == 0
        assert engine.runtime.statistics().host.num_quarantined == 5
        engine.runtime.check_integrity()
        async with engine.runtime.request(OTHER) as request:  # the link has stalled: nothing is fetched
            await request.allocate()
        held.may_end.set()
        with anyio.fail_after(GUARD_S):
            while engine.runtime.statistics().host.num_quarantined:
                await anyio.lowlevel.checkpoint()
        await engine.at_rest()


def test_a_store_that_is_given_up_lands_nothing(tmp_path: Path) -> None:
    """Its source may be overwritten by then."""
    directory = EXAMPLE["Directory"](str(tmp_path), 4)
    import numpy as np

    from aoffload.transport import Env

    done: list[Any] = []
    host, began, may_end = np.ones((4, 8), np.uint8), threading.Event(), threading.Event()
    directory.open(host, None, done.append, Env())
    store = directory._store

    def hold(*args: int) -> bool:
        began.set()
        assert may_end.wait(GUARD_S)
        return bool(store(*args))

    directory._store = hold
    ledger = Ledger(OffloadConfig(groups=[KVCacheGroup("full")], num_host_blocks=4), 9, extensions=[LowerTier(4)])
    assert ledger.statistics().custom is not None
    directory.launch(plan(1, Tier.HOST, Tier.CUSTOM))
    assert began.wait(GUARD_S)
    directory.give_up(1)
    directory.give_up(2)  # not one of its own
    host[:] = 2
    may_end.set()
    directory.stop_launching()
    assert directory.join(GUARD_S)
    assert [one.outcome for one in done] == [Outcome.FAILED] and list(tmp_path.iterdir()) == []
    assert not directory._given_up and not directory._running


def plan(job_id: int, source: Tier, destination: Tier) -> Any:
    from array import array

    from aoffload.ledger import TransferPlan

    return TransferPlan(job_id, source, destination, array("i", [0, 1]), array("i", [0, 1]))


@pytest.mark.parametrize("tier", [None, Tier.CUSTOM, Tier.HOST])
async def test_a_reset(opened: Any, tier: Tier | None) -> None:
    async with opened() as engine:
        await engine.only_in_the_directory(PROMPT)
        await engine.runtime.reset(tier)
        num_left = 80 if tier is Tier.HOST else 0
        assert engine.runtime.lookup(PROMPT).num_lower_tokens == num_left
        await engine.at_rest()
        assert await engine.serve(PROMPT) == num_left
        await engine.only_in_the_directory(OTHER)
        assert await engine.serve(OTHER) == 80


async def test_a_reset_during_a_fetch(opened: Any) -> None:
    async with opened() as engine:
        await engine.only_in_the_directory(PROMPT)
        held = HeldLoads.loads_of(engine.directory)
        async with anyio.create_task_group() as group:
            group.start_soon(engine.serve, PROMPT)
            await held.begun()
            await engine.runtime.reset(timeout_s=0.0)
            held.may_end.set()
        await engine.at_rest()
        assert not engine.runtime.lookup(OTHER).num_lower_tokens


async def test_a_disk_beside_it(opened: Any, tmp_path: Path) -> None:
    """Both store what the host evicts. What one of them has lost, the other brings."""
    pytest.importorskip("xxhash", reason="the extra `disk` is not installed")
    disk = DiskTier(str(tmp_path / "disk"), size=2**22, close_flush_s=0)
    async with opened(disk=disk) as engine:
        await engine.runtime.disk.wait_restored()
        await engine.only_in_the_directory(PROMPT)
        assert await engine.serve(PROMPT) == 80
        found = engine.runtime.statistics()
        assert found.disk_transfers is not None and found.disk_transfers.blocks_loaded == 5  # the nearer one
        await engine.only_in_the_directory(PROMPT)
        await engine.runtime.reset(Tier.DISK)
        assert await engine.serve(PROMPT) == 80
        found = engine.runtime.statistics()
        assert found.disk_transfers is not None and found.disk_transfers.blocks_loaded == 5
        await engine.at_rest()
        await engine.only_in_the_directory(OTHER)
        await engine.runtime.reset(Tier.CUSTOM)
        assert await engine.serve(OTHER) == 80
        await engine.at_rest()


# -- what is seen of it -----------------------------------------------------------------------------------------------


async def test_it_is_seen(opened: Any, tmp_path: Path) -> None:
    """By the statistics, `explain`, the metrics, and events about blocks."""
    from aoffload._observe.kv_events.format import MEDIA
    from aoffload._observe.metrics.snapshot import snapshot_of_runtime
    from aoffload.metrics import Metrics

    async with opened() as engine:
        await engine.only_in_the_directory(PROMPT)
        assert "256 custom blocks: " in engine.runtime.explain()
        assert "disk" not in f"{engine.runtime!r}\n{engine.runtime.explain()}"
        found = snapshot_of_runtime(engine.runtime, Metrics()).samples
        pools = {sample.labels: sample.value for sample in found["aoffload_pool_blocks"]}
        assert pools == {("device",): 8, ("host",): 64, ("custom",): 256}
        assert {sample.labels[0] for sample in found["aoffload_blocks"]} == {"device", "host", "custom"}
        assert ("custom",) in {sample.labels for sample in found["aoffload_fetches_skipped_total"]}
        assert MEDIA["aoffload"][Tier.CUSTOM] == MEDIA["vllm"][Tier.CUSTOM] == "CUSTOM"


# -- what is refused --------------------------------------------------------------------------------------------------


def test_what_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    config, kv_cache = OffloadConfig(groups=[KVCacheGroup("full")], num_host_blocks=8), EXAMPLE["kv_cache"]
    with pytest.raises(ConfigError, match="CUSTOM, which the transport lacks"):
        OffloadRuntime(config, kv_cache, extensions=[LowerTier(4)])
    with pytest.raises(ConfigError, match="add the tier CUSTOM twice"):
        Ledger(config, 9, extensions=[LowerTier(4), LowerTier(4)])
    with pytest.raises(InvalidArgument, match="num_blocks"):
        LowerTier(0)
    odd: tuple[Any, ...] = (5, "ab", (1,), (1, 2, 3), ("a", "b"), (-1, 1), (1, 0), (math.nan, 1), (1, math.inf))
    for timeouts_s in odd:
        with pytest.raises(InvalidArgument, match="timeouts_s"):
            LowerTier(4, timeouts_s=timeouts_s)

    class Builds(LowerTier):
        def on_build(self, build: Build) -> None:
            pass

    with pytest.raises(ConfigError, match=r"extensions: Builds\.on_build must call"):
        Ledger(config, 9, extensions=[Builds(4)])
    directory: TransportTier = EXAMPLE["Directory"](str(tmp_path), 4)
    wrong: tuple[Any, ...] = ([], {Tier.DISK: directory}, {Tier.CUSTOM: object()})
    for tiers in wrong:
        with pytest.raises(InvalidArgument, match="tiers"):
            LocalTransport(kv_cache, tiers=tiers)


class Remote(LowerTier):
    tier = Tier.REMOTE


def test_only_a_tier_that_the_index_knows_is_added() -> None:
    config = OffloadConfig(groups=[KVCacheGroup("full")], num_host_blocks=8)
    with pytest.raises(ConfigError, match="cannot add the tier REMOTE"):
        Ledger(config, 9, extensions=[Remote(4)])
