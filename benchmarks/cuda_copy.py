"""The CUDA backend beside one large pinned copy, beside compute, and how soon a task hears of the end of a copy.

Everything that is compared is measured in this run, in turns. Without a GPU there is nothing to measure, and no rows.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue

import attrs
import numpy as np
import torch

from aoffload import (
    AdaptivePolling,
    BlockingWait,
    BreakEven,
    Completion,
    CudaBackend,
    CudaOptions,
    Direction,
    Env,
    KVCacheGroup,
    LocalTransport,
    OffloadConfig,
    OffloadRuntime,
    Outcome,
    Tier,
    TransferPlan,
)
from aoffload.transfer.backends.cuda import Pieces, WaitPolicy
from aoffload.transfer.backends.cuda.trials import scattered
from aoffload.transfer.region import regions_of
from aoffload.transfer.turns import Turns

from .harness import Measured, Row, Sample, Subject, interleave, timed
from .peer import Peer

__all__ = ["Copying", "choice_rows", "copy_rows", "run"]

MIB = 2**20
BLOCK_BYTES = 2 * MIB
NUM_BLOCKS_MOVED = 128
NUM_DEVICE_BLOCKS = 2 * NUM_BLOCKS_MOVED + 1
BLOCKS_PER_JOB = 16
SECONDS = 3.0
TURN_S = 300e-6
NUM_WAITS = 200
PRODUCT_SIDE = 8192
NUM_PRODUCTS = 40
WAYS = {Direction.STORE: (Tier.DEVICE, Tier.HOST), Direction.LOAD: (Tier.HOST, Tier.DEVICE)}


def run(vllm: Peer | None = None) -> list[Row]:
    """All rows, or none and a line that says so."""
    if not torch.cuda.is_available():
        print("cuda_copy: not run, since torch sees no CUDA device", file=sys.stderr)
        return []
    print(f"cuda_copy: {torch.cuda.get_device_name()}", file=sys.stderr)
    device = torch.device("cuda")
    return [
        *copy_rows(device, CudaOptions(), piece_bytes=64 * 1024, wanted=0.9),
        *copy_rows(device, CudaOptions(), piece_bytes=16 * 1024, wanted=0.7),
        *choice_rows(device, CudaOptions()),
        *overlap_rows(device),
        fitting_row(device),
        *latency_rows(device),
    ]


# -- copies -----------------------------------------------------------------------------------------------------------


class Copying:
    """A transport whose blocks lie in pieces of `piece_bytes`, no two neighbours on the device, and one large copy."""

    def __init__(
        self, device: torch.device, options: CudaOptions, piece_bytes: int, num_moved: int = NUM_BLOCKS_MOVED
    ) -> None:
        self.num_moved = num_moved
        num_blocks = 2 * num_moved + 1
        layers = torch.empty(BLOCK_BYTES // piece_bytes, num_blocks, piece_bytes, dtype=torch.uint8, device=device)
        self.large = {
            direction: torch.empty(num_moved * BLOCK_BYTES, dtype=torch.uint8, device=device) for direction in Direction
        }
        # Fences on a stream that has nothing to do: what is measured is copying, not waiting for compute.
        idle = torch.cuda.Stream() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.transport = LocalTransport(list(layers), partial(CudaBackend, compute_stream=idle, options=options))
        self.completions: SimpleQueue[Completion] = SimpleQueue()
        # Both ways at once need blocks of their own.
        self.transport.open(2 * num_moved, verify=False, deliver=self.completions.put, env=Env())
        order = np.random.default_rng(0).permutation(np.arange(1, num_blocks, dtype=np.int32))
        self._on_device = {Direction.STORE: order[:num_moved], Direction.LOAD: order[num_moved:]}
        self._first_host = {Direction.STORE: 0, Direction.LOAD: num_moved}
        self._job_ids = itertools.count(1)

    @property
    def backend(self) -> CudaBackend:
        assert isinstance(self.transport.backend, CudaBackend)
        return self.transport.backend

    @property
    def gigabytes(self) -> float:
        return self.num_moved * BLOCK_BYTES / 1e9

    def move(self, *directions: Direction) -> None:
        """All blocks, each way at once."""
        for _ in range(sum(self.launch(direction) for direction in directions)):
            completion = self.completions.get(timeout=60)
            assert completion.outcome is Outcome.LANDED, completion

    def launch(self, direction: Direction) -> int:
        """How many jobs were launched."""
        starts = range(0, self.num_moved, BLOCKS_PER_JOB)
        for start in starts:
            ids = self._on_device[direction][start : start + BLOCKS_PER_JOB]
            on_device = array("i", ids.tolist())
            first = self._first_host[direction] + start
            on_host = array("i", range(first, first + len(ids)))
            given = (on_device, on_host) if direction is Direction.STORE else (on_host, on_device)
            self.transport.launch(TransferPlan(next(self._job_ids), *WAYS[direction], *given), None)
        return len(starts)

    def move_large(self, *directions: Direction) -> None:
        """As many bytes in one piece each way: what the link can do."""
        with self.backend.driver.bound():
            for direction in directions:
                self.backend.copy_by_engine(self._one_piece(direction), direction)
            for direction in directions:
                self.backend.settle(direction)

    def _one_piece(self, direction: Direction) -> Pieces:
        host = self.backend.host.address + self._first_host[direction] * BLOCK_BYTES
        device = self.large[direction].data_ptr()
        ends = (device, host) if direction is Direction.STORE else (host, device)
        size = self.large[direction].numel()
        return Pieces(*(np.array([number], dtype=np.uint64) for number in (*ends, size)))

    def close(self) -> None:
        assert self.transport.close(timeout_s=10)


def copy_rows(
    device: torch.device, options: CudaOptions, piece_bytes: int, wanted: float, num_moved: int = NUM_BLOCKS_MOVED,
    seconds: float = SECONDS,
) -> list[Row]:  # fmt: skip
    """Scattered blocks each way and both ways at once, beside one large copy the same way."""
    copying = Copying(device, options, piece_bytes, num_moved)
    ways = {"store": (Direction.STORE,), "load": (Direction.LOAD,), "both ways": tuple(Direction)}
    subjects: dict[str, Subject] = {}
    for name, directions in ways.items():
        subjects[name] = lambda directions=directions: timed(lambda: copying.move(*directions))  # type: ignore[misc]
        subjects[f"large {name}"] = lambda directions=directions: timed(  # type: ignore[misc]
            lambda: copying.move_large(*directions)
        )
    found = interleave(subjects, seconds=seconds)
    copying.close()
    about = f"blocks of 2 MiB in pieces of {piece_bytes // 1024} KiB"
    return [
        _rate_row(f"{name}, {about}", copying.gigabytes * len(directions), found[name], found[f"large {name}"],
                  min(wanted, 0.85) if len(directions) > 1 else wanted)
        for name, directions in ways.items()
    ]  # fmt: skip


def _rate_row(name: str, gigabytes: float, ours: Measured, limit: Measured, wanted: float) -> Row:
    return Row(
        name=name, value=gigabytes / ours.median_s, unit="GB/s",
        spread=f"{gigabytes / ours.high_s:.3g}-{gigabytes / ours.low_s:.3g}",
        against="one large copy", limit=gigabytes / limit.median_s, ratio=limit.median_s / ours.median_s, wanted=wanted,
    )  # fmt: skip


def choice_rows(device: torch.device, options: CudaOptions, seconds: float = 1.0) -> list[Row]:
    """A size on each side of the break-even that was measured: what is chosen, beside the better one."""
    copying = Copying(device, options, piece_bytes=64 * 1024, num_moved=16)
    rows = [
        _choice_row(copying, direction, size, seconds)
        for direction in Direction
        for size in _around(copying, direction)
    ]
    copying.close()
    return [row for row in rows if row is not None]


def _around(copying: Copying, direction: Direction) -> tuple[int, int]:
    """Half of the break-even and twice of it, in sizes that are copied whole."""
    at = copying.backend.break_even.of(direction) or 28 * 1024
    return max(1024, at // 2 // 1024 * 1024), min(MIB, max(1, at // 1024) * 2048)


def _choice_row(copying: Copying, direction: Direction, size: int, seconds: float) -> Row | None:
    backend, memory = copying.backend, copying.large[direction]
    if backend.break_even == BreakEven(0, 0):
        return None  # nothing to choose: no kernel here
    pieces = scattered(direction, memory.data_ptr(), backend.host.address, memory.numel() // size * size, size)

    def subject(copy: Callable[[Pieces, Direction], None]) -> Subject:
        def once() -> None:
            with backend.driver.bound():
                copy(pieces, direction)
                backend.settle(direction)

        return lambda: timed(once)

    found = interleave(
        {"engine": subject(backend.copy_by_engine), "kernel": subject(backend.copy_by_kernel)}, seconds=seconds
    )
    chosen = "kernel" if size < backend.break_even.of(direction) else "engine"
    better = min(found.values(), key=lambda measured: measured.median_s)
    name = f"{direction.value} in pieces of {size // 1024} KiB, by the {chosen}"
    row = _rate_row(name, memory.numel() / 1e9, found[chosen], better, 0.95)
    return attrs.evolve(row, against="the better of engine and kernel")


# -- beside compute ---------------------------------------------------------------------------------------------------


def overlap_rows(device: torch.device) -> list[Row]:
    """Large matrix products with copies at full rate both ways, beside the same alone; and the rate of those copies."""
    left, right = (torch.randn(PRODUCT_SIDE, PRODUCT_SIDE, dtype=torch.bfloat16, device=device) for _ in range(2))

    def multiply() -> None:
        for _ in range(NUM_PRODUCTS):
            torch.mm(left, right)

    copying = Copying(device, CudaOptions(), piece_bytes=64 * 1024)
    moved: list[Sample] = []

    def beside() -> Sample:
        with traffic(copying, moved):
            return _on_stream_alone(multiply)

    found = interleave({"alone": lambda: _on_stream_alone(multiply), "beside": beside}, seconds=2 * SECONDS)
    copies = {"beside": Measured.of(moved)}
    copies |= interleave({"alone": lambda: timed(lambda: copying.move(*Direction))}, seconds=SECONDS)
    copying.close()
    gigabytes = 2 * copying.gigabytes
    return [
        _share_row("matrix products beside copies both ways", NUM_PRODUCTS, "1/s", found, "alone", "beside", 0.97),
        _share_row("the copies beside those products", gigabytes, "GB/s", copies, "alone", "beside", 0.9),
    ]


def _on_stream_alone(work: Callable[[], None]) -> Sample:
    """Timed by the device, on the stream of the work alone."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    return Sample(start.elapsed_time(end) / 1e3, 0.0)


