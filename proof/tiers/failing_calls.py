"""The k-th call of the disk fails, in each way and for every k: requests go on with right bytes or misses."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import anyio
import torch

from aoffload import ConfigError, DiskTier, KVCacheGroup, OffloadConfig, Tier
from aoffload._transfer.local import LocalTransport
from aoffload.errors import TransferRefused
from proof.report_lines import Line

from ..disk.simulated_disk import DiskFault, SimulatedDisk
from .engine import BLOCK_TOKENS, ByteEngine, WrongBytes, tokens_of

__all__ = ["each_call_failed", "one_run"]

SIZE_BYTES = 2**20
LIMIT_S = 20.0
"""For one run, which takes milliseconds; with a call that hangs, a second."""
KINDS = (
    DiskFault.ERROR, DiskFault.PART_ERROR, DiskFault.NO_SPACE, DiskFault.SHORT, DiskFault.LOST, DiskFault.HANG,
)  # fmt: skip


class StuckError(AssertionError):
    """Requests did not go on."""


def each_call_failed(kinds: tuple[DiskFault, ...] = KINDS, step: int = 1) -> Iterator[Line]:
    """Fail every `step`-th call in each of these ways."""
    torch.set_num_threads(1)
    for kind in kinds:
        num_runs, num_opened, broken, number = 0, 0, list[str](), 0
        while True:
            try:
                num_calls, opened = one_run(kind, number, "trio" if number % 2 else "asyncio")
            except (WrongBytes, StuckError, ExceptionGroup, ConfigError) as error:
                broken.append(f"call {number}: {error!r}")
                num_calls, opened = number + 2, True
            num_runs, num_opened = num_runs + 1, num_opened + opened
            if num_calls <= number:
                break
            number += step
        what = f"the k-th call: {kind.value}"
        about = f"{num_runs} runs, {num_opened} of them past the opening; {len(broken)} broken {broken[:3] or ''}"
        yield Line(what, "right bytes or misses, and requests go on", about, not broken)


def one_run(kind: DiskFault, number: int, backend: str) -> tuple[int, bool]:
    """Two processes on one disk, whose call `number` fails so: how many calls there were, and whether both opened."""
    disk = SimulatedDisk(random.Random(number), 2 * SIZE_BYTES)
    resume = threading.Event()
    disk.fault = lambda call: kind if call.number == number else None
    opened: list[bool] = []
    serving: list[bool] = []
    disk.hang = lambda call: _wait(resume) if serving else None  # who opens waits for the disk as long as it takes

    async def both() -> None:
        with anyio.fail_after(LIMIT_S):
            for life in range(2):
                serving.clear()
                opened.append(await _live(disk, life, resume, serving))

    try:
        anyio.run(both, backend=backend)
    except TimeoutError:
        raise StuckError(f"not over within {LIMIT_S:g} s") from None
    finally:
        resume.set()
    return disk.num_calls, all(opened)


def _wait(resume: threading.Event) -> None:
    resume.wait(LIMIT_S)


async def _live(disk: SimulatedDisk, life: int, resume: threading.Event, serving: list[bool]) -> bool:
    """Serve while the disk fails. False: it could not be opened, which was said by name."""
    engine = ByteEngine(40)
    runtime = engine.run_with(_config())
    transport: Any = runtime.transport
    assert isinstance(transport, LocalTransport)
    transport._disk.directory = lambda path: disk.directory()  # type: ignore[union-attr]
    try:
        async with runtime:
            serving.append(True)
            await _serve_all(engine, life)
            resume.set()  # what hangs ends late, or closing would wait for it
    except ConfigError as error:
        if error.argument not in ("path", "size"):
            raise
        return False
    left = runtime.ledger.statistics()
    if left.num_requests or left.host.num_pinned or left.device.num_pinned:
        raise StuckError(f"a leak: {left}")
    return True


async def _serve_all(engine: ByteEngine, life: int) -> None:
    runtime = engine.runtime
    with anyio.move_on_after(0.3):  # a reading that hangs is over later
        await runtime.disk.wait_restored()
    for turn in range(2):
        for number in range(6):
            if await engine.serve(_prompt(number)) > len(_prompt(number)):
                raise StuckError("more hits than tokens")
        if turn == life:
            await runtime.reset(Tier.HOST)
            await runtime.reset(Tier.DEVICE)
    if life:
        try:
            await runtime.reset(Tier.DISK)
        except TransferRefused:
            return  # said, and the disk is used no more
        await engine.serve(_prompt(0))


def _prompt(number: int) -> list[int]:
    return tokens_of(number, BLOCK_TOKENS * (4 + number % 3) + 1)


def _config() -> OffloadConfig:
    return OffloadConfig(
        groups=[KVCacheGroup("all", block_size=BLOCK_TOKENS)], num_host_blocks=24, namespace="calls",
        max_fetch_share=0.5, fetch_timeout_s=0.2, transfer_timeout_s=0.3, close_timeout_s=5.0, verify=True,
        disk=DiskTier("simulated", SIZE_BYTES, close_flush_s=0.5, daily_writes="1GiB"),
    )  # fmt: skip
