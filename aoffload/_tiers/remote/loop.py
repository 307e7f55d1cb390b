"""The remote tier in the event loop of a runtime: questions to a store that other processes share, stores and removals.

The ledger does not know which cells the store has, so a request asks how many of the cells after its hit the store has.
Each question, load and store has a timeout, because the store may hang. If a question times out, its cells count as
missing. No question, load or store can fail a request. An answer is only a hint, because another process may remove a
cell before it is loaded.

Stores are limited by a rate (`WriteRate`), because other processes share the network and the store. Cells with blocks
of a failed forward must be removed, because other processes would load them. So removals are tried again until they
succeed, even after this runtime has stopped using the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import anyio
import attrs

from ..._common.env import Env
from ..._common.prefix import Prefix
from ..._common.tiers import Tier
from ..._extensions.assembly import AnyLedger
from ..._kernel.layout import Layout
from ..._kernel.states import Direction
from ..._kernel.tokens import TokenSequence
from ..._observe.log import Telemetry
from ..._runtime.worker import CopyWorker
from ..._transfer.breaker import in_lines
from ..._transfer.transport import TransportRemote
from ..lower.loop import TierWork
from ..write_rate import WriteRate
from .plans import CellLabel
from .rules import cells_to_hit

LATE_S = 0.01
"""Seconds added to a timeout, so that an answer that is sent just in time can still arrive."""
MUCH_TO_HASH = 65_536
"""A prompt with at least this many tokens has its digests computed in a thread."""
MAX_BYTES = 32 * 2**20
"""Maximum bytes per call that plans stores, because the event loop computes their digests."""


@attrs.define(eq=False)
class RemoteWork(TierWork):
    """The remote tier of one runtime, in its event loop's thread."""

    ledger: AnyLedger
    worker: CopyWorker
    remote: TransportRemote
    block_bytes: int
    env: Env
    telemetry: Telemetry
    tier = Tier.REMOTE
    now: Callable[[], float] = attrs.field(init=False, default=lambda: 0.0)
    """The event loop's clock; set by `open`."""
    hashing: anyio.CapacityLimiter | None = attrs.field(init=False, default=None)
    is_on: bool = attrs.field(init=False, default=False)
    """Between `open` and `end`."""
    num_fetches_skipped: int = attrs.field(default=0, init=False)
    _rate: WriteRate = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._rate = WriteRate(self.remote.tier.write_bytes_per_s, self.cell_blocks * self.block_bytes)

    # -- sizes ----------------------------------------------------------------------------------------------------

    @property
    def cell_tokens(self) -> int:
        return self.ledger.remote.cell_units * self.ledger.layout.unit_tokens

    @property
    def cell_blocks(self) -> int:
        return self.ledger.remote.cell_units * self.ledger.layout.full.width

    # -- begin and end --------------------------------------------------------------------------------------------

    def identify(self, layout: Layout, namespace: str) -> None:
        self.remote.identify(layout, namespace)

    async def open(self, hashing: anyio.CapacityLimiter | None) -> None:
        """Begin to use the store, and wait until it has connected or failed, for at most `load_timeout_s`. The runtime
        waits here because a request that asks the store has less time."""
        self.hashing, self.now, self.is_on = hashing, self.env.loop_clock(), True
        tier = self.remote.tier
        self.telemetry.remote_opened(type(tier.store).__name__, tier.secret is not None, self.cell_tokens)
        over = anyio.Event()
        self.remote.connect(partial(self.worker.call_soon, over.set))
        with anyio.move_on_after(tier.load_timeout_s + LATE_S):
            await over.wait()

    async def reset(self, tier: Tier | None, timeout_s: float) -> None:
        """A reset of all tiers: stop asking, loading and storing, because others use the cells of the store."""
        if tier is None and self.is_on:
            self.is_on = False
            self.telemetry.remote_turned_off("a reset: the store still has cells from before it under this namespace")

    def invalidate(self) -> None:
        self.store_more()  # removes the cells, too

    def end(self) -> None:
        """Stop. Stores under way may end, but the runtime does not wait for them."""
        self._forget()
        self.is_on = False

    # -- asking ---------------------------------------------------------------------------------------------------

    @property
    def may_fetch(self) -> bool:
        """Whether a fetch may begin. False if the store has failed recently or hangs."""
        copies = self.worker.copies
        is_off = not self.is_on or not copies.is_accepting or self.remote.refuses(Direction.LOAD)
        return not is_off and not copies.is_stalled(Tier.REMOTE, Tier.HOST)

    def skip_fetch(self, request_id: str) -> None:
        """Count a fetch that was skipped because all nodes of the store have failed. The request computes the cells."""
        if self.is_on and self.remote.refuses(Direction.LOAD):
            self.num_fetches_skipped += 1
            self.telemetry.fetch_skipped(request_id, Tier.REMOTE)

    def remarks(self) -> Iterator[str]:
        alone = self.remote.statistics().left_alone
        yield from in_lines("the remote store", alone)
        if alone and self.num_fetches_skipped:
            yield f"fetches from the remote store skipped so far: {self.num_fetches_skipped:,}"

    def cells_stop(self, num_tokens: int) -> int:
        """The end, in tokens, of the last whole cell that a prompt of `num_tokens` tokens may hit."""
        return (num_tokens - 1) // self.cell_tokens * self.cell_tokens

    def fetch_s(self, prefix: Prefix, num_remote_tokens: int) -> float:
        """Seconds until the first `num_remote_tokens` tokens of `prefix` would be in host memory; 0 if the store was
        not measured yet."""
        copies, link = self.worker.copies, (Tier.REMOTE, Tier.HOST)
        num_blocks = copies.call_ledger(self.ledger.fetches.num_remote_blocks, prefix, num_remote_tokens) or 0
        return copies.seconds(*link, num_blocks)

    async def labels(self, prefix: Prefix, after: int) -> Sequence[CellLabel]:
        """The whole cells of `prefix` that end after its token `after`."""
        compute = partial(self._labels, self.ledger.sequence_of(prefix), after)
        if prefix.num_tokens > MUCH_TO_HASH:
            return await self.env.run_in_thread(compute, self.hashing)
        return compute()

    def labels_nowait(self, prefix: Prefix, after: int) -> Sequence[CellLabel]:
        return self._labels(self.ledger.sequence_of(prefix), after)

    def _labels(self, sequence: TokenSequence, after: int) -> Sequence[CellLabel]:
        cells = cells_to_hit(sequence, self.ledger.layout.unit_tokens, self.ledger.remote.cell_units)
        return cells[after // self.cell_tokens :]

    def ask(self, labels: Sequence[CellLabel], answered: Callable[[int], object]) -> Question:
        """Ask how many of the leading cells of `labels` the store has. `answered` is called once in the event loop with
        that number. If there is no answer soon after `ask_timeout_s`, it is called with 0."""
        question = Question(answered)
        deadline = self.now() + self.remote.tier.ask_timeout_s + LATE_S
        question.stop_timer = self.env.call_at(deadline, partial(self.worker.call_soon, partial(question.over, 0)))
        worker = self.worker
        self.remote.ask(labels, lambda num_cells: worker.call_soon(partial(question.over, num_cells)))  # in any thread
        return question

    # -- storing --------------------------------------------------------------------------------------------------

    def store_more(self) -> None:
        """Remove invalidated cells, and store cells that were requested twice and that the store lacks. Called after
        each change that may have made a removal or a store due."""
        for move in self.remote.take_moves():
            self.telemetry.storage_moved(move)
        self._forget()  # also when it is off: others use the store
        is_refused = self.remote.refuses(Direction.STORE)  # removals are tried again with it
        if self.is_on and not is_refused and (most := self._num_storable()):
            plans = self.worker.copies.call_ledger(self.ledger.remote.plan_stores, most, self.remote.is_wanted) or ()
            self.worker.submit(plans)

    def _num_storable(self) -> int:
        """Number of blocks that may be stored now, in whole cells."""
        cell_bytes, copies, now = self.cell_blocks * self.block_bytes, self.worker.copies, self.now()
        self._rate.spend_up_to(copies.link(Tier.HOST, Tier.REMOTE).bytes_begun, now)
        left = min(self._rate.left(now), MAX_BYTES, copies.room_bytes(Tier.HOST, Tier.REMOTE))
        num_cells = max(1, left // cell_bytes) if left > 0 else 0
        return num_cells * self.cell_blocks

    def _forget(self) -> None:
        """Remove the cells that hold blocks of a failed forward."""
        if cells := self.ledger.remote.take_forgotten():
            self.remote.forget(cells)


@attrs.define(eq=False)
class Question:
    """A question to the store. It ends with the store's answer or with its timeout, whichever comes first."""

    answered: Callable[[int], object]
    stop_timer: Callable[[], object] | None = None
    is_over: bool = False

    def over(self, num_cells: int) -> None:
        """Called in the event loop."""
        if not self.is_over:
            self.cancel()
            self.answered(num_cells)

    def cancel(self) -> None:
        """Ignore the answer."""
        self.is_over = True
        if self.stop_timer is not None:
            self.stop_timer()
