"""Packed batches over block tables, and the one attention function that every model here uses.

Each sequence is attended on its own, with shapes that depend on nothing but the sequence. That is what makes a row's
result independent of its neighbours, bit for bit; only the linear layers see the packed batch, so a caller who wants
equal bits keeps the number of packed tokens fixed too: slices of one sequence on a fixed grid, decoding padded to a
fixed batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from ..errors import InvalidArgument

__all__ = ["PagedBatch", "PagedModel", "SequenceSlice", "paged_attention"]


@attrs.frozen
class SequenceSlice:
    """One sequence's part of a packed forward: compute `token_ids` at the positions from `start` on.

    `block_ids` is the sequence's block table: the rows of the KV tensor for positions [0, start + len(token_ids)).
    A longer table is fine; what lies behind is not touched. KV of the positions before `start` must be there already.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]


@attrs.define(eq=False)
class _Span:
    """One sequence inside a batch: rows [first, stop) of the packed tokens, attending to `kv_len` positions."""

    first: int
    stop: int
    kv_len: int
    table: torch.Tensor
    """int64 [ceil(kv_len / block_size)], the blocks that hold positions [0, kv_len)."""
    mask: torch.Tensor | None = None
    """[group * (stop - first), kv_len], made by the first layer and shared by the others; a single token needs none."""

    def causal_mask(self, group: int, dtype: torch.dtype) -> torch.Tensor | None:
        """0 where a query may look, -inf elsewhere; `group` query heads after one another for each position.

        SDPA's own `is_causal` is aligned to the top left, so it is wrong as soon as a prefix is cached.
        """
        num_queries = self.stop - self.first
        if num_queries == 1:
            return None
        if self.mask is None:
            keys = torch.arange(self.kv_len, device=self.table.device)
            queries = keys[self.kv_len - num_queries :].repeat_interleave(group)
            hidden = keys[None, :] > queries[:, None]
            # Additive, because a boolean one would be turned into this again in every layer.
            self.mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
        return self.mask


