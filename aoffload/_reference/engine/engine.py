"""A small continuous-batching engine around the runtime, as a reference for engines of your own.

    async with PagedEngine(model, runtime, kv_cache) as engine:
        generation = await engine.generate(token_ids, max_new_tokens=16)

Clients and engine share a `LineUp` of sequences, which only the event loop's thread uses. A client's task owns its
request: it waits for blocks, loads, adds its sequence to the `LineUp` and waits until the sequence has ended. If it is
cancelled at any point, it removes the sequence synchronously and leaves its `async with`. The engine loop is one task.
It picks a step, holds the step's blocks with `runtime.step` while a worker thread computes, and passes the results to
the requests that are still live.

With windowed groups a request gets its blocks slice by slice, because blocks that leave a window are freed meanwhile,
and at most `MAX_PREFILLING` prompts are in progress (see `tries` for the case that all of them wait). Otherwise a
request gets all its blocks at once.

If the model has recurrent layers, a request has a slot with its states from its load to its end (see
`RecurrentSequence`). A hit ends at a checkpoint, whose blocks the first forward copies into the slot. A request that
gives up its blocks loses its slot, too, and its next try resumes from the last checkpoint that it committed.

With `PrefillStart.BY_LAYER` a prompt's first slice is computed while its prefix is being loaded (see `HeadStart`).

Results are comparable bit for bit, because prompts are computed one slice per forward on a fixed grid, only whole
slices are committed (unless `reuse_decoded`), hits end on the grid, and decoding always computes the same number of
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

import anyio
import anyio.abc
import numpy as np
import torch

from ..._common.env import Env
from ..._common.prefix import TokenIds, encode_tokens
from ..._config.config import GroupLike
from ..._config.groups import FullAttention
from ..._kernel.plans import StoreScope
from ...errors import InvalidArgument, OutOfBlocks, RequestAborted
from .batching import EngineOptions, HeadStart, LineUp, PrefillStart, Step
from .checkpoints import RecurrentSequence, check_state_group
from .layers import check_groups
from .loop import EngineClosed, EngineLoop, EngineStatistics, StepFailed
from .paged import PagedModel, SequenceSlice
from .recurrent import RecurrentSlice, StateLayout
from .sequence import Generation, PromptTable, RunningSequence, SliceResult
from .tries import Ask, PromptPlace, Rivals, Try

if TYPE_CHECKING:
    from ..._runtime.runtime import OffloadRuntime

MAX_PREFILLING = 2
"""Prompts in progress with windowed groups: one computes, one loads. More of them would only hold some of their blocks
and wait for the rest."""

MAX_ALONE = 3
"""How often a request may lack blocks although no other request holds any. After that, it will never get enough."""


def _ignore(_: int) -> None:
    return None


def _never(_: int) -> bool:
    return False


class PagedEngine:
    """Generates greedily with `model`. KV is stored in `kv_cache`, whose leading blocks `runtime` owns.

    `kv_cache` has at least `options.num_scratch_blocks` rows more than the runtime uses:

        kv_cache = model.new_kv_cache(num_blocks + options.num_scratch_blocks, options.block_size)
        OffloadRuntime(config, kv_cache[:num_blocks])                   # or layer_regions(kv_cache[:num_blocks])

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
        num_owned = runtime.transport.num_device_blocks
        self._scratch_ids = range(num_owned, len(kv_cache))
        if len(self._scratch_ids) < self.options.num_scratch_blocks:
            wanted = num_owned + self.options.num_scratch_blocks
            raise InvalidArgument("kv_cache", f"has {len(kv_cache)} rows, the engine needs {wanted}")
        self._states: StateLayout | None = getattr(model, "states", None)
        kv_groups: Sequence[GroupLike] = runtime.config.groups
        if self._states is not None:
            kv_groups = check_state_group(self._states, kv_groups, kv_cache, self.options)
        check_groups(model.groups, kv_groups, self.options.block_size)
        self._is_windowed = any(not isinstance(group.attention, FullAttention) for group in model.groups)
        max_prefilling = (
            min(MAX_PREFILLING, self.options.max_running) if self._is_windowed else self.options.max_running
        )
        self._places = anyio.Semaphore(self.options.max_running, fast_acquire=True)
        self._prompt_places = anyio.Semaphore(max_prefilling, fast_acquire=True)
        self._rivals = Rivals()
        dummy = SequenceSlice([0], 0, [self._scratch_ids[-1:]] * len(model.groups))
        if self._states is not None:
            dummy = RecurrentSlice(dummy.token_ids, dummy.start, dummy.block_ids, slot=None)
        self._line_up = LineUp(self.options, dummy)
        self._loop = EngineLoop(
            model, runtime, kv_cache, self.options, self._env, on_step, self._line_up, self._is_windowed
        )
        self._tasks: anyio.abc.TaskGroup | None = None
        self._num_asks = self._num_head_starts_used = 0

    def __repr__(self) -> str:
        return f"<PagedEngine {'closed' if self._loop.is_closed else 'open'} {self.statistics()}>"

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            num_steps=self._loop.num_steps,
            num_prefilled_tokens=self._loop.num_prefilled,
            num_decoded_tokens=self._loop.num_decoded,
            num_waiting=sum(each.statistics().tasks_waiting for each in (self._places, self._prompt_places)),
            num_prefilling=len(self._line_up.prefilling),
            num_decoding=len(self._line_up.decoding),
            num_head_starts=self._loop.num_head_starts,
            num_head_starts_used=self._num_head_starts_used,
            num_made_way=self._rivals.num_made_way,
            peak_pinned_blocks=self._loop.peaks.num_pinned,
            peak_null_blocks=self._loop.peaks.num_nulls,
            num_blocks_at_peak=self._loop.peaks.num_positions,
        )

    # -- start and end --------------------------------------------------------------------------------------------

    async def __aenter__(self) -> PagedEngine:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._loop.is_closed = False
        self._tasks.start_soon(self._loop.serve, name="aoffload engine")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Wait for the running forward. Unfinished calls of `generate` raise `EngineClosed`."""
        assert self._tasks is not None
        self._loop.close()
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
        reads_cache: bool = True,
        store: StoreScope | str = StoreScope.ALL,
        deadline_s: float | None = None,
        on_token: Callable[[int], None] = _ignore,
        until: Callable[[int], bool] = _never,
    ) -> Generation:
        """Generate up to `max_new_tokens` tokens after `token_ids`, greedily. `deadline_s` counts from the admission to
        the engine.

        Raises `RequestAborted` if the runtime cancelled the request or its deadline passed, `StepFailed` if its forward
        failed, `EngineClosed`, and the errors of `OffloadRuntime.request` and `allocate`. `on_token` is called with
        each token, then `until`. If `until` returns True, the token was the last one. Their exceptions are raised here.
        """
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise InvalidArgument("max_new_tokens", f"must be a positive integer, got {max_new_tokens!r}")
        # Copied before the first await: the caller may use its sequence again.
        tokens = np.frombuffer(encode_tokens(token_ids), dtype="<i4")
        if tokens.max(initial=0) >= self.model.vocab_size:
            raise InvalidArgument(
                "token_ids", f"has an id of {tokens.max()}, but the vocabulary has {self.model.vocab_size} tokens"
            )
        arrived = self._env.now()
        options = {"cache_salt": cache_salt, "adapter_key": adapter_key, "reads_cache": reads_cache, "store": store}
        self._num_asks += 1
        ask = Ask(
            self._num_asks, tokens, tokens.tolist(), max_new_tokens, request_id, options, deadline_s, on_token, until
        )
        async with self._places:
            while True:
                async with PromptPlace(self._prompt_places) as place:
                    self._check_open()
                    generation = await self._try(ask, place, arrived)
                    if generation is not None:
                        return generation

    async def _try(self, ask: Ask, place: PromptPlace, arrived: float) -> Generation | None:
        """One try. None: try again, because the request gave up its blocks or its hit ended off the grid."""
        request = self.runtime.request(
            ask.tokens,
            ask.request_id,
            deadline_s=ask.remaining_s(),
            max_hit_tokens=ask.max_hit_tokens,
            hit_alignment=self.options.prefill_tokens,
            **ask.options,
        )
        with self._rivals.entered(Try(ask, request)) as one:
            async with request:
                ask.request_id = request.request_id
                await self._allocate(one)
                admitted = self._env.now()
                sequence = await self._load(one, place)
                if sequence is None:
                    return None
                await self._finish(sequence, one)
                return sequence.record(arrived, admitted, self._env.now())
        if one.is_to_be_repeated:
            place.give_back()
            await one.wait_to_return()
            return None
        raise RequestAborted(request.request_id, str(request.reason))

    async def _allocate(self, one: Try) -> None:
        room = self._first_room(one)
        await one.request.allocate(num_tokens=room)
        if self._first_room(one) > room:  # more was cached at admission than at arrival
            with suppress(OutOfBlocks):
                one.request.extend_nowait(self._first_room(one))

    def _first_room(self, one: Try) -> int:
        """Number of tokens that need blocks before the load."""
        if not self._is_windowed:
            return one.ask.num_tokens
        return min(one.request.match.num_tokens + self.options.prefill_tokens, one.ask.num_tokens)

    async def _load(self, one: Try, place: PromptPlace) -> RunningSequence | None:
        """Load the cached prefix. None: it ended off the grid, so the next try limits its hit to the grid point
        before."""
        request = one.request
        if self.options.prefill_start is PrefillStart.BY_LAYER:
            num_ready, head_start = await self._load_by_layer(one)
        else:
            num_ready, head_start = await request.load(), None
        # Block ids are final only now, because a failed load may have taken other blocks.
        table = self._table(request.block_ids, num_ready)
        if table.start != num_ready and len(table.block_ids) > 1:
            # A window that is complete at `num_ready` may be incomplete at the grid point before it.
            one.ask.max_hit_tokens = table.start
            return None
        if self._states is not None:
            return self._recurrent(self._states, one, place, table)
        return RunningSequence(
            request,
            one.ask.prompt,
            one.ask.max_new_tokens,
            table,
            one.ask.listener(),
            num_computed=table.start,
            on_prompt_done=place.give_back,
            head_start=head_start,
        )

    def _recurrent(self, states: StateLayout, one: Try, place: PromptPlace, table: PromptTable) -> RecurrentSequence:
        found = one.request.resume_checkpoint
        return RecurrentSequence(
            one.request,
            one.ask.prompt,
            one.ask.max_new_tokens,
            table,
            one.ask.listener(),
            num_computed=table.start,
            on_prompt_done=place.give_back,
            slot=states.new_slot(self.kv_cache),
            # Without the checkpoint of exactly this position, the first forward fails, because its slot is empty.
            resume=found.block_ids if found is not None and found.num_tokens == table.start else (),
        )

    async def _load_by_layer(self, one: Try) -> tuple[int, SliceResult | None]:
        """As `Request.load`. Also returns the first slice's result, if the engine loop computed it meanwhile."""
        early = one.request.load_nowait()
        if early.is_over:
            return await early.wait(), None
        head = HeadStart(one.request, early, one.ask.prompt, self._table, num_slots=self.kv_cache.shape[1])
        with self._line_up.entered(head):
            self._loop.wake()
            num_ready = await early.wait()
            fell_short = early.first_invalid_token is not None
            if fell_short:
                head.give_up("the load fell short")
            await head.wait_until_over()
        if head.error is not None:
            raise StepFailed([one.request.request_id], head.error)
        return num_ready, None if fell_short else head.result

    def _table(self, block_ids: Sequence[Sequence[int]], num_ready: int) -> PromptTable:
        # The checkpoints' group, which is the last one, has no block table.
        block_ids = block_ids[: len(self.model.groups)]
        return PromptTable(
            block_ids, num_ready, self.options.prefill_tokens, self.options.block_size, self._scratch_ids
        )

    async def _finish(self, sequence: RunningSequence, one: Try) -> None:
        """Pass the sequence to the engine loop and wait until it has ended. Remove it from the loop, also when
        cancelled."""
        self._check_open()
        self._line_up.put_in(sequence)
        if sequence.head_start is not None:
            self._num_head_starts_used += 1
            self._loop.take_in(Step([sequence], [sequence.head_start.part]), [sequence.head_start.output])
        self._loop.wake()
        try:
            while not sequence.is_over:
                if sequence.needs_room:
                    await self._wait_for_room(sequence, one)
                    self._loop.wake()
                await sequence.wait_for_attention()
        finally:
            self._line_up.take_out(sequence)
        if sequence.error is not None:
            raise sequence.error

    async def _wait_for_room(self, sequence: RunningSequence, one: Try) -> None:
        """Queue in the runtime for the next slice's blocks. The caller repeats this until it has them."""
        was_alone = self._rivals.is_alone(one)
        try:
            await sequence.request.extend(sequence.wanted_room)
        except OutOfBlocks as error:
            self._check_open()
            # Only waiting requests hold blocks. A request that is alone may hold private copies of blocks that others
            # have cached meanwhile. Its next try uses the cached ones.
            one.ask.num_alone += was_alone and self._rivals.is_alone(one)
            if not error.retryable or one.ask.num_alone > MAX_ALONE:
                raise
            await self._rivals.have_one_make_way(one)
        else:
            one.is_served.set()
            sequence.take_tables()

    def _check_open(self) -> None:
        if self._loop.is_closed:
            raise EngineClosed("the engine is closed")
