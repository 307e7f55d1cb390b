"""Ranks that hold the same bytes: stored once, in host memory that they share, and loaded by all of them."""

from __future__ import annotations

import os
import queue
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import attrs
import builds
import pytest
import torch
from copies import GUARD_S
from scripted import ScriptedTransport

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime
from aoffload._common.tiers import Tier
from aoffload._kernel.plans import Completion, TransferPlan
from aoffload._kernel.states import Outcome
from aoffload._transfer import shared_memory
from aoffload._transfer.local import LocalTransport
from aoffload._transfer.ranks.process import spawn_ranks
from aoffload._transfer.ranks.rank import LocalRank
from aoffload._transfer.ranks.transport import RankTransport
from aoffload._transfer.shared_memory import SharedMemory, allocated_bytes, map_rows, shared_size
from aoffload.errors import ConfigError
from aoffload.transport import Env

START_S = 120.0
BLOCK_BYTES = 64


class Replicas:
    """An opened transport over ranks of which `num_replicas` in a row hold the same bytes."""

    def __init__(self, num_ranks: int = 2, num_replicas: int = 2, *, verify: bool = True, local: bool = True) -> None:
        self.pools = [
            torch.full((12, BLOCK_BYTES), rank // num_replicas, dtype=torch.uint8).share_memory_()
            for rank in range(num_ranks)
        ]
        for pool in self.pools:
            pool += torch.arange(12, dtype=torch.uint8)[:, None] * 10
        if local:
            self.ranks: Any = [LocalRank(LocalTransport(pool)) for pool in self.pools]
        else:
            self.ranks = spawn_ranks(partial(builds.shared, self.pools), num_ranks, START_S)
        self.transport = RankTransport(self.ranks, open_timeout_s=START_S, num_replicas=num_replicas)
        self.completions: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self.transport.open(8, verify=verify, deliver=self.completions.put, env=Env())

    def copy(self, job_id: int, source: Tier, destination: Tier, source_ids: list[int], ids: list[int]) -> Completion:
        self.transport.launch(TransferPlan(job_id, source, destination, array("i", source_ids), array("i", ids)), None)
        return self.completions.get(timeout=GUARD_S)

    def store(self, job_id: int, device: list[int], host: list[int]) -> Completion:
        return self.copy(job_id, Tier.DEVICE, Tier.HOST, device, host)

    def load(self, job_id: int, host: list[int], device: list[int]) -> Completion:
        return self.copy(job_id, Tier.HOST, Tier.DEVICE, host, device)


@pytest.fixture
def start() -> Iterator[Callable[..., Replicas]]:
    started: list[Replicas] = []

    def start_one(*args: Any, **options: Any) -> Replicas:
        started.append(Replicas(*args, **options))
        return started[-1]

    yield start_one
    for replicas in started:
        replicas.transport.close(GUARD_S)


where = pytest.mark.parametrize("local", [True, False], ids=["one process", "processes"])


@where
@pytest.mark.usefixtures("forked_ranks")
def test_every_rank_loads_blocks_that_another_rank_stored(start: Callable[..., Replicas], local: bool) -> None:
    """Whichever rank has made the store: the bytes on all devices are those that were stored, verified by a checksum,
    and they were copied once."""
    replicas = start(local=local)
    assert replicas.transport.block_bytes == BLOCK_BYTES, "the part of a group counts once"
    before = [pool.clone() for pool in replicas.pools]
    for job_id, block_id in ((1, 3), (2, 4)):  # each rank makes one of them
        done = replicas.store(job_id, [block_id], [job_id])
        assert (done.outcome, done.num_bytes) == (Outcome.LANDED, BLOCK_BYTES)
    for pool in replicas.pools:
        pool.zero_()
    assert replicas.load(3, [1, 2], [7, 8]).outcome is Outcome.LANDED
    for pool, old in zip(replicas.pools, before, strict=True):
        assert torch.equal(pool[[7, 8]], old[[3, 4]])
    found = replicas.transport.statistics()
    assert (found.num_stores, found.blocks_stored, found.bytes_stored) == (2, 2, 2 * BLOCK_BYTES)
    assert (found.blocks_loaded, found.blocks_verified, found.bytes_loaded) == (2, 2, 4 * BLOCK_BYTES)


def test_groups_of_replicas_have_memories_of_their_own(start: Callable[..., Replicas]) -> None:
    """Two KV heads over four ranks: ranks 0 and 1 hold one of them, ranks 2 and 3 the other."""
    replicas = start(4, 2)
    assert replicas.transport.block_bytes == 2 * BLOCK_BYTES
    before = [pool.clone() for pool in replicas.pools]
    assert replicas.store(1, [5], [0]).num_bytes == 2 * BLOCK_BYTES
    for pool in replicas.pools:
        pool.zero_()
    assert replicas.load(2, [0], [6]).outcome is Outcome.LANDED
    for pool, old in zip(replicas.pools, before, strict=True):
        assert torch.equal(pool[6], old[5])


def test_each_rank_verifies_what_another_one_has_stored(start: Callable[..., Replicas]) -> None:
    """The checksums are shared, too: a block that was never stored, or that has other bytes by now, is corrupt."""
    replicas = start()
    assert replicas.load(1, [2], [7]).outcome is Outcome.CORRUPT, "never stored"
    replicas.store(2, [3], [0])
    replicas.ranks[1].transport.backend.host_rows[0, 5] ^= 1
    done = replicas.load(3, [0], [7])
    assert (done.outcome, done.corrupt) == (Outcome.CORRUPT, (0,))
    assert "rank" not in done.error or done.num_landed == 0


@pytest.mark.parametrize("verify", [False, True])
def test_ranks_map_the_same_host_memory(start: Callable[..., Replicas], verify: bool) -> None:
    """The ranks map the same pages, which are free again when the transport is closed."""
    before = num_shared()
    replicas = start(verify=verify)
    replicas.store(1, [3], [6])
    rows = [rank.transport.backend.host_rows for rank in replicas.ranks]
    assert rows[0].ctypes.data != rows[1].ctypes.data
    assert rows[0].tobytes() == rows[1].tobytes()
    assert rows[0][6].any()
    assert num_shared() == before + 2 * (1 + verify), "one for each mapping"
    del rows
    assert replicas.transport.close(GUARD_S)
    assert num_shared() == before


def num_shared() -> int:
    """Number of open file descriptors of this process for shared host memory."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found += "memfd:aoffload" in os.readlink(f"/proc/self/fd/{descriptor}")
    return found


@pytest.mark.anyio
@pytest.mark.usefixtures("forked_ranks")
async def test_a_runtime_over_replicas_hits_with_the_right_bytes() -> None:
    """A prompt that the device has lost comes back on every rank, from memory for one."""
    pools = [torch.zeros(12, BLOCK_BYTES, dtype=torch.uint8).share_memory_() for _ in range(2)]
    transport = RankTransport.spawn(partial(builds.shared, pools), 2, timeout_s=START_S, num_replicas=2)
    config = OffloadConfig(groups=[KVCacheGroup("latent", block_size=4)], host_bytes=16 * BLOCK_BYTES)
    async with OffloadRuntime(config, transport=transport) as runtime:
        assert runtime.statistics().host.num_blocks == 16, "sized by one copy"
        async with runtime.request(range(13)) as request:
            await request.allocate()
            for number, block_id in enumerate(request.block_ids[0]):
                for pool in pools:
                    pool[block_id] = number + 1
            request.commit(13)
        await runtime.flush()
        await runtime.reset(Tier.DEVICE)
        for pool in pools:
            pool.zero_()
        async with runtime.request(range(13)) as request:
            await request.allocate()
            assert await request.load() == 12
            for pool in pools:
                found = [int(pool[block_id][0]) for block_id in request.block_ids[0][:3]]
                assert found == [1, 2, 3]


@attrs.define
class OneSize:
    """A rank whose blocks have this size."""

    block_bytes: int
    num_device_blocks: int = 9

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


@pytest.mark.parametrize(
    ("sizes", "num_replicas", "problem"),
    [
        ((8, 8, 8), 2, "must divide the number of ranks, 3, got 2"),
        ((8, 8), 0, "must be"),
        ((8, 8), 3, "must be"),
        ((8, 8), True, "must be"),
        ((8, 8, 8, 9), 2, r"ranks 2 to 3 have blocks of \[8, 9\] bytes: replicas hold the same bytes"),
    ],
)
def test_an_invalid_num_replicas_is_refused(sizes: tuple[int, ...], num_replicas: Any, problem: str) -> None:
    """The error is raised before host memory is allocated."""
    ranks: Any = [OneSize(size) for size in sizes]
    with pytest.raises(ConfigError, match=f"num_replicas: .*{problem}"):
        RankTransport(ranks, num_replicas=num_replicas)


def test_a_transport_that_cannot_share_memory_is_refused() -> None:
    """A transport of the program's own, or a tier below the host, which would have a copy for each rank."""
    transport = RankTransport([LocalRank(ScriptedTransport(9)), LocalRank(ScriptedTransport(9))], num_replicas=2)
    with pytest.raises(ConfigError, match=r"num_replicas: rank 0: must be 1: .* cannot share host memory"):
        transport.open(4, verify=False, deliver=lambda completion: None, env=Env())


def test_the_error_says_why_memory_cannot_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too much of it, a system without it, and memory that its owner has closed."""
    with pytest.raises(ConfigError, match=r"num_host_blocks: the system refuses .* GiB of host memory \("):
        SharedMemory(2**63)
    with pytest.raises(ConfigError, match=r"num_host_blocks: the system refuses 1048576.0 GiB of host memory"):
        SharedMemory(2**50)
    memory = SharedMemory(shared_size(4, 8))
    rows = map_rows(memory.path, 4, 8)
    rows[3] = 7
    assert allocated_bytes(memory.path) > 0
    memory.close()
    memory.close()
    assert rows[3, 0] == 7, "a mapping outlives the file"
    with pytest.raises(ConfigError, match="num_replicas: the shared host memory cannot be mapped"):
        map_rows(memory.path, 4, 8)
    monkeypatch.delattr(shared_memory.os, "memfd_create")
    with pytest.raises(ConfigError, match=r"num_replicas: sharing host memory needs Linux \(memfd_create\)"):
        SharedMemory(8)
