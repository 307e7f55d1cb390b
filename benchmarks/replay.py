"""The first 4,000 requests of a trace through the ledger and through the whole runtime. `TRACE=FILE` names the trace.

Each id of the trace is one block, one more token follows, and each request computes its prompt and one decode step.
Blocks have 64 bytes. With one request at a time its stores land before it ends, and both sides have to hit the same
blocks. Prompts that overlap in time cannot hit each other.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import anyio
import torch

from aoffload import KVCacheGroup, Ledger, OffloadConfig, OffloadRuntime
from aoffload.ledger import Completion, Outcome, Prefix, TransferPlan

from .cycle import ROOT, Tokens
from .harness import Measured, Rounds, Row, Sample
from .peer import Peer
from .policies import BLOCK_TOKENS, read_trace

__all__ = ["run", "through_ledger", "through_runtime"]

NUM_DEVICE, NUM_HOST, NUM_REQUESTS = 3000, 20_000, 4000
AT_A_TIME = (1, 64, 1000)
WITH_HASHING, DIGESTS_GIVEN = "vLLM with its hashing", "vLLM, digests given"
WANTED = {
    ("Ledger", WITH_HASHING): 5.0, ("runtime, 64 at a time", WITH_HASHING): 2.0,
    ("Ledger", DIGESTS_GIVEN): 3.5, ("runtime, 64 at a time", DIGESTS_GIVEN): 1.4,
    ("compiled Ledger", WITH_HASHING): 9.0, ("compiled runtime, 64 at a time", WITH_HASHING): 3.0,
    ("compiled Ledger", DIGESTS_GIVEN): 6.0, ("compiled runtime, 64 at a time", DIGESTS_GIVEN): 2.0,
}  # fmt: skip
SECONDS = 20.0


def run(vllm: Peer | None) -> list[Row]:
    """Rows for the ledger and for each number of requests at a time, also with the compiled core if it was built. No
    rows without a trace."""
    named = os.environ.get("TRACE")
    if named is None:
        print("replay: TRACE=FILE names the trace", file=sys.stderr)
        return []
    path = str(Path(named).resolve())
    prompts = read_trace(Path(named), NUM_REQUESTS)
    ours: dict[str, Callable[[], Sample]] = {"Ledger": lambda: through_ledger(prompts)}
    for number in AT_A_TIME:
        ours[f"runtime, {number:,} at a time"] = partial(anyio.run, through_runtime, prompts, number)
    others: dict[str, Callable[[], Sample]] = {}
    if vllm is not None:
        vllm.ask("prepare_replay", path=path, limit=NUM_REQUESTS)
        others[WITH_HASHING] = lambda: _through_peer(vllm, path, hashes=True)
        others[DIGESTS_GIVEN] = lambda: _through_peer(vllm, path, hashes=False)
    with ExitStack() as held:
        if (compiled := Peer.compiled()) is not None:
            held.enter_context(compiled)
            ours["compiled Ledger"] = lambda: Sample(**compiled.ask("replay", path=path, at_a_time=0))
            ours["compiled runtime, 64 at a time"] = lambda: Sample(**compiled.ask("replay", path=path, at_a_time=64))
        found = _measured(ours | others)
    against = list(others) or ["Ledger"]
    return [_row(name, found, other) for name in ours for other in against if name != other]


def _measured(subjects: Mapping[str, Callable[[], Sample]]) -> dict[str, Measured]:
    rounds = Rounds(subjects, seconds=SECONDS, least=3, warm_up=1)
    for name in rounds:
        rounds.add(name, subjects[name]())
    return rounds.measured()


def _row(name: str, found: dict[str, Measured], against: str) -> Row:
    wanted = WANTED.get((name, against))
    return Row.faster(f"replay, {name}, one request", found[name], against, found[against], wanted)


def _config() -> OffloadConfig:
    return OffloadConfig(groups=[KVCacheGroup("full", block_size=BLOCK_TOKENS)], num_host_blocks=NUM_HOST)


def through_ledger(prompts: list[Tokens]) -> Sample:
    """The time per request."""
    ledger = Ledger(_config(), NUM_DEVICE + 1)
    num_hits = [0, 0]

    def land(plans: Iterable[TransferPlan]) -> None:
        for plan in plans:
            ledger.launch(plan.job_id)
            ledger.settle(Completion(plan.job_id, Outcome.LANDED))

    cpu, wall = time.thread_time(), time.perf_counter()
    for prompt in prompts:
        record = ledger.admit(Prefix.of(ROOT, prompt))
        num_hits[0] += record.match.num_device_tokens
        num_hits[1] += record.match.num_host_tokens
        ledger.allocate_nowait(record)
        land(ledger.plan_load(record))
        land(ledger.commit(record, len(prompt), (7,)))
        ledger.extend_nowait(record, len(prompt) + 1)
        land(ledger.commit(record, len(prompt) + 1, (8,)))
        land(ledger.release(record))
    sample = _share(cpu, wall, len(prompts))
    _check(prompts, num_hits[0], num_hits[1])
    return sample


async def through_runtime(prompts: list[Tokens], at_a_time: int) -> Sample:
    """The time per request of the event loop's thread."""
    num_hits = [0, 0]
    todo = iter(prompts)
    kv_cache = torch.zeros(NUM_DEVICE + 1, BLOCK_TOKENS)

    async def client(runtime: OffloadRuntime) -> None:
        for prompt in todo:
            async with runtime.request(prompt) as request:
                await request.allocate()
                num_hits[0] += request.match.num_device_tokens
                num_hits[1] += request.match.num_host_tokens
                await request.load()
                request.commit(len(prompt), (7,))
                await request.extend(len(prompt) + 1)
                request.commit(len(prompt) + 1, (8,))
                if at_a_time == 1:
                    await runtime.flush()

    async with OffloadRuntime(_config(), kv_cache) as runtime:
        cpu, wall = time.thread_time(), time.perf_counter()
        async with anyio.create_task_group() as clients:
            for _ in range(at_a_time):
                clients.start_soon(client, runtime)
        await runtime.flush()
        sample = _share(cpu, wall, len(prompts))
    if at_a_time == 1:
        _check(prompts, *num_hits)
    return sample


def _through_peer(vllm: Peer, path: str, *, hashes: bool) -> Sample:
    found = vllm.ask("replay", path=path, num_device=NUM_DEVICE, num_host=NUM_HOST, hashes=hashes)
    device, host = found["num_device_hits"], found["num_host_hits"]
    print(f"replay, {vllm.name}: {device:,} device and {host:,} host hits", file=sys.stderr)
    return Sample(found["wall_s"], found["cpu_s"])


def _share(cpu: float, wall: float, number: int) -> Sample:
    return Sample((time.perf_counter() - wall) / number, (time.thread_time() - cpu) / number)


def _check(prompts: list[Tokens], num_device: int, num_host: int) -> None:
    """Print the hits. With one request at a time they are determined, so fail if they are too few."""
    asked = sum(len(prompt) // BLOCK_TOKENS for prompt in itertools.chain(prompts))
    found = (num_device + num_host) // BLOCK_TOKENS
    print(
        f"replay: {num_device // BLOCK_TOKENS:,} device and {num_host // BLOCK_TOKENS:,} host hits of {asked:,}",
        file=sys.stderr,
    )
    assert found >= 0.27 * asked or len(prompts) < NUM_REQUESTS, found
