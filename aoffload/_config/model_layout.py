"""The groups and regions of a model, from its configuration alone.

A block id names one row in every region, whichever group uses it. So the blocks of all groups must have equal bytes.
Layers of one kind form groups of equal numbers of layers. *Slot* `j` is the `j`-th layer of each group: these layers
share the regions of the slot, because each block belongs to only one group. A kind of layer that needs fewer bytes a
token gets blocks of more tokens.

Recurrent layers have no regions. A checkpoint of their states is one string of bytes, which lies in several blocks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import attrs

from .._common.arguments import check_int, shown
from ..errors import ConfigError
from .deepseek_v4 import BLOCK_SIZE as V4_BLOCK_SIZE
from .deepseek_v4 import PagedKind, pages_of
from .groups import (
    MAX_BLOCK_SIZE,
    MAX_ROWS,
    AttentionKind,
    ChunkedLocal,
    FullAttention,
    KVCacheGroup,
    RecurrentState,
    SlidingWindow,
)
from .hybrid_models import HYBRID_MODELS, STATE_DTYPES, StatePart, hybrid_layers_of
from .kv_formats import ITEM_BYTES, LAYOUTS, SCALES_PART, KVFormat, LayerKV
from .model_config import read_config
from .model_families import layers_of

MAX_RANKS = 65_536


@attrs.frozen
class LayerView:
    """The bytes of one layer in a block of a region, on one rank."""

    group: str
    """The name of the group whose block table the layer uses."""
    layer: int
    holds: str
    """Such as "keys and values", "latent", "indexer keys" or "scales"."""
    shape: tuple[int, ...]
    dtype: str
    """The name of the dtype in torch."""
    offset: int = 0
    """Where it begins in the block, in bytes."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@attrs.frozen
class RegionSpec:
    """A region that a model needs, described by one of its blocks on one rank."""

    name: str
    """The name, such as `layer 0 keys and values`. With several groups: `slot 0 keys and values`, because the first
    layers of all groups share slot 0."""
    shape: tuple[int, ...]
    """The shape of a block. In a group with other heads, the same bytes have another shape: see `views`."""
    dtype: str
    """The name of the dtype in torch. A tensor of `uint8` serves for each dtype of 8 bits."""
    block_bytes: int
    views: tuple[LayerView, ...]
    """The layers that store in a block: one view for each group, or several in a packed block."""
    num_replicas: int = 1
    """The number of tensor parallel ranks that hold the same bytes, such as 2 if 8 ranks share 4 KV heads."""
    is_replicated: bool = False
    """Whether there are several ranks and all hold the same bytes, such as the latents of MLA."""

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return ITEM_BYTES[self.dtype]


