"""`LocalRemote`: the remote tier of a local transport, opened together with the host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from ..._config.tiers import RemoteTier
from ..._kernel.layout import Layout
from ..._kernel.plans import Completion, TransferPlan
from ..._kernel.states import Direction
from ..._transfer.breaker import StorageMove, taken
from ..._transfer.lane import BlockChecksums
from ..._transfer.region import KVRegion, identity_of
from ..._transfer.transport import RemoteStatistics
from ..._common.env import Env
from ...errors import TransferRefused, WrongState
from .cells import CellShape, cells_of_tier
from .jobs import HostRows
from .lanes import RemoteLanes
from .plans import CellLabel


@attrs.define(eq=False)
class LaneRemote:
    """Implements `TransportRemote` with lanes that a derived class opens. Before that, each answer is that the store
    has nothing."""

    tier: RemoteTier
    _shape: CellShape | None = attrs.field(default=None, init=False)
    _lanes: RemoteLanes | None = attrs.field(default=None, init=False)

    def _known_shape(self) -> CellShape:
        if self._shape is None:
            raise WrongState("the remote tier does not know its layout: a runtime says it before opening")
        return self._shape

    @property
    def num_blocks(self) -> int:
        """Blocks of a cell, because the block ids of this tier are places in a cell."""
        return 0 if self._shape is None else self._shape.num_blocks

    def launch(self, plan: TransferPlan) -> None:
        if self._lanes is None:
            raise TransferRefused("the remote tier is not open")
        self._lanes.launch(plan)

    def give_up(self, job_id: int) -> None:
        if self._lanes is not None:
            self._lanes.give_up(job_id)

    def connect(self, hear: Callable[[], None]) -> None:
        if self._lanes is None:
            hear()
        else:
            self._lanes.questions.connect(self.tier.load_timeout_s, hear)

    def ask(self, labels: Sequence[CellLabel], hear: Callable[[int], None]) -> None:
        if self._lanes is None:
            hear(0)
        else:
            self._lanes.ask(labels, hear)

    def is_wanted(self, label: CellLabel) -> bool:
        return self._lanes is not None and self._lanes.is_wanted(label)

    def forget(self, labels: Sequence[CellLabel]) -> None:
        if self._lanes is not None and labels:
            self._lanes.forget(labels)

    def refuses(self, direction: Direction) -> bool:
        return self._lanes is None or self._lanes.refuses(direction)

    def take_moves(self) -> Sequence[StorageMove]:
        return () if self._lanes is None else taken(self._lanes.calls.moves)

    def statistics(self) -> RemoteStatistics:
        lanes = self._lanes
        if lanes is None:
            return RemoteStatistics()
        loads, stores = lanes.counts[Direction.LOAD], lanes.counts[Direction.STORE]
        return RemoteStatistics(
            num_loads=loads.num_jobs,
            num_stores=stores.num_jobs,
            blocks_loaded=loads.num_blocks,
            blocks_stored=stores.num_blocks,
            bytes_loaded=loads.num_bytes,
            bytes_stored=stores.num_bytes,
            load_seconds=loads.seconds,
            store_seconds=stores.seconds,
            cells_missing=lanes.num_missing,
            cells_corrupt=lanes.num_corrupt,
            cells_removed=lanes.num_removed,
            num_failures=lanes.calls.num_failures,
            num_questions=lanes.questions.num_questions,
            question_seconds=lanes.questions.seconds,
            num_unknown=lanes.questions.num_unknown,
            left_alone=lanes.calls.left_alone(),
        )

    def stop_launching(self) -> None:
        if self._lanes is not None:
            self._lanes.stop_launching()

    def join(self, timeout_s: float) -> bool:
        """Whether all threads ended within `timeout_s` seconds, and the connections to the store are closed."""
        return self._lanes is None or self._lanes.join(timeout_s)


@attrs.define(eq=False)
class LocalRemote(LaneRemote):
    """Opens lanes on the store of `tier`. `regions` are part of the identity of the cells."""

    regions: Sequence[KVRegion]

    def identify(self, layout: Layout, namespace: str) -> None:
        """Called before `open`. `layout` and `namespace` identify the KV, together with the regions."""
        block_bytes = sum(region.block_bytes for region in self.regions)
        self._shape = CellShape.of(
            layout, identity_of(layout, namespace, self.regions), block_bytes, self.tier.max_cell_bytes
        )

    def open(
        self, host: NDArray[np.uint8], checksums: BlockChecksums | None, deliver: Callable[[Completion], None], env: Env
    ) -> None:
        """Start the threads, without a call to the store. `MissingExtra` names the packages that are not installed."""
        cells = cells_of_tier(self._known_shape(), self.tier.secret)
        self._lanes = RemoteLanes(self.tier, cells, HostRows(host, checksums), deliver, env)