@contextmanager
def traffic(copying: Copying, moved: list[Sample]) -> Iterator[None]:
    """All blocks both ways, over and over, from before this is entered; what each time took goes to `moved`."""
    has_begun, is_over = threading.Event(), threading.Event()

    def feed() -> None:
        try:
            while not is_over.is_set():
                moved.append(timed(lambda: copying.move(*Direction)))
                has_begun.set()
        finally:
            has_begun.set()

    feeder = threading.Thread(target=feed)
    feeder.start()
    has_begun.wait()
    try:
        yield
    finally:
        is_over.set()
        feeder.join()


def fitting_row(device: torch.device) -> Row:
    """Requests that all fit on the device: with stores of everything, beside a runtime that stores nothing."""
    subjects = {policy: partial(_serve_all, device, policy) for policy in ("eager", "off")}
    found = interleave(subjects, seconds=2 * SECONDS, least=5)
    return _share_row("requests that fit on the device", 1.0, "rounds/s", found, "off", "eager", 0.99)


def _serve_all(device: torch.device, policy: str) -> Sample:
    return asyncio.run(_serve(device, policy))


async def _serve(device: torch.device, policy: str, num_requests: int = 40) -> Sample:
    """Each request computes one block of prompt tokens after another with a matrix product each."""
    pool = torch.zeros(num_requests * 8 + 1, 64 * 1024, device=device)
    matrix = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
    config = OffloadConfig(
        groups=[KVCacheGroup("full", block_size=16)], num_host_blocks=num_requests * 8, store_policy=policy
    )
    async with OffloadRuntime(config, pool) as runtime:
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        for number in range(num_requests):
            async with runtime.request([number + 1] * 128) as request:
                await request.allocate()
                await request.load()
                with runtime.step([request]):
                    for _ in range(64):
                        torch.mm(matrix, matrix)
                request.commit(128)
        torch.cuda.synchronize()
        return Sample(time.perf_counter() - began_s, 0.0)


