"""The remote tier of a simulated transport. Its lanes and cells are the real ones, and the content of a block is a tag.

A cell is an object as in any store. In place of a block's bytes, it has the number of the tag in the store. A reader of
wrong bytes does not get the right tag.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from functools import partial

import attrs
import numpy as np
from numpy.typing import NDArray

from .._common.env import Env
from .._config.tiers import ObjectStore, RemoteTier
from .._kernel.layout import Layout
from .._kernel.plans import Completion, TransferPlan
from .._kernel.states import Direction, Outcome
from .._tiers.remote.cells import OVERHEAD_BYTES, SEAL_BYTES, WRITER_BYTES, Cells, CellShape
from .._tiers.remote.lanes import LaneRemote, RemoteLanes
from .._tiers.remote.plans import CellLabel
from ..errors import TransferRefused
from .memory import TORN, Memory
from .network import Network, NetworkThreads
from .simulated_store import SimulatedStore

__all__ = ["TagRemote", "TagStore", "remote_of"]

NUMBER_BYTES = 8


class TagStore(SimulatedStore):
    """A simulated store of the tags of blocks. It outlives the runtimes that use it."""

    def __init__(self, rng: random.Random | None = None, *, num_nodes: int = 1, keeps_first: bool = False) -> None:
        super().__init__(rng, num_nodes=num_nodes, keeps_first=keeps_first)
        self._contents: list[int] = []
        self._num_writers = 0

    def note(self, content: int) -> int:
        """The number under which the content is stored."""
        self._contents.append(content)
        return len(self._contents) - 1

    def content_of(self, number: int) -> int:
        """The content with that number. If there is none, the reader has read bytes that are no cell, and gets torn
        bytes."""
        return self._contents[number] if 0 <= number < len(self._contents) else TORN

    def new_writer(self) -> bytes:
        """The id of a new process, which distinguishes its objects from those of others."""
        self._num_writers += 1
        return self._num_writers.to_bytes(WRITER_BYTES, "little")

    def after_a_kill(self) -> TagStore:
        """A copy of the store's contents at this moment, for the runtimes after a kill."""
        found = TagStore(self._rng, num_nodes=self._nodes, keeps_first=self._keeps_first)
        found.objects, found._contents, found._num_writers = dict(self.objects), self._contents, self._num_writers
        return found


class _Summed:
    """A seal by a sum that needs no further package."""

    number = 0

    def close(self, label: CellLabel, made: memoryview) -> None:
        made[-SEAL_BYTES:] = _sum(made[:-SEAL_BYTES])

    def opened(self, label: CellLabel, found: memoryview, room: Callable[[], memoryview]) -> memoryview | None:
        body = found[:-SEAL_BYTES]
        return body[OVERHEAD_BYTES - SEAL_BYTES :] if _sum(body) == found[-SEAL_BYTES:] else None


def _sum(body: memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=SEAL_BYTES).digest()


@attrs.define(eq=False)
class _TagHost:
    """Implements `HostCells`. A job that copies must own the blocks at that moment."""

    remote: TagRemote

    def room(self, name: str, num_bytes: int) -> memoryview:
        return memoryview(bytearray(num_bytes))

    def copy_out(self, plan: TransferPlan, blocks: NDArray[np.uint8]) -> bool:
        remote, numbers = self.remote, _numbers(blocks)
        for place, host_id in enumerate(plan.source_ids):
            remote.check_owner(plan, place, host_id)
            if not remote.is_right(host_id):
                return False
            numbers[place] = remote.store.note(remote.host.content[host_id])
        return True

    def copy_in(self, plan: TransferPlan, blocks: NDArray[np.uint8]) -> None:
        remote, numbers = self.remote, _numbers(blocks)
        for place, host_id in enumerate(plan.destination_ids):
            remote.check_owner(plan, place, host_id)
            remote.host.content[host_id] = remote.store.content_of(int(numbers[place]))
            remote.landed(host_id)


