"""Decides what the engine computes next, from its sequences alone."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import attrs

from ...errors import ConfigError
from .head_start import HeadStart
from .paged import SequenceSlice
from .sequence import RunningSequence

__all__ = ["EngineOptions", "LineUp", "PrefillStart", "Step"]


class PrefillStart(enum.Enum):
    """When the first slice of a prompt is computed if its cached prefix has to be loaded."""

    LOADED = "loaded"
    """When the whole prefix is loaded."""
    BY_LAYER = "by layer"
    """While the prefix is loading: each layer waits for its own region. The runtime needs `layer_regions`, and the
    model has to wait as `PagedModel.forward` says."""


@attrs.frozen(kw_only=True)
class EngineOptions:
    """How the engine cuts work into forwards."""

    block_size: int = 16
    prefill_tokens: int = 64
    """The grid, in tokens: slices of a prompt start, and hits end, at its multiples."""
    decode_rows: int = 8
    """Rows of a decode step, padded with dummies."""
    max_running: int = 8
    """Requests in the engine at a time; further ones queue, first come, first served."""
    prefill_start: PrefillStart = PrefillStart.LOADED
    reuse_decoded: bool = False
    """Commit all computed tokens, also the last, shorter slice of a prompt and decoded tokens. Their KV differs in a
    few bits from what the same tokens give in a whole slice."""

    def __attrs_post_init__(self) -> None:
        for field in ("block_size", "prefill_tokens", "decode_rows", "max_running"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(field, f"must be a positive integer, got {value!r}")
        if self.prefill_tokens % self.block_size:
            raise ConfigError("prefill_tokens", f"must be a multiple of block_size {self.block_size}")

    @property
    def num_scratch_blocks(self) -> int:
        """Rows that the engine needs in the KV tensor after the runtime's blocks."""
        return self.prefill_tokens // self.block_size

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)


@attrs.frozen(eq=False)
class Step:
    """One forward: `slices[i]` belongs to `sequences[i]`; slices after the last sequence are padding."""

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
        """Inside this block a step may begin `head`; leaving the block, however that happens, abandons it."""
        self.head_starts.append(head)
        try:
            yield
        finally:
            self.head_starts.remove(head)
            head.give_up("its client has left")

    def next_step(self) -> Step | HeadStart | None:
        """The next slice of the oldest prompt that has room, else a decode step, else None.

        Prompts go first, because clients wait for their first token. That cannot starve decoding: the places in the
        engine are bounded. A head start comes after the prompts whose prefix is loaded: before the decode step if its
        own copy has begun, else after it, because the copies queued before its own may take any time.
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
        """After a step: if its prompt is done, move it to the end of `decoding`, so that sequences take turns."""
        if sequence in self and not sequence.is_prefilling:
            self.take_out(sequence)
            self.decoding.append(sequence)
