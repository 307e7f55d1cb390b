"""Packed batches over block tables.

Only a model's linear layers compute on the packed tokens. Attention runs per sequence. For bitwise equal results, keep
the number of packed tokens fixed: prefill one sequence in slices on a fixed grid, and pad decoding to a fixed batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from ...errors import InvalidArgument
from .layers import NOTHING_TO_WAIT_FOR, LayerFences, LayerGroup, LayerPlace


@attrs.frozen
class SequenceSlice:
    """One sequence's part of a packed forward: compute `token_ids` at the positions from `start` on.

    `block_ids` holds the sequence's block tables, one for each group of the model, like `Request.block_ids`: the rows
    of the KV tensor for positions [0, start + len(token_ids)). Further blocks of a longer table are ignored. The KV of
    positions before `start` must be loaded already, or be loaded when the batch's fences have passed. In a group with a
    window, this holds only for KV inside the window.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[Sequence[int]]


@attrs.define(eq=False)
class Span:
    """One sequence of a batch: rows [first, stop) of the packed tokens are the last of its `kv_len` positions."""

    first: int
    stop: int
    kv_len: int
    tables: tuple[torch.Tensor, ...]
    """For each group int64 [ceil(kv_len / block_size)], the blocks that hold positions [0, kv_len)."""
    _masks: dict[tuple[int, int | None], torch.Tensor] = attrs.field(factory=dict)
    """Made by the first layer of an attention kind, and shared by the others."""

    @property
    def start(self) -> int:
        """The position of the first query."""
        return self.kv_len - (self.stop - self.first)

    def first_key(self, window: int | None) -> int:
        """The first position that any query reads."""
        return 0 if window is None else max(0, self.start - window + 1)

    def mask(self, group: int, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask [queries * group, kv_len - first_key(window)]: 0 where a query reads a key, -inf elsewhere.

        Each position has one row for each of its `group` query heads. None for a single position, which reads all keys.
        SDPA's own `is_causal` is aligned to the top left, so it is wrong if a prefix is cached.
        """
        if self.stop - self.first == 1:
            return None
        if (group, window) not in self._masks:
            positions = torch.arange(self.first_key(window), self.kv_len, device=self.tables[0].device)
            keys, queries = positions, positions[self.start - self.kv_len :].repeat_interleave(group)[:, None]
            hidden = keys > queries
            if window is not None:
                hidden |= keys <= queries - window
            # Additive, because SDPA would convert a boolean mask to this again in every layer.
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
            self._masks[group, window] = mask
        return self._masks[group, window]


@attrs.define(eq=False)
class PagedBatch:
    """The packed tokens of one forward. Make it with `of`. One thread uses it once."""

    input_ids: torch.Tensor
    """int64 [T], the tokens of all slices, one slice after the other."""
    positions: torch.Tensor
    """int64 [T], the absolute position of each token."""
    slot_blocks: tuple[torch.Tensor, ...]
    """For each group int64 [T], the block that each token's KV is written to."""
    slot_offsets: torch.Tensor
    """int64 [T], the position inside that block."""
    last_rows: torch.Tensor
    """int64 [num_sequences], the packed row of each slice's last token."""
    block_size: int
    spans: tuple[Span, ...]
    fences: LayerFences = NOTHING_TO_WAIT_FOR
    """The fences that each layer waits for before it reads KV."""
    slices: Sequence[SequenceSlice] = ()
    """The slices that the batch was made of."""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.spans)

    @classmethod
    def of(
        cls,
        slices: Sequence[SequenceSlice],
        block_size: int,
        device: torch.device | str = "cpu",
        fences: LayerFences = NOTHING_TO_WAIT_FOR,
    ) -> PagedBatch:
        """Pack `slices` (at least one, none empty) for tensors on `device`.

        Raises `InvalidArgument` for a slice without tokens, a negative position or id, a table that is too short, or
        another number of tables than the first slice has. Two slices may name one block only if neither of them reads
        data that the other writes (dummies that share a scratch block).
        """
        if not slices:
            raise InvalidArgument("slices", "is empty")
        if block_size < 1:
            raise InvalidArgument("block_size", f"must be positive, got {block_size}")
        packed = [_Packed.of(f"slices[{index}]", part, block_size) for index, part in enumerate(slices)]
        num_groups = len(packed[0].tables)
        for index, each in enumerate(packed):
            if len(each.tables) != num_groups:
                raise InvalidArgument(f"slices[{index}]", f"has {len(each.tables)} block tables, not {num_groups}")
        tokens, where = (np.concatenate([getattr(each, name) for each in packed]) for name in ("ids", "positions"))
        blocks = [np.concatenate([each.slot_blocks[group] for each in packed]) for group in range(num_groups)]
        stops = np.cumsum([len(each.ids) for each in packed])
        tables = [table for each in packed for table in each.tables]
        # All integers go to the device as one array, because a copy for each of them costs more than the bytes.
        pieces = [tokens, where, where % block_size, stops - 1, *blocks, *tables]
        flat = torch.from_numpy(np.concatenate(pieces)).to(device)
        views = torch.split(flat, [len(piece) for piece in pieces])
        spans = tuple(
            Span(int(stop) - len(each.ids), int(stop), int(each.positions[-1]) + 1, views[at : at + num_groups])
            for stop, each, at in zip(stops, packed, range(4 + num_groups, len(views), num_groups), strict=True)
        )
        return cls(views[0], views[1], views[4 : 4 + num_groups], views[2], views[3], block_size, spans, fences, slices)