@attrs.define(eq=False)
class TagRemote(LaneRemote):
    """Implements `TransportRemote` in the `TagStore` of `tier`.

    `is_right` returns whether a host block matches its checksum. `landed` is called with the host blocks that a load
    fills.
    """

    host: Memory = attrs.field(kw_only=True)
    network: Network = attrs.field(kw_only=True)
    deliver: Callable[[Completion], None] = attrs.field(kw_only=True)
    is_right: Callable[[int], bool] = attrs.field(kw_only=True)
    landed: Callable[[int], None] = attrs.field(kw_only=True)
    under_way: dict[int, TransferPlan] = attrs.field(factory=dict, init=False)
    """Launched jobs without a completion, by id."""
    num_failed: int = attrs.field(default=0, init=False)
    """Jobs that failed."""
    asked: list[tuple[CellLabel, ...]] = attrs.field(factory=list, init=False)
    """Questions without an answer."""
    _owners: dict[int, tuple[int, ...]] = attrs.field(factory=dict, init=False)
    """The generations of their host blocks."""

    @property
    def store(self) -> TagStore:
        assert isinstance(self.tier.store, TagStore), "a simulated transport keeps tags: its store is a TagStore"
        return self.tier.store

    def identify(self, layout: Layout, namespace: str) -> None:
        """Set the identity. A block counts as one byte."""
        shape = CellShape.of(layout, repr((namespace, layout.groups)), 1, self.tier.max_cell_bytes)
        self._shape = attrs.evolve(shape, block_bytes=NUMBER_BYTES)

    def open(self, env: Env) -> None:
        self.store.fault, self.store.later = self.network.fault, self.network.later
        shape = self._known_shape()
        cells = Cells(shape, _Summed(), shape.layout, self.store.new_writer())
        threads = partial(NetworkThreads, network=self.network)
        self._lanes = RemoteLanes(self.tier, cells, _TagHost(self), self._over, env, threads)

    def launch(self, plan: TransferPlan) -> None:
        is_load = plan.direction is Direction.LOAD
        self._owners[plan.job_id] = self.host.generations(plan.destination_ids if is_load else plan.source_ids)
        self.under_way[plan.job_id] = plan
        try:
            super().launch(plan)
        except TransferRefused:
            self._forget_job(plan.job_id)
            raise

    def ask(self, labels: Sequence[CellLabel], hear: Callable[[int], None]) -> None:
        question = tuple(labels)
        self.asked.append(question)

        def heard(num_cells: int) -> None:
            self.asked.remove(question)
            hear(num_cells)

        super().ask(labels, heard)

    def close(self) -> bool:
        """Begin nothing any more. Returns whether all calls have ended."""
        self.stop_launching()
        return self.join(0.0)

    def check_owner(self, plan: TransferPlan, place: int, host_id: int) -> None:
        what = f"the store's {plan.direction.value} {plan.job_id}"
        self.host.check_owner(what, host_id, self._owners[plan.job_id][place])

    def _over(self, completion: Completion) -> None:
        self._forget_job(completion.job_id)
        self.num_failed += completion.outcome is not Outcome.LANDED
        self.deliver(completion)

    def _forget_job(self, job_id: int) -> None:
        del self.under_way[job_id], self._owners[job_id]

    # -- inspection for oracles -------------------------------------------------------------------------------------

    def kept(self) -> list[tuple[bytes, list[int]]]:
        """The objects in the store that may be cells of this shape, with the contents of their blocks."""
        lanes, store = self._lanes, self.store
        if lanes is None:
            return []
        whole = [(key, one) for key, one in store.objects.items() if len(one) == lanes.cells.object_bytes]
        return [
            (key, [store.content_of(int(at)) for at in _numbers(lanes.cells.blocks_in(memoryview(one)))])
            for key, one in whole
        ]

    def is_to_be_removed(self, key: bytes) -> bool:
        """Whether this cell waits for its removal."""
        lanes = self._lanes
        return lanes is not None and any(lanes.calls.name(label) == key for label in lanes.removals.waiting)


def _numbers(blocks: NDArray[np.uint8]) -> NDArray[np.int64]:
    """One number for each block."""
    found: NDArray[np.int64] = blocks.view("<i8")[:, 0]
    return found


def remote_of(store: ObjectStore, cell_units: int, block_sizes: Sequence[int]) -> RemoteTier:
    """The tier of a configuration whose cells have exactly `cell_units` units, and blocks of one byte."""
    unit_tokens = math.lcm(*block_sizes)
    return RemoteTier(store, cell_bytes=cell_units * sum(unit_tokens // size for size in block_sizes))
