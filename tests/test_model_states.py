"""Models with recurrent layers: the tensors of a checkpoint, and the group whose blocks hold it."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from aoffload import ConfigError, FullAttention, KVCacheGroup, ModelLayout, OffloadConfig, RecurrentState, groups_of
from aoffload._config.hybrid_models import HYBRID_MODELS

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "tests/model_configs"
MIB = 2**20
INPUTS, STATE = "convolution inputs", "recurrent state"
COMMON: dict[str, Any] = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "head_dim": 16, "dtype": "bfloat16",
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 32, "mamba_d_conv": 4,
    "mamba_expand": 2,
}  # fmt: skip
KIMI = {
    "full_attn_layers": [4], "kda_layers": [1, 2, 3], "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4,
}  # fmt: skip
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 8}
TYPES = ["linear_attention"] * 3 + ["full_attention"]
SMALL: dict[str, dict[str, Any]] = {
    "bamba": MAMBA | {"attn_layer_indices": [3]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 128},
    "granitemoehybrid": MAMBA | {"layer_types": ["mamba"] * 3 + ["attention"]},
    "kimi_linear": LATENT | {"linear_attn_config": KIMI},
    "lfm2": {"conv_L_cache": 3, "full_attn_idxs": [3]},
    "lfm2_moe": {"conv_L_cache": 3, "layer_types": ["conv"] * 3 + ["full_attention"]},
    "nemotron_h": {
        "hybrid_override_pattern": "MM-ME*", "num_hidden_layers": 6, "mamba_num_heads": 8, "mamba_head_dim": 16,
        "n_groups": 2, "ssm_state_size": 32, "conv_kernel": 4,
    },
    "olmo_hybrid": LINEAR | {"layer_types": TYPES},
    "qwen3_5": LINEAR,
    "qwen3_5_moe": LINEAR,
    "qwen3_5_moe_text": LINEAR,
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR,
}  # fmt: skip
"""A model of each known type: three layers with a state and one with attention, except for Falcon H1."""


def small(model_type: str, *, without: str = "", **fields: Any) -> dict[str, Any]:
    config = COMMON | {"model_type": model_type, "num_hidden_layers": 4} | SMALL[model_type] | fields
    return {name: value for name, value in config.items() if name != without}


def known(name: str, **options: Any) -> ModelLayout:
    (path,) = CONFIGS.glob(f"*{name}.json")
    return groups_of(path, **options)


def shapes(model: ModelLayout) -> list[tuple[str, tuple[int, ...], str]]:
    """The tensors of one layer's state, which are the same in every layer."""
    by_layer: dict[int, list[Any]] = {}
    for state in model.states:
        by_layer.setdefault(state.layer, []).append((state.holds, state.shape, state.dtype))
    first, *others = by_layer.values()
    assert all(other == first for other in others)
    return first


# -- models by name --------------------------------------------------------------------------------------------------

