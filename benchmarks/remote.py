"""Cells of a remote tier in a server on loopback, compared with plain redis-py (with hiredis) on values of the same
sizes in the same rounds. Also the rate of a cluster of three while one node has failed.

A load gets, verifies and copies its cell to host memory. A store asks, copies, seals and puts it. They are compared one
at a time, because the plain side has one connection. The cluster serves loads of random cells, four at a time, so that
a node that hangs can block all threads.
"""

from __future__ import annotations

import hashlib
import itertools
import queue
import random
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from aoffload import RemoteTier
from aoffload._common.tiers import Tier
from aoffload._config.tiers import MAX_CELL_BYTES, ObjectStore
from aoffload._kernel.plans import Completion, TransferPlan
from aoffload._kernel.states import Outcome
from aoffload._tiers.remote.cells import CellShape, cells_of_tier
from aoffload._tiers.remote.lanes import HostRows, RemoteLanes
from aoffload._tiers.remote.plans import CellLabel
from aoffload.errors import MissingExtra
from aoffload.stores import RedisClusterStore, RedisStore
from aoffload.transport import Env

from .harness import Row, Sample, Subject, interleave, timed
from .peer import Peer
from .redis_servers import NoServerError, RedisServer, cluster_of

__all__ = ["cluster_rows", "job_rows", "run"]

KIB, MIB = 2**10, 2**20
SIZES = (256 * KIB, MIB, 4 * MIB)
BLOCKS = 16
"""Blocks of a cell."""
SECRET = bytes(range(32))
SECONDS = 4.0
WANTED = 0.8
CLUSTER_CELL = 64 * KIB
CLUSTER_CELLS = 120
SETTLE_S = 2.0
MEASURE_S = 6.0
TURN_S = 1.0
AT_ONCE = 4


def run(vllm: Peer | None = None) -> Iterator[Row]:
    """Loads and stores of three sizes, sealed in both ways, and a cluster that loses a node in two ways."""
    try:
        for size in SIZES:
            for secret in (None, SECRET):
                yield from job_rows(size, secret)
        for is_killed in (True, False):
            yield from cluster_rows(is_killed)
    except (NoServerError, MissingExtra) as missing:
        print(f"remote: {missing}", file=sys.stderr)


