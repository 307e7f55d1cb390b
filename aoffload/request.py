"""The request as its task sees it. It holds blocks until its `async with` block ends, and no longer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

import anyio

from .core.owners import Holding, Waiter
from .core.results import Extension, Preemption
from .engine_calls import EngineCalls
from .errors import OutOfBlocks
from .fetching import fetch
from .loading import AwaitedLoad, PendingLoad, wait_for_room
from .prefix import TokenIds
from .transfer.fence import Fence

__all__ = ["Request"]


class Request(EngineCalls):
    """Returned by `OffloadRuntime.request`; an async context manager for the task that serves the request.

    Its cancel scope swallows a cancellation by `cancel` or `deadline_s`; check `state` and `reason` after the block.
    Any other cancellation or exception passes through. The blocks are released in either case.

    In an async generator the block has no cancel scope: while the generator is suspended at a `yield`, its task runs
    other code, which the scope would cancel instead. There, `cancel` and `deadline_s` release the blocks at once, and
    the next use of the request (or the method that is waiting) raises `RequestAborted`, which the block swallows.
    """

    @property
    def block_ids(self) -> list[list[int]]:
        """The block table, one list per group; null block 0 for blocks that are not needed or still loading.
        `WrongState` before `allocate`; empty after `preempt`."""
        return self._session.ledger.block_ids(self._with_blocks())

    # -- allocation -----------------------------------------------------------------------------------------------

    def allocate_nowait(self, num_tokens: int | None = None) -> None:
        """Allocate blocks for `num_tokens` tokens in total (None: the prompt's). `OutOfBlocks` changes nothing.

        To allocate only the first part of a prompt, allocate whole blocks. A part that ends inside a block causes a
        warning, because it is most often a mistake, and the rest of that block costs nothing.
        """
        holding = self._live()
        self._warn_of_part(holding, num_tokens)
        self._session.ledger.allocate_nowait(holding, num_tokens)

    def _warn_of_part(self, holding: Holding, num_tokens: int | None) -> None:
        num_known = holding.sequence.num_tokens
        if type(num_tokens) is not int or not 0 < num_tokens < num_known:
            return
        if num_tokens % self._session.ledger.layout.unit_tokens:
            problem = (
                f"{num_tokens} tokens in total are fewer than the {num_known} of {holding}, and end inside of a block"
            )
            warnings.warn(f"allocate: {problem}", UserWarning, stacklevel=3)

    async def fetch(self) -> int:
        """Bring what disk and remote store have behind the hit into host memory, and match again, while the request has
        no blocks. Returns the whole hit in tokens. `allocate` does it; with `engine_blocks`, call it before `load`.

        It takes at most `fetch_timeout_s`, and never raises for a tier that fails: what is not there is computed.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        await fetch(self, self._live(), self._prefix)
        return self.match.num_tokens

    async def allocate(self, num_tokens: int | None = None) -> None:
        """As `allocate_nowait`, but waits for room, and fetches before that what only the disk has; `OutOfBlocks` only
        if it can never fit."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        holding = self._live()
        self._warn_of_part(holding, num_tokens)
        await self._allocate(holding, num_tokens)

    async def _allocate(self, holding: Holding, num_tokens: int | None) -> None:
        ledger = self._session.ledger
        if not ledger.is_engine_owned and (holding.match.num_disk_tokens or self._session.remote is not None):
            await fetch(self, holding, self._prefix)
        try:
            ledger.allocate_nowait(holding, num_tokens)
            return
        except OutOfBlocks as error:
            if not error.retryable:
                raise
        await self._wait_in_line(ledger.queue_allocation(holding, num_tokens, self._wake))

    def extend_nowait(self, num_tokens: int) -> Extension:
        """Allocate blocks for `num_tokens` tokens in total. Returns what was added to the block tables.

        A refused request is not in the waiter queue: blocks that another request frees for it by `preempt` go to
        waiters, so wait for them with `extend`.
        """
        return self._session.ledger.extend_nowait(self._live(), num_tokens)

    async def extend(self, num_tokens: int) -> Extension:
        """As `extend_nowait`, but waits. A retryable `OutOfBlocks`: only waiters hold blocks, so abort one of them."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        holding = self._live()
        try:
            return self._session.ledger.extend_nowait(holding, num_tokens)
        except OutOfBlocks as error:
            if not error.retryable:
                raise
        return await self._wait_in_line(self._session.ledger.queue_extension(holding, num_tokens, self._wake))

    async def _wait_in_line(self, waiter: Waiter) -> Extension:
        session = self._session
        began_s = session.env.now()
        try:
            while not waiter.is_over:  # a grant may be taken back before its task has run
                await wait_for_room(self, waiter)
                self._live()
            return self._session.ledger.accept(waiter)
        finally:  # leave the line, or give an unused grant back, however the wait ends
            self._session.ledger.withdraw(waiter)
            session.observers.waited_for_room(waiter.holding, session.env.now() - began_s)

    # -- preemption -----------------------------------------------------------------------------------------------

    def preempt_nowait(self) -> Preemption:
        """Release every device block. Computed blocks are stored to host memory as far as there is room, and pinned
        there until `resume`. Not inside a step. Returns how many blocks are free now, and which jobs free the rest."""
        found = self._session.ledger.preempt_nowait(self._live())
        self._session.worker.submit(found.plans)
        return found

    async def preempt(self) -> Preemption:
        """As `preempt_nowait`, but waits: first for steps that hold its blocks, then until every block is free. Any
        task may call it. It frees nothing if the request has ended meanwhile, was preempted by another task, or waits
        for blocks.

        A request that needs these blocks must be waiting in `extend` by then; otherwise, a `resume` takes them back."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        holding = self._entered()
        while holding.num_steps and not holding.is_over:
            await self._wait(anyio.Event())
        if holding.reason == "runtime_closed":
            self._live()  # raises
        if not self._session.ledger.is_engine_owned and not holding.may_be_preempted:
            return Preemption(0, 0, ())  # no error: the caller cannot know what another task has done
        found = self.preempt_nowait()
        await self._session.worker.wait_over(max(found.job_ids, default=0))
        return found

    async def resume(self, num_tokens: int | None = None) -> int:
        """Wait for room for `num_tokens` tokens (None: all known tokens) and load what is in host memory. Returns how
        many tokens are ready; later ones have to be computed again.

        A cancellation leaves the request in the state of the wait: go on with `allocate` (PINNED) or `load` (ALLOCATED,
        LOADING), or leave the block.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        self._session.ledger.resume(self._live(), num_tokens)
        await self._allocate(self._live(), num_tokens)
        return await self.load()

    # -- loading --------------------------------------------------------------------------------------------------

    def load_nowait(self, max_tokens: int | None = None, *, into: Sequence[Sequence[int]] | None = None) -> PendingLoad:
        """Start to load the host hit onto the device, region by region, without waiting for it."""
        load = PendingLoad(self, max_tokens, into)
        load._start(self._live())
        return load

    async def load(self, max_tokens: int | None = None, *, into: Sequence[Sequence[int]] | None = None) -> int:
        """Load the host hit onto the device. Returns how many tokens are ready there. Never raises for a failed copy.

        `max_tokens` limits the load: rounded down to a block, never below the device hit. `block_ids` is final
        afterwards. Returns 0 if another task has preempted the request meanwhile: call `resume` then.

        With `engine_blocks`, `into` holds the request's block tables, one per group, from the first token at least to
        the end of the hit. Copies write only to the blocks named there for what is loaded. If fewer tokens are ready
        than were matched, compute the others into other blocks: copies may still write to those of `into`.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        holding, load = self._live(), AwaitedLoad(self, max_tokens, into)
        load._start(holding)
        if holding.sequence.has_much_to_hash(holding.hit_stop):
            await self._session.env.run_in_thread(
                partial(holding.sequence.hash_ahead, holding.hit_stop), self._session.hashing
            )
            self._live()
        return await load._until_over(holding)

    # -- computing ------------------------------------------------------------------------------------------------

    def commit(self, num_computed_tokens: int, new_token_ids: TokenIds = (), after: Fence | None = None) -> None:
        """Append `new_token_ids`, then publish the KV of the first `num_computed_tokens` tokens.

        `after` is the fence behind the compute that wrote it; None: behind all work on the current stream so far.
        """
        holding, session = self._live(), self._session
        session.commit_behind(session.fence_after(after), holding, num_computed_tokens, new_token_ids)

    def invalidate(self, from_token: int) -> None:
        """Invalidate what a failed forward committed from `from_token` on. Aborts requests that may have read it."""
        self._session.invalidate(self._live(), from_token)