GRANITE = {
    "model_type": "granitemoehybrid", "dtype": "bfloat16", "hidden_size": 4096, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "mamba_n_heads": 128, "mamba_d_head": 64,
    "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_expand": 2, "mamba_d_conv": 4,
    "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
}  # fmt: skip
NEMOTRON_H_8B = {
    "model_type": "nemotron_h", "dtype": "bfloat16", "hidden_size": 4096, "num_hidden_layers": 52,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64,
    "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
}  # fmt: skip
FALCON_H1_34B = {
    "model_type": "falcon_h1", "dtype": "bfloat16", "hidden_size": 5120, "num_hidden_layers": 72,
    "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 128, "mamba_d_ssm": 4096, "mamba_n_heads": 32,
    "mamba_d_head": 128, "mamba_d_state": 256, "mamba_n_groups": 2, "mamba_d_conv": 4,
}  # fmt: skip
QWEN3_NEXT_80B = {
    "model_type": "qwen3_next", "dtype": "bfloat16", "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
KIMI_FULL = [4, 8, 12, 16, 20, 24, 27]
KIMI_LINEAR_48B = {
    "model_type": "kimi_linear", "dtype": "bfloat16", "num_hidden_layers": 27, "num_attention_heads": 32,
    "hidden_size": 2304, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "linear_attn_config": {
        "full_attn_layers": KIMI_FULL, "kda_layers": [each for each in range(1, 28) if each not in KIMI_FULL],
        "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
    },
}  # fmt: skip
LFM2_1B = {
    "model_type": "lfm2", "dtype": "bfloat16", "hidden_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "conv_L_cache": 3, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "state_dtype", "mib", "token_bytes"),
    [
        pytest.param(QWEN3_NEXT_80B, "auto", 73.7, 24 * 1024, id="Qwen3-Next-80B"),
        pytest.param(KIMI_LINEAR_48B, "auto", 41.4, 7 * 576 * 2, id="Kimi-Linear-48B"),
        pytest.param(GRANITE, "bfloat16", 73.7, 16 * 1024, id="Granite-4.0-H-Small"),
        pytest.param(GRANITE, "auto", 145.7, 16 * 1024, id="Granite-4.0-H-Small in float32"),
        pytest.param(NEMOTRON_H_8B, "bfloat16", 49.4, 16 * 1024, id="Nemotron-H-8B"),
        pytest.param(FALCON_H1_34B, "bfloat16", 146.1, 144 * 1024, id="Falcon-H1-34B"),
        pytest.param(LFM2_1B, "auto", 0.08, 12 * 1024, id="LFM2-1.2B"),
    ],
)
def test_sizes_of_known_models(config: dict[str, Any], state_dtype: str, mib: float, token_bytes: int) -> None:
    """A checkpoint weighs what these models' states weigh, and a token what their layers with attention store."""
    model = groups_of(config, state_dtype=state_dtype)
    assert model.state_bytes / MIB == pytest.approx(mib, abs=0.05 if mib > 1 else 0.005)
    assert model.bytes_per_token == token_bytes


@pytest.mark.parametrize(
    ("name", "recurrent", "attention", "inputs", "state", "weighs"),
    [
        ("Qwen3.5-27B", 48, 16, (3, 10240), (48, 128, 128), 2349),
        ("Qwen3.5-397B-A17B", 45, 15, (3, 12288), (64, 128, 128), 6252),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 23, 6, (3, 6144), (64, 64, 128), 7989),
        ("Kimi-K3", 69, 24, (3, 36864), (96, 128, 128), 16253),
    ],
)
def test_hybrids_by_name(
    name: str, recurrent: int, attention: int, inputs: tuple[int, ...], state: tuple[int, ...], weighs: int
) -> None:
    """Layers with a state, layers with KV, the shapes of a state, and the tokens whose KV weighs as much."""
    model = known(name)
    assert [len(layers) for layers in model.layers] == [attention, recurrent]
    assert shapes(model) == [(INPUTS, inputs, "bfloat16"), (STATE, state, "float32")]
    assert round(model.state_bytes / model.bytes_per_token) == weighs
    assert [group.attention for group in model.groups] == [FullAttention(), RecurrentState()]
    assert not set(model.layers[0]) & set(model.layers[1])


def test_layers_have_their_own_numbers() -> None:
    """Layers with attention keep the numbers of the model, in groups, regions and views; layers of an MLP or of experts
    alone are in no group."""
    model = groups_of(small("nemotron_h"))
    assert model.layers == ((5,), (0, 1, 3))
    assert [state.layer for state in model.states] == [0, 0, 1, 1, 3, 3]
    (region,) = model.regions
    assert region.name == "layer 5 keys and values" and [view.layer for view in region.views] == [5]
    assert known("Kimi-K3").layers[0][:2] == (3, 7) and known("Kimi-K3").layers[0][-2:] == (91, 92)
    assert groups_of(small("falcon_h1")).layers == ((0, 1, 2, 3), (0, 1, 2, 3))


def test_every_known_type_has_a_small_model_and_is_listed() -> None:
    """docs/models.md lists the types that `groups_of` knows, and each is tried here."""
    page = (ROOT / "docs/models.md").read_text().partition("## Models with recurrent layers")[2].partition("\n## ")[0]
    listed = page.partition("these types: ")[2].partition(".")[0]
    assert re.findall(r"`(\w+)`", listed) == sorted(HYBRID_MODELS)
    assert set(SMALL) == set(HYBRID_MODELS)


@pytest.mark.parametrize("model_type", SMALL)
def test_the_group_of_states(model_type: str) -> None:
    """It comes last, its checkpoints lie at whole units, and its blocks are just enough for a checkpoint. The tensors
    of a checkpoint do not overlap, and each begins at a multiple of its elements."""
    model = groups_of(small(model_type), block_size=2)
    attention, group = model.groups
    assert group == KVCacheGroup("state", RecurrentState(), attention.block_size, num_rows=group.num_rows)
    assert (group.num_rows - 1) * model.block_bytes < model.state_bytes <= group.num_rows * model.block_bytes
    end = 0
    for state in model.states:
        assert state.offset >= end and state.offset % {"float32": 4, "bfloat16": 2}[state.dtype] == 0
        end = state.offset + state.num_bytes
    assert model.state_bytes == end
    assert model.bytes_per_token * attention.block_size == model.block_bytes, "a token has no checkpoint"
    assert OffloadConfig(groups=model.groups, num_host_blocks=1).groups == model.groups