@attrs.frozen
class StateView:
    """The bytes of one tensor of a recurrent layer in a checkpoint, on one rank."""

    layer: int
    holds: str
    """ "convolution inputs" or "recurrent state"."""
    shape: tuple[int, ...]
    """`(kernel - 1, channels)`, or of the recurrent state: `(heads, head size, state size)` of Mamba 2, and
    `(heads, value size, key size)` of a delta rule. These are vLLM's shapes. An engine may keep the same elements in
    another order; then its namespace has to say so."""
    dtype: str
    """The name of the dtype in torch."""
    offset: int
    """Where it begins in the checkpoint, in bytes: a multiple of the bytes of an element."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@attrs.frozen
class ModelLayout:
    """The groups and regions of a model on one rank. `groups_of` makes it.

    Layers are counted from 0, without draft layers (`num_nextn_predict_layers`, `mtp_num_hidden_layers`). A model with
    recurrent layers has a last group `state`, and `states`. Layers that store nothing are in no group.
    """

    model_type: str
    groups: tuple[KVCacheGroup, ...]
    """The groups, for `OffloadConfig(groups=...)`."""
    layers: tuple[tuple[int, ...], ...]
    """The layers of each group."""
    regions: tuple[RegionSpec, ...]
    """The regions. Give all of them to a runtime (`KVRegion.of_model`), because a block id names a row in each of
    them."""
    tensor_parallel_size: int
    fingerprint: str
    """Text for `OffloadConfig.namespace`, in addition to the name of the weights. It covers everything here that
    decides the bytes of a block or of a checkpoint: dtypes, scales, layout, block size, windows, head sizes, shapes of
    states, tensor parallel size."""
    states: tuple[StateView, ...] = ()
    """The tensors of a checkpoint, one after the other. Block `i` of a checkpoint holds its bytes from `i *
    block_bytes` on. The regions hold the bytes of a block in order. The last block is not full."""

    @property
    def state_bytes(self) -> int:
        """Bytes of a checkpoint on one rank; 0 if there are no recurrent layers."""
        return self.states[-1].offset + self.states[-1].num_bytes if self.states else 0

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all regions together, on one rank."""
        return sum(region.block_bytes for region in self.regions)

    @property
    def num_replicas(self) -> int:
        """The number of consecutive ranks that hold the same bytes in every region. Pass it to `RankTransport`, which
        then stores these bytes once."""
        return math.gcd(*(region.num_replicas for region in self.regions))

    @property
    def bytes_per_token(self) -> int:
        """Bytes that the KV of a token takes on one rank, in all groups together, rounded up. Groups with a window keep
        only the last tokens. Checkpoints are not counted, because a token has none."""
        stored = [group for group in self.groups if not group.is_recurrent]
        return math.ceil(sum(Fraction(self.block_bytes, group.block_size) for group in stored))


def groups_of(
    config: object,
    *,
    block_size: int | None = None,
    dtype: str = "auto",
    scales: str = "auto",
    layout: str = "NHD",
    tensor_parallel_size: int = 1,
    state_dtype: str = "auto",
) -> ModelLayout:
    """The groups and regions of a model, from its config.json.

    - `config`: the parsed config.json, the path of the file or of its directory, or a configuration of transformers.
    - `block_size`: tokens per block, for the kind of layer that stores the most bytes per token; by default 16. Blocks
      of other kinds hold a multiple of it. For DeepSeek V4: tokens per block of compressed latents, by default 256; its
      other blocks are shorter.
    - `dtype`: "auto" (that of the weights), "bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2", "int8", or
      "fp8_ds_mla" (latents in rows that hold their scales).
    - `scales`: "auto", "none", "per_tensor", "per_token_head" (a region of float32) or "in_row".
    - `layout`: "NHD" (tokens before heads) or "HND".
    - `tensor_parallel_size`: the number of ranks among which KV heads, and the heads of recurrent layers, are divided.
    - `state_dtype`: the dtype of recurrent states: "float32", "bfloat16" or "float16". "auto": that of
      `mamba_ssm_dtype` or `mamba_ssm_cache_dtype` in the config, else float32. The inputs of convolutions have the
      dtype of the model.

    `ConfigError` names the wrong argument. For `config`, it gives the reason: a recurrent state of unknown shape, an
    encoder, or a field that decides which KV is cached and that groups_of does not know for this type. Only the
    configuration is read.
    """
    if block_size is not None:
        check_int("block_size", block_size, 1, MAX_BLOCK_SIZE, ConfigError)
    check_int("tensor_parallel_size", tensor_parallel_size, 1, MAX_RANKS, ConfigError)
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ConfigError("layout", f"must be {' or '.join(LAYOUTS)}, got {shown(layout)}")
    if not isinstance(state_dtype, str) or state_dtype not in ("auto", *STATE_DTYPES):
        raise ConfigError("state_dtype", f"must be one of auto, {', '.join(STATE_DTYPES)}; got {shown(state_dtype)}")
    reader = read_config(config)
    form = KVFormat.of(dtype, scales, reader.dtype())
    if dtype == "auto":
        for fields in (reader.fields, reader.outer):
            _check_quantization(fields.get("quantization_config"))
    if reader.model_type == "deepseek_v4":
        kinds = pages_of(reader, form, block_size or V4_BLOCK_SIZE)
        groups, layers, regions = _packed(kinds, tensor_parallel_size)
        states: tuple[StateView, ...] = ()
    elif reader.model_type in HYBRID_MODELS:
        found = hybrid_layers_of(reader, form, state_dtype, tensor_parallel_size)
        states = _state_views(found.states)
        arranged = _slotted(found.kv, block_size or 16, layout, tensor_parallel_size)
        groups, layers, regions = _with_states(arranged, states) if states else arranged
    else:
        stored = dict(enumerate(layers_of(reader, form)))
        groups, layers, regions = _slotted(stored, block_size or 16, layout, tensor_parallel_size)
        states = ()
    text = _fingerprint(reader.model_type, form, layout, tensor_parallel_size, groups, regions, states)
    return ModelLayout(reader.model_type, groups, layers, regions, tensor_parallel_size, text, states)


