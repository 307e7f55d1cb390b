"""What the engine computes next: pure decisions over the sequences it works on."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import attrs

from ..errors import ConfigError
from .head_start import HeadStart
from .paged import SequenceSlice
from .sequence import RunningSequence

__all__ = ["EngineOptions", "LineUp", "PrefillStart", "Step"]


class PrefillStart(enum.Enum):
    """When the first slice of a prompt is computed whose prefix has to be loaded."""

    LOADED = "loaded"
    """When all of the prefix is there."""
    BY_LAYER = "by layer"
    """While it is coming: each layer waits for its own part. The runtime needs `layer_regions` for it, and the model
    has to wait as `PagedModel.forward` says."""


@attrs.frozen(kw_only=True)
class EngineOptions:
    """How the engine cuts work into forwards."""

    block_size: int = 16
    prefill_tokens: int = 64
    """The grid: a slice of a prompt starts at a multiple of it, and hits end at one."""
    decode_rows: int = 8
    """Rows of a decode step, filled up with dummies."""
    max_running: int = 8
    """Requests in the engine at a time; further ones queue, first come, first served."""
    prefill_start: PrefillStart = PrefillStart.LOADED
    reuse_decoded: bool = False
    """Commit everything that was computed: also the last, shorter slice of a prompt, and what decoding wrote. Their
    bits differ a little from those that the same tokens would give in a whole slice."""

    def __attrs_post_init__(self) -> None:
        for field in ("block_size", "prefill_tokens", "decode_rows", "max_running"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(field, f"must be a positive integer, got {value!r}")
        if self.prefill_tokens % self.block_size:
            raise ConfigError("prefill_tokens", f"must be a multiple of block_size {self.block_size}")

    @property
    def num_scratch_blocks(self) -> int:
        """Rows the engine needs in the KV tensor behind the blocks that the runtime owns."""
        return self.prefill_tokens // self.block_size

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)


@attrs.frozen(eq=False)
class Step:
    """One forward: `slices[i]` belongs to `sequences[i]`; slices behind the last sequence are padding."""

    sequences: Sequence[RunningSequence]
    slices: Sequence[SequenceSlice]

    @property
    def request_ids(self) -> list[str]:
        return [sequence.request.request_id for sequence in self.sequences]


@attrs.define(eq=False)
class LineUp:
    """The sequences the engine works on, in the order they came. Touched by the event loop's thread only.

    A sequence is in exactly one of the two lists from when its client puts it in until its client takes it out. Before
    that, while its load is under way, there may be a head start of it.
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
        """`head` may be begun in this block, and not when it has been left, however that happens."""
        self.head_starts.append(head)
        try:
            yield
        finally:
            self.head_starts.remove(head)
            head.give_up("its client has left")

    def next_step(self) -> Step | HeadStart | None:
        """A slice of the oldest prompt that has room for it, else a decode step, else nothing.

        Prompts go first: that is what clients wait for. It can't starve decoding, since the places are bounded. Whose
        prefix is still being loaded comes after those whose is there: after all others, while it is not known how long
        the copies before it take, and before the decode step when its own copy has begun.
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
        """After a step: whose prompt is done decodes from now on; who has decoded queues behind those who haven't."""
        if sequence in self and not sequence.is_prefilling:
            self.take_out(sequence)
            self.decoding.append(sequence)
