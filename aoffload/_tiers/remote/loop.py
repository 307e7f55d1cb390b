"""What a runtime does with its remote tier: asks what the store has, writes behind, and has what is wrong removed.

A question, a load and a store never make anybody wait longer than they may, and none of them can fail a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import anyio
import attrs

from ..._kernel.ledger import Ledger
from ..._kernel.plans import CellLabel
from ..._kernel.prefix import Prefix
from ..._kernel.states import Direction, Tier
from ..._observe.log import Telemetry
from ..._runtime.worker import CopyWorker
from ..._transfer.breaker import in_lines
from ..._transfer.transport import TransportRemote
from ...env import Env
from ..write_rate import WriteRate
from .rules import cells_of

__all__ = ["Question", "RemoteWork"]


LATE_S = 0.01
"""For an answer that is given just in time, to arrive."""
MUCH_TO_HASH = 65_536
"""Tokens whose digests are computed in a thread."""
MAX_BYTES = 32 * 2**20
"""Stored at once: their digests are computed in the event loop."""


@attrs.define(eq=False)
class RemoteWork:
    """The remote tier of one runtime, in its event loop's thread."""

    ledger: Ledger
    worker: CopyWorker
    remote: TransportRemote
    block_bytes: int
    env: Env
    telemetry: Telemetry
    now: Callable[[], float] = attrs.field(init=False, default=lambda: 0.0)
    """The event loop's clock; set by `begin`."""
    hashing: anyio.CapacityLimiter | None = attrs.field(init=False, default=None)
    is_on: bool = attrs.field(init=False, default=False)
    """Between `begin` and `end`."""
    num_fetches_skipped: int = attrs.field(default=0, init=False)
    """Not begun, since all nodes are left alone."""
    _rate: WriteRate = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._rate = WriteRate(self.remote.tier.write_bytes_per_s, self.cell_blocks * self.block_bytes)

    # -- sizes ----------------------------------------------------------------------------------------------------

    @property
    def cell_tokens(self) -> int:
        return self.ledger.cell_units * self.ledger.layout.unit_tokens

    @property
    def cell_blocks(self) -> int:
        return self.ledger.cell_units * self.ledger.layout.full.width

    # -- begin and end --------------------------------------------------------------------------------------------

    def begin(self, hashing: anyio.CapacityLimiter | None) -> None:
        """Called in the event loop, once the transport is open. `hashing`: for threads that compute digests."""
        self.hashing, self.now, self.is_on = hashing, self.env.loop_clock(), True
        tier = self.remote.tier
        self.telemetry.remote_opened(type(tier.store).__name__, tier.secret is not None, self.cell_tokens)

    async def connect(self) -> None:
        """Wait until the store has connected or failed, for `load_timeout_s` at most, because a request that asks the
        store has less time."""
        over = anyio.Event()
        self.remote.connect(partial(self.worker.call_soon, over.set))
        with anyio.move_on_after(self.remote.tier.load_timeout_s + LATE_S):
            await over.wait()

    def turn_off(self, reason: str) -> None:
        """Neither ask, load nor store any more."""
        if self.is_on:
            self.is_on = False
            self.telemetry.remote_turned_off(reason)

    def end(self) -> None:
        """The runtime closes. What is being stored may end; nothing is waited for."""
        self._forget()
        self.is_on = False

    # -- asking ---------------------------------------------------------------------------------------------------

    @property
    def may_fetch(self) -> bool:
        """Whether a fetch is worth its time: not from a store that has failed lately, or hangs."""
        copies = self.worker.copies
        is_off = not self.is_on or not copies.is_accepting or self.remote.refuses(Direction.LOAD)
        return not is_off and not copies.is_stalled(Tier.REMOTE, Tier.HOST)

    def skip_fetch(self, request_id: str) -> None:
        """A request computes what the store may have, since all of its nodes are left alone."""
        if self.is_on and self.remote.refuses(Direction.LOAD):
            self.num_fetches_skipped += 1
            self.telemetry.fetch_skipped(request_id, Tier.REMOTE)

    def remarks(self) -> Iterator[str]:
        """What `explain` says of it."""
        alone = self.remote.statistics().left_alone
        yield from in_lines("the remote store", alone)
        if alone and self.num_fetches_skipped:
            yield f"fetches from the remote store skipped so far: {self.num_fetches_skipped:,}"

    def cells_stop(self, num_tokens: int) -> int:
        """The token at which the last whole cell ends that a prompt of so many tokens may hit."""
        return (num_tokens - 1) // self.cell_tokens * self.cell_tokens

    def fetch_s(self, prefix: Prefix, num_remote_tokens: int) -> float:
        """Seconds until so many tokens of `prefix` would be in host memory; 0 if nothing is known of the store yet."""
        copies, link = self.worker.copies, (Tier.REMOTE, Tier.HOST)
        num_blocks = copies.tell(self.ledger.num_remote_fetch_blocks, prefix, num_remote_tokens) or 0
        return copies.seconds(*link, num_blocks)

    async def labels(self, prefix: Prefix, behind: int) -> Sequence[CellLabel]:
        """The whole cells of `prefix` that end behind its token `behind`."""
        compute = partial(self.labels_nowait, prefix, behind)
        if prefix.num_tokens > MUCH_TO_HASH:
            return await self.env.run_in_thread(compute, self.hashing)
        return compute()

    def labels_nowait(self, prefix: Prefix, behind: int) -> Sequence[CellLabel]:
        cells = cells_of(prefix, self.ledger.layout.unit_tokens, self.ledger.cell_units)
        return cells[behind // self.cell_tokens :]

    def ask(self, labels: Sequence[CellLabel], answered: Callable[[int], object]) -> Question:
        """Ask how many of these cells the store has from the first one on. `answered` is called with that once, in the
        event loop, soon after `ask_timeout_s` at the latest: what is not known then the store does not have."""
        question = Question(answered)
        deadline = self.now() + self.remote.tier.ask_timeout_s + LATE_S
        question.stop_timer = self.env.call_at(deadline, partial(self.worker.call_soon, partial(question.over, 0)))
        self.remote.ask(labels, partial(_heard, self.worker, question))
        return question

    # -- storing --------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Have what is wrong removed; store what was asked for twice and the store lacks. Called after whatever may
        have changed that."""
        for move in self.remote.take_moves():
            self.telemetry.storage_moved(move)
        self._forget()  # also when it is off: others use the store
        is_refused = self.remote.refuses(Direction.STORE)  # removals are tried again with it
        if self.is_on and not is_refused and (most := self._num_storable()):
            plans = self.worker.copies.tell(self.ledger.plan_remote_stores, most, self.remote.is_wanted) or ()
            self.worker.submit(plans)

    def _num_storable(self) -> int:
        """Blocks that may be stored now: whole cells."""
        cell_bytes, copies, now = self.cell_blocks * self.block_bytes, self.worker.copies, self.now()
        self._rate.spend_up_to(copies.link(Tier.HOST, Tier.REMOTE).bytes_begun, now)
        left = min(self._rate.left(now), MAX_BYTES, copies.room_bytes(Tier.HOST, Tier.REMOTE))
        num_cells = max(1, left // cell_bytes) if left > 0 else 0
        return num_cells * self.cell_blocks

    def _forget(self) -> None:
        """What a failed forward has left in the store is wrong: nobody is to find it."""
        if cells := self.ledger.take_forgotten_cells():
            self.remote.forget(cells)


def _heard(worker: CopyWorker, question: Question, num_cells: int) -> None:
    """In any thread."""
    worker.call_soon(partial(question.over, num_cells))


@attrs.define(eq=False)
class Question:
    """A question to the store that is out. What comes first counts: the store's answer, or the timer."""

    answered: Callable[[int], object]
    stop_timer: Callable[[], object] | None = None
    is_over: bool = False

    def over(self, num_cells: int) -> None:
        """In the event loop."""
        if not self.is_over:
            self.cancel()
            self.answered(num_cells)

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        self.is_over = True
        if self.stop_timer is not None:
            self.stop_timer()