def _check_quantization(quantization: object) -> None:
    """Raise if the checkpoint says that KV is quantized, because "auto" would take the dtype of the weights."""
    if not isinstance(quantization, Mapping):
        return
    for name in ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_quant_config"):
        if quantization.get(name):
            raise ConfigError("dtype", f"is 'auto', but the checkpoint quantizes KV (`{name}`): give the dtype")


def _fingerprint(
    model_type: str,
    form: KVFormat,
    layout: str,
    tensor_parallel_size: int,
    groups: Sequence[KVCacheGroup],
    regions: Sequence[RegionSpec],
    states: Sequence[StateView],
) -> str:
    """A readable head, and a SHA-256 over all that decides the bytes of a block or of a checkpoint. Without states, the
    text is that of versions that knew none."""
    attentions = [(group.name, repr(group.attention), group.block_size) for group in groups]
    shapes = [(each.name, each.shape, each.dtype, each.block_bytes) for each in regions]
    views = [
        (view.group, view.layer, view.holds, view.shape, view.dtype, view.offset)
        for each in regions
        for view in each.views
    ]
    head = f"{model_type} kv={form.dtype} scales={form.scales} layout={layout} tp={tensor_parallel_size}"
    content = repr((1, head, attentions, shapes, views))
    if states:
        rows = [group.num_rows for group in groups]
        content += repr((rows, [(each.layer, each.holds, each.shape, each.dtype, each.offset) for each in states]))
    return f"{head} {hashlib.sha256(content.encode()).hexdigest()[:32]}"


# -- groups of equal bytes -------------------------------------------------------------------------------------------


def equal_groups(kinds: Sequence[AttentionKind]) -> list[tuple[str, AttentionKind, tuple[int, ...]]]:
    """Names, kinds and layers of the groups of a model whose layer `i` has the attention `kinds[i]`.

    All groups have the same number of layers: the greatest common divisor of the kinds' layer counts. Kinds are in
    order of first occurrence.

        kinds      s s s s s f s s s s s f          s: sliding, f: full
        group      0 0 1 1 2 5 2 3 3 4 4 5          two layers each
    """
    by_kind: dict[AttentionKind, list[int]] = {}
    for layer, kind in enumerate(kinds):
        by_kind.setdefault(kind, []).append(layer)
    size = math.gcd(*(len(layers) for layers in by_kind.values()))
    parts = [(k, tuple(layers[at : at + size])) for k, layers in by_kind.items() for at in range(0, len(layers), size)]
    names = _numbered([_name_of(kind) for kind, _ in parts])
    return [(name, kind, layers) for name, (kind, layers) in zip(names, parts, strict=True)]


def _name_of(kind: AttentionKind) -> str:
    names = {FullAttention: "full", SlidingWindow: "sliding", ChunkedLocal: "chunked"}
    return names.get(type(kind), type(kind).__name__.lower())


