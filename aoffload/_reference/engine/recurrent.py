"""The recurrent states of running requests, and their way into blocks and back.

A recurrent layer (Mamba, a gated delta net, a short convolution) has no KV. It has a state that summarises all tokens
so far, and every forward overwrites it. A running request has all its states in one `Slot`, outside the KV tensor. A
checkpoint is a copy of the slot in `num_rows` blocks of the KV tensor. For the runtime these blocks are opaque bytes,
and they move to the host and back like any other block.

    slot        [ state of layer 0 | state of layer 1 | ... | padding ]     a multiple of a block's bytes
    blocks      [ id 7             ][ id 3            ][ id 12         ]     the same bytes, in any blocks
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch

from ..._config.groups import KVCacheGroup, RecurrentState
from ...errors import InvalidArgument
from .paged import SequenceSlice

ALIGNMENT = 64
"""Bytes at whose multiples states begin in a slot. It is the alignment of tensors that torch allocates on a CPU, and a
kernel may round differently for tensors with a smaller one."""

BROKEN = -1
"""`Slot.num_tokens` after a forward that failed: some layers may have advanced, and others not."""


@attrs.frozen
class StatePiece:
    """One tensor of one layer's state, and its place in a slot."""

    layer: int
    name: str
    """`"conv"` or `"recurrent"`, as in transformers' cache."""
    index: int
    """The number of the state in its layer, for layers that have several."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    """Bytes before it in the slot, a multiple of `ALIGNMENT`."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@attrs.frozen
class StateLayout:
    """The places of all recurrent states of one sequence in its slot."""

    pieces: tuple[StatePiece, ...]
    device: torch.device

    @classmethod
    def of(cls, tensors: Sequence[tuple[int, str, int, torch.Tensor]], device: torch.device) -> StateLayout:
        """The layout for the states of a sequence, given as (layer, name, index, tensor), in the order of the slot."""
        pieces: list[StatePiece] = []
        offset = 0
        for layer, name, index, tensor in tensors:
            pieces.append(StatePiece(layer, name, index, tuple(tensor.shape), tensor.dtype, offset))
            offset += -(-pieces[-1].num_bytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(pieces), device)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have a state, in the order of the slot."""
        return tuple(dict.fromkeys(piece.layer for piece in self.pieces))

    @property
    def num_bytes(self) -> int:
        """Bytes of a checkpoint, without the padding at the end of its last block."""
        last = self.pieces[-1]
        return last.offset + last.num_bytes

    def num_rows(self, kv_cache: torch.Tensor) -> int:
        """Number of blocks of `kv_cache` [num_blocks, ...] that a checkpoint takes."""
        return -(-self.num_bytes // kv_cache[0].nbytes)

    def group(self, kv_cache: torch.Tensor, block_size: int, name: str = "state") -> KVCacheGroup:
        """The group of the checkpoints, which comes after the groups of attention layers in `OffloadConfig.groups`.

        Checkpoints lie at multiples of `block_size` tokens.
        """
        return KVCacheGroup(name, RecurrentState(), block_size=block_size, num_rows=self.num_rows(kv_cache))

    def new_slot(self, kv_cache: torch.Tensor) -> Slot:
        """A slot in the initial state, on the model's device, for checkpoints in blocks of `kv_cache`."""
        num_bytes = self.num_rows(kv_cache) * kv_cache[0].nbytes
        with torch.inference_mode(False):  # a tensor of that mode could not be written outside of it
            memory = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        views = tuple(
            memory[piece.offset : piece.offset + piece.num_bytes].view(piece.dtype).view(piece.shape)
            for piece in self.pieces
        )
        return Slot(self, memory, views)


