"""Models with recurrent layers beside attention: which layers store KV, and the tensors of a recurrent state.

A recurrent layer keeps one state of fixed size for each request. It has two tensors: the last inputs of a short
convolution, and the recurrent state itself (of Mamba 2, or of a gated delta rule). A layer of LFM2 has only the first.

Shapes and their division among ranks follow vLLM (`MambaStateShapeCalculator`):

- The convolution keeps `kernel - 1` inputs of each channel, in the dtype of the model. A cache of transformers keeps
  one input more, which no later token reads.
- Ranks divide the heads. If a Mamba layer has one group, each rank has a copy of it. More groups are divided.

The dtype of the recurrent state is that of the argument `state_dtype`, else that of the field `mamba_ssm_dtype` or
`mamba_ssm_cache_dtype`, else float32. vLLM reads the same fields; where a config has neither, it uses float32 for Kimi
and Nemotron-H and the dtype of the model for the others. Transformers always keeps float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from .._common.arguments import shown
from ..errors import ConfigError
from .groups import FullAttention
from .kv_formats import KVFormat, LayerKV
from .model_config import ConfigReader
from .model_families import layer_parts, refuse_uncacheable

STATE_DTYPES = ("float32", "bfloat16", "float16")
_STATE_DTYPE_FIELDS = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
CONVOLUTION, STATE = "convolution inputs", "recurrent state"


@attrs.frozen
class StatePart:
    """A tensor of the state of one layer, on one rank."""

    holds: str
    """ "convolution inputs" or "recurrent state"."""
    shape: tuple[int, ...]
    dtype: str


@attrs.frozen
class HybridLayers:
    """What the layers of a model store, by the number of the layer. A layer may store KV, a state, both or neither."""

    kv: dict[int, LayerKV]
    states: dict[int, tuple[StatePart, ...]]


@attrs.frozen
class StateFormat:
    """The dtypes of states, and the number of ranks that divide their heads."""

    conv_dtype: str
    dtype: str
    num_ranks: int

    @classmethod
    def of(cls, reader: ConfigReader, form: KVFormat, state_dtype: str, num_ranks: int) -> StateFormat:
        """`form`: the format of KV. If KV is not quantized, the model computes in its dtype, so the inputs of the
        convolution have it, too."""
        conv = form.dtype if form.dtype in STATE_DTYPES else reader.dtype()
        if conv not in STATE_DTYPES:
            raise reader.refuse(
                f"has weights of {conv}, so the dtype of the inputs that its convolutions keep is unknown"
            )
        return cls(conv, _state_dtype(reader, state_dtype), num_ranks)

    def share(self, what: str, number: int) -> int:
        """The part of `number` on one rank. `ConfigError("tensor_parallel_size")` if the parts are unequal."""
        if number % self.num_ranks:
            problem = f"is {self.num_ranks}, which does not divide the {number} {what}"
            raise ConfigError("tensor_parallel_size", f"{problem}, so the ranks would have unequal states")
        return number // self.num_ranks

    def convolution(self, reader: ConfigReader, kernel_field: str, channels: int) -> StatePart:
        """The last inputs of `channels` channels, for a kernel of the length that `kernel_field` gives."""
        kernel = reader.count(kernel_field)
        if kernel < 2:
            raise reader.refuse(f"has a `{kernel_field}` of {kernel}, so its convolution keeps no inputs")
        return StatePart(CONVOLUTION, (kernel - 1, channels), self.conv_dtype)

    def state(self, *shape: int) -> StatePart:
        return StatePart(STATE, shape, self.dtype)


def _state_dtype(reader: ConfigReader, state_dtype: str) -> str:
    given = {name: reader.get(name) for name in _STATE_DTYPE_FIELDS}
    if state_dtype != "auto":
        return state_dtype
    found = {str(value).removeprefix("torch.") for value in given.values() if value is not None}
    if len(found) > 1 or not found <= set(STATE_DTYPES):
        fields = " and ".join(f"`{name}` of {shown(value)}" for name, value in given.items() if value is not None)
        raise ConfigError("state_dtype", f"is 'auto', but the config has {fields}: give {', '.join(STATE_DTYPES)}")
    return found.pop() if found else "float32"


def hybrid_layers_of(reader: ConfigReader, form: KVFormat, state_dtype: str, num_ranks: int) -> HybridLayers:
    """The KV and the states of a model whose type is one of `HYBRID_MODELS`.

    `ConfigError("config")` if no layer stores KV, if no layer has a state, or if a field is not understood.
    """
    refuse_uncacheable(reader, knows_recurrent=True)
    found = HYBRID_MODELS[reader.model_type](reader, form, StateFormat.of(reader, form, state_dtype, num_ranks))
    reader.check_all_read()
    if not found.kv:
        raise reader.refuse("has a recurrent state in every layer, but blocks need the KV of a layer with attention")
    return found


# -- which layers are of which kind ----------------------------------------------------------------------------------

_FULL, _RECURRENT, _NOTHING = "attention", "recurrent", "nothing"
_KINDS = {"full_attention": _FULL, "attention": _FULL, "linear_attention": _RECURRENT}
_MAMBA = _KINDS | {"mamba": _RECURRENT}
_NEMOTRON = _MAMBA | {"moe": _NOTHING, "mlp": _NOTHING}
_LFM2 = {"full_attention": _FULL, "conv": _RECURRENT}
_PATTERN = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}


def _kinds(reader: ConfigReader, names: Sequence[str], known: dict[str, str]) -> list[str]:
    strange = sorted(set(names) - known.keys())
    if strange:
        problem = f"has a recurrent state and layers of {', '.join(strange)}"
        raise reader.refuse(f"{problem}; groups_of supports {', '.join(known)} for this type of model")
    return [known[name] for name in names]


def _given_kinds(reader: ConfigReader, *fields: str) -> list[str]:
    """The names of the layers' kinds, from the first of these fields that the config has."""
    num_layers = reader.num_layers()
    for name in fields:
        names = reader.per_layer(name, num_layers, str)
        if names is not None:
            reader.ignore(*fields)
            return names
    raise reader.refuse(f"has a recurrent state, but no `{'` or `'.join(fields)}` that says which layers have it")


