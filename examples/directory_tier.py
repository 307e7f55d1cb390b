"""A custom tier below host memory: a directory with one file for each block.

The ledger decides which block holds which KV, and which blocks are stored and fetched. The tier only makes the copies:
its threads write and read the files. The tier remembers the digest of each block, so a file that is damaged, missing,
or left by another process is a miss and never wrong KV.

Prints:
    after other prompts: PrefixMatch(num_device_tokens=0, num_host_tokens=0, num_lower_tokens=80)
    fetched and loaded 80 tokens, bytes right: True
    with damaged files: loaded 0 tokens, bytes right: True
"""

import hashlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import anyio
import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime, Tier
from aoffload.ledger import Completion, Direction, LowerTier, Outcome, TransferPlan
from aoffload.transport import BlockChecksums, Env, LocalTransport, TransferRefused

NUM_THREADS = 2


class Directory:
    """The copies between host memory and the files of `path`: a `TransportTier`."""

    def __init__(self, path: str, num_blocks: int) -> None:
        self.path, self.num_blocks = Path(path), num_blocks
        self._digests: dict[int, bytes] = {}  # of the stored blocks
        self._plans: SimpleQueue[TransferPlan | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # guards everything below
        self._is_open = False
        self._running: set[int] = set()
        self._given_up: set[int] = set()

    def open(
        self, host: NDArray[np.uint8], checksums: BlockChecksums | None, deliver: Callable[[Completion], None], env: Env
    ) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self._host, self._checksums, self._deliver, self._is_open = host, checksums, deliver, True
        for number in range(NUM_THREADS):
            self._threads.append(env.start_thread(self._work, f"directory-{number}"))

    def launch(self, plan: TransferPlan) -> None:
        with self._lock:
            if not self._is_open:
                raise TransferRefused("the directory is closed")
            self._running.add(plan.job_id)
            self._plans.put(plan)

    def give_up(self, job_id: int) -> None:
        with self._lock:
            if job_id in self._running:
                self._given_up.add(job_id)

    def stop_launching(self) -> None:
        with self._lock:
            if self._is_open:
                for _ in self._threads:
                    self._plans.put(None)
            self._is_open = False

    def join(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (plan := self._plans.get()) is not None:
            self._deliver(self._copied(plan))
            with self._lock:
                self._running.discard(plan.job_id)
                self._given_up.discard(plan.job_id)

    def _copied(self, plan: TransferPlan) -> Completion:
        """Copy every block. The ledger forgets the blocks of a load whose bytes are not the stored ones."""
        began_s, bad, num_bytes = time.monotonic(), list[int](), 0
        copy = self._load if plan.direction is Direction.LOAD else self._store
        try:
            for number, (source, destination) in enumerate(zip(plan.source_ids, plan.destination_ids, strict=True)):
                if copy(plan.job_id, source, destination):
                    num_bytes += self._host.shape[1]
                else:
                    bad.append(number)
            outcome, num_landed, error = Outcome.LANDED, plan.num_blocks, ""
        except Exception as problem:  # noqa: BLE001 - such as a full disk: the blocks before this one are stored
            outcome, num_landed, error = Outcome.FAILED, number, repr(problem)
        if bad:
            outcome, num_landed = Outcome.CORRUPT, bad[0]
        seconds = time.monotonic() - began_s
        return Completion(plan.job_id, outcome, num_landed, tuple(bad), error, num_bytes, seconds)

    def _store(self, job_id: int, host_id: int, block_id: int) -> bool:
        self._digests.pop(block_id, None)
        block = self._host[host_id].copy()
        with self._lock:
            if job_id in self._given_up:  # the block may have been overwritten while it was copied
                raise RuntimeError("given up")
        if self._checksums is not None and not self._checksums.matches(host_id, block):
            return False
        file = self.path / f"{block_id}.kv"
        beside = file.with_suffix(".new")
        try:
            beside.write_bytes(block.data)
            os.replace(beside, file)  # so no file is ever incomplete
        except OSError:
            with suppress(OSError):
                beside.unlink()
            raise
        self._digests[block_id] = _digest(block.data)
        return True

    def _load(self, job_id: int, block_id: int, host_id: int) -> bool:
        try:
            found = (self.path / f"{block_id}.kv").read_bytes()
        except OSError:
            return False
        if self._digests.get(block_id) != _digest(found):
            return False
        self._host[host_id] = np.frombuffer(found, np.uint8)
        if self._checksums is not None:
            self._checksums.record(host_id, self._host[host_id])
        return True


def _digest(block: bytes | memoryview) -> bytes:
    return hashlib.blake2b(block, digest_size=16).digest()


BLOCK_SIZE = 16
kv_cache = torch.zeros(9, 2, BLOCK_SIZE, 64)  # 8 usable blocks after the null block 0


async def serve(runtime: OffloadRuntime, token_ids: list[int]) -> tuple[int, torch.Tensor]:
    """Stands for an engine. The KV of a token depends on all tokens up to it. Returns the number of loaded tokens, and
    the KV of the first five blocks."""
    sums = torch.tensor(token_ids, dtype=torch.float32).cumsum(0)
    async with runtime.request(token_ids) as request:
        await request.allocate()  # fetches blocks that only the directory holds into host memory
        num_loaded = await request.load()
        with runtime.step([request]):
            for position in range(num_loaded, len(token_ids)):
                block_id = request.block_ids[0][position // BLOCK_SIZE]
                kv_cache[block_id, :, position % BLOCK_SIZE] = sums[position]
        request.commit(len(token_ids))
        found = kv_cache[request.block_ids[0][:5]]  # indexing with a list copies
    await runtime.flush()
    return num_loaded, found


async def fill_host(runtime: OffloadRuntime) -> None:
    """Ten other prompts, of 7 blocks each."""
    for first in range(1000, 11_000, 1000):
        await serve(runtime, list(range(first, first + 120)))


def damage(path: str) -> None:
    for file in Path(path).iterdir():
        file.write_bytes(b"damaged")


async def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))  # without warnings
    groups, prompt = [KVCacheGroup("full", block_size=BLOCK_SIZE)], list(range(90))
    # The runtime may compute in place of a fetch if it measures that this toy is fast. So pass the speed of a real
    # model.
    config = OffloadConfig(groups=groups, num_host_blocks=64, prefill_tokens_per_s=100.0)
    with tempfile.TemporaryDirectory() as path:
        directory = Directory(path, num_blocks=256)
        transport, tier = LocalTransport(kv_cache, tiers={Tier.CUSTOM: directory}), LowerTier(directory.num_blocks)
        async with OffloadRuntime(config, transport=transport, extensions=[tier]) as runtime:
            _, right = await serve(runtime, prompt)
            await fill_host(runtime)
            print(f"after other prompts: {runtime.lookup(prompt)}")
            num_loaded, found = await serve(runtime, prompt)
            print(f"fetched and loaded {num_loaded} tokens, bytes right: {torch.equal(found, right)}")
            await fill_host(runtime)
            damage(path)
            num_loaded, found = await serve(runtime, prompt)
            print(f"with damaged files: loaded {num_loaded} tokens, bytes right: {torch.equal(found, right)}")


if __name__ == "__main__":
    anyio.run(main)