@attrs.frozen(eq=False)
class _Packed:
    """A checked slice, as arrays of int64."""

    ids: np.ndarray
    positions: np.ndarray
    tables: list[np.ndarray]
    slot_blocks: list[np.ndarray]

    @classmethod
    def of(cls, where: str, part: SequenceSlice, block_size: int) -> _Packed:
        ids = np.asarray(part.token_ids, dtype=np.int64)
        stop = part.start + len(ids)
        whole = [np.asarray(table, dtype=np.int64) for table in part.block_ids]
        if not whole or any(table.ndim != 1 for table in whole):
            raise InvalidArgument(where, "block_ids must hold a block table, a sequence of ids, for each group")
        tables = [table[: -(-stop // block_size)] for table in whole]
        _check(where, ids, part.start, tables, block_size)
        positions = np.arange(part.start, stop, dtype=np.int64)
        return cls(ids, positions, tables, [table[positions // block_size] for table in tables])


class PagedModel(Protocol):
    """A decoder whose keys and values are in a paged tensor. The caller owns the tensor."""

    vocab_size: int
    groups: tuple[LayerGroup, ...]
    """The layers of the model by attention kind. Slices have a block table for each group, in this order."""
    max_positions: int
    """The longest sequence that the model supports, in tokens of prompt and answer together."""
    end_token_ids: frozenset[int]
    """Tokens that end an answer; empty if the model has none."""

    def new_kv_cache(self, num_blocks: int, block_size: int) -> torch.Tensor:
        """Zeros [num_blocks, layers of a group, 2, block_size, num_kv_heads, head_dim], in the model's dtype and on its
        device.

        Block-major, so that all layers of a block are contiguous. A transfer is then one copy per block. A row belongs
        to one group at a time, as the block tables say.
        """
        ...

    def forward(self, batch: PagedBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        """Write the batch's keys and values into `kv_cache`. Return logits [num_sequences, vocab_size], float32.

        Logits are those after each slice's last token. Before a layer reads KV, it calls `batch.fences.wait_for` with
        its place, as `paged_attention` does, because KV before a slice may still be loading. Enters
        `torch.inference_mode` itself, because that mode is local to a thread and a forward belongs in a worker thread.
        """
        ...


def _check(where: str, ids: np.ndarray, start: int, tables: Sequence[np.ndarray], block_size: int) -> None:
    if ids.ndim != 1 or len(ids) == 0:
        raise InvalidArgument(where, "token_ids must be one-dimensional and not empty")
    if start < 0:
        raise InvalidArgument(where, f"start must not be negative, got {start}")
    for table in tables:
        if len(table) * block_size < start + len(ids):
            raise InvalidArgument(
                where, f"block_ids cover only {len(table) * block_size} of {start + len(ids)} positions"
            )
    if ids.min() < 0 or any(table.min() < 0 for table in tables):
        raise InvalidArgument(where, "token_ids and block_ids must not be negative")


# -- attention -------------------------------------------------------------------------------------------------------
#
# The attention function of all models here.
#
# Attention runs on each sequence alone, with shapes that depend only on that sequence. A row's result is therefore
# independent of the other sequences in the batch, bit for bit.


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: PagedBatch,
    place: LayerPlace,
    *,
    scaling: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write this layer's keys and values by slot. Then run causal attention of each sequence over its own blocks.

    `query` [T, num_heads, head_dim]; `key`, `value` [T, num_kv_heads, head_dim], already rotated; `kv_cache`
    [num_blocks, layers of a group, 2, block_size, num_kv_heads, head_dim]. `sinks` [num_heads] is, for each head, the
    score of an extra key without a value: it takes weight from all others. Returns [T, num_heads, head_dim].

    Waits for this layer's part of a load, see `PagedBatch.fences`. Reads only blocks with a token that a query of the
    batch may read. Blocks before a window are not read: they may be null or belong to another request.
    """
    layer_cache = kv_cache[:, place.slot]
    slots = layer_cache.transpose(1, 2)
    slots[batch.slot_blocks[place.group], batch.slot_offsets] = torch.stack((key, value), dim=1)
    batch.fences.wait_for(place)
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for span in batch.spans:
        keys, values = _gather(layer_cache, span, place)
        rows = query[span.first : span.stop]
        output[span.first : span.stop] = _attend(rows, keys, values, span, place.window, scaling, sinks)
    return output


def _gather(layer_cache: torch.Tensor, span: Span, place: LayerPlace) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the positions that the span's queries read: [1, num_kv_heads, K, head_dim] each."""
    _, _, block_size, num_kv_heads, head_dim = layer_cache.shape
    first_key = span.first_key(place.window)
    first_block = first_key // block_size
    table = span.tables[place.group][first_block:]
    gathered = (layer_cache[:, which].index_select(0, table).view(-1, num_kv_heads, head_dim) for which in (0, 1))
    # Exactly these rows, because their neighbours may be unwritten or outside the window, and a NaN there would survive
    # its weight of zero.
    start, stop = (position - first_block * block_size for position in (first_key, span.kv_len))
    keys, values = (rows[start:stop].transpose(0, 1)[None] for rows in gathered)
    return keys, values


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    span: Span,
    window: int | None,
    scaling: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one sequence: `query` [Q, num_heads, head_dim] → the same shape.

    The query heads that share a key head become rows of the query axis. So no key is repeated. Decoding, whose query
    axis would be one row, becomes several times faster.
    """
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    rows = query.view(num_queries, num_kv_heads, group, head_dim).transpose(0, 1)
    rows = rows.reshape(1, num_kv_heads, num_queries * group, head_dim)
    mask = span.mask(group, window, query.dtype)
    if sinks is None:
        found = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scaling)
    else:
        sink_of_row = sinks.view(1, num_kv_heads, 1, group).expand(1, -1, num_queries, -1)
        found = _attend_with_sinks(rows, keys, values, mask, scaling, sink_of_row.reshape(*rows.shape[:-1], 1))
    return found.view(num_kv_heads, num_queries, group, head_dim).transpose(0, 1).reshape(query.shape)


def _attend_with_sinks(
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    sink_of_row: torch.Tensor,
) -> torch.Tensor:
    """Adds one column of scores, `sink_of_row` [..., R, 1], which counts in the softmax's sum and has no value.

    Written in plain operations, because SDPA has neither sinks nor a mask per head without extra cost.
    """
    scores = rows @ keys.transpose(-1, -2) * scaling
    if mask is not None:
        scores = scores + mask
    weights = torch.cat((scores, sink_of_row.to(scores.dtype)), dim=-1).softmax(dim=-1, dtype=torch.float32)
    return weights[..., :-1].to(values.dtype) @ values