def _share_row(
    name: str, amount: float, unit: str, found: dict[str, Measured], alone: str, beside: str, wanted: float
) -> Row:
    ours, limit = found[beside], found[alone]
    return Row(
        name=name, value=amount / ours.median_s, unit=unit,
        spread=f"{amount / ours.high_s:.3g}-{amount / ours.low_s:.3g}",
        against=alone, limit=amount / limit.median_s, ratio=limit.median_s / ours.median_s, wanted=wanted,
    )  # fmt: skip


# -- how soon a task hears of it --------------------------------------------------------------------------------------


def latency_rows(device: torch.device) -> list[Row]:
    """From the end on the device to the waiting task, p50 and p99, for both ways to wait, the loop idle and busy."""
    policies: dict[str, WaitPolicy] = {"blocking": BlockingWait(), "polling": AdaptivePolling()}
    rows = []
    for state, turn_s in (("idle", 0.0), ("busy", TURN_S)):
        found = asyncio.run(_latencies(device, policies, turn_s))
        for share in (50, 99):
            blocking, polling = (float(np.percentile(found[name], share)) * 1e6 for name in policies)
            rows.append(
                Row(
                    name=f"fence to task, loop {state}, p{share}, blocking", value=blocking, unit="us",
                    against="polling", limit=polling, ratio=blocking / polling,
                )
            )  # fmt: skip
    return rows


