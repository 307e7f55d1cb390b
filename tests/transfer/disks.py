"""A transport with a disk, of the system or simulated, whose completions are waited for."""

from __future__ import annotations

import itertools
import queue
import random
import threading
from array import array
from collections.abc import Callable
from pathlib import Path

import torch
from copies import GUARD_S

from aoffload import DiskTier, KVCacheGroup
from aoffload._common.tiers import Tier
from aoffload._kernel.layout import Layout
from aoffload._kernel.plans import Completion, TransferPlan
from aoffload._kernel.states import Outcome
from aoffload._tiers.disk.plans import BlockLabel, DiskPayload, DiskTrouble, RestoredRun
from aoffload._transfer.local import LocalTransport
from aoffload.transport import Env
from proof.disk.simulated_disk import DiskFault, IOCall, SimulatedDisk

BLOCK = 4096
NUM_HOST = 16
SIZE = 1 << 20


class Clock(Env):
    """Time that passes when it is told to."""

    seconds = 0.0

    def now(self) -> float:
        return self.seconds


class DiskCopies:
    """A `LocalTransport` of 16 device and 16 host blocks with a disk, and what it delivered."""

    def __init__(self, path: Path, disk: SimulatedDisk | None = None, *, verify: bool = False, seed: int = 0) -> None:
        self.pool = torch.randint(
            0, 256, (NUM_HOST, BLOCK), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )
        self.transport = LocalTransport(self.pool, disk=DiskTier(str(path), SIZE))
        local = self.transport._disk
        assert local is not None
        if disk is not None:
            local.directory = lambda path: disk.directory()
        local.identify(Layout.of([KVCacheGroup("full", block_size=4)]), "model")
        self.completions: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self.troubles: list[DiskTrouble] = []
        self.guard_s = GUARD_S
        """How long `next` waits. Less where only a mistake makes it wait at all."""
        self.clock = Clock()
        self._job_ids = itertools.count(1)
        self.transport.open(NUM_HOST, verify=verify, deliver=self.completions.put, env=self.clock)
        self.disk = local

    @property
    def host(self) -> object:
        return self.transport.backend.host_rows  # type: ignore[attr-defined]

    def launch(
        self, source: Tier, destination: Tier, sources: list[int], destinations: list[int],
        labels: list[BlockLabel] | None = None, generation: int = 0,
    ) -> int:  # fmt: skip
        ids = array("i", sources), array("i", destinations)
        given = tuple(labels or [None] * len(sources))
        payload = DiskPayload(given, generation) if destination is Tier.DISK else None
        plan = TransferPlan(next(self._job_ids), source, destination, *ids, payload)
        self.transport.launch(plan, None)
        return plan.job_id

    def move(self, *args: object, **kwargs: object) -> Completion:
        job_id = self.launch(*args, **kwargs)  # type: ignore[arg-type]
        found = self.next()
        assert found.job_id == job_id
        return found

    def next(self) -> Completion:
        return self.completions.get(timeout=self.guard_s)

    def wait_until_idle(self, num_threads: int) -> None:
        """Wait until this number of the disk's threads wait for work. A launch takes a thread out of the wait, so no
        thread is idle until it has looked at the jobs launched before."""
        turn = self.disk._turn
        for _ in range(100_000):  # a turn of the interpreter each
            with turn:
                if len(turn._waiters) >= num_threads:  # type: ignore[attr-defined]
                    return
            assert self.move(Tier.DEVICE, Tier.HOST, [1], [9]).outcome is Outcome.LANDED
        raise AssertionError(f"fewer than {num_threads} threads of the disk wait for work")

    def read_back(self) -> list[RestoredRun]:
        found: list[RestoredRun] = []
        over: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.disk.read_back(found.extend, over.put, self.troubles.append)
        assert over.get(timeout=GUARD_S) == ""
        return found

    def reset(self, num_resets: int) -> str:
        over: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.disk.reset(num_resets, over.put)
        return over.get(timeout=GUARD_S)


class Hanging:
    """Calls of a simulated disk that hang until they are released."""

    def __init__(self, disk: SimulatedDisk, hangs: Callable[[IOCall], bool]) -> None:
        self._go_on = threading.Event()
        self._begun: queue.SimpleQueue[IOCall] = queue.SimpleQueue()
        disk.fault = lambda call: DiskFault.HANG if hangs(call) and not self._go_on.is_set() else None
        disk.hang = self._hang

    def _hang(self, call: IOCall) -> None:
        self._begun.put(call)
        assert self._go_on.wait(GUARD_S)

    def wait_for(self, num_calls: int) -> None:
        """Wait until so many more calls hang."""
        for _ in range(num_calls):
            self._begun.get(timeout=GUARD_S)

    def resume(self) -> None:
        self._go_on.set()


def simulated(seed: int = 0) -> SimulatedDisk:
    return SimulatedDisk(random.Random(seed), 1 << 21)