def _numbered(names: Sequence[str]) -> list[str]:
    """Names that occur several times, each with its number."""
    return [
        name if names.count(name) == 1 else f"{name}-{names[:index].count(name)}" for index, name in enumerate(names)
    ]


Arranged = tuple[tuple[KVCacheGroup, ...], tuple[tuple[int, ...], ...], tuple[RegionSpec, ...]]


def _slotted(stored: Mapping[int, LayerKV], block_size: int, layout: str, num_ranks: int) -> Arranged:
    """Groups of equal numbers of layers. A region belongs to one slot, and each group has a layer in it. `stored`: the
    KV of each layer that stores some, by the number of the layer, in order."""
    numbers = tuple(stored)
    found = [
        (name, kind, tuple(numbers[index] for index in indices))
        for name, kind, indices in equal_groups([layer.attention for layer in stored.values()])
    ]
    if len(found) > 1:
        _check_alike(stored)
    sizes = _block_sizes({kind: stored[layers[0]] for _, kind, layers in found}, block_size, num_ranks)
    regions = []
    for slot in range(len(found[0][2])):
        names = [part.holds for part in stored[found[0][2][slot]].parts]
        for number, holds in enumerate(names):
            views = []
            for name, kind, layers in found:
                part = stored[layers[slot]].parts[number]
                shape = part.shape(sizes[kind], layout, num_ranks)
                views.append(LayerView(name, layers[slot], holds, shape, part.dtype))
            copies = [stored[layers[slot]].parts[number].num_replicas(num_ranks) for _, _, layers in found]
            place = f"slot {slot}" if len(found) > 1 else f"layer {found[0][2][slot]}"
            regions.append(_slot_region(f"{place} {holds}", views, math.gcd(*copies), num_ranks))
    groups = tuple(KVCacheGroup(name, kind, sizes[kind]) for name, kind, _ in found)
    return groups, tuple(layers for _, _, layers in found), tuple(regions)


def _slot_region(name: str, views: Sequence[LayerView], num_replicas: int, num_ranks: int) -> RegionSpec:
    """The region of one slot, as long as the longest view; blocks of the other groups are padded."""
    longest = max(views, key=lambda view: view.num_bytes)
    return RegionSpec(
        name, longest.shape, longest.dtype, longest.num_bytes, tuple(views), num_replicas, 1 < num_ranks == num_replicas
    )  # fmt: skip


def _check_alike(stored: Mapping[int, LayerKV]) -> None:
    """Raise if layers store different parts, because their groups could not share regions."""
    by_kind: dict[AttentionKind, LayerKV] = {}
    for number, layer in stored.items():
        first = by_kind.setdefault(layer.attention, layer)
        if layer.parts != first.parts:
            problem = f"layer {number} does not store the same vectors as an earlier layer with {layer.attention}"
            raise ConfigError("config", f"{problem}, so the groups could not share regions")
    kinds = {tuple((part.holds, part.dtype) for part in layer.parts) for layer in stored.values()}
    if len(kinds) > 1:
        problem = "kinds of layers store different vectors, so their groups could not share regions"
        raise ConfigError("config", problem)


