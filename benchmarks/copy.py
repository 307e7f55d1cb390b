"""Copying scattered blocks through `LocalTransport`, compared with one plain memmove in the same run.

The ids come from pools after thousands of takes and gives. So the blocks of a job are hardly ever neighbours on the
device, and are in several extents in host memory. "Loop idle": this thread waits. "Loop busy": it runs an event loop
that is never idle, as with a thousand clients. Loop and copy threads each have their own core, so that the kernel's
choice of cores is not measured. A sample in which one of them waited for its core is repeated.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import attrs
import numpy as np
import torch

from aoffload._common.tiers import Tier
from aoffload._kernel.plans import Completion, TransferPlan
from aoffload._kernel.pools import ExtentPool, FreeList
from aoffload._kernel.protocols import DevicePool
from aoffload._kernel.states import Outcome
from aoffload._transfer.fences import RegionFences
from aoffload._transfer.local import LocalTransport
from aoffload.transport import Env

from .harness import Measured, Row, Sample, Subject, interleave, timed
from .peer import Peer

__all__ = ["run"]

KIB, MIB = 2**10, 2**20
MOVED_BYTES = 128 * MIB
JOB_BYTES = 32 * MIB
POOL_BYTES = 320 * MIB
TURN_S = 300e-6
SHORT_TURN_S = 50e-6
NUM_CHURNS = 5_000
MEDIAN_BLOCKS = 16
"""Median number of blocks taken at once while a pool ages. The numbers are log-normal, as in a trace's prompts."""
MOST_WAITED = 0.03
NUM_TRIES = 4


@attrs.frozen
class Shape:
    """Blocks of `num_regions` pieces, each in a tensor of its own."""

    num_regions: int
    piece_bytes: int
    turns_s: tuple[float, ...] = (TURN_S,)
    wanted_idle: float | None = None
    wanted_busy: float | None = None
    seconds: float = 1.2

    @property
    def block_bytes(self) -> int:
        return self.num_regions * self.piece_bytes

    @property
    def name(self) -> str:
        piece = f"{self.piece_bytes // MIB} MiB" if self.piece_bytes >= MIB else f"{self.piece_bytes // KIB} KiB"
        return f"{self.num_regions} regions of {piece}" if self.num_regions > 1 else f"one region of {piece}"


SHAPES = (
    Shape(1, 2 * MIB, (TURN_S, SHORT_TURN_S), 0.9, 0.75, seconds=3.0),
    Shape(32, 64 * KIB, (TURN_S, SHORT_TURN_S), 0.9, 0.75, seconds=3.0),
    *(Shape(1, piece * KIB) for piece in (256, 64, 16, 4)),
    *(Shape(32, piece * KIB) for piece in (256, 16, 4)),
    Shape(8, 2 * MIB),
)
LAYERS = SHAPES[1]


def run(vllm: Peer | None = None) -> Iterator[Row]:
    """One row per shape, direction and loop, with GB/s of payload beside one plain memmove. Two rows for loads by
    region."""
    for shape in SHAPES:
        yield from measure(shape)
    yield from measure_regions(LAYERS)


def measure(shape: Shape) -> list[Row]:
    """Store and load the same scattered blocks, each round beside a memmove of the same number of bytes."""
    with _opened(shape) as copies:
        source, destination = np.ones((2, MOVED_BYTES), dtype=np.uint8)
        subjects: dict[str, Subject] = {"memmove": lambda: timed(lambda: np.copyto(destination, source))}
        for name in ("store", "load"):
            subjects[name] = partial(timed, partial(copies.move, name))
            for turn_s in shape.turns_s:
                subjects[_busy(name, turn_s)] = partial(copies.move_beside, name, turn_s)
        sampler = Undisturbed()
        measured = interleave({name: partial(sampler, each) for name, each in subjects.items()}, seconds=shape.seconds)
    if sampler.num_disturbed:
        print(f"{shape.name}: others slowed down {sampler.num_disturbed} of the samples", file=sys.stderr)
    rows: list[Row] = []
    for name in ("store", "load"):
        rows.append(_row(shape, name, "loop idle", measured[name], measured["memmove"], shape.wanted_idle))
        for turn_s in shape.turns_s:
            loop, ours = f"loop busy, {turn_s * 1e6:.0f} us", measured[_busy(name, turn_s)]
            rows.append(_row(shape, name, loop, ours, measured["memmove"], shape.wanted_busy))
    return rows


def measure_regions(shape: Shape) -> list[Row]:
    """Load the same blocks region after region and block after block, and measure when the first region is loaded."""
    with _opened(shape) as copies:
        subjects: dict[str, Subject] = {
            "by block": partial(timed, partial(copies.move, "load")),
            "by region": partial(timed, copies.load_by_region),
            "first region": copies.load_first_region,
            "one load": partial(timed, partial(copies.move, "load", num_jobs=1)),
        }
        found = interleave({name: partial(Undisturbed(), each) for name, each in subjects.items()}, seconds=2.0)
    name, first = f"load by region, {shape.name}", f"first of {shape.num_regions} regions of a load"
    return [
        Row.faster(name, found["by region"], "by block", found["by block"], None),
        Row.faster(first, found["first region"], "all of it, by block", found["one load"], None),
    ]


def _busy(name: str, turn_s: float) -> str:
    return f"{name} beside {turn_s}"


