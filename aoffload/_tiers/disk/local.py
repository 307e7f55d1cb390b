"""`LocalDisk`: the disk of a local transport, opened together with the host memory."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from functools import partial

import attrs
import numpy as np
from numpy.typing import NDArray

from ..._config.tiers import DiskTier
from ..._kernel.layout import Layout
from ..._kernel.plans import Completion, TransferPlan
from ..._kernel.states import Direction
from ..._transfer.breaker import StorageMove, taken
from ..._transfer.lane import BlockChecksums
from ..._transfer.region import KVRegion, identity_of
from ..._transfer.transport import DiskStatistics
from ..._transfer.turns import started_thread
from ..._common.env import Env
from ...errors import ConfigError, TransferRefused, WrongState
from .files import DiskDirectory
from .forgetting import DiskTrouble
from .lanes import DiskCounts, DiskLanes
from .plans import RestoredRun
from .posix import PosixDirectory
from .records import SlotLayout
from .slots import DiskSlots


@attrs.define(eq=False)
class LocalDisk:
    """Implements `TransportDisk`, in the files of `tier`. `regions` are part of the identity of the KV there."""

    tier: DiskTier
    regions: Sequence[KVRegion]
    directory: Callable[[str], DiskDirectory] = PosixDirectory
    """Opens the directory, of the operating system or simulated."""
    _layout: SlotLayout | None = None
    _fingerprint: bytes = b""
    _lanes: DiskLanes | None = None

    def identify(self, layout: Layout, namespace: str) -> None:
        """Called before `open`. `layout` and `namespace` identify the KV, together with the regions."""
        block_bytes = sum(region.block_bytes for region in self.regions)
        widths = tuple(component.width for component in layout.components)
        leading = tuple(not component.number for component in layout.components)
        self._layout = SlotLayout(layout.unit_tokens, block_bytes, widths, leading)
        self._fingerprint = hashlib.sha256(identity_of(layout, namespace, self.regions).encode()).digest()

    def open(
        self, host: NDArray[np.uint8], checksums: BlockChecksums | None, deliver: Callable[[Completion], None], env: Env
    ) -> None:
        """Open or make the files within `open_timeout_s`, and start the threads. `ConfigError` if the files cannot be
        had. `TransferRefused` if a thread cannot be started: `stop_launching` and `join` then close the files."""
        if self._layout is None:
            raise WrongState("the disk does not know its layout: a runtime says it before it opens the transport")
        slots = opened_within(self.tier.open_timeout_s, partial(self._slots, self._layout, host, env), env)
        self._lanes = DiskLanes(
            slots, host, checksums, deliver, env
        )  # set before the start, so that `join` closes it if the start fails
        self._lanes.start()

    def _slots(self, layout: SlotLayout, host: NDArray[np.uint8], env: Env) -> DiskSlots:
        return DiskSlots.open(
            self.directory(self.tier.path),
            layout,
            host,
            size_bytes=self.tier.size_bytes,
            fingerprint=self._fingerprint,
            draw_generation=lambda: env.random.getrandbits(63),
        )

    @property
    def num_slots(self) -> int:
        return 0 if self._lanes is None else self._lanes.slots.num_slots

    @property
    def num_blocks(self) -> int:
        return self.num_slots

    def launch(self, plan: TransferPlan) -> None:
        self._open_lanes().launch(plan)

    def give_up(self, job_id: int) -> None:
        if self._lanes is not None:
            self._lanes.give_up(job_id)

    def forget(self, slots: Sequence[int]) -> None:
        self._open_lanes().forget(slots)

    def refuses(self, direction: Direction) -> bool:
        return self._lanes is None or self._lanes.refuses(direction)

    def take_moves(self) -> Sequence[StorageMove]:
        return () if self._lanes is None else taken(self._lanes.moves)

    def read_back(
        self, hear: Callable[[Sequence[RestoredRun]], None], over: Callable[[str], None],
        hear_trouble: Callable[[DiskTrouble], None],
    ) -> None:  # fmt: skip
        self._open_lanes().read_back(hear, over, hear_trouble)

    def reset(self, num_resets: int, over: Callable[[str], None]) -> None:
        self._open_lanes().reset(num_resets, over)

    def disown(self) -> None:
        self._open_lanes().disown()

    def statistics(self) -> DiskStatistics:
        loads, stores = DiskCounts(), DiskCounts()
        if self._lanes is not None:
            loads, stores = (self._lanes.counts[direction] for direction in (Direction.LOAD, Direction.STORE))
        block_bytes = 0 if self._layout is None else self._layout.block_bytes
        return DiskStatistics(
            num_loads=loads.num_jobs,
            num_stores=stores.num_jobs,
            blocks_loaded=loads.num_blocks,
            blocks_stored=stores.num_blocks,
            blocks_corrupt=loads.num_corrupt,
            bytes_loaded=loads.num_blocks * block_bytes,
            bytes_stored=stores.num_blocks * block_bytes,
            load_seconds=loads.seconds,
            store_seconds=stores.seconds,
            num_failures=loads.num_failed + stores.num_failed,
            left_alone=() if self._lanes is None else self._lanes.left_alone(),
        )

    def stop_launching(self) -> None:
        if self._lanes is not None:
            self._lanes.stop_launching()

    def join(self, timeout_s: float) -> bool:
        """Whether all threads ended within `timeout_s`, and the files are closed."""
        return self._lanes is None or self._lanes.join(timeout_s)

    def _open_lanes(self) -> DiskLanes:
        if self._lanes is None:
            raise TransferRefused("the disk is not open")
        return self._lanes


def opened_within(timeout_s: float, open_slots: Callable[[], DiskSlots], env: Env) -> DiskSlots:
    """Call `open_slots` in a thread of its own, and return its result. `ConfigError("path")` if it takes longer than
    `timeout_s` seconds. The thread then closes the slots as soon as they are open; until then, the directory stays
    locked."""
    is_over = threading.Lock()  # taken by the thread once the slots are open, or by the caller once it gives up
    has_ended = threading.Event()
    found: list[DiskSlots] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            slots = open_slots()
            if is_over.acquire(blocking=False):
                found.append(slots)
            else:
                slots.close()
        except Exception as error:  # noqa: BLE001 - the caller raises it
            errors.append(error)
        has_ended.set()

    started_thread(env, work, "aoffload-disk-opener")
    if not has_ended.wait(timeout_s) and is_over.acquire(blocking=False):
        raise ConfigError("path", f"does not answer: it was not open within {timeout_s:g} s")
    has_ended.wait()
    if errors:
        raise errors[0]
    return found[0]