@attrs.define(eq=False)
class PagedBatch:
    """The packed tokens of one forward. Made by `of`, used once, by one thread."""

    input_ids: torch.Tensor
    """int64 [T], the tokens of all slices, one slice after the other."""
    positions: torch.Tensor
    """int64 [T], absolute."""
    slot_blocks: torch.Tensor
    """int64 [T], the block a token's KV is written to…"""
    slot_offsets: torch.Tensor
    """int64 [T], …and where inside it."""
    last_rows: torch.Tensor
    """int64 [num_sequences], the packed row of each slice's last token."""
    block_size: int
    spans: tuple[_Span, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.spans)

    @classmethod
    def of(cls, slices: Sequence[SequenceSlice], block_size: int, device: torch.device | str = "cpu") -> PagedBatch:
        """Pack `slices` (at least one, none empty) for tensors on `device`.

        Raises `InvalidArgument` for a slice without tokens, a negative position or id, or a table that is too short.
        Two slices may name one block only if neither reads what the other writes (dummies that share a scratch block).
        """
        if not slices:
            raise InvalidArgument("slices", "is empty")
        if block_size < 1:
            raise InvalidArgument("block_size", f"must be positive, got {block_size}")
        tokens, positions, blocks, tables = [], [], [], []
        for index, part in enumerate(slices):
            ids = np.asarray(part.token_ids, dtype=np.int64)
            stop = part.start + len(ids)
            table = np.asarray(part.block_ids, dtype=np.int64)[: -(-stop // block_size)]
            _check(f"slices[{index}]", ids, part.start, table, block_size)
            where = np.arange(part.start, stop, dtype=np.int64)
            tokens.append(ids)
            positions.append(where)
            blocks.append(table[where // block_size])
            tables.append(table)
        packed = np.concatenate(positions)
        stops = np.cumsum([len(ids) for ids in tokens])
        # All integers travel to the device as one array: a copy for each of them costs more than the bytes.
        pieces = [np.concatenate(tokens), packed, np.concatenate(blocks), packed % block_size, stops - 1, *tables]
        flat = torch.from_numpy(np.concatenate(pieces)).to(device)
        ids_, positions_, blocks_, offsets, last_rows, *table_views = torch.split(
            flat, [len(piece) for piece in pieces]
        )
        spans = tuple(
            _Span(int(stop) - len(where), int(stop), int(where[-1]) + 1, view)
            for stop, where, view in zip(stops, positions, table_views, strict=True)
        )
        return cls(ids_, positions_, blocks_, offsets, last_rows, block_size, spans)


class PagedModel(Protocol):
    """A decoder whose keys and values live in a paged tensor that somebody else owns."""

    vocab_size: int

    def new_kv_cache(self, num_blocks: int, block_size: int) -> torch.Tensor:
        """Zeros [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim] in the model's dtype, on its device.

        Block-major, so that all layers of a block are one contiguous piece: a transfer is then one copy per block.
        """
        ...

    def forward(self, batch: PagedBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        """Write the batch's keys and values into `kv_cache`; return logits [num_sequences, vocab_size], float32.

        Logits are those after each slice's last token. Enters `torch.inference_mode` itself, because that is local to a
        thread and a forward belongs in a worker thread.
        """
        ...


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer_cache: torch.Tensor,
    batch: PagedBatch,
    scaling: float,
) -> torch.Tensor:
    """Write this layer's keys and values by slot, then attend each sequence to its own blocks, causally.

    `query` [T, num_heads, head_dim]; `key`, `value` [T, num_kv_heads, head_dim], rotated already; `layer_cache` is the
    view `kv_cache[:, layer]`: [num_blocks, 2, block_size, num_kv_heads, head_dim]. Returns [T, num_heads, head_dim].
    """
    slots = layer_cache.transpose(1, 2)
    slots[batch.slot_blocks, batch.slot_offsets] = torch.stack((key, value), dim=1)
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for span in batch.spans:
        output[span.first : span.stop] = _attend(query[span.first : span.stop], layer_cache, span, scaling)
    return output


def _attend(query: torch.Tensor, layer_cache: torch.Tensor, span: _Span, scaling: float) -> torch.Tensor:
    """One sequence: `query` [Q, num_heads, head_dim] → the same shape.

    The query heads that share a key head become rows of the query axis: no key is repeated, and decoding, whose query
    axis would be one row, is several times faster.
    """
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads = layer_cache.shape[3]
    gathered = (layer_cache[:, which].index_select(0, span.table).view(-1, num_kv_heads, head_dim) for which in (0, 1))
    # Exactly kv_len rows: what lies behind is unwritten, and a NaN there would survive its weight of zero.
    keys, values = (rows[: span.kv_len].transpose(0, 1)[None] for rows in gathered)
    group = num_heads // num_kv_heads
    rows = query.view(num_queries, num_kv_heads, group, head_dim).transpose(0, 1)
    mask = span.causal_mask(group, query.dtype)
    found = F.scaled_dot_product_attention(
        rows.reshape(1, num_kv_heads, num_queries * group, head_dim), keys, values, attn_mask=mask, scale=scaling
    )
    return found.view(num_kv_heads, num_queries, group, head_dim).transpose(0, 1).reshape(query.shape)


def _check(where: str, ids: np.ndarray, start: int, table: np.ndarray, block_size: int) -> None:
    if ids.ndim != 1 or len(ids) == 0:
        raise InvalidArgument(where, "token_ids must be one-dimensional and not empty")
    if start < 0:
        raise InvalidArgument(where, f"start must not be negative, got {start}")
    if len(table) * block_size < start + len(ids):
        raise InvalidArgument(where, f"block_ids cover {len(table) * block_size} of {start + len(ids)} positions")
    if ids.min() < 0 or table.min() < 0:
        raise InvalidArgument(where, "token_ids and block_ids must not be negative")