def test_a_model_without_recurrent_layers_has_no_group_of_states() -> None:
    """LFM2 with attention in every layer."""
    model = groups_of(small("lfm2", full_attn_idxs=[0, 1, 2, 3]))
    assert (len(model.groups), model.states, model.state_bytes) == (1, (), 0)
    assert (known("Qwen3-8B").states, known("Qwen3-8B").state_bytes) == ((), 0)


# -- ranks and dtypes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "fields", "inputs", "state"),
    [
        ("qwen3_next", {}, (3, 2 * 8 + 2 * 16), (2, 16, 8)),
        ("granitemoehybrid", {}, (3, 4 * 16 + 2 * 32), (4, 16, 32)),
        ("granitemoehybrid", {"mamba_n_groups": 1}, (3, 4 * 16 + 2 * 32), (4, 16, 32)),
        ("kimi_linear", {}, (3, 3 * 2 * 8), (2, 8, 8)),
        ("lfm2", {}, (2, 32), None),
    ],
)
def test_ranks_divide_states(
    model_type: str, fields: dict[str, Any], inputs: tuple[int, ...], state: tuple[int, ...] | None
) -> None:
    """Two ranks have half of the heads and channels each, and one group of Mamba heads is on both."""
    model = groups_of(small(model_type, **fields), tensor_parallel_size=2)
    found = {holds: shape for holds, shape, _ in shapes(model)}
    assert found == {INPUTS: inputs, **({STATE: state} if state else {})}


@pytest.mark.parametrize(
    ("config", "size", "what"),
    [
        (small("qwen3_next"), 4, "2 key heads of linear attention"),
        (small("qwen3_next", linear_num_key_heads=8, linear_num_value_heads=4), 8, "4 value heads"),
        (small("falcon_h1"), 4, "2 groups of Mamba heads"),
        (small("falcon_h1", mamba_n_groups=1), 16, "8 Mamba heads"),
        (small("kimi_linear"), 8, "4 heads of linear attention"),
        (small("lfm2"), 128, "64 channels of a convolution"),
    ],
)
def test_ranks_that_do_not_divide_a_state_are_refused(config: dict[str, Any], size: int, what: str) -> None:
    """The ranks' checkpoints would have unequal bytes, and the rows of a checkpoint are the same on all ranks."""
    with pytest.raises(ConfigError, match=f"^tensor_parallel_size: is {size}, which does not divide the {what}"):
        groups_of(config, tensor_parallel_size=size)


def test_no_region_with_states_has_replicas() -> None:
    """Two ranks that hold the same latents, or the same KV heads, hold different heads of a state, and a block may hold
    a piece of a checkpoint. If one rank stored for both, the other one would load a wrong state."""
    for name, ranks in [("Kimi-K3", 8), ("Qwen3.5-397B-A17B", 8)]:
        model = known(name, tensor_parallel_size=ranks)
        assert model.num_replicas == 1
        assert {(region.num_replicas, region.is_replicated) for region in model.regions} == {(1, False)}


@pytest.mark.parametrize(
    ("fields", "options", "dtypes"),
    [
        ({}, {}, ("bfloat16", "float32")),
        ({"mamba_ssm_dtype": "float16"}, {}, ("bfloat16", "float16")),
        ({"mamba_ssm_cache_dtype": "torch.bfloat16"}, {}, ("bfloat16", "bfloat16")),
        ({"mamba_ssm_dtype": "float16"}, {"state_dtype": "bfloat16"}, ("bfloat16", "bfloat16")),
        ({}, {"dtype": "float32"}, ("float32", "float32")),
        ({}, {"dtype": "fp8_e4m3"}, ("bfloat16", "float32")),
    ],
)
def test_dtypes_of_states(fields: dict[str, Any], options: dict[str, Any], dtypes: tuple[str, str]) -> None:
    """The argument comes before the config, and the config before float32. Convolution inputs have the dtype of the
    model, also if KV is quantized."""
    model = groups_of(small("qwen3_next", **fields), **options)
    assert tuple(dtype for _, _, dtype in shapes(model)) == dtypes


