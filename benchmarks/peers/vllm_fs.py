"""vLLM's `fs` tier below host memory, without its scheduler: its thread pool, its calls and its names of files,
combined as in `FileSystemTierManager.submit_store` and `submit_load`."""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import line
import numpy as np
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.fs.io import batch_load_block, batch_store_block, probe_o_direct
from vllm.v1.kv_offload.tiering.fs.thread_pool import DualQueueThreadPool

__all__ = ["CALLS"]

NUM_THREADS = 16
"""Threads of each kind, the tier's default."""


class FileTier:
    """Blocks of one size in host memory, and the files of those that were stored."""

    def __init__(self, root: Path, block_bytes: int, job_bytes: int) -> None:
        self._root, self._block_bytes, self._num = root, block_bytes, job_bytes // block_bytes
        root.mkdir()
        memory = np.frombuffer(mmap.mmap(-1, job_bytes), dtype=np.uint8)
        memory[:] = np.random.default_rng(0).integers(0, 256, job_bytes, dtype=np.uint8)
        self._view = memoryview(memory)
        self._names = FileMapper(str(root), "model", 16, 1, 1, 1, 1, 1, 0, "float32", parallel_agnostic=True)
        self._pool = DualQueueThreadPool(NUM_THREADS, NUM_THREADS)
        self._is_direct = probe_o_direct(str(root))
        self._jobs = itertools.count()
        self._stored: list[list[str]] = []

    def store(self, num_jobs: int, num_kept: int) -> dict[str, Any]:
        """Write that many jobs at a time. Afterwards, remove the jobs beyond `num_kept`."""
        first = next(self._jobs) * self._num
        paths = [self._names.get_file_name(_key(first + at)) for at in range(self._num)]
        took = line.timed_once(lambda: self._run(self._pool.enqueue_store, batch_store_block, paths, num_jobs))
        assert all(map(os.path.exists, paths)), "a store has failed"
        self._stored.append(paths)
        while len(self._stored) > num_kept:
            for path in self._stored.pop(0):
                os.remove(path)
        return took | {"is_direct": self._is_direct}

    def load(self, num_jobs: int) -> dict[str, Any]:
        """Read the files of the job that was stored first."""
        paths = self._stored[0]
        return line.timed_once(lambda: self._run(self._pool.enqueue_load, batch_load_block, paths, num_jobs))

    def close(self) -> None:
        self._pool.shutdown()
        shutil.rmtree(self._root)

    def _run(self, enqueue: Callable[..., None], call: Callable[..., None], paths: list[str], num_jobs: int) -> None:
        share = len(paths) // num_jobs
        for job in range(num_jobs):
            part = range(job * share, (job + 1) * share)
            names, offsets = [paths[at] for at in part], [at * self._block_bytes for at in part]
            task = functools.partial(call, names, self._view, offsets, self._block_bytes, self._is_direct)
            enqueue(job, 1, [task])
        self._pool.wait_idle()
        finished = self._pool.get_finished()
        assert [ended for _, ended, _ in finished] == [True] * num_jobs, finished


def _key(number: int) -> Any:
    return make_offload_key(np.random.default_rng(number).bytes(32), 0)


TIERS: dict[str, FileTier] = {}


def fs_open(root: str, block_bytes: int, job_bytes: int) -> None:
    TIERS[root] = FileTier(Path(root), block_bytes, job_bytes)


def fs_store(root: str, num_jobs: int, num_kept: int) -> dict[str, Any]:
    return TIERS[root].store(num_jobs, num_kept)


def fs_load(root: str, num_jobs: int) -> dict[str, Any]:
    return TIERS[root].load(num_jobs)


def fs_close(root: str) -> None:
    TIERS.pop(root).close()


CALLS: dict[str, Callable[..., Any]] = {
    "fs_open": fs_open, "fs_store": fs_store, "fs_load": fs_load, "fs_close": fs_close,
}  # fmt: skip
