"""The pages that DeepSeek V4 stores, of several kinds with different block sizes.

Every layer stores a window of latents. A layer with a `compress_ratio` of 4 or 128 also stores one compressed latent
for every 4 or 128 tokens; with a ratio of 4, an indexer key for each of these. The compressor computes the next
compressed latent from states of the last tokens. These states are not a recurrent state: each belongs to one token and
is read within a window, so blocks can hold them.

Sizes are those of vLLM. Its blocks of the four kinds have 256, 64, 4 and 8 tokens, so that their bytes are about equal.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from ..errors import ConfigError
from .groups import AttentionKind, FullAttention, SlidingWindow
from .kv_formats import ITEM_BYTES, KVFormat, check_latents, indexer_part
from .model_config import ConfigReader
from .model_families import refuse_uncacheable

BLOCK_SIZE = 256
MAX_RATIO = 128
"""Tokens of the longest compressed latent. A block holds whole ones."""


@attrs.frozen
class Page:
    """The bytes of one layer in one block of a group."""

    layer: int
    holds: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    """With the padding that the alignment of kernels needs."""


@attrs.frozen
class PagedKind:
    """The pages that have one kind of attention and one block size."""

    name: str
    attention: AttentionKind
    block_size: int
    pages: tuple[Page, ...]


def pages_of(reader: ConfigReader, form: KVFormat, block_size: int) -> list[PagedKind]:
    """The pages of all layers; `block_size`: tokens of a block of compressed latents.

    `ConfigError` names `block_size`, or an argument or field that does not fit this model.
    """
    refuse_uncacheable(reader)
    check_latents(form)
    if block_size % MAX_RATIO:
        problem = (
            f"must be a multiple of {MAX_RATIO} for {reader.model_type}, because a latent stands for as many tokens"
        )
        raise ConfigError("block_size", f"{problem}; got {block_size}")
    num_layers, size, window = reader.num_layers(), reader.count("head_dim"), reader.count("sliding_window")
    ratios = reader.per_layer("compress_ratios", num_layers, allow_longer=True)
    if ratios is None or not set(ratios) <= {0, 1, 4, MAX_RATIO}:
        raise reader.refuse(f"has no `compress_ratios` of 0, 1, 4 or {MAX_RATIO} for each layer")
    if reader.count("num_key_value_heads", 1) != 1:
        raise reader.refuse("has several KV heads, but a latent has no heads")
    width, dtype = _latent(reader, form, size)
    index_size = reader.count("index_head_dim")
    reader.ignore("index_n_heads", "index_topk")
    index = indexer_part(index_size)
    reader.ignore("compress_rope_theta")  # changes positions, not the stored bytes
    reader.check_all_read()
    alignment = 576 if form.is_ds_mla else 512
    full, states_4, states_128 = list[Page](), list[Page](), list[Page]()
    for layer, ratio in enumerate(ratios):
        if ratio > 1:
            full.append(_page(layer, "compressed latent", block_size // ratio, width, dtype, alignment))
        if ratio == 4:
            # Two latents overlap: a state has twice the elements, and is read by the next two.
            rows = block_size // 64
            full.append(_page(layer, "indexer keys", block_size // ratio, index.size, index.dtype, alignment))
            states_4.append(_page(layer, "compressor state", rows, 4 * size, "float32", alignment))
            states_4.append(_page(layer, "indexer state", rows, 4 * index_size, "float32", alignment))
        elif ratio == MAX_RATIO:
            states_128.append(_page(layer, "compressor state", block_size // 32, 2 * size, "float32", alignment))
    local = [_page(layer, "latent", block_size // 4, width, dtype, alignment) for layer in range(num_layers)]
    return _nonempty(
        ("full", FullAttention(), block_size, full),
        ("sliding", SlidingWindow(window), block_size // 4, local),
        ("state-4", SlidingWindow(2 * 4), block_size // 64, states_4),
        ("state-128", SlidingWindow(MAX_RATIO), block_size // 32, states_128),
    )


def _nonempty(*kinds: tuple[str, AttentionKind, int, Iterable[Page]]) -> list[PagedKind]:
    """The kinds that have pages."""
    found = [PagedKind(name, attention, block_size, tuple(pages)) for name, attention, block_size, pages in kinds]
    return [kind for kind in found if kind.pages]


def _latent(reader: ConfigReader, form: KVFormat, size: int) -> tuple[int, str]:
    """Elements of a latent and their dtype. A row of `fp8_ds_mla` consists of fp8 elements, rotary elements in
    bfloat16, and one scale byte for every 64 fp8 elements, padded to a multiple of 8 scale bytes."""
    rope = reader.count("qk_rope_head_dim")
    if rope >= size:
        raise reader.refuse(f"has latents of {size} elements, of which {rope} cannot be rotary")
    if not form.is_ds_mla:
        return size, form.element
    num_scales = -(-(size - rope) // 64)
    return (size - rope) + 2 * rope + -(-num_scales // 8) * 8, "uint8"


def _page(layer: int, holds: str, rows: int, elements: int, dtype: str, alignment: int) -> Page:
    num_bytes = -(-rows * elements * ITEM_BYTES[dtype] // alignment) * alignment
    return Page(layer, holds, (rows, elements), dtype, num_bytes)