@attrs.define(eq=False)
class Slot:
    """The recurrent states of one running request. Used by one thread at a time."""

    layout: StateLayout
    memory: torch.Tensor
    """uint8 [num_rows * bytes of a block]: the states, then zeros."""
    views: tuple[torch.Tensor, ...]
    """`views[i]` is the state of `layout.pieces[i]`, in `memory`."""
    num_tokens: int = 0
    """The position of the state, which summarises the tokens before this position; or `BROKEN`."""

    def reset(self) -> None:
        """Return to the initial state, that of position 0."""
        self.memory.zero_()
        self.num_tokens = 0

    def save(self, kv_cache: torch.Tensor, block_ids: Sequence[int]) -> None:
        """Copy the state into the blocks `block_ids` of `kv_cache`. One copy on the device; the slot is unchanged."""
        rows = _rows(kv_cache)
        ids = self._ids(kv_cache, block_ids)
        if self.num_tokens <= 0:
            what = "the initial state" if self.num_tokens == 0 else "the remains of a failed forward"
            raise InvalidArgument("block_ids", f"would receive {what}, which is not a checkpoint")
        rows.index_copy_(0, ids, self.memory.view(len(block_ids), -1))

    def load(self, kv_cache: torch.Tensor, block_ids: Sequence[int], num_tokens: int) -> None:
        """Copy the checkpoint of position `num_tokens` from the blocks `block_ids` of `kv_cache`, bit for bit."""
        if num_tokens < 1:
            raise InvalidArgument("num_tokens", f"must be positive for a checkpoint, got {num_tokens}")
        ids = self._ids(kv_cache, block_ids)
        self.memory.view(len(block_ids), -1).copy_(_rows(kv_cache).index_select(0, ids))
        self.num_tokens = num_tokens

    def _ids(self, kv_cache: torch.Tensor, block_ids: Sequence[int]) -> torch.Tensor:
        wanted = len(self.memory) // kv_cache[0].nbytes
        if len(block_ids) != wanted or len(set(block_ids)) != wanted:
            raise InvalidArgument("block_ids", f"must be {wanted} different blocks, got {list(block_ids)}")
        if not all(0 <= block < len(kv_cache) for block in block_ids):
            raise InvalidArgument("block_ids", f"must be below {len(kv_cache)} and not negative, got {list(block_ids)}")
        return torch.tensor(block_ids, dtype=torch.int64, device=kv_cache.device)


def _rows(kv_cache: torch.Tensor) -> torch.Tensor:
    """The bytes of `kv_cache`, uint8 [num_blocks, bytes of a block]: a view."""
    return kv_cache.view(len(kv_cache), -1).view(torch.uint8)


@attrs.frozen
class RecurrentSlice(SequenceSlice):
    """A slice of a sequence whose model has recurrent layers.

    The forward copies the blocks `resume` into the slot, computes, and copies the slot into the blocks `checkpoint`.
    """

    slot: Slot | None = attrs.field(kw_only=True)
    """The states of all tokens before `start`, unless `resume` brings them. None: a dummy that pads a batch, whose
    recurrent layers are not computed."""
    resume: Sequence[int] = attrs.field(default=(), kw_only=True)
    """The blocks of the checkpoint of position `start`. Empty if the slot has the state already."""
    checkpoint: Sequence[int] = attrs.field(default=(), kw_only=True)
    """The blocks for a checkpoint of the position after the slice's last token. Empty for no checkpoint."""

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)

    def enter(self, kv_cache: torch.Tensor) -> None:
        """Bring the slot to `start`, and mark it as in work. Call this before the forward."""
        slot = self.slot
        if slot is None:
            return
        if self.resume:
            slot.load(kv_cache, self.resume, self.start)
        if slot.num_tokens != self.start:
            at = "broken" if slot.num_tokens == BROKEN else f"at {slot.num_tokens}"
            raise InvalidArgument("slices", f"one starts at token {self.start}, but its slot is {at}")
        slot.num_tokens = BROKEN

    def leave(self, kv_cache: torch.Tensor) -> None:
        """Record that the slot is at `stop`. Call this after the forward."""
        if self.slot is not None:
            self.slot.num_tokens = self.stop
            if self.checkpoint:
                self.slot.save(kv_cache, self.checkpoint)


def recurrent_slices(slices: Sequence[SequenceSlice]) -> list[RecurrentSlice]:
    """The slices of a batch. `InvalidArgument` if one is no `RecurrentSlice`, or if two share a slot."""
    found = [part for part in slices if isinstance(part, RecurrentSlice)]
    if len(found) < len(slices):
        raise InvalidArgument("slices", "must be RecurrentSlice objects, because the model has recurrent layers")
    slots = [id(part.slot) for part in found if part.slot is not None]
    if len(set(slots)) < len(slots):
        raise InvalidArgument("slices", "use one slot twice")
    return found
