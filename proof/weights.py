"""The weights' epoch under load: `python -m proof.weights --changes 1000`.

Clients serve prompts that share prefixes, on a real runtime with real threads and bytes, on asyncio and on trio.
Meanwhile another task sets the weights' epoch again and again, also to earlier epochs. Each token of KV records its
prefix and the epoch whose weights computed it. Whenever a request is about to compute, all KV that it is given is read:
a token of another epoch, or of another prefix, counts as wrong. At the end, each epoch is set once more, and what it
finds again is read, too.
"""

from __future__ import annotations

import argparse
import random
import sys
from typing import Any

import anyio
import attrs
import torch
from anyio.lowlevel import checkpoint

from aoffload import FullAttention, KVCacheGroup, OffloadConfig, OffloadRuntime, OutOfBlocks, Request

__all__ = ["Result", "run"]

BLOCK, NUM_DEVICE, NUM_HOST = 4, 120, 600
EPOCHS = ("", "step 1", "step 2", "step 3")
NUM_CLIENTS, MOST_TOKENS = 8, 60
BACKENDS = ("asyncio", "trio")


@attrs.define
class Result:
    """What happened on one event loop."""

    num_changes: int = 0
    num_requests: int = 0
    num_refused: int = 0
    """Requests that found no blocks."""
    num_read: int = 0
    """Tokens of KV that requests were given, from the device and from host memory."""
    num_wrong: int = 0
    """Those of another epoch, or of another prefix."""
    num_back: int = 0
    """Tokens that were found again at the end, when their epoch was set once more."""

    def __str__(self) -> str:
        return (
            f"{self.num_changes:,} changes, {self.num_requests:,} requests, {self.num_read:,} tokens of KV given, "
            f"{self.num_wrong:,} of another epoch, {self.num_back:,} found again"
        )


class _Load:
    """Clients and the administrator of one runtime."""

    def __init__(self, runtime: OffloadRuntime, memory: torch.Tensor, num_changes: int, seed: int) -> None:
        self.runtime, self.memory, self.num_changes = runtime, memory, num_changes
        self.rng, self.result = random.Random(seed), Result()
        self.texts = [[self.rng.randrange(1000) for _ in range(MOST_TOKENS)] for _ in range(4)]
        self.ended = anyio.Event()
        """Set once another request has ended; then another event replaces it."""
        self.is_over = False

    async def administrator(self) -> None:
        """Set another epoch again and again, after a few requests or at once."""
        weights, rng = self.runtime.weights, self.rng
        while self.result.num_changes < self.num_changes:
            for _ in range(rng.randrange(12)):
                await self.ended.wait()
            weights.set(rng.choice([epoch for epoch in EPOCHS if epoch != weights.epoch]))
            self.result.num_changes += 1
        self.is_over = True

    async def client(self) -> None:
        while not self.is_over:
            prompt = self.rng.choice(self.texts)[: self.rng.randint(5, MOST_TOKENS)]
            try:
                async with self.runtime.request(prompt) as request:
                    await self.serve(request, prompt)
            except OutOfBlocks:
                self.result.num_refused += 1
            self.ended.set()
            self.ended = anyio.Event()
            await checkpoint()

    async def serve(self, request: Request, prompt: list[int]) -> None:
        """Compute the prompt in pieces. The epoch may change between two of them."""
        await request.allocate()
        done = await request.load()
        self.result.num_read += done
        self.result.num_wrong += self.num_wrong(request, prompt, done)
        while done < len(prompt):
            stop = min(len(prompt), done + self.rng.randint(1, 24))
            with self.runtime.step([request]):
                self.write(request, prompt, done, stop)
                if self.rng.random() < 0.3:
                    await checkpoint()
            request.commit(stop)
            done = stop
            if self.rng.random() < 0.5:
                await checkpoint()
        self.result.num_requests += 1

    def tags(self, prompt: list[int], start: int, stop: int) -> torch.Tensor:
        """The KV of tokens `[start, stop)` as the present weights compute it."""
        epoch = EPOCHS.index(self.runtime.weights.epoch)
        return torch.tensor([[hash(tuple(prompt[: at + 1])), epoch] for at in range(start, stop)]).view(-1, 2)

    def rows(self, request: Request, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.arange(start, stop)
        return torch.tensor(request.block_ids[0])[places // BLOCK], places % BLOCK

    def write(self, request: Request, prompt: list[int], start: int, stop: int) -> None:
        self.memory[self.rows(request, start, stop)] = self.tags(prompt, start, stop)

    def num_wrong(self, request: Request, prompt: list[int], num_ready: int) -> int:
        if not num_ready:
            return 0
        found = self.memory[self.rows(request, 0, num_ready)]
        return int((found != self.tags(prompt, 0, num_ready)).any(dim=1).sum())

    async def look_back(self) -> None:
        """Set each epoch once more, and read what it finds."""
        for epoch in EPOCHS:
            self.runtime.weights.set(epoch)
            for text in self.texts:
                async with self.runtime.request(text) as request:
                    await request.allocate()
                    found = await request.load()
                    self.result.num_wrong += self.num_wrong(request, text, found)
                    self.result.num_back += found


async def _run(num_changes: int, seed: int) -> Result:
    memory = torch.zeros(NUM_DEVICE, BLOCK, 2, dtype=torch.int64)
    config = OffloadConfig(
        groups=[KVCacheGroup("full", FullAttention(), BLOCK)], num_host_blocks=NUM_HOST, namespace="proof"
    )
    async with OffloadRuntime(config, memory, logger=_NoLog()) as runtime:
        load = _Load(runtime, memory, num_changes, seed)
        async with anyio.create_task_group() as group:
            group.start_soon(load.administrator)
            for _ in range(NUM_CLIENTS):
                group.start_soon(load.client)
        await load.look_back()
        runtime.check_integrity()
    return load.result


class _NoLog:
    """A logger that writes nothing."""

    def bind(self, **_: Any) -> _NoLog:
        return self

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def run(backend: str, num_changes: int, seed: int = 0) -> Result:
    """`num_changes` changes under load on one event loop."""
    found: Result = anyio.run(_run, num_changes, seed, backend=backend)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.weights", description=__doc__)
    parser.add_argument("--changes", type=int, default=1000, help="on each event loop")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    results = {backend: run(backend, given.changes, given.seed) for backend in BACKENDS}
    for backend, result in results.items():
        print(f"{backend}: {result}")
    return 0 if all(not one.num_wrong and one.num_read and one.num_back for one in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
