"""A disk below host memory on a trace: hits compared with a simulation block by block, bytes written, and the daily
cap.

`TRACE=FILE` names the trace, one JSON object per line with `hash_ids` (see `policies.py`). Through the ledger every
copy lands at once, and the disk is idle after each request. The simulation keeps an LRU of single blocks in each tier.
Blocks that host memory evicts go to the disk. The selective policy stores only blocks that were requested twice. The
cap is tried through a runtime with real files, which may write a quarter of the bytes that it would write without a
cap.
"""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import anyio
import attrs
import torch

from aoffload import DiskTier, KVCacheGroup, Ledger, OffloadConfig, OffloadRuntime
from aoffload.ledger import Prefix
from aoffload.plan.replay import land

from .cycle import ROOT, Tokens
from .disk_start import directory
from .harness import Row
from .peer import Peer
from .policies import BLOCK_TOKENS, read_trace

__all__ = ["Hits", "by_blocks", "run", "through_ledger", "through_runtime"]

NUM_DEVICE, NUM_HOSTS, NUM_DISK = 3000, (5000, 20_000), 200_000
NUM_REQUESTS = 4000
WANTED_HITS, WANTED_SELECTIVE = 0.95, 0.3
BLOCK_BYTES = 512
RECORD_BYTES = 256
"""Bytes of a block in the slot table, at most."""
AT_A_TIME = 16


@attrs.define
class Hits:
    """Blocks of all requests together."""

    above: int = 0
    """Hits on the device and in host memory."""
    on_disk: int = 0
    written: int = 0
    """Blocks written to the disk."""

    @property
    def all(self) -> int:
        return self.above + self.on_disk


def run(vllm: Peer | None = None) -> Iterator[Row]:
    """Three rows for each size of host memory, and the cap. No rows without a trace."""
    named = os.environ.get("TRACE")
    if named is None:
        print("disk_replay: TRACE=FILE names the trace", file=sys.stderr)
        return
    prompts = read_trace(Path(named), NUM_REQUESTS)
    for num_host in NUM_HOSTS:
        yield from _of_host(prompts, num_host)
    yield from _capped(prompts, NUM_HOSTS[0])


def _of_host(prompts: list[Tokens], num_host: int) -> list[Row]:
    alone = through_ledger(prompts, NUM_DEVICE, num_host, 0)
    eager = through_ledger(prompts, NUM_DEVICE, num_host, NUM_DISK)
    selective = through_ledger(prompts, NUM_DEVICE, num_host, NUM_DISK, only_requested_twice=True)
    ids = [prompt[:-1:BLOCK_TOKENS].tolist() for prompt in prompts]
    simulated = by_blocks(ids, NUM_DEVICE, num_host, NUM_DISK)
    about = f"trace, host {num_host:,}"
    more = {name: f"{(found.all / alone.all - 1) * 100:+.0f} %" for name, found in _named(eager, selective, simulated)}
    print(f"disk_replay, {about}: more hits than without a disk: {more}", file=sys.stderr)
    return [
        Row(name=f"{about}: hits with a disk", value=eager.all, unit="blocks", spread=more["eager"],
            against=f"block by block ({more['by blocks']})", limit=simulated.all, ratio=eager.all / simulated.all,
            wanted=WANTED_HITS),
        Row(name=f"{about}: hits, selective", value=selective.all, unit="blocks", spread=more["selective"],
            against="without a disk", limit=alone.all, ratio=selective.all / alone.all),
        Row(name=f"{about}: written, selective", value=selective.written, unit="blocks", against="eager",
            limit=eager.written, ratio=selective.written / eager.written, wanted=WANTED_SELECTIVE, is_at_most=True),
    ]  # fmt: skip


def _named(eager: Hits, selective: Hits, simulated: Hits) -> list[tuple[str, Hits]]:
    return [("eager", eager), ("selective", selective), ("by blocks", simulated)]


def _capped(prompts: list[Tokens], num_host: int) -> list[Row]:
    with directory() as path:
        free = anyio.run(through_runtime, prompts, num_host, path / "free", None)
        cap = free.written * BLOCK_BYTES // 4
        found = anyio.run(through_runtime, prompts, num_host, path / "capped", cap)
    print(f"disk_replay: {free.all:,} hits without a cap, {found.all:,} with one", file=sys.stderr)
    written = found.written * BLOCK_BYTES
    return [
        Row(name="runtime on the trace: written", value=written / 1e6, unit="MB", against="daily_writes",
            limit=cap / 1e6, ratio=written / cap, wanted=1.0, is_at_most=True),
    ]  # fmt: skip


