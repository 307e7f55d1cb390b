"""The engine's loop: picks a step, computes it in a worker thread, and hands the results to live requests."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import anyio
import attrs
import torch

from ..._common.env import Env
from ...errors import AoffloadError, OutOfBlocks
from .batching import EngineOptions, HeadStart, LineUp, Step
from .layers import NOTHING_TO_WAIT_FOR, LayerFences
from .paged import PagedBatch, PagedModel, SequenceSlice
from .sequence import PromptTable, RowOutput, RunningSequence

if TYPE_CHECKING:
    from ..._runtime.runtime import OffloadRuntime


# -- failures --------------------------------------------------------------------------------------------------------
#
# Errors that an engine raises besides those of the runtime.


class EngineClosed(AoffloadError):  # noqa: N818 - reads as what it is at the call
    """The engine is closed, or was never opened."""


class StepFailed(AoffloadError):  # noqa: N818
    """The forward of a step failed. Raised for every request of that step and no other. `__cause__` has the reason."""

    def __init__(self, request_ids: Sequence[str], cause: Exception) -> None:
        super().__init__(f"the step of {', '.join(request_ids)} failed: {type(cause).__name__}: {cause}")
        self.request_ids = tuple(request_ids)
        self.__cause__ = cause


# -- statistics ------------------------------------------------------------------------------------------------------
#
# Counters of an engine.


@attrs.frozen(kw_only=True)
class EngineStatistics:
    """Counts since the engine was opened, over all requests, unfinished ones included."""

    num_steps: int
    num_prefilled_tokens: int
    num_decoded_tokens: int
    num_waiting: int
    """Requests that wait for a place."""
    num_prefilling: int
    num_decoding: int
    num_head_starts: int
    """Prompts whose first slice was computed while their cached prefix was still loading."""
    num_head_starts_used: int
    """Number of head starts whose result was used: the load succeeded, and the client was still connected."""
    num_made_way: int
    """Tries that gave up their blocks to an older request and began again."""
    peak_pinned_blocks: int
    """Peak of `num_pinned`, the runtime's count of device blocks in use."""
    peak_null_blocks: int
    """Peak of the blocks saved by windows: null entries in the block tables of live requests."""
    num_blocks_at_peak: int
    """All entries of those tables at that peak, null ones included: the number of blocks that they would need without
    windows. A prefix shared by two requests counts in both."""


@attrs.define(eq=False)
class Peaks:
    """Peak use of the device, sampled in every step but head starts."""

    num_pinned: int = 0
    num_nulls: int = 0
    num_positions: int = 0

    def observe(self, num_pinned: int, tables: Iterable[PromptTable]) -> None:
        self.num_pinned = max(self.num_pinned, num_pinned)
        num_nulls = num_positions = 0
        for table in tables:
            num_nulls += table.num_nulls
            num_positions += table.num_positions
        if num_nulls > self.num_nulls:
            self.num_nulls, self.num_positions = num_nulls, num_positions


# -- forward ---------------------------------------------------------------------------------------------------------
#
# One forward pass, from slices to tokens: the part of a step that runs in the worker thread.


@attrs.define(eq=False)
class Forward:
    """One forward. It is made and finished in the event loop's thread, and run in a worker thread."""

    model: PagedModel
    kv_cache: torch.Tensor
    block_size: int
    slices: Sequence[SequenceSlice]
    num_rows: int
    """Rows whose token is used. Further rows are padding."""
    fences: LayerFences = NOTHING_TO_WAIT_FOR
    """The fences that its layers wait for."""
    outputs: list[RowOutput] = attrs.field(factory=list)
    error: Exception | None = None
    _finished: bool = False
    _running: threading.Lock = attrs.field(factory=threading.Lock)

    def run(self) -> None:
        """Compute, unless `finish` was called first. An exception of the model is stored in `error`."""
        with self._running:
            if self._finished:
                return
            try:
                self.outputs = self._compute()
            except Exception as error:  # noqa: BLE001 - a model may raise anything, and only this step's requests pay
                self.error = error

    def finish(self) -> None:
        """Ensure that no thread computes after this call. It blocks only if the wait for the thread was cut short.

        Awaiting the thread is shielded, but a native `asyncio.Task.cancel()` breaks every shield, and a step must not
        release its blocks while a forward still writes into them. The forward's fences are given up first, because a
        load that it waits for may need this thread in order to end.
        """
        if not self._running.acquire(blocking=False):
            self.fences.give_up("nobody waits for the forward any more")
            self._running.acquire()
        self._finished = True
        self._running.release()

    def _compute(self) -> list[RowOutput]:
        batch = PagedBatch.of(self.slices, self.block_size, self.kv_cache.device, self.fences)
        logits = self.model.forward(batch, self.kv_cache)[: self.num_rows].cpu().contiguous()
        token_ids = logits.argmax(dim=-1).tolist()
        return [RowOutput(token, _digest(row)) for token, row in zip(token_ids, logits, strict=True)]


