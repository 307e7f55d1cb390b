"""A process that serves under load until it is killed. It records the contents of its disk with times."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import anyio
import anyio.lowlevel
import torch

from aoffload import DiskTier, KVCacheGroup, OffloadConfig, OffloadRuntime, Tier
from aoffload._kernel.tokens import TokenSequence

from .engine import BLOCK_TOKENS, ByteEngine, WrongBytes, tokens_of

__all__ = ["SIZE_BYTES", "Journal", "serve_until_killed"]

NUM_PROMPTS = 120
NUM_CLIENTS = 6
NUM_DEVICE, NUM_HOST = 192, 256
SIZE_BYTES = 9 * 2**20
"""Some two thousand slots: fewer than all prompts take, so that the disk evicts, too."""
LOOK_S = 0.1


class Journal:
    """Lines in a file, which outlive their process: `[kind, when, what]`."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)

    def write(self, kind: str, what: object) -> None:
        os.write(self._descriptor, (json.dumps([kind, time.monotonic(), what]) + "\n").encode())


def serve_until_killed(place: Path, journal: Journal, seed: int, begun: int) -> None:
    """Serve; once the disk is read back, write to the descriptor `begun`."""
    torch.set_num_threads(1)
    backend = "trio" if seed % 2 else "asyncio"
    try:
        anyio.run(_serve, place, journal, seed, begun, backend=backend)
    except* WrongBytes as wrong:
        journal.write("wrong", repr(wrong.exceptions[0]))
    os.write(begun, b"over")


async def _serve(place: Path, journal: Journal, seed: int, begun: int) -> None:
    engine = ByteEngine(NUM_DEVICE)
    rng = random.Random(seed)
    async with engine.run_with(_config(place)) as runtime, anyio.create_task_group() as group:
        for number in range(NUM_CLIENTS):
            group.start_soon(_client, engine, random.Random(f"{seed} {number}"))
        await runtime.disk.wait_restored()
        found = {number: _whole(runtime, number) for number in range(NUM_PROMPTS)}
        journal.write("found", found)
        os.write(begun, b"go")
        group.start_soon(_compare, engine, rng)
        while True:
            journal.write("held", {number: _on_disk(runtime, number) for number in range(NUM_PROMPTS)})
            journal.write("compared", engine.num_checked)
            await anyio.sleep(LOOK_S)


async def _compare(engine: ByteEngine, rng: random.Random) -> None:
    """Each byte of what the last process has left is compared, in some order, as far as there is time."""
    for number in rng.sample(range(NUM_PROMPTS), NUM_PROMPTS):
        await engine.serve(_prompt(number))


async def _client(engine: ByteEngine, rng: random.Random) -> None:
    while True:
        number = min(rng.randrange(NUM_PROMPTS), rng.randrange(NUM_PROMPTS))
        with anyio.move_on_after(rng.choice((0.001, 0.01, 1.0, 1.0, 1.0))):
            await engine.serve(_prompt(number), rng)
        await anyio.lowlevel.checkpoint()


def _config(place: Path) -> OffloadConfig:
    return OffloadConfig(
        groups=[KVCacheGroup("all", block_size=BLOCK_TOKENS)], num_host_blocks=NUM_HOST, namespace="kills", verify=True,
        disk=DiskTier(str(place), SIZE_BYTES, daily_writes="100GiB"),
    )  # fmt: skip


def _prompt(number: int) -> list[int]:
    return tokens_of(number, BLOCK_TOKENS * (10 + number % 30) + 1)


def _whole(runtime: OffloadRuntime, number: int) -> int:
    """Tokens of a prompt that would hit, after a fetch."""
    found = runtime.lookup(_prompt(number))
    return found.num_tokens + found.num_lower_tokens


def _on_disk(runtime: OffloadRuntime, number: int) -> int:
    """Tokens of a prompt that the disk alone has published, from its start on."""
    cache = runtime.ledger.cache
    unit = cache.layout.unit_tokens
    sequence = TokenSequence(runtime._session.prefix("prefix", _prompt(number), {}), unit)
    run, stop = None, 0
    while (following := cache.index.find(sequence, run, stop)) is not None:
        common = sequence.common_stop(following, len(_prompt(number)) // unit)
        reached = min(common, following.parts[Tier.DISK].stop)
        if reached <= stop:
            break
        run, stop = following, reached
        if stop < following.stop:
            break
    return stop * unit