def _config(num_host: int, disk: DiskTier | None) -> OffloadConfig:
    groups = [KVCacheGroup("full", block_size=BLOCK_TOKENS)]
    return OffloadConfig(groups=groups, num_host_blocks=num_host, namespace="benchmark", disk=disk)


def _tier(path: Path | str, num_slots: int, daily_writes: int | None = None) -> DiskTier:
    size = num_slots * (BLOCK_BYTES + RECORD_BYTES) + 2**20
    return DiskTier(str(path), size, daily_writes=daily_writes, close_flush_s=0)


def through_ledger(
    prompts: list[Tokens], num_device: int, num_host: int, num_disk: int, *, only_requested_twice: bool = False
) -> Hits:
    """Serve one request after the other. Every copy lands at once."""
    config = _config(num_host, _tier("unused", num_disk) if num_disk else None)
    ledger, found = Ledger(config, num_device + 1, block_bytes=BLOCK_BYTES), Hits()
    for tokens in prompts:
        prefix = Prefix.of(ROOT, tokens)
        found.above += ledger.lookup(prefix).num_tokens // BLOCK_TOKENS
        if num_disk:
            found.on_disk += land(ledger, ledger.fetches.fetch(prefix).plans)
        record = ledger.admit(prefix)
        ledger.allocate_nowait(record)
        land(ledger, ledger.plan_load(record))
        land(ledger, ledger.commit(record, len(tokens)))
        land(ledger, ledger.release(record))
        while num_disk and (
            plans := ledger.disk.plan_stores(num_disk, is_idle=True, only_requested_twice=only_requested_twice)
        ):
            found.written += land(ledger, plans)
    return found


def by_blocks(prompts: Sequence[Sequence[int]], num_device: int, num_host: int, num_disk: int) -> Hits:
    """The same with an LRU of single blocks in each tier. The ids identify the cached blocks."""
    device, host, disk = OrderedDict[int, None](), OrderedDict[int, None](), OrderedDict[int, None]()
    found = Hits()
    for ids in prompts:
        is_above = True
        for each in ids:
            is_above = is_above and (each in device or each in host)
            if is_above:
                found.above += 1
            elif each in device or each in host or each in disk:
                found.on_disk += 1
            else:
                break
        _use(device, ids, num_device)
        evicted = _use(host, ids, num_host)
        found.written += sum(each not in disk for each in evicted)
        _use(disk, [each for each in evicted if each in disk or each not in host], num_disk)
    return found


def _use(tier: OrderedDict[int, None], ids: Sequence[int], room: int) -> list[int]:
    """Mark the blocks as used, the first of them last. Returns the blocks evicted for them."""
    for each in reversed(ids):
        tier[each] = None
        tier.move_to_end(each)
    return [tier.popitem(last=False)[0] for _ in range(len(tier) - room)]


async def through_runtime(prompts: list[Tokens], num_host: int, path: Path, daily_writes: int | None) -> Hits:
    """Serve some requests at a time, without pauses. The disk copies as much as it can meanwhile."""
    tier, found, todo = _tier(path, NUM_DISK, daily_writes), Hits(), iter(prompts)
    kv_cache = torch.zeros(NUM_DEVICE + 1, BLOCK_BYTES, dtype=torch.uint8)

    async def client(runtime: OffloadRuntime) -> None:
        for tokens in todo:
            async with runtime.request(tokens) as request:
                before = request.match.num_tokens
                await request.allocate()
                found.above += before // BLOCK_TOKENS
                found.on_disk += max(0, request.match.num_tokens - before) // BLOCK_TOKENS
                await request.load()
                request.commit(len(tokens))

    async with OffloadRuntime(_config(num_host, tier), kv_cache) as runtime:
        await runtime.disk.wait_restored()
        async with anyio.create_task_group() as clients:
            for _ in range(AT_A_TIME):
                clients.start_soon(client, runtime)
        await runtime.flush()
        counts = runtime.statistics().disk_transfers
        assert counts is not None
        found.written = counts.blocks_stored
    return found
