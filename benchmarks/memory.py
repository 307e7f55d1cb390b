"""Memory: bytes of the index per cached block, and of an idle request in flight.

Each figure is the growth of a fresh process's resident set, so everything counts: objects, the hash states outside of
Python's heap, and the rounding of the allocators. Cached blocks are held by both tiers, and the ids of both count as
index. Linux only: elsewhere there are no rows.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import anyio
import torch

from aoffload import OffloadConfig, OffloadRuntime
from aoffload.ledger import Prefix

from .cycle import BLOCK_SIZE, ROOT, Tokens, prompts_of
from .harness import Row
from .peer import Peer
from .pools import ONE_GROUP, RUN_BLOCKS, ledger_of, prompt_of, serve

__all__ = ["measure", "run"]

NUM_BLOCKS = 10**6
NUM_REQUESTS = 10_000
NUM_BRANCHES = 3
TOKEN_BYTES = 4 * BLOCK_SIZE
MOST_BESIDE_TOKENS = 60
STATM = Path("/proc/self/statm")
Found = dict[str, float]


def run(vllm: Peer | None = None) -> Iterator[Row]:
    """Two rows for the index, one for a collection of garbage, one for each kind of idle request."""
    if not STATM.exists():
        print("memory: the resident set is read from /proc", file=sys.stderr)
        return
    alone = in_fresh_process("alone", NUM_BLOCKS)
    yield index_row("alone", alone)
    yield index_row("branching", in_fresh_process("branching", NUM_BLOCKS))
    yield collection_row(alone)
    yield idle_row("Ledger", in_fresh_process("records", NUM_REQUESTS), "its token ids")
    for backend in ("asyncio", "trio"):
        idle = in_fresh_process(f"requests {backend}", NUM_REQUESTS)
        yield idle_row(f"runtime, {backend}", idle, "a task that only waits")


def index_row(kind: str, found: Found) -> Row:
    """Bytes per block, compared with those of the tokens themselves and 60 more."""
    most = TOKEN_BYTES + MOST_BESIDE_TOKENS
    return Row(
        name=f"index of 10^6 blocks in runs of {RUN_BLOCKS}, {kind}: a block", value=found["bytes"], unit="B",
        against=f"tokens + {MOST_BESIDE_TOKENS}", limit=most, ratio=found["bytes"] / most, wanted=1.0, is_at_most=True,
    )  # fmt: skip


def collection_row(found: Found) -> Row:
    """Time of a full garbage collection while nothing is frozen. It stops an event loop for that time."""
    return Row(
        name="full collection with that index", value=found["collect_s"] * 1e3, unit="ms", against="before it",
        limit=found["collect_before_s"] * 1e3, ratio=found["collect_s"] / found["collect_before_s"],
    )  # fmt: skip


def idle_row(name: str, found: Found, against: str) -> Row:
    return Row(
        name=f"idle request of {RUN_BLOCKS * BLOCK_SIZE + 1} tokens, {name}", value=found["bytes"], unit="B",
        against=against, limit=found["beside"], ratio=found["bytes"] / found["beside"],
    )  # fmt: skip


def in_fresh_process(kind: str, number: int) -> Found:
    """`measure` in a process that has held nothing else before."""
    command = [sys.executable, "-m", "benchmarks.memory", kind, str(number)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: Found = json.loads(answer)
    return found


def measure(kind: str, number: int) -> Found:
    """In this process: bytes per block or request, for `number` of a kind."""
    kinds: dict[str, Callable[[int], Found]] = {
        "alone": lambda number: index_of(_prompts_alone(number // RUN_BLOCKS), number),
        "branching": lambda number: index_of(_prompts_branching(number // RUN_BLOCKS // (NUM_BRANCHES + 1)), number),
        "records": idle_holdings,
        "requests asyncio": lambda number: anyio.run(idle_requests, number, backend="asyncio"),
        "requests trio": lambda number: anyio.run(idle_requests, number, backend="trio"),
    }
    return kinds[kind](number)


def index_of(prompts: Iterator[Tokens], num_blocks: int) -> Found:
    """Bytes per block of an index that holds all of `prompts`, `num_blocks` blocks, in both tiers."""
    for tokens in _prompts_alone(100):  # makes the objects that are made only once
        serve(ledger_of(2 * RUN_BLOCKS, RUN_BLOCKS), tokens)
    collect_before = _collect()
    before = resident_bytes()
    ledger = ledger_of(num_blocks + 1, num_blocks)
    for tokens in prompts:
        serve(ledger, tokens)
    collect = _collect()
    taken = resident_bytes() - before
    found = ledger.statistics()
    assert (found.device.num_cached, found.host.num_cached) == (num_blocks, num_blocks), found
    assert len(ledger.cache.index.runs) == num_blocks // RUN_BLOCKS
    return {"bytes": taken / num_blocks, "collect_s": collect, "collect_before_s": collect_before}


def _prompts_alone(number: int) -> Iterator[Tokens]:
    """Prompts that are one run each, without children."""
    (template,) = prompts_of(RUN_BLOCKS, 1)
    return (prompt_of(at, template) for at in range(number))


def _prompts_branching(number: int) -> Iterator[Tokens]:
    """Groups of three that share their first half: four runs, one of which is the parent of the others."""
    (template,) = prompts_of(2 * RUN_BLOCKS, 1)
    for at in range(number):
        for branch in range(NUM_BRANCHES):
            tokens = prompt_of(at, template)
            tokens[RUN_BLOCKS * BLOCK_SIZE] = branch
            yield tokens


def idle_holdings(number: int) -> Found:
    """Request records of the same cached prompt, each with one more computed token in a block of its own."""
    ledger = ledger_of(RUN_BLOCKS + number, RUN_BLOCKS)
    (tokens,) = _prompts_alone(1)
    serve(ledger, tokens)
    _collect()
    before = resident_bytes()
    for _ in range(number):
        record = ledger.admit(Prefix.of(ROOT, tokens))
        ledger.allocate_nowait(record)
        ledger.commit(record, len(tokens))
    _collect()
    taken = resident_bytes() - before
    assert ledger.statistics().num_requests == number
    return {"bytes": taken / number, "beside": tokens.nbytes}


async def idle_requests(number: int) -> Found:
    """The same through the runtime, each in a task of its own, compared with tasks that hold nothing."""
    config = OffloadConfig(groups=ONE_GROUP, num_host_blocks=RUN_BLOCKS)
    (tokens,) = _prompts_alone(1)

    async def wait() -> None:
        await anyio.Event().wait()

    async def idle() -> None:
        async with runtime.request(tokens) as request:
            await request.allocate()
            request.commit(len(tokens))
            await anyio.Event().wait()

    async def bytes_of(function: Callable[[], Coroutine[Any, Any, None]]) -> float:
        _collect()
        before = resident_bytes()
        for _ in range(number):
            tasks.start_soon(function)
        await anyio.wait_all_tasks_blocked()
        _collect()
        return (resident_bytes() - before) / number

    async with OffloadRuntime(config, torch.zeros(RUN_BLOCKS + number + 1, 1)) as runtime:
        async with runtime.request(tokens) as request:
            await request.allocate()
            request.commit(len(tokens))
        await runtime.flush()
        async with anyio.create_task_group() as tasks:
            beside = await bytes_of(wait)
            taken = await bytes_of(idle)
            assert runtime.statistics().num_requests == number
            tasks.cancel_scope.cancel()
    return {"bytes": taken, "beside": beside}


def resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _collect() -> float:
    """Collect all garbage. Returns the seconds it took."""
    began = time.perf_counter()
    gc.collect()
    return time.perf_counter() - began


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
