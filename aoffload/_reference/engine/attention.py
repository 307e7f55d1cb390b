"""The attention function of all models here.

Each sequence is attended on its own, with shapes that depend only on that sequence. A row's result is therefore
independent of the other sequences in the batch, bit for bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from .layers import LayerPlace
from .paged import PagedBatch, Span

__all__ = ["paged_attention"]


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
    """Write this layer's keys and values by slot, then attend each sequence to its own blocks, causally.

    `query` [T, num_heads, head_dim]; `key`, `value` [T, num_kv_heads, head_dim], rotated already; `kv_cache`
    [num_blocks, layers of a group, 2, block_size, num_kv_heads, head_dim]. `sinks` [num_heads] is, for each head, the
    score of an extra key without a value: it takes weight from all others. Returns [T, num_heads, head_dim].

    Waits for this layer's part of a load, see `PagedBatch.fences`. Reads only blocks with a token that a query of the
    batch may look at. Blocks before a window are not read: they may be null or belong to another request.
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
    # Exactly these rows: their neighbours may be unwritten or outside the window, and a NaN there would survive its
    # weight of zero.
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
    """One sequence: `query` [Q, num_heads, head_dim] → the same shape.

    The query heads that share a key head become rows of the query axis: no key is repeated, and decoding, whose query
    axis would be one row, is several times faster.
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

    Written out, because SDPA has no sinks, nor a mask per head that costs nothing.
    """
    scores = rows @ keys.transpose(-1, -2) * scaling
    if mask is not None:
        scores = scores + mask
    weights = torch.cat((scores, sink_of_row.to(scores.dtype)), dim=-1).softmax(dim=-1, dtype=torch.float32)
    return weights[..., :-1].to(values.dtype) @ values