async def _latencies(device: torch.device, policies: dict[str, WaitPolicy], turn_s: float) -> dict[str, list[float]]:
    """Seconds, by policy; they take turns."""
    regions = regions_of(torch.zeros(4, 1024, device=device))
    backends = {name: CudaBackend(regions, options=CudaOptions(waiting=policy)) for name, policy in policies.items()}
    found: dict[str, list[float]] = {name: [] for name in policies}
    turning, turns = asyncio.create_task(_turns(turn_s)), Turns()
    turns.begin()  # threads get their turn as they do while a transport copies
    for _ in range(NUM_WAITS):
        for name, backend in backends.items():
            found[name].append(await _latency(backend))
    turns.close()
    turning.cancel()
    return found


async def _turns(turn_s: float) -> None:
    while turn_s:
        end = time.perf_counter() + turn_s
        while time.perf_counter() < end:
            pass
        await asyncio.sleep(0)


async def _latency(backend: CudaBackend) -> float:
    """The device's clock says when the work ended: so long after a point whose time on the host is known."""
    before, behind = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    before.record()
    before.synchronize()
    known_s = time.perf_counter()
    torch.cuda._sleep(3_000_000)  # type: ignore[no-untyped-call]
    behind.record()
    fence, loop, is_over = backend.record_fence(), asyncio.get_running_loop(), asyncio.Event()

    def wait() -> None:
        fence.synchronize()
        loop.call_soon_threadsafe(is_over.set)

    threading.Thread(target=wait).start()
    await is_over.wait()
    heard_s = time.perf_counter()
    return heard_s - known_s - float(before.elapsed_time(behind)) / 1e3
