"""Stores to and loads from a disk through its threads. They are compared, in the same rounds, with plain O_DIRECT
writes and reads of the same sizes, and with vLLM's `fs` tier, which uses a file for each block.

A job copies 32 MiB between host blocks in four extents and neighbouring slots. One job runs, or two at the same time,
as in a runtime. The plain side moves the same memory to and from the same slots in calls of the same sizes, in one
thread per job, without sums and records. It uses the same slots because another file may be on a part of the disk that
is half as fast. All sides cycle through 256 MiB. The files are in build/bench, or in the directory of the variable
AOFFLOAD_BENCH_DISK.
"""

from __future__ import annotations

import itertools
import os
import queue
import random
import threading
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from aoffload import DiskTier, KVCacheGroup
from aoffload._common.tiers import Tier
from aoffload._config.tiers import ROUNDING_BYTES, SUPERBLOCK_BYTES, record_bytes
from aoffload._kernel.layout import Layout
from aoffload._kernel.plans import Completion, TransferPlan
from aoffload._kernel.states import Outcome
from aoffload._tiers.disk.files import READ_BYTES, WRITE_BYTES
from aoffload._tiers.disk.plans import DiskPayload
from aoffload.transport import Env, LocalTransport

from .disk_start import UNIT_TOKENS, directory, labels
from .harness import Rounds, Row, Sample, Subject, timed
from .peer import Peer

__all__ = ["job_rows", "run"]

KIB, MIB = 2**10, 2**20
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
NUM_JOBS = (1, 2)
MOVED_BYTES = 32 * MIB
FILE_BYTES = 256 * MIB
NUM_EXTENTS = 4
WANTED, WANTED_OF_FILES = 0.8, 1.5
Calls: TypeAlias = list[list[NDArray[np.uint8]]]
"""The buffers of each call."""
SECONDS = 8.0


def run(vllm: Peer | None = None) -> Iterator[Row]:
    """A store and a load for each size of a block and number of jobs."""
    for block_bytes in SIZES:
        for num_jobs in NUM_JOBS:
            yield from job_rows(block_bytes, num_jobs, vllm=vllm)


def job_rows(
    block_bytes: int, num_jobs: int, seconds: float = SECONDS, moved_bytes: int = MOVED_BYTES, vllm: Peer | None = None
) -> list[Row]:
    """GB/s of jobs of blocks of this size, relative to the plain side and to vLLM."""
    with directory() as path:
        sides = Sides(path, block_bytes, num_jobs, moved_bytes)
        subjects: dict[str, Subject] = {
            "store": partial(timed, sides.store),
            "plain write": partial(timed, sides.plain_write),
            "load": partial(timed, sides.load),
            "plain read": partial(timed, sides.plain_read),
        }
        if vllm is not None:
            subjects |= _files(vllm, path / "files", block_bytes, num_jobs, moved_bytes)
        rounds = Rounds(subjects, seconds=seconds)
        for name in rounds:
            rounds.add(name, subjects[name]())
        sides.close()
        if vllm is not None:
            vllm.ask("fs_close", root=str((path / "files").resolve()))
    size = f"{block_bytes // MIB} MiB" if block_bytes >= MIB else f"{block_bytes // KIB} KiB"
    about = f"blocks of {size}, {num_jobs} at a time"
    pairs: list[tuple[str, str, float | None]] = [("store", "plain write", WANTED), ("load", "plain read", WANTED)]
    if vllm is not None:
        pairs += [("store", "vLLM's fs tier, store", WANTED_OF_FILES), ("load", "vLLM's fs tier, load", None)]
    return [_row(f"disk: {ours}, {about}", rounds, ours, other, wanted, moved_bytes) for ours, other, wanted in pairs]


def _row(name: str, rounds: Rounds, ours: str, other: str, wanted: float | None, moved_bytes: int) -> Row:
    """The ratio is the median over the rounds, because other work on the machine slows both sides of a round."""
    found, gigabytes = rounds.measured(), moved_bytes / 1e9
    one, two = found[ours], found[other]
    pairs = zip(rounds.samples[ours], rounds.samples[other], strict=True)
    return Row(
        name=name, value=gigabytes / one.median_s, unit="GB/s",
        spread=f"{gigabytes / one.high_s:.3g}-{gigabytes / one.low_s:.3g}",
        against=f"{other}, O_DIRECT" if other.startswith("plain") else other, limit=gigabytes / two.median_s,
        ratio=float(np.median([theirs.wall_s / mine.wall_s for mine, theirs in pairs])), wanted=wanted,
    )  # fmt: skip


