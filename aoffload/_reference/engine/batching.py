"""Decides what the engine computes next, from the state of its sequences."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio
import attrs

from ..._kernel.states import RequestState
from ...errors import ConfigError, RegionNotLoaded
from .layers import NOTHING_TO_WAIT_FOR, LayerFences
from .paged import SequenceSlice
from .sequence import PromptTable, RowOutput, RunningSequence, SliceResult

if TYPE_CHECKING:
    from ..._runtime.loading import PendingLoad
    from ..._runtime.request import Request


# -- head start ------------------------------------------------------------------------------------------------------
#
# Head starts (layer-wise overlap): compute the first slice of a prompt while its cached prefix is still loading.
#
# Each layer waits for its own region only, so the first layers compute while the KV of later layers is being copied.
# Nothing is committed or sent to the client before the load has ended. If the load brings fewer tokens than expected,
# the result is dropped, and the prompt is computed from the first token that is not loaded.


class HeadStartState(enum.Enum):
    WAITING = "waiting"
    COMPUTING = "computing"
    OVER = "over"


@attrs.define(eq=False)
class HeadStart:
    """One load and the prompt slice that follows it. Used in the event loop's thread only.

    The client's task waits for the load. Meanwhile the engine loop may compute the slice.
    """

    request: Request
    pending: PendingLoad
    prompt: Sequence[int]
    table_of: Callable[[Sequence[Sequence[int]], int], PromptTable]
    """Makes the prompt's table from block ids and the number of ready tokens."""
    num_slots: int
    state: HeadStartState = HeadStartState.WAITING
    result: SliceResult | None = None
    error: Exception | None = None
    """The error of the model, unless it was `RegionNotLoaded`."""
    fences: LayerFences = NOTHING_TO_WAIT_FOR
    """The fences that its layers wait for."""
    _is_over: anyio.Event = attrs.field(factory=anyio.Event)

    @property
    def can_begin(self) -> bool:
        """Whether a step may compute the slice now. False after the load has ended, because no head start is needed
        then."""
        is_loading = self.state is HeadStartState.WAITING and self.request.state is RequestState.LOADING
        return is_loading and self.pending.can_start

    @property
    def is_arriving(self) -> bool:
        """Whether the first region is loaded, or queued on a GPU: a forward that begins now waits only for this
        copy."""
        return self.pending.region(0).is_given

    def begin(self) -> SequenceSlice | None:
        """The slice to compute. Call it inside a step of `pending`. None: the slice would begin off the grid or lacks
        blocks."""
        table = self.table_of(self.pending.block_ids, self.pending.num_expected_tokens)
        stop = table.stop_of(table.start, len(self.prompt))
        if table.start != table.num_ready or stop > table.num_tokens:
            self._end()
            return None
        self.state = HeadStartState.COMPUTING
        self.fences = LayerFences.of(self.pending.regions, self.num_slots)
        return SequenceSlice(self.prompt[table.start : stop], table.start, table.for_slice(table.start))

    def computed(self, part: SequenceSlice, outputs: Sequence[RowOutput], error: Exception | None) -> None:
        """Record the outcome of the slice."""
        if outputs:
            self.result = SliceResult(part, outputs[0])
        if not isinstance(error, RegionNotLoaded):
            self.error = error
        self._end()

    def give_up(self, why: str) -> None:
        """Abandon the slice. A forward that computes it raises `RegionNotLoaded` at its next wait for a copy."""
        if self.state is HeadStartState.COMPUTING:
            self.fences.give_up(why)
        else:
            self._end()

    async def wait_until_over(self) -> None:
        """Wait for the forward that computes it, if there is one. No step begins it afterwards."""
        if self.state is HeadStartState.COMPUTING:
            await self._is_over.wait()
        self._end()

    def _end(self) -> None:
        self.state = HeadStartState.OVER
        self._is_over.set()


# -- batching --------------------------------------------------------------------------------------------------------


class PrefillStart(enum.Enum):
    """The moment to compute the first slice of a prompt whose cached prefix has to be loaded."""

    LOADED = "loaded"
    """After the whole prefix is loaded."""
    BY_LAYER = "by layer"
    """While the prefix is loading: each layer waits for its own region. The runtime needs `layer_regions`, and the
    model has to wait as described at `PagedModel.forward`. Refused with recurrent states, because a layer needs its
    whole state before its first token."""


