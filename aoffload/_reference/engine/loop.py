"""The engine's loop: picks a step, computes it in a worker thread, and hands the results to live requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import anyio
import attrs
import torch

from ..._common.env import Env
from ...errors import OutOfBlocks
from .batching import EngineOptions, LineUp, Step
from .failures import EngineClosed, StepFailed
from .forward import Forward
from .head_start import HeadStart
from .paged import PagedModel
from .sequence import RowOutput, RunningSequence
from .statistics import Peaks

if TYPE_CHECKING:
    from ..._runtime.runtime import OffloadRuntime

__all__ = ["EngineLoop"]


@attrs.define(eq=False)
class EngineLoop:
    """The engine's task, and the state that it shares with the clients' tasks: line-up and counters."""

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
        """Wake the loop: the line-up has changed."""
        self._work.set()

    def close(self) -> None:
        """Take in no further sequences, and abandon head starts; a forward that waits for a load raises."""
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
        # A client may leave at any time; the step holds its blocks until the thread is done with them.
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
            # A client that has left or was cancelled gets nothing: its blocks may belong to another request.
            if sequence in self.line_up and sequence.is_live:
                try:
                    self._advance(sequence, len(part.token_ids), output, now)
                except Exception as error:  # noqa: BLE001 - the client's own callback, or a commit refused: its error alone
                    sequence.end(error)

    def _advance(self, sequence: RunningSequence, num_tokens: int, output: RowOutput, now: float) -> None:
        was_prefilling = sequence.is_prefilling
        has_token = sequence.advance(num_tokens, output, now)
        if self.options.reuse_decoded:
            sequence.request.commit(sequence.num_computed, [output.token_id] if has_token else ())
        elif was_prefilling:
            sequence.request.commit(sequence.num_reusable)
        if self.is_windowed:
            self._make_room(sequence)
        if was_prefilling and not sequence.is_prefilling:
            sequence.on_prompt_done()
        self.line_up.has_moved_on(sequence)
        is_last = has_token and sequence.tell(output.token_id)
        if is_last or sequence.is_complete:
            sequence.end()

    def _make_room(self, sequence: RunningSequence) -> None:
        """Give it room for its next slice. If there is none, its client wakes and queues for it."""
        if sequence.needs_room:
            try:
                sequence.request.extend_nowait(sequence.wanted_room)
            except OutOfBlocks as error:
                if not error.retryable:
                    raise
                sequence.attention.set()
        sequence.take_tables()
