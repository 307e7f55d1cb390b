"""A transport with a remote tier, whose store is simulated or real, and whose completions are waited for."""

from __future__ import annotations

import hashlib
import itertools
import queue
import threading
from array import array
from collections.abc import Callable, Sequence

import torch
from copies import GUARD_S

from aoffload import KVCacheGroup, RemoteTier
from aoffload._common.tiers import Tier
from aoffload._config.tiers import ObjectStore
from aoffload._kernel.layout import Layout
from aoffload._kernel.plans import Completion, TransferPlan
from aoffload._tiers.remote.plans import CellLabel
from aoffload._transfer.local import LocalTransport
from aoffload.testing import SimulatedStore, StoreCall, StoreFault
from aoffload.transport import Env

BLOCK = 2**20
"""Four blocks make a cell."""
CELL = 4
NUM_HOST = 16
SECRET = b"sixteen or more bytes"


class Clock(Env):
    """Time that passes when it is told to."""

    seconds = 0.0

    def now(self) -> float:
        return self.seconds


def cell(number: int, prompt: str = "a prompt") -> CellLabel:
    """The cell at this place of a prompt."""
    digest = hashlib.sha256(f"{prompt} {number}".encode()).digest()
    return CellLabel(0, digest, number * CELL, (number + 1) * CELL)


class RemoteCopies:
    """A `LocalTransport` of 16 device and 16 host blocks with a remote tier, and what it delivered."""

    def __init__(
        self, store: ObjectStore, secret: bytes | None = None, *, verify: bool = False, namespace: str = "model",
        group: KVCacheGroup | None = None, dtype: torch.dtype = torch.uint8, env: Env | None = None,
        **options: float,
    ) -> None:  # fmt: skip
        self.pool = torch.randint(0, 256, (NUM_HOST, BLOCK), dtype=torch.uint8).view(dtype)
        self.tier = RemoteTier(store, secret, **options)  # type: ignore[arg-type]
        self.transport = LocalTransport(self.pool, remote=self.tier)
        remote = self.transport._remote
        assert remote is not None
        self.remote = remote
        remote.identify(Layout.of([group or KVCacheGroup("full", block_size=4)]), namespace)
        self.completions: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self.clock = Clock() if env is None else env
        self._job_ids = itertools.count(1)
        self.transport.open(NUM_HOST, verify=verify, deliver=self.completions.put, env=self.clock)
        self.host = self.transport.backend.host_rows  # type: ignore[attr-defined]
        self.host[:] = self.pool.view(torch.uint8).numpy()

    def launch_store(self, label: CellLabel, host_ids: Sequence[int] = range(CELL)) -> int:
        return self.launch(Tier.HOST, Tier.REMOTE, host_ids, range(len(host_ids)), label)

    def launch_load(self, label: CellLabel, host_ids: Sequence[int] = range(8, 12), first: int = 0) -> int:
        return self.launch(Tier.REMOTE, Tier.HOST, range(first, first + len(host_ids)), host_ids, label)

    def launch(
        self, source: Tier, destination: Tier, sources: Sequence[int], destinations: Sequence[int],
        label: CellLabel | None,
    ) -> int:  # fmt: skip
        ids = array("i", sources), array("i", destinations)
        plan = TransferPlan(next(self._job_ids), source, destination, *ids, payload=label)
        self.transport.launch(plan, None)
        return plan.job_id

    def store(self, label: CellLabel, host_ids: Sequence[int] = range(CELL)) -> Completion:
        job_id = self.launch_store(label, host_ids)
        found = self.next()
        assert found.job_id == job_id
        return found

    def load(self, label: CellLabel, host_ids: Sequence[int] = range(8, 12), first: int = 0) -> Completion:
        job_id = self.launch_load(label, host_ids, first)
        found = self.next()
        assert found.job_id == job_id
        return found

    def next(self) -> Completion:
        return self.completions.get(timeout=GUARD_S)

    def ask(self, labels: Sequence[CellLabel]) -> int:
        heard: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.remote.ask(labels, heard.put)
        return heard.get(timeout=GUARD_S)

    def name(self, label: CellLabel) -> bytes:
        lanes = self.remote._lanes
        assert lanes is not None
        return lanes.calls.name(label)

    def forget_memories(self) -> None:
        """What was asked and stored before is not remembered."""
        lanes = self.remote._lanes
        assert lanes is not None
        lanes.memory._memories.clear()

    def close(self) -> bool:
        return self.transport.close(GUARD_S)


class Waiting:
    """Calls of a simulated store that wait until they are released."""

    def __init__(
        self, store: SimulatedStore, waits: Callable[[StoreCall], bool], fault: StoreFault = StoreFault.SLOW
    ) -> None:
        self._go_on = threading.Event()
        self._begun: queue.SimpleQueue[StoreCall] = queue.SimpleQueue()
        store.fault = lambda call: fault if waits(call) and not self._go_on.is_set() else None
        store.wait = self._wait

    def _wait(self, call: StoreCall) -> None:
        self._begun.put(call)
        assert self._go_on.wait(GUARD_S)

    def wait_for(self, num_calls: int) -> None:
        """Wait until so many more calls wait."""
        for _ in range(num_calls):
            self._begun.get(timeout=GUARD_S)

    def resume(self) -> None:
        self._go_on.set()