class Jobs:
    """Jobs on cells of one size."""

    def __init__(self, store: ObjectStore, cell_bytes: int, secret: bytes | None) -> None:
        shape = CellShape(hashlib.sha256(b"benchmark").digest(), BLOCKS, 1, cell_bytes // BLOCKS)
        self.host = np.random.default_rng(0).integers(0, 256, (AT_ONCE * BLOCKS, shape.block_bytes), dtype=np.uint8)
        self.done: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        cells = cells_of_tier(shape, secret)
        self.lanes = RemoteLanes(RemoteTier(store, secret), cells, HostRows(self.host, None), self.done.put, Env())
        self._job_ids = itertools.count(1)

    def launch(self, label: CellLabel, *, is_load: bool, place: int = 0) -> int:
        ids, positions = array("i", range(place * BLOCKS, (place + 1) * BLOCKS)), array("i", range(BLOCKS))
        job_id = next(self._job_ids)
        if is_load:
            plan = TransferPlan(job_id, Tier.REMOTE, Tier.HOST, positions, ids, payload=label)
        else:
            plan = TransferPlan(job_id, Tier.HOST, Tier.REMOTE, ids, positions, payload=label)
        self.lanes.launch(plan)
        return job_id

    def do(self, labels: Iterator[CellLabel], *, is_load: bool) -> None:
        self.launch(next(labels), is_load=is_load)
        found = self.done.get()
        assert found.outcome is Outcome.LANDED, found

    def close(self) -> None:
        self.lanes.stop_launching()
        assert self.lanes.join(10.0)


def label(number: int) -> CellLabel:
    return CellLabel(0, hashlib.sha256(str(number).encode()).digest(), 0, BLOCKS)


def job_rows(cell_bytes: int, secret: bytes | None, seconds: float = SECONDS) -> list[Row]:
    """GB/s of one job after the other, relative to the plain client's."""
    import redis

    with (
        _directory() as path,
        RedisServer(path / "redis", "--maxmemory", "512mb", "--maxmemory-policy", "allkeys-lru") as server,
    ):
        jobs = Jobs(RedisStore.from_url(server.url), cell_bytes, secret)
        plain = redis.Redis(port=server.port, protocol=2)
        value, kept = jobs.host.tobytes()[:cell_bytes], [label(number) for number in range(AT_ONCE)]

        def reading(work: Callable[[], object]) -> Sample:
            """Stores since the last round may have evicted the cells to read."""
            plain.set("plain", value)
            for each in kept:
                jobs.do(iter([each]), is_load=False)
            return timed(work)

        subjects: dict[str, Subject] = {
            "load": partial(reading, partial(jobs.do, itertools.cycle(kept), is_load=True)),
            "plain GET": partial(reading, partial(plain.get, "plain")),
            "store": partial(timed, partial(jobs.do, map(label, itertools.count(AT_ONCE)), is_load=False)),
            "plain SET": partial(timed, partial(plain.set, "plain", value)),
        }
        found = interleave(subjects, seconds=seconds)
        jobs.close()
        plain.close()
    how = "secret" if secret else "sum"
    wanted = WANTED if cell_bytes == MAX_CELL_BYTES and secret is None else None
    size = f"{cell_bytes // MIB} MiB" if cell_bytes >= MIB else f"{cell_bytes // KIB} KiB"
    rows = []
    for ours, other in (("load", "plain GET"), ("store", "plain SET")):
        mine, theirs, gigabytes = found[ours], found[other], cell_bytes / 1e9
        rows.append(
            Row(
                name=f"remote: {ours}, cells of {size}, {how}", value=gigabytes / mine.median_s, unit="GB/s",
                spread=f"{gigabytes / mine.high_s:.3g}-{gigabytes / mine.low_s:.3g}", against=other,
                limit=gigabytes / theirs.median_s, ratio=theirs.median_s / mine.median_s, wanted=wanted,
            )
        )  # fmt: skip
    return rows


def cluster_rows(is_killed: bool, settle_s: float = SETTLE_S, measure_s: float = MEASURE_S) -> list[Row]:
    """Loads per second while one of three nodes has failed, misses among them, relative to those of a whole cluster.
    They take turns, and the ratio is the median over the turns, because other work on the machine slows both."""
    with _directory() as path, ExitStack() as held:
        whole, lame = (Cluster(held, path / name) for name in ("whole", "lame"))
        if is_killed:
            lame.servers[2].end()
        else:
            lame.servers[2].pause()
            held.callback(lame.servers[2].go_on)
        lame.rates(settle_s)
        turns = [(whole.rates(TURN_S), lame.rates(TURN_S)) for _ in range(max(1, round(measure_s / TURN_S)))]
    how = "killed" if is_killed else "stopped"
    share = 2 / 3
    return [
        _cluster_row(f"loads, one of three nodes {how}", "all three", [(one[0], two[0]) for one, two in turns]),
        _cluster_row(
            f"hits among them, {how}", "two thirds of all three's", [(one[1] * share, two[1]) for one, two in turns]
        ),
    ]


def _cluster_row(name: str, against: str, turns: list[tuple[float, float]]) -> Row:
    whole, lame = (statistics.median(rates) for rates in zip(*turns, strict=True))
    return Row(
        name=f"remote: {name}", value=lame, unit="1/s", against=against, limit=whole,
        spread=f"{min(two for _, two in turns):,.0f}-{max(two for _, two in turns):,.0f}",
        ratio=statistics.median(two / one for one, two in turns), wanted=WANTED,
    )  # fmt: skip


class Cluster:
    """Three nodes, and `AT_ONCE` loads of random cells in progress."""

    def __init__(self, held: ExitStack, path: Path) -> None:
        path.mkdir()
        self.servers = cluster_of(path, 3)
        for server in self.servers:
            held.callback(server.end)
        store = RedisClusterStore.from_url(*(server.url for server in self.servers))
        self._jobs = Jobs(store, CLUSTER_CELL, None)
        held.callback(self._jobs.close)
        self._labels, self._random = [label(number) for number in range(CLUSTER_CELLS)], random.Random(0)
        for each in self._labels:
            self._jobs.do(iter([each]), is_load=False)
        self._places: dict[int, int] = {}
        for place in range(AT_ONCE):
            self._launch(place)

    def _launch(self, place: int) -> None:
        job_id = self._jobs.launch(self._random.choice(self._labels), is_load=True, place=place)
        self._places[job_id] = place

    def rates(self, seconds: float) -> tuple[float, float]:
        """Loads and hits per second. Those in progress at the end count in the next turn."""
        stop_s, num_done, num_hits = time.monotonic() + seconds, 0, 0
        while time.monotonic() < stop_s:
            found = self._jobs.done.get()
            num_done += 1
            num_hits += found.outcome is Outcome.LANDED
            self._launch(self._places.pop(found.job_id))
        return num_done / seconds, num_hits / seconds


@contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="aoffload-remote-") as path:
        yield Path(path)