def test_a_state_dtype_that_is_unknown_is_refused() -> None:
    """With the argument that decides it."""
    for fields in ({"mamba_ssm_dtype": "fp8"}, {"mamba_ssm_dtype": "float32", "mamba_ssm_cache_dtype": "float16"}):
        with pytest.raises(ConfigError, match=r"^state_dtype: is 'auto', but the config has `mamba_ssm_dtype` of"):
            groups_of(small("qwen3_next", **fields))
    for value in ("fp8", None, 4):
        with pytest.raises(ConfigError, match=r"^state_dtype: must be one of auto, float32, bfloat16, float16; got"):
            groups_of(known_config("Qwen3-8B"), state_dtype=value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the dtype of the inputs that its convolutions keep is unknown"):
        groups_of(small("qwen3_next", dtype="float8_e4m3fn"), dtype="fp8_e4m3")


def known_config(name: str) -> dict[str, Any]:
    (path,) = CONFIGS.glob(f"*{name}.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_every_change_of_a_checkpoint_changes_the_fingerprint() -> None:
    """No two of these checkpoints have the same bytes, so a namespace never mixes them. The KV is the same in most."""
    changed = [
        groups_of(small("qwen3_next")),
        groups_of(small("qwen3_next"), state_dtype="bfloat16"),
        groups_of(small("qwen3_next"), block_size=8),
        groups_of(small("qwen3_next", linear_conv_kernel_dim=3)),
        groups_of(small("qwen3_next", linear_num_value_heads=8)),
        groups_of(small("qwen3_next", linear_num_value_heads=8, linear_value_head_dim=8)),
        groups_of(small("qwen3_next", layer_types=[*TYPES[1:], TYPES[0]])),
        groups_of(small("qwen3_next", layer_types=[*TYPES, TYPES[0]], num_hidden_layers=5)),
    ]
    assert len({model.fingerprint for model in changed}) == len(changed)
    assert changed[0].fingerprint == groups_of(small("qwen3_next")).fingerprint == FINGERPRINT


FINGERPRINT = "qwen3_next kv=bfloat16 scales=none layout=NHD tp=1 5080197cc100cfd330b867084a82afba"


# -- how a configuration is read -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (small("qwen3_next"), small("qwen3_next", layer_types=TYPES)),
        (small("qwen3_next"), small("qwen3_next", full_attention_interval=4, use_sliding_window=False)),
        (small("granitemoehybrid"), small("granitemoehybrid", layer_types=TYPES)),
        (
            small("granitemoehybrid"),
            small("granitemoehybrid", without="layer_types", layers_block_type=["mamba"] * 3 + ["attention"]),
        ),
        (small("granitemoehybrid"), small("granitemoehybrid", mamba_d_head="auto")),
        (small("falcon_h1"), small("falcon_h1", mamba_d_ssm=None)),
        (small("falcon_h1"), small("falcon_h1", layers_block_type=["hybrid"] * 4)),
        (
            small("nemotron_h"),
            small(
                "nemotron_h",
                without="hybrid_override_pattern",
                layers_block_type=["mamba", "mamba", "mlp", "mamba", "moe", "attention"],
            ),
        ),
        (small("lfm2"), small("lfm2", without="full_attn_idxs", layer_types=["conv"] * 3 + ["full_attention"])),
        (
            small("kimi_linear"),
            small(
                "kimi_linear",
                without="linear_attn_config",
                layer_types=TYPES,
                linear_num_heads=4,
                linear_head_dim=8,
                linear_conv_kernel_dim=4,
            ),
        ),
    ],
)
def test_two_ways_to_write_one_model(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Defaults, and the names that older versions of a configuration use."""
    assert groups_of(one) == groups_of(other)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        small("granitemoehybrid", layer_types=["mamba"] * 4),
        "a recurrent state in every layer, but blocks need the KV of a layer with attention",
    ),
    (
        small("granitemoehybrid", without="layer_types"),
        "no `layer_types` or `layers_block_type` that says which layers have it",
    ),
    (small("granitemoehybrid", layer_types=["mamba"] * 3), "has 4 layers, but a `layer_types` for 3"),
    (small("granitemoehybrid", layer_types=["rwkv"] * 4), "layers of rwkv; groups_of supports .*mamba for this type"),
    (small("granitemoehybrid", mamba_d_head=8), "8 Mamba heads of 8, which do not fill a width of 128"),
    (small("granitemoehybrid", mamba_n_groups=3), "8 Mamba heads, but its 3 groups do not divide them"),
    (small("granitemoehybrid", mamba_d_conv=1), "`mamba_d_conv` of 1, so its convolution keeps no inputs"),
    (small("granitemoehybrid", mamba_of_its_own=1), "fields that may change what is cached.*: `mamba_of_its_own`"),
    (small("granitemoehybrid", without="mamba_d_state"), "has no `mamba_d_state`"),
    (small("falcon_h1", layers_block_type=["mamba"] * 4), "layers of mamba; groups_of supports hybrid"),
    (small("qwen3_next", use_sliding_window=True), "uses a window"),
    (small("qwen3_next", layer_types=["sliding_attention"] * 4), "layers of sliding_attention"),
    (small("qwen3_next", without="head_dim"), "has no `head_dim`"),
    (small("qwen3_next", is_causal=False), "attends to later tokens"),
    (small("nemotron_h", hybrid_override_pattern="MX*", num_hidden_layers=3), "layers of X; groups_of supports"),
    (small("nemotron_h", hybrid_override_pattern="M*"), "has 6 layers, but .* of 2 layers"),
    (small("nemotron_h", without="hybrid_override_pattern"), "neither a `hybrid_override_pattern` nor"),
    (small("nemotron_h", sliding_window=8), "fields that may change what is cached.*: `sliding_window`"),
    (small("bamba", attn_layer_indices=[4]), "`attn_layer_indices` is not a list of layers from 0 to 3"),
    (small("bamba", attn_layer_indices=None), "`attn_layer_indices` is not a list of layers"),
    (small("lfm2", without="full_attn_idxs"), "`full_attn_idxs` is not a list of layers"),
    (small("lfm2", conv_dim=32), "`conv_dim` other than its `hidden_size`"),
    (small("kimi_linear", without="kv_lora_rank"), "has no `kv_lora_rank`"),
    (small("kimi_linear", without="linear_attn_config"), "neither `linear_attn_config` nor `layer_types` says"),
    (small("kimi_linear", linear_attn_config=KIMI | {"kda_layers": [1, 2]}), "do not name each of 4 layers once"),
    (small("kimi_linear", linear_attn_config=KIMI | {"kda_layers": [1, 2, 3, 4]}), "do not name each of 4 layers once"),
    (small("kimi_linear", linear_attn_config=KIMI | {"kda_layers": [0, 2, 3]}), "not a list of layers from 1 to 4"),
    (small("kimi_linear", linear_attn_config=KIMI | {"num_kv_heads": 2}), "may change what is cached.*`num_kv_heads`"),
    (small("kimi_linear", layer_types=TYPES[::-1]), "`layer_types` that differ from its `linear_attn_config`"),
]


@pytest.mark.parametrize(("config", "reason"), REFUSED, ids=[reason[:50] for _, reason in REFUSED])
def test_a_hybrid_that_is_not_understood_is_refused(config: dict[str, Any], reason: str) -> None:
    """By `ConfigError("config")` with the field and the reason: a wrong shape would give a wrong state."""
    with pytest.raises(ConfigError, match=reason) as refusal:
        groups_of(config)
    assert refusal.value.argument == "config"


def test_a_checkpoint_of_too_many_blocks_is_refused() -> None:
    """The error names the block size, and the number of blocks."""
    with pytest.raises(
        ConfigError, match=r"^block_size: gives blocks of 64 bytes, .* would take .*: the limit is 1,048,576"
    ):
        groups_of(small("qwen3_next", head_dim=8, num_key_value_heads=1, linear_value_head_dim=2**18), block_size=2)


ODD_VALUES: list[Any] = [
    None,
    -1,
    0,
    1,
    3,
    2**31 - 1,
    2**40,
    1.5,
    True,
    "",
    "x",
    [],
    [0],
    [[0]],
    [1] * 4,
    ["mamba"] * 4,
    {},
    {"a": 1},
]


@pytest.mark.parametrize("model_type", SMALL)
def test_a_hybrid_with_an_odd_value_is_read_or_refused(model_type: str) -> None:
    """Whatever a field holds, the answer is a layout or `ConfigError`, and no other error."""
    for name in small(model_type):
        for value in ODD_VALUES:
            for ranks in (1, 2):
                with contextlib.suppress(ConfigError):
                    model = groups_of(small(model_type) | {name: value}, tensor_parallel_size=ranks)
                    assert model.state_bytes <= model.groups[-1].num_rows * model.block_bytes
                    assert all(size > 0 for state in model.states for size in state.shape)