def _files(vllm: Peer, path: Path, block_bytes: int, num_jobs: int, moved_bytes: int) -> dict[str, Subject]:
    root, num_kept = str(path.resolve()), FILE_BYTES // moved_bytes
    vllm.ask("fs_open", root=root, block_bytes=block_bytes, job_bytes=moved_bytes)

    def sample(call: str, **arguments: int) -> Sample:
        found = vllm.ask(call, root=root, num_jobs=num_jobs, **arguments)
        return Sample(found["wall_s"], found["cpu_s"])

    for _ in range(num_kept):
        sample("fs_store", num_kept=num_kept)
    return {
        "vLLM's fs tier, store": lambda: sample("fs_store", num_kept=num_kept),
        "vLLM's fs tier, load": lambda: sample("fs_load"),
    }


class Sides:
    """A transport with a disk, and its slab as a plain file, for jobs of the same memory. Both write the same bytes."""

    def __init__(self, path: Path, block_bytes: int, num_jobs: int, moved_bytes: int) -> None:
        self._num, self._num_jobs, self._moved_bytes = moved_bytes // block_bytes, num_jobs, moved_bytes
        num_slots = FILE_BYTES // block_bytes
        size = num_slots * (block_bytes + record_bytes(UNIT_TOKENS)) + SUPERBLOCK_BYTES + ROUNDING_BYTES
        tier = DiskTier(str(path / "slots"), size)
        self._transport = LocalTransport(torch.zeros(2, block_bytes, dtype=torch.uint8), disk=tier)
        disk = self._transport._disk
        assert disk is not None
        disk.identify(Layout.of([KVCacheGroup("full", block_size=UNIT_TOKENS)]), "benchmark")
        self._over: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._transport.open(self._num, verify=False, deliver=self._over.put, env=Env())
        assert disk.num_slots == num_slots
        host: NDArray[np.uint8] = self._transport.backend.host_rows  # type: ignore[attr-defined]
        host[:] = np.random.default_rng(0).integers(0, 256, host.shape, dtype=np.uint8)
        extents = np.array_split(np.arange(self._num), min(NUM_EXTENTS, self._num))[::-1]
        self._rows = np.array_split(np.concatenate(extents), num_jobs)
        self._writes = [_calls(rows, host, WRITE_BYTES) for rows in self._rows]
        self._reads = [_calls(rows, host, READ_BYTES) for rows in self._rows]
        self._labels = list(itertools.islice(labels(random.Random(0)), self._num))
        self._numbers = itertools.count()
        self._num_places = FILE_BYTES // moved_bytes
        self._places = {name: itertools.cycle(range(self._num_places)) for name in ("store", "load", "write", "read")}
        self._plain = os.open(path / "slots" / "slab", os.O_RDWR | getattr(os, "O_DIRECT", 0))
        for _ in range(self._num_places):
            self.store()
            self.plain_write()

    def close(self) -> None:
        assert self._transport.close(10.0)
        os.close(self._plain)

    def store(self) -> None:
        self._move(Tier.HOST, Tier.DISK, next(self._places["store"]) * self._num)

    def load(self) -> None:
        self._move(Tier.DISK, Tier.HOST, next(self._places["load"]) * self._num)

    def _move(self, source: Tier, destination: Tier, slot: int) -> None:
        at = 0
        for rows in self._rows:
            slots, host = array("i", range(slot + at, slot + at + len(rows))), array("i", rows.tolist())
            is_store = destination is Tier.DISK
            source_ids, destination_ids = (host, slots) if is_store else (slots, host)
            payload = DiskPayload(tuple(self._labels[at : at + len(rows)]), 0) if is_store else None
            plan = TransferPlan(next(self._numbers), source, destination, source_ids, destination_ids, payload)
            self._transport.launch(plan, None)
            at += len(rows)
        for _ in self._rows:
            completion = self._over.get()
            assert completion.outcome is Outcome.LANDED, completion

    def plain_write(self) -> None:
        self._plain_move("write", os.pwritev, self._writes)

    def plain_read(self) -> None:
        self._plain_move("read", os.preadv, self._reads)

    def _plain_move(self, name: str, move: Callable[[int, Any, int], int], calls: list[Calls]) -> None:
        first = next(self._places[name]) * self._moved_bytes
        share = self._moved_bytes // self._num_jobs

        def work(number: int) -> None:
            at = first + number * share
            for buffers in calls[number]:
                num_bytes = sum(buffer.nbytes for buffer in buffers)
                assert move(self._plain, buffers, at) == num_bytes
                at += num_bytes

        others = [threading.Thread(target=work, args=(number,)) for number in range(1, self._num_jobs)]
        for each in others:
            each.start()
        work(0)
        for each in others:
            each.join()


def _calls(rows: NDArray[np.int64], host: NDArray[np.uint8], call_bytes: int) -> Calls:
    """The memory of these blocks as the buffers of calls, none larger than one of the slab."""
    most = max(1, call_bytes // host.shape[1])
    calls = Calls()
    for first in range(0, len(rows), most):
        part = rows[first : first + most]
        cuts = np.flatnonzero(np.diff(part) != 1) + 1
        calls.append([host[piece[0] : piece[-1] + 1] for piece in np.split(part, cuts)])
    return calls
