"""How each layer of a model stores KV, from the fields of its configuration.

One rule covers most decoders: keys and values by head, or a latent (MLA), and a kind of attention from `layer_types` or
`sliding_window`. The families below that rule use fields of their own. An unknown type is read by the common rule, and
refused if a further field may change what is cached. `hybrid_models` reads models with recurrent layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .._common.arguments import shown
from .groups import AttentionKind, ChunkedLocal, FullAttention, SlidingWindow
from .kv_formats import KVFormat, LayerKV, LayerPart, heads_parts, indexer_part, latent_part
from .model_config import ConfigReader

_RECURRENT_KINDS = frozenset(
    {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "rwkv", "hybrid", "lightning_attention", "kda", "gdn"}
)
_RECURRENT_FIELDS = (
    "ssm_cfg", "ssm_state_size", "state_size", "mamba_d_state", "mamba_d_ssm", "mamba_num_heads", "lru_width",
    "conv_L_cache", "linear_num_value_heads", "attn_layer_period", "attn_type_list", "attention_hidden_size",
)  # fmt: skip
"""Fields that only models with recurrent layers have."""
_HEADS_BY_DEFAULT = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "olmo", "olmo2", "stablelm"})
"""Types in which a missing `num_key_value_heads` means as many as attention heads."""
_HEAD_SIZE_OF_ITS_OWN = frozenset(
    {
        "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4_text", "qwen3", "qwen3_next", "qwen3_5",
        "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "nemotron_h",
    }
)  # fmt: skip
"""Types whose default `head_dim` is not `hidden_size / num_attention_heads`."""
_ALL_SLIDE = frozenset({"mistral", "mixtral", "ministral", "phi3", "phimoe", "starcoder2"})
"""Types in which every layer has the window, if there is one."""
_FULL_LAYER_EVERY = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "gemma3n_text": 5, "cohere2": 4, "gpt_oss": 2}
"""n by type: by default, every n-th layer has full attention and the others have the window."""
_SHARE_KV = frozenset({"gemma3n_text", "gemma4_text"})
_OF_PARTS = ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim", "num_attention_heads", "hidden_size")
"""Fields that decide the parts of a layer, beside its heads and their size."""
_IMAGES_BOTH_WAYS = frozenset({"gemma3_text", "gemma4_text"})
_WHY_NOT_RECURRENT = "groups_of does not know the shapes of such a state for this type of model"


def layers_of(reader: ConfigReader, form: KVFormat) -> list[LayerKV]:
    """The KV of each layer, in order. Layers at the end that use the KV of earlier ones are left out.

    `ConfigError("config")` if a layer stores something that blocks cannot hold, or a field is not understood.
    """
    refuse_uncacheable(reader)
    family = _FAMILIES.get(reader.model_type, _common)
    layers = family(reader, form)
    reader.check_all_read()
    return layers


def refuse_uncacheable(reader: ConfigReader, *, knows_recurrent: bool = False) -> None:
    """Raise if the model has an encoder, recurrent layers, or attention to later tokens.

    `knows_recurrent`: The caller reads the recurrent layers."""
    for fields in (reader.fields, reader.outer):
        if fields.get("is_encoder_decoder"):
            raise reader.refuse("is an encoder-decoder: its KV does not depend on the token prefix alone")
    for name in ("add_cross_attention", "cross_attention_layers", "cross_attention_hidden_size"):
        if reader.fields.get(name):
            raise reader.refuse(f"has cross attention (`{name}`): its KV does not depend on the token prefix alone")
    found = "" if knows_recurrent else _recurrent_layers(reader)
    if found:
        raise reader.refuse(f"has a recurrent state ({found}): {_WHY_NOT_RECURRENT}")
    # Tokens of an image read each other in Gemma. A `KeySpan` over the image makes a block's key depend on all of them.
    harmless = (None, False, "vision") if reader.model_type in _IMAGES_BOTH_WAYS else (None, False)
    if reader.get("use_bidirectional_attention") not in harmless or reader.get("is_causal") not in (None, True):
        raise reader.refuse("attends to later tokens, so a cached key depends on more than its prefix")


def _recurrent_layers(reader: ConfigReader) -> str:
    """The layers with a recurrent state, as text; empty if there are none."""
    for name in ("layer_types", "layers_block_type", "block_types", "_block_types"):
        given = reader.fields.get(name)
        if isinstance(given, (list, tuple)):
            kinds = [str(kind) for kind in given if str(kind) in _RECURRENT_KINDS]
            if kinds:
                return f"{', '.join(sorted(set(kinds)))} in {len(kinds)} of {len(given)} layers"
    pattern = reader.fields.get("hybrid_override_pattern")
    if isinstance(pattern, str) and "M" in pattern:
        return f"Mamba in {pattern.count('M')} of {len(pattern)} layers"
    linear = reader.fields.get("linear_attn_config")
    if linear:
        layers = linear.get("kda_layers") if isinstance(linear, dict) else None
        number = f"{len(layers)} of {reader.fields.get('num_hidden_layers')}" if isinstance(layers, list) else "some"
        return f"linear attention, KDA, in {number} layers"
    named = [name for name in _RECURRENT_FIELDS if reader.fields.get(name)]
    return f"`{named[0]}` is set" if named else ""


# -- the common rule -------------------------------------------------------------------------------------------------


def _common(reader: ConfigReader, form: KVFormat) -> list[LayerKV]:
    num_layers = reader.num_layers()
    kinds = _kinds(reader, num_layers)
    parts = _own_parts(reader, form, num_layers, [layer_parts(reader, form)] * num_layers)
    return _without_sharing(reader, kinds, parts)


def _without_sharing(
    reader: ConfigReader, kinds: Sequence[AttentionKind], parts: Sequence[tuple[LayerPart, ...]]
) -> list[LayerKV]:
    layers = [LayerKV(kind, found) for kind, found in zip(kinds, parts, strict=True)]
    return layers[: len(layers) - _num_sharing_layers(reader, len(layers))]


def _own_parts(
    reader: ConfigReader, form: KVFormat, num_layers: int, parts: list[tuple[LayerPart, ...]]
) -> list[tuple[LayerPart, ...]]:
    """`parts` with those of `per_layer_config`, in which transformers 5 names the layers that have other heads."""
    given = reader.get("per_layer_config")
    if not given:
        return parts
    if not isinstance(given, Mapping):
        raise reader.refuse(f"has a `per_layer_config` that is not a table: {shown(given)}")
    parts = list(parts)
    for name, own in given.items():
        layer = int(name) if str(name).isdecimal() and len(str(name)) < 10 else -1
        if not 0 <= layer < num_layers or not isinstance(own, Mapping):
            raise reader.refuse(
                f"has a `per_layer_config` with {shown(name)}, which is not one of its {num_layers} layers"
            )
        common = {name: reader.get(name) for name in _OF_PARTS}
        fields = common | {"num_key_value_heads": _heads(reader), "head_dim": _head_size(reader), **own}
        part = ConfigReader(f"{reader.model_type}, layer {layer},", fields, fields)
        parts[layer] = layer_parts(part, form)
        part.check_all_read()
    return parts


def layer_parts(reader: ConfigReader, form: KVFormat) -> tuple[LayerPart, ...]:
    """The parts of a layer by the common rule: a latent, or keys and values by head."""
    rank = reader.optional_count("kv_lora_rank")
    if rank is not None:
        reader.ignore("num_key_value_heads", "head_dim", "v_head_dim", "qk_nope_head_dim", "qk_head_dim")
        return (latent_part(form, rank, reader.count("qk_rope_head_dim")),)
    key_size = _head_size(reader)
    return heads_parts(form, _heads(reader), key_size, reader.count("v_head_dim", key_size))


def _heads(reader: ConfigReader) -> int:
    """The number of KV heads. A null or absent field means one for each attention head, in types known for it."""
    is_known = reader.model_type in _HEADS_BY_DEFAULT or "num_key_value_heads" in reader.fields
    if reader.get("num_key_value_heads") is None and is_known:
        return reader.count("num_attention_heads")
    return reader.count("num_key_value_heads")


def _head_size(reader: ConfigReader) -> int:
    if reader.get("head_dim") is not None or reader.model_type in _HEAD_SIZE_OF_ITS_OWN:
        return reader.count("head_dim")
    hidden_size, heads = reader.count("hidden_size"), reader.count("num_attention_heads")
    if hidden_size % heads:
        raise reader.refuse(f"has no `head_dim`, and {heads} heads do not divide a `hidden_size` of {hidden_size}")
    return hidden_size // heads


def _num_sharing_layers(reader: ConfigReader, num_layers: int) -> int:
    """The layers at the end that read the KV of earlier layers and store none."""
    if reader.model_type not in _SHARE_KV or not reader.get("num_kv_shared_layers"):
        return 0
    number = reader.count("num_kv_shared_layers")
    if number >= num_layers:
        raise reader.refuse(f"has {num_layers} layers, but a `num_kv_shared_layers` of {number} leaves none with KV")
    return number


def _kinds(reader: ConfigReader, num_layers: int) -> list[AttentionKind]:
    """The attention of each layer."""
    reader.ignore("use_sliding_window", "max_window_layers", "sliding_window_pattern", "_sliding_window_pattern")
    pattern = "sliding_window_pattern" if reader.fields.get("sliding_window_pattern") else "_sliding_window_pattern"
    types = reader.per_layer("layer_types", num_layers, str)
    window = _window(reader)
    if types is not None:
        return _from_types(reader, types)
    if window is None:
        return [FullAttention()] * num_layers
    sliding = SlidingWindow(window)
    if reader.flag("use_sliding_window"):
        first = reader.get("max_window_layers")
        if type(first) is not int or first < 0:
            raise reader.refuse(
                f"uses a window, but has no valid `max_window_layers` (the first such layer): {first!r}"
            )
        return [FullAttention() if layer < first else sliding for layer in range(num_layers)]
    if reader.model_type in _ALL_SLIDE:
        return [sliding] * num_layers
    if reader.model_type in _FULL_LAYER_EVERY:
        every = reader.count(pattern, _FULL_LAYER_EVERY[reader.model_type])
        return [sliding if (layer + 1) % every else FullAttention() for layer in range(num_layers)]
    raise reader.refuse(f"has a window of {window} tokens, but neither `layer_types` nor another field says which "
                        "layers have it")  # fmt: skip


def _window(reader: ConfigReader) -> int | None:
    """The window that layers may have; None if `use_sliding_window` is off, or there is none."""
    if reader.model_type.startswith(("qwen2", "qwen3")) and not reader.flag("use_sliding_window"):
        reader.ignore("sliding_window")
        return None
    if reader.get("use_sliding_window") is False:
        reader.ignore("sliding_window")
        return None
    if "sliding_window" not in reader.fields:
        if reader.model_type in ("mistral", "ministral"):
            return 4096  # transformers' default, which a config.json may leave out
        if reader.model_type in _FULL_LAYER_EVERY:
            return reader.count("sliding_window")
    return reader.optional_count("sliding_window")


def _from_types(reader: ConfigReader, types: list[str]) -> list[AttentionKind]:
    known: dict[str, AttentionKind] = {}
    for name in dict.fromkeys(types):
        if name == "full_attention":
            known[name] = FullAttention()
        elif name == "sliding_attention":
            if reader.get("use_sliding_window") is False:
                raise reader.refuse("has layers of sliding_attention, but its `use_sliding_window` is false")
            known[name] = SlidingWindow(reader.count("sliding_window"))
        elif name == "chunked_attention":
            known[name] = ChunkedLocal(reader.count("attention_chunk_size"))
        else:
            served = "full_attention, sliding_attention and chunked_attention"
            raise reader.refuse(f"has layers of {name}; groups_of supports {served}")
    return [known[name] for name in types]


# -- families with fields of their own -------------------------------------------------------------------------------


def _gemma_4(reader: ConfigReader, form: KVFormat) -> list[LayerKV]:
    """Full layers have heads of another size. With `attention_k_eq_v` they have another number of heads, too; their
    keys and values come from one projection, but keys are rotated and values are not, so both are stored."""
    num_layers = reader.num_layers()
    types = reader.per_layer("layer_types", num_layers, str)
    if types is None or types[-1] != "full_attention":
        raise reader.refuse("has no `layer_types` that end with full_attention")
    own_heads, heads, size = reader.flag("attention_k_eq_v"), _heads(reader), _head_size(reader)
    full_size = reader.count("global_head_dim", 512)
    full_heads = reader.count("num_global_key_value_heads", heads)
    full = heads_parts(form, full_heads if own_heads else heads, full_size, full_size)
    local = heads_parts(form, heads, size, size)
    parts = [full if name == "full_attention" else local for name in types]
    return _without_sharing(reader, _from_types(reader, types), _own_parts(reader, form, num_layers, parts))


def _llama_4(reader: ConfigReader, form: KVFormat) -> list[LayerKV]:
    """Layers without rotary positions, every fourth by default, have full attention, and the others have chunks."""
    num_layers = reader.num_layers()
    types = reader.per_layer("layer_types", num_layers, str)
    every = reader.count("no_rope_layer_interval", 4)
    rotated = reader.per_layer("no_rope_layers", num_layers)  # 0: no rotary positions, whatever the name suggests
    if types is None:
        is_chunked = "attention_chunk_size" not in reader.fields or reader.get("attention_chunk_size") is not None
        rotated = rotated or [int((layer + 1) % every != 0) for layer in range(num_layers)]
        local = ChunkedLocal(reader.count("attention_chunk_size", 8192)) if is_chunked else FullAttention()
        kinds: list[AttentionKind] = [local if rotates else FullAttention() for rotates in rotated]
    else:
        kinds = _from_types(reader, types)
    parts = layer_parts(reader, form)
    return [LayerKV(kind, parts) for kind in kinds]


def _mimo_v2(reader: ConfigReader, form: KVFormat) -> list[LayerKV]:
    """Windowed layers have another number of KV heads, and values are smaller than keys.

    The reference implementation reads `sliding_window_size` tokens before a token, so its window has one more. An
    engine with the smaller window finds all that it reads.
    """
    num_layers = reader.num_layers()
    reader.ignore("attention_chunk_size")  # repeats the window
    pattern = reader.per_layer("hybrid_layer_pattern", num_layers)
    types = reader.per_layer("layer_types", num_layers, str)
    if pattern is None and types is not None:
        pattern = [int(not isinstance(kind, FullAttention)) for kind in _from_types(reader, types)]
    if pattern is None or not set(pattern) <= {0, 1}:
        raise reader.refuse("has no `hybrid_layer_pattern` of 0 (full attention) and 1 (window) for each layer")
    before = reader.optional_count("sliding_window_size")
    window = reader.count("sliding_window", before)
    heads, size = _heads(reader), _head_size(reader)
    full = LayerKV(FullAttention(), heads_parts(form, heads, size, reader.count("v_head_dim", size)))
    local_size = reader.count("swa_head_dim", size)
    values = reader.count("swa_v_head_dim", local_size)
    local = LayerKV(
        SlidingWindow(window if before is None else before + 1),
        heads_parts(form, reader.count("swa_num_key_value_heads"), local_size, values),
    )
    reader.ignore("swa_num_attention_heads", "add_swa_attention_sink_bias", "add_full_attention_sink_bias")
    return [local if is_local else full for is_local in pattern]


def _deepseek(reader: ConfigReader, form: KVFormat) -> list[LayerKV]:
    """Latents, and with an indexer (V3.2) its keys."""
    num_layers, parts = reader.num_layers(), layer_parts(reader, form)
    if reader.get("kv_lora_rank") is None:
        raise reader.refuse("has no `kv_lora_rank`, so what a latent holds is unknown")
    types = reader.per_layer("layer_types", num_layers, str)
    if types is not None and not set(types) <= {"full_attention", "indexed_attention"}:
        kinds = ", ".join(sorted(set(types)))
        raise reader.refuse(f"has layers of {kinds}; groups_of supports latents only with full attention")
    if reader.model_type == "deepseek_v32":
        parts += (indexer_part(reader.count("index_head_dim")),)
        reader.ignore("index_n_heads", "index_topk")
    return [LayerKV(FullAttention(), parts)] * num_layers


def _minimax_m3(reader: ConfigReader, form: KVFormat) -> list[LayerKV]:
    """Keys and values in every layer. Sparse layers store one index key of a token, too, in the dtype of the weights:
    it chooses which blocks a query reads, so a hit without it would choose wrong ones."""
    num_layers, parts = reader.num_layers(), layer_parts(reader, form)
    if not reader.get("sparse_attention_config"):
        return [LayerKV(FullAttention(), parts)] * num_layers
    sparse = reader.part("sparse_attention_config")
    is_sparse = sparse.per_layer("sparse_attention_freq", num_layers, allow_longer=True)
    if is_sparse is None or not sparse.flag("use_sparse_attention", default=True):
        raise reader.refuse("has a `sparse_attention_config` that does not say which layers are sparse")
    without_values = sparse.per_layer("sparse_disable_index_value", num_layers, allow_longer=True) or [0] * num_layers
    if any(on and not off for on, off in zip(is_sparse, without_values, strict=True)):
        raise reader.refuse(
            "stores index values (`sparse_disable_index_value` is 0 in a sparse layer), which aoffload cannot cache yet"
        )
    dtype = reader.dtype()
    if dtype not in ("bfloat16", "float16", "float32"):
        raise reader.refuse(f"has weights of {dtype}, so the dtype of its index keys is unknown")
    index = LayerPart("indexer keys", sparse.count("sparse_index_dim"), dtype)
    sparse.ignore(
        "sparse_num_index_heads", "sparse_block_size", "sparse_topk_blocks", "sparse_init_block",
        "sparse_local_block", "sparse_score_type",
    )  # fmt: skip
    reader.check_all_read(also=[sparse])
    return [LayerKV(FullAttention(), (*parts, index) if on else parts) for on in is_sparse]


_FAMILIES = {
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "deepseek_v32": _deepseek,
    "gemma4": _gemma_4,
    "gemma4_text": _gemma_4,
    "kimi_k2": _deepseek,
    "llama4": _llama_4,
    "llama4_text": _llama_4,
    "mimo_v2_flash": _mimo_v2,
    "minimax_m3": _minimax_m3,
}