def _row(shape: Shape, name: str, loop: str, ours: Measured, limit: Measured, wanted: float | None) -> Row:
    gigabytes = MOVED_BYTES / 1e9
    return Row(
        name=f"{name}, {shape.name}, {loop}", value=gigabytes / ours.median_s, unit="GB/s",
        spread=f"{gigabytes / ours.high_s:.3g}-{gigabytes / ours.low_s:.3g}",
        against="one memmove", limit=gigabytes / limit.median_s, ratio=limit.median_s / ours.median_s, wanted=wanted,
    )  # fmt: skip


@attrs.frozen(eq=False)
class Copies:
    """An opened transport and jobs over aged pools, `device` and `host` block ids for each."""

    transport: LocalTransport
    completions: SimpleQueue[Completion]
    jobs: tuple[tuple[array[int], array[int]], ...]

    def move(self, name: str, num_jobs: int | None = None) -> None:
        self._launch(name, num_jobs)
        self._finish(len(self.jobs) if num_jobs is None else num_jobs)

    def load_by_region(self) -> None:
        for number in range(len(self.jobs)):
            self.transport.watch(number, RegionFences(self.transport.num_regions))
        self.move("load")

    def load_first_region(self) -> Sample:
        """From the launch of one load until the first region of its blocks is loaded."""
        fences, cpu, wall = RegionFences(self.transport.num_regions), time.thread_time(), time.perf_counter()
        self.transport.watch(0, fences)
        self._launch("load", 1)
        fences[0].synchronize()
        sample = Sample(time.perf_counter() - wall, time.thread_time() - cpu)
        self._finish(1)
        return sample

    def _finish(self, num_jobs: int) -> None:
        for _ in range(num_jobs):
            assert self.completions.get(timeout=60).outcome is Outcome.LANDED

    def move_beside(self, name: str, turn_s: float) -> Sample:
        """`move` beside an event loop whose turns last `turn_s` and follow each other immediately."""
        return asyncio.run(self._move_beside(name, turn_s))

    async def _move_beside(self, name: str, turn_s: float) -> Sample:
        cpu, wall = time.thread_time(), time.perf_counter()
        self._launch(name)
        missing = len(self.jobs)
        while missing:
            end = time.perf_counter() + turn_s
            while time.perf_counter() < end:
                pass
            await asyncio.sleep(0)
            while not self.completions.empty():
                assert self.completions.get().outcome is Outcome.LANDED
                missing -= 1
        return Sample(time.perf_counter() - wall, time.thread_time() - cpu)

    def _launch(self, name: str, num_jobs: int | None = None) -> None:
        for number, (device_ids, host_ids) in enumerate(self.jobs[:num_jobs]):
            if name == "store":
                plan = TransferPlan(number, Tier.DEVICE, Tier.HOST, device_ids, host_ids)
            else:
                plan = TransferPlan(number, Tier.HOST, Tier.DEVICE, host_ids, device_ids)
            self.transport.launch(plan, None)


@contextmanager
def _opened(shape: Shape) -> Iterator[Copies]:
    num_blocks = POOL_BYTES // shape.block_bytes
    regions = [torch.ones(num_blocks + 1, shape.piece_bytes, dtype=torch.uint8) for _ in range(shape.num_regions)]
    transport, completions = LocalTransport(regions), SimpleQueue[Completion]()
    num_jobs, per_job = MOVED_BYTES // JOB_BYTES, JOB_BYTES // shape.block_bytes
    device_ids = _aged(FreeList(num_blocks + 1), num_jobs, per_job)
    host_ids = _aged(ExtentPool(num_blocks), num_jobs, per_job)
    with _apart(lambda: transport.open(num_blocks, verify=False, deliver=completions.put, env=Env())):
        yield Copies(transport, completions, tuple(zip(device_ids, host_ids, strict=True)))
    transport.close(timeout_s=10)


@contextmanager
def _apart(start_threads: Callable[[], None]) -> Iterator[None]:
    """Run this thread on one core and those of `start_threads` on others, if cores can be chosen and there are at least
    two."""
    if not hasattr(os, "sched_setaffinity") or len(cores := os.sched_getaffinity(0)) == 1:
        start_threads()
        yield
        return
    own, *others = sorted(cores)
    try:
        os.sched_setaffinity(0, others)
        start_threads()
        os.sched_setaffinity(0, {own})
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _aged(pool: DevicePool, num_jobs: int, per_job: int) -> list[array[int]]:
    """The blocks of some jobs, taken from a pool that has been nearly full for a long time."""
    rng = random.Random(0)
    held: list[array[int]] = []

    def take(num_blocks: int) -> array[int]:
        while pool.num_free < num_blocks:
            at = rng.randrange(len(held))
            held[at], held[-1] = held[-1], held[at]
            pool.give(held.pop())
        return pool.take(num_blocks)

    for _ in range(NUM_CHURNS):
        size = round(MEDIAN_BLOCKS * rng.lognormvariate(0, 1))
        held.append(take(max(1, min(size, pool.num_blocks // 8))))
    return [take(per_job) for _ in range(num_jobs)]


class Undisturbed:
    """Repeats a sample, a few times at most, if a thread of this process waited for a core."""

    def __init__(self) -> None:
        self.num_disturbed = 0
        """Samples that were disturbed in every try. They count nevertheless."""

    def __call__(self, subject: Subject) -> Sample:
        for _ in range(NUM_TRIES):
            before = _waited_s()
            sample = subject()
            if _waited_s() - before <= MOST_WAITED * sample.wall_s:
                return sample
        self.num_disturbed += 1
        return sample


def _waited_s() -> float:
    """Seconds for which threads of this process were ready to run but did not. 0 if the system does not report it."""
    tasks = Path("/proc/self/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[1]) for task in tasks) / 1e9