@attrs.frozen(kw_only=True)
class EngineOptions:
    """How the engine cuts work into forwards."""

    block_size: int = 16
    prefill_tokens: int = 64
    """The grid, in tokens: slices of a prompt start, and hits end, at multiples of this number."""
    decode_rows: int = 8
    """Rows of a decode step, padded with dummies."""
    max_running: int = 8
    """Requests in the engine at a time. Further requests queue, first come, first served."""
    prefill_start: PrefillStart = PrefillStart.LOADED
    reuse_decoded: bool = False
    """Commit all computed tokens, also the last, shorter slice of a prompt and decoded tokens. Their KV differs in a
    few bits from the KV of the same tokens in a whole slice."""

    def __attrs_post_init__(self) -> None:
        for field in ("block_size", "prefill_tokens", "decode_rows", "max_running"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(field, f"must be a positive integer, got {value!r}")
        if self.prefill_tokens % self.block_size:
            raise ConfigError("prefill_tokens", f"must be a multiple of block_size {self.block_size}")

    @property
    def num_scratch_blocks(self) -> int:
        """Rows of the KV tensor that the engine needs after the runtime's blocks."""
        return self.prefill_tokens // self.block_size

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)


@attrs.frozen(eq=False)
class Step:
    """One forward: `slices[i]` belongs to `sequences[i]`. Slices after the last sequence are padding."""

    sequences: Sequence[RunningSequence]
    slices: Sequence[SequenceSlice]

    @property
    def request_ids(self) -> list[str]:
        return [sequence.request.request_id for sequence in self.sequences]


@attrs.define(eq=False)
class LineUp:
    """The engine's sequences: prompts in order of arrival, decoding ones in turn. Used in the event loop's thread only.

    From `put_in` to `take_out` a sequence is in exactly one of `prefilling` and `decoding`. Before that, while its
    prefix loads, it may have a head start.
    """

    options: EngineOptions
    dummy: SequenceSlice
    prefilling: list[RunningSequence] = attrs.field(factory=list)
    decoding: list[RunningSequence] = attrs.field(factory=list)
    head_starts: list[HeadStart] = attrs.field(factory=list)

    def __contains__(self, sequence: RunningSequence) -> bool:
        return sequence in self.prefilling or sequence in self.decoding

    def __iter__(self) -> Iterator[RunningSequence]:
        yield from self.prefilling
        yield from self.decoding

    def put_in(self, sequence: RunningSequence) -> None:
        self.prefilling.append(sequence)

    def take_out(self, sequence: RunningSequence) -> None:
        for sequences in (self.prefilling, self.decoding):
            if sequence in sequences:
                sequences.remove(sequence)

    @contextmanager
    def entered(self, head: HeadStart) -> Iterator[None]:
        """Inside this block a step may begin `head`. Leaving the block, for any reason, abandons it."""
        self.head_starts.append(head)
        try:
            yield
        finally:
            self.head_starts.remove(head)
            head.give_up("its client has left")

    def next_step(self) -> Step | HeadStart | None:
        """The next slice of the oldest prompt that has its blocks, else a decode step, else None.

        Prompts go first, because clients wait for their first token. That cannot starve decoding, because the number of
        requests in the engine is bounded. A head start comes after the prompts whose prefix is loaded. It comes before
        the decode step if its own copy has begun. Otherwise it comes after it, because the copies queued before its own
        may take any time.
        """
        for sequence in self.prefilling:
            if sequence.is_ready:
                return Step([sequence], [sequence.next_slice()])
        head_starts = [head for head in self.head_starts if head.can_begin]
        for head in head_starts:
            if head.is_arriving:
                return head
        return self._decode_step() or next(iter(head_starts), None)

    def _decode_step(self) -> Step | None:
        sequences = [sequence for sequence in self.decoding if sequence.is_ready][: self.options.decode_rows]
        if not sequences:
            return None
        slices = [sequence.next_slice() for sequence in sequences]
        return Step(sequences, slices + [self.dummy] * (self.options.decode_rows - len(slices)))

    def has_moved_on(self, sequence: RunningSequence) -> None:
        """After a step: if its prompt is complete, move it to the end of `decoding`, so that sequences take turns."""
        if sequence in self and not sequence.is_prefilling:
            self.take_out(sequence)
            self.decoding.append(sequence)
