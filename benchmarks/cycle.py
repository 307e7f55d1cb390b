"""The bookkeeping of one request on a host hit, device pool full: the ledger against a cache kept block by block.

Admit, allocate (which evicts another prompt), plan the load, settle it, commit, release. Both do the same work in the
same run: pins and counts, an order of eviction, a digest for each position where one is needed, tokens compared or
hashed in full. No bytes move. `python -m benchmarks.cycle` prints the table.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from aoffload import Completion, KVCacheGroup, Ledger, OffloadConfig, Outcome, Prefix, Root

__all__ = ["run"]

Tokens = npt.NDArray[np.int32]
BLOCK_SIZE = 16
SIZES = (64, 512, 8192)
SECONDS_PER_ROW = 1.0
ROOT = Root("benchmark")


def run() -> list[dict[str, Any]]:
    """A row per size: µs of the ledger, µs block by block as the limit, and their ratio."""
    return [measure(num_blocks) for num_blocks in SIZES]


def measure(num_blocks: int) -> dict[str, Any]:
    """Two prompts take turns on a device pool that holds one of them; both are in host memory."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, 100_000, num_blocks * BLOCK_SIZE + 1, dtype=np.int32) for _ in range(2)]
    by_runs, by_blocks = _ledger(num_blocks, prompts), PerBlock(num_blocks + 1, prompts)
    timings: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + SECONDS_PER_ROW
    while time.perf_counter() < end or len(timings[0]) < 6:
        for cycle, found in zip((by_runs, by_blocks.cycle), timings, strict=True):
            found += [_seconds(lambda prompt=prompt, cycle=cycle: cycle(prompt)) for prompt in prompts]
    value, limit = (statistics.median(found) * 1e6 for found in timings)
    name = f"cycle on a host hit of {num_blocks:,} blocks"
    return {"name": name, "value": value, "unit": "us", "limit": limit, "ratio": value / limit}


def _ledger(num_blocks: int, prompts: list[Tokens]) -> Callable[[Tokens], None]:
    config = OffloadConfig(
        groups=[KVCacheGroup("full", block_size=BLOCK_SIZE)], num_host_blocks=len(prompts) * num_blocks
    )
    ledger = Ledger(config, num_blocks + 2)

    def cycle(prompt: Tokens) -> None:
        holding = ledger.admit(Prefix.of(ROOT, prompt))
        ledger.allocate_nowait(holding)
        for plan in ledger.plan_load(holding):
            ledger.launch(plan.job_id)
            ledger.settle(Completion(plan.job_id, Outcome.LANDED))
        stores = [*ledger.commit(holding, len(prompt)), *ledger.release(holding)]
        for plan in stores:
            ledger.launch(plan.job_id)
            ledger.settle(Completion(plan.job_id, Outcome.LANDED))

    for prompt in prompts:
        cycle(prompt)
    assert ledger.lookup(Prefix.of(ROOT, prompts[0])).num_host_tokens == num_blocks * BLOCK_SIZE
    return cycle


class PerBlock:
    """The usual way: a running digest per block, a dictionary entry, a reference count and a place in an LRU each."""

    def __init__(self, num_device_blocks: int, prompts: list[Tokens]) -> None:
        self.free = list(range(1, num_device_blocks + 1))
        self.device: dict[bytes, int] = {}
        self.host: dict[bytes, int] = {}
        self.references: dict[bytes, int] = {}
        self.host_references: dict[bytes, int] = {}
        self.evictable: dict[bytes, None] = {}
        for prompt in prompts:
            self.host |= {key: len(self.host) + i for i, key in enumerate(self.keys(prompt))}

    @staticmethod
    def keys(prompt: Tokens) -> list[bytes]:
        hasher, raw = ROOT.hasher.copy(), prompt.tobytes()
        keys = []
        for at in range(0, (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE * 4, BLOCK_SIZE * 4):
            hasher.update(raw[at : at + BLOCK_SIZE * 4])
            keys.append(hasher.copy().digest())
        return keys

    def cycle(self, prompt: Tokens) -> None:
        keys = self.keys(prompt)
        hits = [key for key in keys if key in self.device]
        loads = [key for key in keys[len(hits) :] if key in self.host]
        for key in hits:
            self._pin(key)
        for key in loads:
            self.host_references[key] = self.host_references.get(key, 0) + 1
        blocks = self._take(len(loads) + 1)
        plan = ([self.host[key] for key in loads], blocks[: len(loads)])
        for key, block in zip(loads, plan[1], strict=True):  # landed
            self.device[key] = block
            self.references[key] = 1
            self.host_references[key] -= 1
        self.free.append(blocks[-1])
        for key in reversed(keys):
            self.references[key] -= 1
            if not self.references[key]:
                self.evictable[key] = None

    def _pin(self, key: bytes) -> None:
        self.references[key] = self.references.get(key, 0) + 1
        self.evictable.pop(key, None)

    def _take(self, num_blocks: int) -> list[int]:
        while len(self.free) < num_blocks:
            key = next(iter(self.evictable))
            del self.evictable[key]
            self.free.append(self.device.pop(key))
        return [self.free.pop() for _ in range(num_blocks)]


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Print the table."""
    for row in run():
        print(
            f"{row['name']:<36} {row['value']:8.1f} {row['unit']}, block by block {row['limit']:10.1f},"
            f" {row['limit'] / row['value']:5.0f} times faster"
        )


if __name__ == "__main__":
    main()
