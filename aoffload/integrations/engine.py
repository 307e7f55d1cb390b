"""A small continuous-batching engine around the runtime: the reference for people who write their own.

    async with PagedEngine(model, runtime, kv_cache) as engine:
        generation = await engine.generate(token_ids, max_new_tokens=16)

Clients and engine meet in a line-up that only the event loop's thread touches. A client's task owns its request: it
waits for room, loads, puts its sequence in and waits for its end; wherever it is cancelled, it takes the sequence out
synchronously and leaves its `async with`. The engine loop is one task: it picks a step, holds the step's blocks with
`runtime.step` while a worker thread computes, and gives the results to whoever is still there.

What makes results comparable bit for bit: prompts are computed one slice per forward on a fixed grid, only whole
slices are committed and hits end on the grid, and decoding always computes the same number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import anyio
import anyio.abc
import attrs
import numpy as np
import torch

from ..env import Env
from ..errors import AoffloadError, InvalidArgument, RequestAborted
from ..prefix import TokenIds, encode_tokens
from .batching import EngineOptions, LineUp, Step
from .forward import Forward
from .paged import PagedModel, SequenceSlice
from .sequence import Generation, PromptTable, RowOutput, RunningSequence

if TYPE_CHECKING:
    from ..request import Request
    from ..runtime import OffloadRuntime

__all__ = ["EngineClosed", "EngineOptions", "EngineStatistics", "PagedEngine", "StepFailed"]


class EngineClosed(AoffloadError):  # noqa: N818 - reads as what it is at the call
    """The engine is closed, or was never opened."""


class StepFailed(AoffloadError):  # noqa: N818
    """The forward of a step failed: every request of that step gets this, and no other one. `__cause__` says why."""

    def __init__(self, request_ids: Sequence[str], cause: Exception) -> None:
        super().__init__(f"the step of {', '.join(request_ids)} failed: {type(cause).__name__}: {cause}")
        self.request_ids = tuple(request_ids)
        self.__cause__ = cause


@attrs.frozen(kw_only=True)
class EngineStatistics:
    """Counts since the engine was opened, for every request, also those that did not finish."""

    num_steps: int
    num_prefilled_tokens: int
    num_decoded_tokens: int
    num_waiting: int
    """Requests that wait for a place."""
    num_prefilling: int
    num_decoding: int


def _ignore(_: int) -> None:
    return None


class PagedEngine:
    """Generates greedily with `model`, its KV in `kv_cache`, whose leading blocks `runtime` owns.

    `kv_cache` has `options.num_scratch_blocks` rows more than the runtime was given:

        kv_cache = model.new_kv_cache(num_blocks + options.num_scratch_blocks, options.block_size)
        OffloadRuntime(config, kv_cache[:num_blocks])

    `on_step` is called after each step with the number of steps so far.
    """

    def __init__(
        self,
        model: PagedModel,
        runtime: OffloadRuntime,
        kv_cache: torch.Tensor,
        options: EngineOptions | None = None,
        *,
        env: Env | None = None,
        on_step: Callable[[int], None] = _ignore,
    ) -> None:
        self.model = model
        self.runtime = runtime
        self.kv_cache = kv_cache
        self.options = options if options is not None else EngineOptions()
        self._env = env if env is not None else Env()
        self._on_step = on_step
        num_owned = runtime.transport.num_device_blocks
        self._scratch_ids = range(num_owned, len(kv_cache))
        if len(self._scratch_ids) < self.options.num_scratch_blocks:
            wanted = num_owned + self.options.num_scratch_blocks
            raise InvalidArgument("kv_cache", f"has {len(kv_cache)} rows, the engine needs {wanted}")
        self._places = anyio.Semaphore(self.options.max_running, fast_acquire=True)
        self._worker = anyio.CapacityLimiter(1)
        self._line_up = LineUp(self.options, SequenceSlice([0], 0, self._scratch_ids[-1:]))
        self._work = anyio.Event()
        self._tasks: anyio.abc.TaskGroup | None = None
        self._closed = True
        self._num_steps = self._num_prefilled = self._num_decoded = 0

    def __repr__(self) -> str:
        return f"<PagedEngine {'closed' if self._closed else 'open'} {self.statistics()}>"

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            num_steps=self._num_steps,
            num_prefilled_tokens=self._num_prefilled,
            num_decoded_tokens=self._num_decoded,
            num_waiting=self._places.statistics().tasks_waiting,
            num_prefilling=len(self._line_up.prefilling),
            num_decoding=len(self._line_up.decoding),
        )

    # -- life -----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> PagedEngine:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._closed = False
        self._tasks.start_soon(self._serve, name="aoffload engine")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Wait for the forward that runs; whoever still generates gets `EngineClosed`."""
        assert self._tasks is not None
        self._closed = True
        self._tasks.cancel_scope.cancel()
        return await self._tasks.__aexit__(kind, error, trace)

    # -- clients --------------------------------------------------------------------------------------------------

    async def generate(
        self,
        token_ids: TokenIds,
        max_new_tokens: int,
        *,
        request_id: str | None = None,
        cache_salt: str | bytes | None = None,
        adapter_key: str | bytes | None = None,
        deadline_s: float | None = None,
        on_token: Callable[[int], None] = _ignore,
    ) -> Generation:
        """The next `max_new_tokens` tokens after `token_ids`, greedily. `deadline_s` counts from the grant of a place.

        Raises `RequestAborted` when the runtime cancelled the request or its deadline passed, `StepFailed` when its
        forward failed, and what `OffloadRuntime.request` and `allocate` raise. `on_token` is called with each token;
        what it raises comes out here.
        """
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise InvalidArgument("max_new_tokens", f"must be a positive integer, got {max_new_tokens!r}")
        # Copied before anything is waited for: the caller may use its sequence again.
        tokens = np.frombuffer(encode_tokens(token_ids), dtype="<i4")
        if tokens.max(initial=0) >= self.model.vocab_size:
            raise InvalidArgument("token_ids", f"holds {tokens.max()}; the model has {self.model.vocab_size} tokens")
        arrived = self._env.now()
        async with self._places:
            self._check_open()
            async with self.runtime.request(
                tokens,
                request_id,
                cache_salt=cache_salt,
                adapter_key=adapter_key,
                deadline_s=deadline_s,
                hit_alignment=self.options.prefill_tokens,
            ) as request:
                await request.allocate(num_tokens=len(tokens) + max_new_tokens)
                admitted = self._env.now()
                sequence = await self._load(request, tokens.tolist(), max_new_tokens, on_token)
                await self._finish(sequence)
                return self._record(sequence, arrived, admitted)
        raise RequestAborted(request.request_id, str(request.reason))

    async def _load(
        self, request: Request, prompt: Sequence[int], max_new_tokens: int, on_token: Callable[[int], None]
    ) -> RunningSequence:
        num_ready = await request.load()
        # Final only now: a load that failed may have taken other blocks.
        table = PromptTable(
            request.block_ids[0], num_ready, self.options.prefill_tokens, self.options.block_size, self._scratch_ids
        )
        return RunningSequence(request, prompt, max_new_tokens, table, on_token, num_computed=table.start)

    async def _finish(self, sequence: RunningSequence) -> None:
        """Hand the sequence to the engine loop and wait for its end; wherever this is cut short, take it back."""
        self._check_open()
        self._line_up.put_in(sequence)
        self._work.set()
        try:
            await sequence.ended.wait()
        finally:
            self._line_up.take_out(sequence)
        if sequence.error is not None:
            raise sequence.error

    def _record(self, sequence: RunningSequence, arrived: float, admitted: float) -> Generation:
        num_hit = sequence.table.start
        num_device = min(sequence.request.match.num_device_tokens, num_hit)
        return Generation(
            request_id=sequence.request.request_id,
            token_ids=tuple(sequence.token_ids),
            logits_digests=tuple(sequence.logits_digests),
            num_prompt_tokens=len(sequence.prompt),
            num_device_tokens=num_device,
            num_host_tokens=num_hit - num_device,
            num_computed_tokens=len(sequence.prompt) - num_hit,
            arrived_s=arrived,
            admitted_s=admitted,
            first_token_s=sequence.first_token_s,
            finished_s=self._env.now(),
        )

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine is closed")

    # -- the engine loop ------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        try:
            while True:
                step = self._line_up.next_step()
                if step is None:
                    self._work = anyio.Event()
                    await self._work.wait()
                else:
                    await self._run(step)
        finally:
            self._closed = True
            for sequence in [*self._line_up.prefilling, *self._line_up.decoding]:
                sequence.end(EngineClosed("the engine was closed before the request was done"))

    async def _run(self, step: Step) -> None:
        forward = Forward(self.model, self.kv_cache, self.options.block_size, step.slices, len(step.sequences))
        # A client may leave at any time; its blocks stay until the thread is through with them.
        with self.runtime.step([sequence.request for sequence in step.sequences]):
            try:
                await self._env.run_in_thread(forward.run, self._worker)
            finally:
                forward.finish()
        self._num_steps += 1
        if forward.error is not None:
            for sequence in step.sequences:
                sequence.end(StepFailed(step.request_ids, forward.error))
        else:
            self._take_in(step, forward.outputs)
        self._on_step(self._num_steps)

    def _take_in(self, step: Step, outputs: Sequence[RowOutput]) -> None:
        now = self._env.now()
        for sequence, part, output in zip(step.sequences, step.slices, outputs, strict=False):
            if sequence.is_prefilling:
                self._num_prefilled += len(part.token_ids)
            else:
                self._num_decoded += len(part.token_ids)
            # Whoever has left or was cancelled meanwhile gets nothing: its blocks may be somebody else's by now.
            if sequence in self._line_up and sequence.is_live:
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
        self._line_up.has_moved_on(sequence)
        if has_token:
            sequence.on_token(output.token_id)
        if sequence.is_complete:
            sequence.end()