def _block_sizes(kinds: dict[AttentionKind, LayerKV], block_size: int, num_ranks: int) -> dict[AttentionKind, int]:
    """Tokens of a block for each kind: `block_size` for the kind with the most bytes a token, and a whole multiple of
    it for others. Scales do not decide it: they are few, and padded."""
    counted = {
        kind: [part.token_bytes(num_ranks) for part in layer.parts if part.holds != SCALES_PART]
        for kind, layer in kinds.items()
    }
    most = [max(column) for column in zip(*counted.values(), strict=True)] if len(counted) > 1 else []
    sizes = {}
    for kind, found in counted.items():
        times = min((top // own for top, own in zip(most, found, strict=True)), default=1) if most else 1
        sizes[kind] = block_size * times
        if sizes[kind] > MAX_BLOCK_SIZE:
            problem = f"is {block_size}, which gives blocks of {sizes[kind]} tokens for {kind}"
            raise ConfigError("block_size", f"{problem}: the limit is {MAX_BLOCK_SIZE}")
    return sizes


# -- states of recurrent layers ----------------------------------------------------------------------------------------


def _state_views(states: Mapping[int, Sequence[StatePart]]) -> tuple[StateView, ...]:
    """The tensors of a checkpoint, layer by layer, each at a multiple of the bytes of its elements."""
    views, end = [], 0
    for layer, parts in states.items():
        for part in parts:
            item_bytes = ITEM_BYTES[part.dtype]
            start = -(-end // item_bytes) * item_bytes
            views.append(StateView(layer, part.holds, part.shape, part.dtype, start))
            end = start + views[-1].num_bytes
    return tuple(views)


def _with_states(arranged: Arranged, states: Sequence[StateView]) -> Arranged:
    """One more group, whose checkpoints lie in blocks of the same pool.

    Ranks that hold the same KV still hold different heads of a state, and any block may hold a piece of a checkpoint.
    So no region has replicas.
    """
    groups, layers, regions = arranged
    block_bytes = sum(region.block_bytes for region in regions)
    num_rows = -(-(states[-1].offset + states[-1].num_bytes) // block_bytes)
    unit = math.lcm(*(group.block_size for group in groups))
    if num_rows > MAX_ROWS:
        problem = f"gives blocks of {block_bytes:,} bytes, and a checkpoint would take {num_rows:,} of them"
        raise ConfigError("block_size", f"{problem}: the limit is {MAX_ROWS:,}")
    group = KVCacheGroup("state", RecurrentState(), unit, num_rows=num_rows)
    alone = tuple(attrs.evolve(region, num_replicas=1, is_replicated=False) for region in regions)
    return (*groups, group), (*layers, tuple(dict.fromkeys(state.layer for state in states))), alone


# -- packed pages ------------------------------------------------------------------------------------------------------


def _packed(kinds: Sequence[PagedKind], num_ranks: int) -> Arranged:
    """Groups whose pages are packed one after the other into one region.

    A block is as long as that of the first kind. The layers of the other kinds are divided into as few groups as fit.
    Every rank holds all pages.
    """
    row_bytes = sum(page.num_bytes for page in kinds[0].pages)
    parts = [(kind, layers) for kind in kinds for layers in _divided(kind, row_bytes)]
    names = _numbered([kind.name for kind, _ in parts])
    views, longest = [], row_bytes
    for name, (kind, layers) in zip(names, parts, strict=True):
        at = 0
        for page in kind.pages:
            if page.layer in layers:
                views.append(LayerView(name, page.layer, page.holds, page.shape, page.dtype, at))
                at += page.num_bytes
        longest = max(longest, at)
    region = RegionSpec("packed pages", (longest,), "uint8", longest, tuple(views), num_ranks, num_ranks > 1)
    groups = tuple(
        KVCacheGroup(name, kind.attention, kind.block_size) for name, (kind, _) in zip(names, parts, strict=True)
    )
    return groups, tuple(layers for _, layers in parts), (region,)


def _divided(kind: PagedKind, row_bytes: int) -> list[tuple[int, ...]]:
    """The layers of a kind, in as few parts of about equal size as fit into rows of `row_bytes`."""
    by_layer: dict[int, int] = {}
    for page in kind.pages:
        by_layer[page.layer] = by_layer.get(page.layer, 0) + page.num_bytes
    layers, num_parts = tuple(by_layer), -(-sum(by_layer.values()) // row_bytes)
    while True:
        size = -(-len(layers) // num_parts)
        parts = [layers[at : at + size] for at in range(0, len(layers), size)]
        if size == 1 or all(sum(by_layer[layer] for layer in part) <= row_bytes for part in parts):
            return parts
        num_parts += 1
