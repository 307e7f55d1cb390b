"""Two tenants share a host, and one of them scans: the hits of the other one with a floor and without quotas, beside
its hits alone in a host of the size of the floor.

The tenant with the floor serves a trace. After each of its requests, the other tenant requests `NUM_SCANS` times as
many blocks, in prompts that never return. `TRACE=FILE` names a trace with `hash_ids`; without it, its rows are left
out. The device holds one request, so hits come from the host.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from aoffload._common.prefix import Prefix, Root
from aoffload._config.config import OffloadConfig
from aoffload._config.groups import KVCacheGroup
from aoffload._config.quotas import Quota, Quotas
from aoffload._extensions.assembly import Ledger
from aoffload.plan.replay import BLOCK_SIZE, land
from aoffload.plan.trace import Trace, read_trace

from .harness import Row
from .made_traces import made
from .peer import Peer

__all__ = ["hits_of_one", "run"]

ONE, OTHER = Root("tenants", "one"), Root("tenants", "other")
FLOORS = (2500, 10_000)
NUM_SCANS = 4
MADE, MADE_FLOOR, MADE_REQUESTS = ("talks", "popular", "scan"), 1000, 2000
WANTED = 0.95


def hits_of_one(trace: Trace, num_host: int, *, num_scans: int = NUM_SCANS, floor: int = 0) -> int:
    """Blocks that the tenant with the trace hits in a host of `num_host` blocks, of which `floor` are its floor. The
    other tenant requests `num_scans` times as many blocks, none of them twice."""
    groups, num_device = [KVCacheGroup("trace", block_size=BLOCK_SIZE)], trace.most_blocks + 2
    quotas = Quotas({"one": Quota(host_floor=floor)}) if floor else None
    ledger = Ledger(OffloadConfig(groups=groups, num_host_blocks=num_host, quotas=quotas), num_device + 1)
    found, scanned = 0, trace.num_blocks
    for request in trace.requests:
        blocks = np.asarray(request.blocks, np.int32)
        found += _serve(ledger, ONE, blocks)
        for _ in range(num_scans):
            _serve(ledger, OTHER, np.arange(scanned, scanned + len(blocks), dtype=np.int32))
            scanned += len(blocks)
    return found


def _serve(ledger: Ledger, root: Root, blocks: np.ndarray[tuple[int], np.dtype[np.int32]]) -> int:
    tokens = np.append(np.repeat(blocks, BLOCK_SIZE), np.int32(0))
    record = ledger.admit(Prefix.of(root, tokens))
    ledger.allocate_nowait(record)
    num_hits = record.match.num_tokens // BLOCK_SIZE
    land(ledger, ledger.plan_load(record))
    land(ledger, ledger.commit(record, len(tokens)))
    land(ledger, ledger.release(record))
    return num_hits


def run(vllm: Peer | None = None) -> Iterator[Row]:
    for name in MADE:
        yield from _rows(name, made(name, MADE_FLOOR, MADE_REQUESTS), MADE_FLOOR)
    if (named := os.environ.get("TRACE")) is None:
        print("tenants: TRACE=FILE names a trace to replay", file=sys.stderr)
        return
    trace = read_trace(Path(named))
    for floor in FLOORS:
        yield from _rows("trace", trace, floor)


def _rows(name: str, trace: Trace, floor: int) -> Iterator[Row]:
    num_host = 2 * floor
    alone = hits_of_one(trace, floor, num_scans=0)
    ours, without = hits_of_one(trace, num_host, floor=floor), hits_of_one(trace, num_host)
    yield Row(
        name=f"hits of a tenant, {name}, floor {floor:,} of {num_host:,} blocks", value=ours, unit="blocks",
        against="alone in the floor", limit=alone, ratio=ours / max(1, alone), wanted=WANTED,
    )  # fmt: skip
    yield Row(
        name=f"hits of a tenant, {name}, without quotas", value=without, unit="blocks", against="alone in the floor",
        limit=alone, ratio=without / max(1, alone), wanted=1.0, is_at_most=True,
    )  # fmt: skip
