"""An opened transport whose completions are waited for."""

from __future__ import annotations

import itertools
import queue
from array import array
from collections.abc import Callable

from aoffload._common.tiers import Tier
from aoffload._kernel.plans import Completion, TransferPlan
from aoffload._transfer.backends.base import CopyBackend
from aoffload._transfer.fences import Fence, RegionFences
from aoffload._transfer.local import LocalTransport
from aoffload._transfer.region import KVRegion
from aoffload.transport import Env

GUARD_S = 60.0
"""Never waited for in full unless something hangs that must not."""


class Copies:
    """A `LocalTransport` and what it delivered."""

    def __init__(
        self,
        kv_caches: object,
        num_host_blocks: int,
        backend: Callable[[tuple[KVRegion, ...]], CopyBackend] | None = None,
        verify: bool = False,
    ) -> None:
        self.transport = LocalTransport(kv_caches, backend)
        self.completions: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._job_ids = itertools.count(1)
        self.transport.open(num_host_blocks, verify=verify, deliver=self.completions.put, env=Env())

    def launch_store(self, device: list[int], host: list[int], after: Fence | None = None) -> int:
        return self._launch(Tier.DEVICE, Tier.HOST, device, host, after)

    def launch_load(self, host: list[int], device: list[int], after: Fence | None = None) -> int:
        return self._launch(Tier.HOST, Tier.DEVICE, host, device, after)

    def launch_watched(self, host: list[int], device: list[int]) -> RegionFences:
        """A load region after region."""
        fences = RegionFences(self.transport.num_regions)
        self._launch(Tier.HOST, Tier.DEVICE, host, device, None, fences)
        return fences

    def store(self, device: list[int], host: list[int]) -> Completion:
        self.launch_store(device, host)
        return self.next()

    def load(self, host: list[int], device: list[int]) -> Completion:
        self.launch_load(host, device)
        return self.next()

    def next(self) -> Completion:
        return self.completions.get(timeout=GUARD_S)

    def _launch(
        self,
        source: Tier,
        destination: Tier,
        froms: list[int],
        tos: list[int],
        after: Fence | None,
        watched: RegionFences | None = None,
    ) -> int:
        job_id = next(self._job_ids)
        if watched is not None:
            self.transport.watch(job_id, watched)
        self.transport.launch(TransferPlan(job_id, source, destination, array("i", froms), array("i", tos)), after)
        return job_id
