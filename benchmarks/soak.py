"""Ten thousand requests, a thousand at a time, a tenth of them cancelled: `python -m benchmarks.soak`.

Real copies, every byte checked, and a look at the resident memory after every thousand.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import attrs
import numpy as np
import torch

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime, Request, RequestState

__all__ = ["Soak", "SoakResult"]

BLOCK_SIZE = 16
BLOCKS_PER_REQUEST = 20
VALUES_PER_BLOCK = 32
NUM_FAMILIES = 1000
SHARED_BLOCKS = 12
"""How many leading blocks the requests of a family have in common."""


@attrs.frozen
class SoakResult:
    num_done: int
    num_cancelled: int
    num_blocks_checked: int
    num_blocks_loaded: int
    num_pinned: int
    num_quarantined: int
    rss_bytes: list[int]
    """After each tenth of the requests."""
    wall_s: float

    @property
    def growth(self) -> float:
        """Of the resident memory over the last half, as a share."""
        middle = self.rss_bytes[len(self.rss_bytes) // 2 - 1]
        return max(self.rss_bytes[len(self.rss_bytes) // 2 :]) / middle - 1


class Soak:
    """One run. The KV of a block is a function of all tokens up to its end."""

    def __init__(self, num_requests: int = 10_000, num_at_a_time: int = 1000, seed: int = 0) -> None:
        self.num_requests = num_requests
        self.num_at_a_time = min(num_at_a_time, num_requests)
        self._random = random.Random(seed)
        # A fifth of what those that run at a time would need: most wait for room, and most of what a family shares has
        # to come back from the host, which remembers a few thousand requests and evicts, too.
        num_device_blocks = self.num_at_a_time * BLOCKS_PER_REQUEST // 5
        self._pool = torch.zeros(num_device_blocks + 1, VALUES_PER_BLOCK, dtype=torch.int64)
        self._rows = self._pool.numpy()
        group = KVCacheGroup("full", block_size=BLOCK_SIZE)
        config = OffloadConfig(groups=[group], num_host_blocks=6 * num_device_blocks, namespace="soak")
        self._runtime = OffloadRuntime(config, self._pool)
        self._num_done = self._num_cancelled = self._num_checked = 0
        self._rss: list[int] = []

    async def run(self) -> SoakResult:
        began = time.monotonic()
        numbers = iter(range(self.num_requests))
        async with self._runtime as runtime:
            async with anyio.create_task_group() as clients:
                for _ in range(self.num_at_a_time):
                    clients.start_soon(self._client, numbers)
            await runtime.flush()
            runtime.check_integrity()
            found = runtime.statistics()
            loaded: Any = runtime.transport
        return SoakResult(
            num_done=self._num_done,
            num_cancelled=self._num_cancelled,
            num_blocks_checked=self._num_checked,
            num_blocks_loaded=loaded.statistics().blocks_loaded,
            num_pinned=found.device.num_pinned + found.host.num_pinned,
            num_quarantined=found.device.num_quarantined + found.host.num_quarantined,
            rss_bytes=self._rss,
            wall_s=time.monotonic() - began,
        )

    async def _client(self, numbers: Iterator[int]) -> None:
        """Sends one request after the other, as long as there are any."""
        for number in numbers:
            leaves_after = self._random.randrange(40) if self._random.random() < 0.1 else None
            await self._serve(number, leaves_after)
            if (self._num_done + self._num_cancelled) % (self.num_requests // 10) == 0:
                self._rss.append(_resident_bytes())

    async def _serve(self, number: int, leaves_after: int | None) -> None:
        token_ids = self._prompt(number)
        async with anyio.create_task_group() as group:
            async with self._runtime.request(token_ids, f"r{number}") as request:
                if leaves_after is not None:
                    group.start_soon(self._leave, request, leaves_after)
                await self._compute(request, token_ids)
        if request.state is RequestState.DONE:
            self._num_done += 1
        else:
            self._num_cancelled += 1

    async def _leave(self, request: Request, num_turns: int) -> None:
        """A client that goes away after some turns of the loop, wherever its request is by then."""
        for _ in range(num_turns):
            await anyio.lowlevel.checkpoint()
        request.cancel("client gone")

    async def _compute(self, request: Request, token_ids: np.ndarray[Any, Any]) -> None:
        await request.allocate()
        num_ready = await request.load() // BLOCK_SIZE
        block_ids = request.block_ids[0]
        expected = _contents(token_ids)
        self._check(block_ids[:num_ready], expected[:num_ready])
        with self._runtime.step([request]):
            self._rows[block_ids[num_ready:]] = expected[num_ready:, None]
            await anyio.lowlevel.checkpoint()
        request.commit(len(token_ids))
        await anyio.lowlevel.checkpoint()
        self._check(block_ids, expected)

    def _check(self, block_ids: list[int], expected: np.ndarray[Any, Any]) -> None:
        if not (self._rows[block_ids] == expected[:, None]).all():
            raise AssertionError("a block holds other bytes than those of its prefix")
        self._num_checked += len(block_ids)

    def _prompt(self, number: int) -> np.ndarray[Any, Any]:
        """Twenty blocks: a beginning that the family shares, and an end of its own that one in four has seen before."""
        family = self._random.randrange(NUM_FAMILIES)
        end = self._random.randrange(8) if self._random.random() < 0.25 else number + 8
        token_ids = np.arange(BLOCKS_PER_REQUEST * BLOCK_SIZE, dtype=np.int32) + family * 1000
        token_ids[SHARED_BLOCKS * BLOCK_SIZE :] += 1_000_000 + end * 10_000
        return token_ids


def _contents(token_ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What each block of a prompt holds."""
    prefix = hashlib.blake2b(digest_size=8)
    digests = bytearray()
    for block in token_ids.reshape(-1, BLOCK_SIZE):
        prefix.update(block.tobytes())
        digests += prefix.copy().digest()
    return np.frombuffer(bytes(digests), np.int64)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-a-time", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio")
    options = parser.parse_args()
    soak = Soak(options.requests, options.at_a_time, options.seed)
    result = anyio.run(soak.run, backend=options.backend)
    print(json.dumps({**attrs.asdict(result), "growth": round(result.growth, 5)}, indent=1))


if __name__ == "__main__":
    main()