def _layer_numbers(reader: ConfigReader, name: str, numbers: range) -> set[int]:
    """The layers that a field lists, of which each is one of `numbers`."""
    given = reader.get(name)
    if not isinstance(given, (list, tuple)) or any(type(layer) is not int or layer not in numbers for layer in given):
        problem = f"has a recurrent state, but its `{name}` is not a list of layers from {numbers[0]} to {numbers[-1]}"
        raise reader.refuse(f"{problem}: {shown(given)}")
    return set(given)


def _arranged(
    reader: ConfigReader, kinds: Sequence[str], form: KVFormat, state: Callable[[], tuple[StatePart, ...]]
) -> HybridLayers:
    """All layers with attention store the same KV, and all recurrent ones have states of the same shapes."""
    stored = LayerKV(FullAttention(), layer_parts(reader, form))
    parts = state()
    return HybridLayers(
        {layer: stored for layer, kind in enumerate(kinds) if kind == _FULL},
        {layer: parts for layer, kind in enumerate(kinds) if kind == _RECURRENT},
    )


def _refuse_windows(reader: ConfigReader) -> None:
    """Qwen's fields for windows, which no hybrid of Qwen uses."""
    if reader.flag("use_sliding_window"):
        raise reader.refuse("has a recurrent state and uses a window (`use_sliding_window`)")
    reader.ignore("sliding_window", "max_window_layers")


# -- states ------------------------------------------------------------------------------------------------------------


def _gated_delta(reader: ConfigReader, states: StateFormat) -> tuple[StatePart, ...]:
    """A gated delta net: the convolution runs over queries, keys and values; the state maps keys to values."""
    key_heads, value_heads = reader.count("linear_num_key_heads"), reader.count("linear_num_value_heads")
    key_size, value_size = reader.count("linear_key_head_dim"), reader.count("linear_value_head_dim")
    keys = states.share("key heads of linear attention", key_heads)
    values = states.share("value heads of linear attention", value_heads)
    channels = 2 * keys * key_size + values * value_size
    return (
        states.convolution(reader, "linear_conv_kernel_dim", channels),
        states.state(values, value_size, key_size),
    )


def _mamba_2(
    reader: ConfigReader, states: StateFormat, heads: int, head_size: int, fields: tuple[str, str, str]
) -> tuple[StatePart, ...]:
    """`fields`: the names of those with the number of groups, the size of the state, and the kernel's length. The
    convolution runs over the inputs of all heads, and B and C of all groups."""
    groups, state_size = reader.count(fields[0]), reader.count(fields[1])
    if heads % groups:
        raise reader.refuse(f"has {heads} Mamba heads, but its {groups} groups do not divide them")
    own_heads = states.share("Mamba heads", heads)
    own_groups = 1 if groups == 1 else states.share("groups of Mamba heads", groups)
    channels = own_heads * head_size + 2 * own_groups * state_size
    return (states.convolution(reader, fields[2], channels), states.state(own_heads, head_size, state_size))


