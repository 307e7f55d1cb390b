"""The remote store in the scheduler: questions to it, and stores into it.

A worker has its connections. A question leaves with a step, and its answer comes with a later one. One try of a
request asks each question once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from weakref import WeakValueDictionary

import attrs

from aoffload import HostCache, RemoteTier, Tier

from .._tiers.remote.memory import CellMemory, Known
from .._tiers.remote.rules import cells_to_hit
from .._tiers.write_rate import WriteRate
from ..ledger import CellLabel, Completion, CopyQueue, Outcome, Prefix, TransferPlan
from .counts import Counts
from .messages import CellsFound, Refusing, Said, TieredOutbox

_log = logging.getLogger("vllm.aoffload")
MAX_BYTES = 32 * 2**20
"""Bytes per store. The scheduler's loop computes the digests of the cells."""
LOADS, STORES = (Tier.REMOTE, Tier.HOST), (Tier.HOST, Tier.REMOTE)


@attrs.define(eq=False)
class Asked:
    """A question: how many of the cells `labels` does the store have, counted from the first one?"""

    labels: tuple[CellLabel, ...]
    until: float
    """The deadline for the answer. A worker answers earlier, after `ask_timeout_s`, if the store has not."""
    num_cells: int | None = None
    """None: there is no answer yet."""

    @property
    def stop(self) -> int:
        """The unit at which the store's known cells end; 0 if it has none."""
        return self.labels[self.num_cells - 1].stop if self.num_cells else 0


@attrs.define(eq=False)
class RemoteSide:
    """One per engine with a remote store. All calls come from the thread of vLLM's scheduler, and none waits."""

    ledger: HostCache
    queue: CopyQueue
    outbox: TieredOutbox
    counts: Counts
    tier: RemoteTier
    block_bytes: int
    answer_s: float
    """How long a request waits for an answer, at most. The answer comes with a step of the worker."""
    clock: Callable[[], float]
    is_on: bool = attrs.field(default=True, init=False)
    _refusing: Refusing = attrs.field(factory=Refusing, init=False)
    _known: CellMemory = attrs.field(factory=CellMemory, init=False)
    _rate: WriteRate = attrs.field(init=False)
    _questions: WeakValueDictionary[int, Asked] = attrs.field(factory=WeakValueDictionary, init=False)
    """Questions by number, while their request waits for the answer."""
    _num_asked: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._rate = WriteRate(self.tier.write_bytes_per_s, self._cell_bytes)

    @property
    def _cell_bytes(self) -> int:
        return self.ledger.remote.cell_units * self.ledger.layout.full.width * self.block_bytes

    @property
    def cell_tokens(self) -> int:
        return self.ledger.remote.cell_units * self.ledger.layout.unit_tokens

    def gauges(self) -> dict[str, float]:
        """Whether the store is off, and whether all of its nodes are disabled for a while."""
        alone = {"load": self._refusing.loads, "store": self._refusing.stores}
        return {"remote_off": float(not self.is_on)} | {f"left_alone|remote|{use}": float(alone[use]) for use in alone}

    # -- reports of the worker ------------------------------------------------------------------------------------

    def take(self, said: Iterable[Said]) -> None:
        for one in said:
            if isinstance(one, Refusing):
                self._refusing = one
            elif isinstance(one, CellsFound) and (asked := self._questions.get(one.number)) is not None:
                asked.num_cells = min(one.num_cells, len(asked.labels))
                self._are_there(asked.labels[: asked.num_cells])

    def copied(self, plan: TransferPlan, completion: Completion) -> None:
        """A copy has ended."""
        cell = plan.payload
        if plan.link == STORES and isinstance(cell, CellLabel) and completion.outcome is Outcome.LANDED:
            self._are_there([cell])

    def _are_there(self, labels: Iterable[CellLabel]) -> None:
        for label in labels:
            self._known.note(label, Known.PRESENT, self.clock())

    def reset(self) -> None:
        """The ledger has forgotten everything, perhaps because the model has changed. So the cells in the store are
        obsolete."""
        if self.is_on:
            self.is_on = False
            self.counts.turned_off("remote")
            _log.warning("aoffload: the cache was reset, so the remote store is no longer used")

    # -- storing --------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Store blocks that were requested twice and that the store lacks."""
        if self.is_on and not self._refusing.stores and (most := self._num_storable()):
            plans = self.ledger.remote.plan_stores(most, self._is_wanted)
            self.queue.submit(plans)

    def _is_wanted(self, label: CellLabel) -> bool:
        return self._known.of(label, self.clock()) is not Known.PRESENT

    def _num_storable(self) -> int:
        """Number of blocks that may be stored now, in whole cells."""
        now = self.clock()
        self._rate.spend_up_to(self.queue.link(*STORES).bytes_begun, now)
        left = min(self._rate.left(now), MAX_BYTES, self.queue.room_bytes(*STORES))
        num_cells = max(1, left // self._cell_bytes) if left > 0 else 0
        return num_cells * self._cell_bytes // self.block_bytes

    # -- asking ---------------------------------------------------------------------------------------------------

    @property
    def may_fetch(self) -> bool:
        """Whether a fetch from the store can be worth its time. It is not if the store failed lately, or hangs."""
        return self.is_on and not self._refusing.loads and not self.queue.is_stalled(*LOADS)

    def cells_stop(self, num_tokens: int) -> int:
        """The token at which the last whole cell of `num_tokens` tokens ends."""
        return num_tokens // self.cell_tokens * self.cell_tokens

    def ask(self, prefix: Prefix, behind: int) -> Asked:
        """Ask for the whole cells of `prefix` that start at its token `behind` or later. The answer comes with a later
        step."""
        ledger = self.ledger
        cells = cells_to_hit(ledger.sequence_of(prefix), ledger.layout.unit_tokens, ledger.remote.cell_units)
        asked = Asked(cells[behind // self.cell_tokens :], self.clock() + self.answer_s)
        self._num_asked += 1
        self._questions[self._num_asked] = asked
        self.outbox.ask(self._num_asked, asked.labels)
        return asked
