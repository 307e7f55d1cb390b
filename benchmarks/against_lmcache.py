"""Copying scattered blocks of 2 MiB in pieces of 64 KiB: `LocalTransport` beside LMCache, in process on CPU.

Both store and load 64 blocks at random places, in the same rounds. LMCache does so in four ways: by slots, like its
connectors for vLLM, and by blocks, which is its fastest way. Each runs with one thread, like `LocalTransport`, and with
torch's default number of threads.
"""

from __future__ import annotations

import itertools
import random
import sys
from array import array
from collections.abc import Sequence
from queue import SimpleQueue

import attrs
import numpy as np
import torch

from aoffload._common.tiers import Tier
from aoffload._kernel.plans import Completion, TransferPlan
from aoffload._kernel.states import Outcome
from aoffload._transfer.local import LocalTransport
from aoffload.transport import Env

from .harness import Measured, Row, Sample, Subject, interleave, timed
from .peer import MissingPeerError, Peer

__all__ = ["run"]

NUM_REGIONS = 32
REGION_BLOCK_BYTES = 64 * 2**10
NUM_DEVICE_BLOCKS = 160
NUM_BLOCKS_MOVED = 64
BLOCKS_PER_JOB = 16
NUM_BYTES = NUM_BLOCKS_MOVED * NUM_REGIONS * REGION_BLOCK_BYTES
DIRECTIONS = ("store", "load")
WAYS = ("slots", "blocks")
WANTED = 2.5
SECONDS = 10.0


@attrs.frozen
class Asked:
    """A direction, and a way in which LMCache copies."""

    direction: str
    by: str
    num_threads: int

    def __str__(self) -> str:
        return f"LMCache by {self.by}, {self.num_threads} thread{'s' if self.num_threads > 1 else ''}"


def run(vllm: Peer | None = None) -> list[Row]:
    """A row for each direction and each way of LMCache. No rows if LMCache is not installed."""
    try:
        peer = Peer("lmcache")
    except MissingPeerError as missing:
        print(missing, file=sys.stderr)
        return []
    with peer as lmcache:
        return measure(lmcache)


def measure(lmcache: Peer) -> list[Row]:
    """Measure all in turns. Before and after, check the bytes that arrive at the peer."""
    ids = random.Random(0).sample(range(1, NUM_DEVICE_BLOCKS), NUM_BLOCKS_MOVED)
    found = lmcache.ask("prepare", num_blocks=NUM_DEVICE_BLOCKS, ids=ids)
    assert found["num_bytes"] == NUM_BYTES, found
    _check(lmcache)
    asked = _ways(found["num_threads"])
    transport = LocalTransport(
        [torch.ones(NUM_DEVICE_BLOCKS, REGION_BLOCK_BYTES, dtype=torch.uint8) for _ in range(NUM_REGIONS)]
    )
    subjects: dict[str, Subject] = {f"{one.direction} {one}": _asking(lmcache, one) for one in asked}
    measured = interleave(subjects | _ours(transport, ids), seconds=SECONDS)
    transport.close(timeout_s=10)
    _check(lmcache)
    return [*_beside_memmove(measured), *(_row(one, measured) for one in asked)]


def _ways(num_threads: int) -> list[Asked]:
    """Many threads first, because their idle threads still spin for a while in the next turn."""
    numbers = sorted({1, num_threads}, reverse=True)
    return [Asked(name, by, number) for number, by, name in itertools.product(numbers, WAYS, DIRECTIONS)]


def _check(lmcache: Peer) -> None:
    for by in WAYS:
        assert (num_arrived := lmcache.ask("check", by=by)) == NUM_BYTES, f"{num_arrived} bytes arrived by {by}"


def _asking(lmcache: Peer, one: Asked) -> Subject:
    return lambda: Sample(**lmcache.ask(one.direction, by=one.by, num_threads=one.num_threads))


def _ours(transport: LocalTransport, ids: Sequence[int]) -> dict[str, Subject]:
    """A memmove of the same number of bytes, and the store and load of `LocalTransport`."""
    completions: SimpleQueue[Completion] = SimpleQueue()
    transport.open(NUM_BLOCKS_MOVED, verify=False, deliver=completions.put, env=Env())
    source, destination = np.ones((2, NUM_BYTES), dtype=np.uint8)
    return {
        "memmove": lambda: timed(lambda: np.copyto(destination, source)),
        "store": lambda: timed(lambda: _move(transport, completions, "store", ids)),
        "load": lambda: timed(lambda: _move(transport, completions, "load", ids)),
    }


def _move(transport: LocalTransport, completions: SimpleQueue[Completion], name: str, ids: Sequence[int]) -> None:
    """Copy in jobs as large as LMCache's memory objects; this thread waits for all of them."""
    starts = range(0, NUM_BLOCKS_MOVED, BLOCKS_PER_JOB)
    for number, start in enumerate(starts):
        on_device = array("i", ids[start : start + BLOCKS_PER_JOB])
        on_host = array("i", range(start, start + BLOCKS_PER_JOB))
        if name == "store":
            plan = TransferPlan(number, Tier.DEVICE, Tier.HOST, on_device, on_host)
        else:
            plan = TransferPlan(number, Tier.HOST, Tier.DEVICE, on_host, on_device)
        transport.launch(plan, None)
    for _ in starts:
        assert completions.get(timeout=60).outcome is Outcome.LANDED


def _beside_memmove(measured: dict[str, Measured]) -> list[Row]:
    """The rates of `LocalTransport` beside a memmove in the same rounds."""
    return [_beside(name, measured[name], "one memmove", measured["memmove"], None) for name in DIRECTIONS]


def _row(one: Asked, measured: dict[str, Measured]) -> Row:
    return _beside(one.direction, measured[one.direction], str(one), measured[f"{one.direction} {one}"], WANTED)


def _beside(name: str, ours: Measured, against: str, other: Measured, wanted: float | None) -> Row:
    gigabytes = NUM_BYTES / 1e9
    return Row(
        name=f"{name}, pieces of 64 KiB", value=gigabytes / ours.median_s, unit="GB/s",
        spread=f"{gigabytes / ours.high_s:.3g}-{gigabytes / ours.low_s:.3g}", against=against,
        limit=gigabytes / other.median_s, ratio=other.median_s / ours.median_s, wanted=wanted,
    )  # fmt: skip