def _mamba_2_by_width(reader: ConfigReader, states: StateFormat, width_field: str = "") -> tuple[StatePart, ...]:
    """Mamba 2 in configs that give the width of all heads together: in `width_field`, or as a multiple of the hidden
    size."""
    reader.ignore("mamba_expand")
    width = reader.optional_count(width_field) if width_field else None
    if width is None:
        width = reader.count("mamba_expand") * reader.count("hidden_size")
    heads = reader.count("mamba_n_heads")
    head_size = width // heads if reader.get("mamba_d_head") == "auto" else reader.count("mamba_d_head")
    if heads * head_size != width:
        raise reader.refuse(f"has {heads} Mamba heads of {head_size}, which do not fill a width of {width}")
    reader.ignore(
        "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "mamba_norm_before_gate", "mamba_rms_norm",
        "mamba_use_mlp", "ssm_multipliers", "ssm_in_multiplier", "ssm_out_multiplier",
    )  # fmt: skip
    return _mamba_2(reader, states, heads, head_size, ("mamba_n_groups", "mamba_d_state", "mamba_d_conv"))


# -- families --------------------------------------------------------------------------------------------------------


def _qwen(reader: ConfigReader, form: KVFormat, states: StateFormat) -> HybridLayers:
    """Qwen3-Next and Qwen3.5: gated delta nets, and full attention in every fourth layer by default."""
    num_layers = reader.num_layers()
    names = reader.per_layer("layer_types", num_layers, str)
    every = reader.count("full_attention_interval", 4)
    if names is None:
        names = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(num_layers)]
    _refuse_windows(reader)
    return _arranged(reader, _kinds(reader, names, _KINDS), form, lambda: _gated_delta(reader, states))


def _olmo(reader: ConfigReader, form: KVFormat, states: StateFormat) -> HybridLayers:
    """Olmo Hybrid: gated delta nets, and full attention."""
    names = _given_kinds(reader, "layer_types")
    reader.ignore(
        "linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor",
        "linear_allow_neg_eigval",
    )  # fmt: skip
    return _arranged(reader, _kinds(reader, names, _KINDS), form, lambda: _gated_delta(reader, states))


def _granite(reader: ConfigReader, form: KVFormat, states: StateFormat) -> HybridLayers:
    """Granite 4: Mamba 2, and few layers with attention."""
    names = _given_kinds(reader, "layer_types", "layers_block_type")
    return _arranged(reader, _kinds(reader, names, _MAMBA), form, lambda: _mamba_2_by_width(reader, states))


def _bamba(reader: ConfigReader, form: KVFormat, states: StateFormat) -> HybridLayers:
    """Bamba: Mamba 2, and the layers with attention by their numbers."""
    num_layers = reader.num_layers()
    full = _layer_numbers(reader, "attn_layer_indices", range(num_layers))
    kinds = [_FULL if layer in full else _RECURRENT for layer in range(num_layers)]
    return _arranged(reader, kinds, form, lambda: _mamba_2_by_width(reader, states))


def _falcon_h1(reader: ConfigReader, form: KVFormat, states: StateFormat) -> HybridLayers:
    """Falcon H1: every layer has both, attention and Mamba 2."""
    num_layers = reader.num_layers()
    for name in ("layer_types", "layers_block_type"):
        names = reader.per_layer(name, num_layers, str)
        if names is not None:
            _kinds(reader, names, {"hybrid": _FULL})
    parts = LayerKV(FullAttention(), layer_parts(reader, form))
    state = _mamba_2_by_width(reader, states, "mamba_d_ssm")
    return HybridLayers(dict.fromkeys(range(num_layers), parts), dict.fromkeys(range(num_layers), state))


def _nemotron_h(reader: ConfigReader, form: KVFormat, states: StateFormat) -> HybridLayers:
    """Nemotron-H and Nemotron 3: Mamba 2, attention, and layers of an MLP or of experts alone, which store nothing."""
    names = reader.get("layers_block_type") or reader.get("layer_types")
    pattern = reader.get("hybrid_override_pattern")
    if names is None and isinstance(pattern, str):
        names = [_PATTERN.get(letter, letter) for letter in pattern]
    if not isinstance(names, (list, tuple)) or not names or any(type(name) is not str for name in names):
        problem = "has a recurrent state, but neither a `hybrid_override_pattern` nor `layers_block_type`"
        raise reader.refuse(f"{problem} says which layers have it")
    if reader.get("num_hidden_layers") is not None and reader.num_layers() != len(names):
        raise reader.refuse(f"has {reader.num_layers()} layers, but lists the kinds of {len(names)} layers")
    reader.ignore(
        "mtp_hybrid_override_pattern", "mtp_layers_block_type", "mtp_layer_types", "chunk_size", "use_conv_bias",
        "mamba_hidden_act", "mamba_proj_bias", "use_mamba_kernels",
    )  # fmt: skip
    fields = ("n_groups", "ssm_state_size", "conv_kernel")
    return _arranged(
        reader,
        _kinds(reader, names, _NEMOTRON),
        form,
        lambda: _mamba_2(reader, states, reader.count("mamba_num_heads"), reader.count("mamba_head_dim"), fields),
    )