def _digest(row: torch.Tensor) -> bytes:
    return hashlib.sha256(row.numpy().data).digest()


# -- loop ------------------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class EngineLoop:
    """The engine's task, and the state that it shares with the clients' tasks: sequences and counters."""

    model: PagedModel
    runtime: OffloadRuntime
    kv_cache: torch.Tensor
    options: EngineOptions
    env: Env
    on_step: Callable[[int], None]
    line_up: LineUp
    is_windowed: bool
    is_closed: bool = True
    num_steps: int = 0
    num_prefilled: int = 0
    num_decoded: int = 0
    num_head_starts: int = 0
    peaks: Peaks = attrs.field(factory=Peaks)
    _worker: anyio.CapacityLimiter = attrs.field(factory=lambda: anyio.CapacityLimiter(1))
    _work: anyio.Event = attrs.field(factory=anyio.Event)

    def wake(self) -> None:
        """Wake the loop after a change of its sequences."""
        self._work.set()

    def close(self) -> None:
        """Accept no further sequences, and abandon head starts. A forward that waits for a load raises."""
        self.is_closed = True
        for head in self.line_up.head_starts:
            head.give_up("the engine is closed")

    async def serve(self) -> None:
        try:
            while True:
                step = self.line_up.next_step()
                if step is None:
                    self._work = anyio.Event()
                    await self._work.wait()
                elif isinstance(step, HeadStart):
                    await self._run_ahead(step)
                else:
                    await self._run(step)
        finally:
            self.is_closed = True
            for sequence in list(self.line_up):
                sequence.end(EngineClosed("the engine was closed before the request was done"))

    async def _run(self, step: Step) -> None:
        forward = Forward(self.model, self.kv_cache, self.options.block_size, step.slices, len(step.sequences))
        # A client may leave at any time. The step holds its blocks until the thread has ended.
        with self.runtime.step([sequence.request for sequence in step.sequences]):
            tables = [sequence.table for sequence in self.line_up] if self.is_windowed else []
            self.peaks.observe(self.runtime.statistics().device.num_pinned, tables)
            await self._compute(forward)
        if forward.error is not None:
            for sequence in step.sequences:
                sequence.end(StepFailed(step.request_ids, forward.error))
        else:
            self.take_in(step, forward.outputs)
        self.on_step(self.num_steps)

    async def _run_ahead(self, head: HeadStart) -> None:
        """Compute a head start: the forward assumes that the load succeeds, and each layer waits for its own region."""
        with self.runtime.step([head.pending]):
            part = head.begin()
            if part is None:
                return
            self.num_head_starts += 1
            ahead = Forward(self.model, self.kv_cache, self.options.block_size, [part], 1, head.fences)
            try:
                await self._compute(ahead)
            finally:
                head.computed(part, ahead.outputs, ahead.error)
        self.on_step(self.num_steps)

    async def _compute(self, forward: Forward) -> None:
        try:
            await self.env.run_in_thread(forward.run, self._worker)
        finally:
            forward.finish()
        self.num_steps += 1

    def take_in(self, step: Step, outputs: Sequence[RowOutput]) -> None:
        now = self.env.now()
        for sequence, part, output in zip(step.sequences, step.slices, outputs, strict=False):
            if sequence.is_prefilling:
                self.num_prefilled += len(part.token_ids)
            else:
                self.num_decoded += len(part.token_ids)
            # A client that has left or was cancelled gets nothing, because its blocks may belong to another request.
            if sequence in self.line_up and sequence.is_live:
                try:
                    self._advance(sequence, len(part.token_ids), output, now)
                except Exception as error:  # noqa: BLE001 - the client's own callback, or a commit refused: its error alone
                    sequence.end(error)

    def _advance(self, sequence: RunningSequence, num_tokens: int, output: RowOutput, now: float) -> None:
        was_prefilling = sequence.is_prefilling
        has_token = sequence.advance(num_tokens, output, now)
        if self.options.reuse_decoded:
            sequence.commit(sequence.num_computed, [output.token_id] if has_token else ())
        elif was_prefilling:
            sequence.commit(sequence.num_reusable)
        if self.is_windowed:
            self._make_room(sequence)
        if was_prefilling and not sequence.is_prefilling:
            sequence.on_prompt_done()
        self.line_up.has_moved_on(sequence)
        is_last = has_token and sequence.tell(output.token_id)
        if is_last or sequence.is_complete:
            sequence.end()

    def _make_room(self, sequence: RunningSequence) -> None:
        """Get blocks for its next slice. If there are none, wake its client, which queues for them."""
        if sequence.needs_room:
            try:
                sequence.request.extend_nowait(sequence.wanted_room)
            except OutOfBlocks as error:
                if not error.retryable:
                    raise
                sequence.attention.set()
        sequence.take_tables()