def _lfm2(reader: ConfigReader, form: KVFormat, states: StateFormat) -> HybridLayers:
    """LFM2: gated short convolutions, which have no recurrent state beside their last inputs."""
    num_layers, width = reader.num_layers(), reader.count("hidden_size")
    names = reader.per_layer("layer_types", num_layers, str)
    reader.ignore("full_attn_idxs")
    if names is None:
        full = _layer_numbers(reader, "full_attn_idxs", range(num_layers))
        names = ["full_attention" if layer in full else "conv" for layer in range(num_layers)]
    for name in ("conv_dim", "conv_dim_out"):
        if reader.count(name, width) != width:
            raise reader.refuse(f"has a `{name}` other than its `hidden_size`, which groups_of does not support")
    reader.ignore("conv_bias", "conv_use_xavier_init")
    channels = states.share("channels of a convolution", width)
    return _arranged(
        reader,
        _kinds(reader, names, _LFM2),
        form,
        lambda: (states.convolution(reader, "conv_L_cache", channels),),
    )


def _kimi(reader: ConfigReader, form: KVFormat, states: StateFormat) -> HybridLayers:
    """Kimi Linear and Kimi K3: Kimi delta attention (KDA), and latents (MLA).

    `linear_attn_config` counts layers from 1. Latents have the same bytes whether or not they are rotated
    (`mla_use_nope`).
    """
    num_layers = reader.num_layers()
    if reader.get("kv_lora_rank") is None:
        raise reader.refuse("has no `kv_lora_rank`, so what a latent holds is unknown")
    reader.ignore("mla_use_nope", "mla_use_output_gate", "qk_head_dim", "activation_situ_linear_beta")
    names = reader.per_layer("layer_types", num_layers, str)
    names_of = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    linear = reader
    if reader.get("linear_attn_config"):
        reader.ignore(*names_of)
        linear, names_of = reader.part("linear_attn_config"), ("num_heads", "head_dim", "short_conv_kernel_size")
        named = _kimi_layers(linear, num_layers)
        if names is not None and names != named:
            raise reader.refuse("has `layer_types` that differ from its `linear_attn_config`")
        names = named
    if names is None:
        raise reader.refuse("has a recurrent state, but neither `linear_attn_config` nor `layer_types` says which "
                            "layers have it")  # fmt: skip
    heads, head_size = linear.count(names_of[0]), linear.count(names_of[1])
    own = states.share("heads of linear attention", heads)
    state = (
        states.convolution(linear, names_of[2], 3 * own * head_size),
        states.state(own, head_size, head_size),
    )
    found = _arranged(reader, _kinds(reader, names, _KINDS), form, lambda: state)
    reader.check_all_read(also=[linear])
    return found


def _kimi_layers(linear: ConfigReader, num_layers: int) -> list[str]:
    """The kind of each layer, from the two lists of `linear_attn_config`, which together name each layer once."""
    numbers = range(1, num_layers + 1)
    full, recurrent = (_layer_numbers(linear, name, numbers) for name in ("full_attn_layers", "kda_layers"))
    if full & recurrent or len(full | recurrent) != num_layers:
        raise linear.refuse(f"has a recurrent state, but its two lists do not name each of {num_layers} layers once")
    return ["full_attention" if layer in full else "linear_attention" for layer in numbers]


HYBRID_MODELS: dict[str, Callable[[ConfigReader, KVFormat, StateFormat], HybridLayers]] = {
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granite,
    "kimi_linear": _kimi,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "nemotron_h": _nemotron_h,
    "olmo_hybrid": _olmo,
    "qwen3_5": _qwen,
    "qwen3_5_moe": _qwen,
    "qwen3_5_moe_text": _qwen,
    "qwen3_5_text": _qwen,
    "qwen3_next": _qwen,
}
"""Types of models with recurrent layers of which the shapes follow from the config."""
