"""The groups and regions of models, from their configurations: what is stored, or why the model is refused."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aoffload import (
    ChunkedLocal,
    ConfigError,
    FullAttention,
    KVCacheGroup,
    ModelLayout,
    OffloadConfig,
    SlidingWindow,
    groups_of,
)
from proof import model_layouts

CONFIGS = Path(__file__).parent / "model_configs"
PLAIN: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
    "hidden_size": 128, "torch_dtype": "bfloat16",
}  # fmt: skip
TYPES = ["sliding_attention", "full_attention"] * 2


def known(name: str, **options: Any) -> ModelLayout:
    (path,) = CONFIGS.glob(f"*{name}.json")
    return groups_of(path, **options)


def plain(**fields: Any) -> ModelLayout:
    return groups_of(PLAIN | fields)


def kinds(model: ModelLayout) -> list[Any]:
    """The attention of each layer, by its index."""
    found = {
        layer: group.attention for group, layers in zip(model.groups, model.layers, strict=True) for layer in layers
    }
    return [found[layer] for layer in sorted(found)]


# -- known models ----------------------------------------------------------------------------------------------------


def test_the_table_of_known_models_is_what_the_code_says() -> None:
    """tests/model_layouts.md has a row for each configuration, and `python -m proof.model_layouts` writes it."""
    assert len(model_layouts.rows()) == 13
    assert model_layouts.page_with_table() == model_layouts.PAGE.read_text(), "run python -m proof.model_layouts"


@pytest.mark.parametrize(
    ("name", "attention", "bytes_per_token"),
    [
        ("Qwen3-8B", {FullAttention(): 36}, 2 * 36 * 8 * 128 * 2),
        ("Llama-3.1-8B", {FullAttention(): 32}, 2 * 32 * 8 * 128 * 2),
        ("Llama-4-Scout-17B-16E-Instruct", {ChunkedLocal(8192): 36, FullAttention(): 12}, 2 * 48 * 8 * 128 * 2),
        ("gemma-4-26B-A4B", {SlidingWindow(1024): 25, FullAttention(): 5}, 2 * (25 * 8 * 256 + 5 * 2 * 512) * 2),
        ("MiMo-V2-Flash", {FullAttention(): 9, SlidingWindow(129): 39}, (9 * 4 + 39 * 8) * (192 + 128) * 2),
        ("DeepSeek-V3", {FullAttention(): 61}, 61 * 576 * 2),
        ("DeepSeek-V3.2", {FullAttention(): 61}, 61 * (576 * 2 + 132)),
        ("MiniMax-M3", {FullAttention(): 60}, 60 * 2 * 4 * 128 * 2 + 57 * 128 * 2),
    ],
)
def test_every_layer_is_in_a_group_of_its_attention(name: str, attention: dict[Any, int], bytes_per_token: int) -> None:
    """Each layer once, in a group of its own kind; the bytes of a token are those that its layers store, unpadded."""
    model = known(name)
    assert sorted(layer for layers in model.layers for layer in layers) == list(range(sum(attention.values())))
    found = kinds(model)
    assert {kind: found.count(kind) for kind in dict.fromkeys(found)} == attention
    assert model.bytes_per_token == bytes_per_token
    assert all(
        isinstance(group, KVCacheGroup) for group in OffloadConfig(groups=model.groups, num_host_blocks=1).groups
    )


def test_llama_4_has_full_attention_in_every_fourth_layer() -> None:
    """These are the layers without rotary positions."""
    found = kinds(known("Llama-4-Scout-17B-16E-Instruct"))
    assert [layer for layer, kind in enumerate(found) if kind == FullAttention()] == list(range(3, 48, 4))


def test_blocks_of_all_groups_have_equal_bytes() -> None:
    """The kind of layer that stores fewer bytes a token has blocks of more tokens: 2 heads of 512 beside 8 of 256, and
    4 heads beside 8 whose values are smaller than keys."""
    for name in ("gemma-4-26B-A4B", "MiMo-V2-Flash"):
        model = known(name)
        sizes = {type(group.attention): group.block_size for group in model.groups}
        assert sizes == {FullAttention: 32, SlidingWindow: 16}
        for region in model.regions:
            assert {view.num_bytes for view in region.views} == {region.block_bytes}
            assert {view.group for view in region.views} == {group.name for group in model.groups}
    assert [region.name for region in known("MiMo-V2-Flash").regions][:2] == ["slot 0 keys", "slot 0 values"]
    keys, values = known("MiMo-V2-Flash").regions[:2]
    assert (keys.shape, values.shape) == ((32, 4, 192), (32, 4, 128))
    assert keys.views[-1].shape == (16, 8, 192)


def test_pages_of_deepseek_v4() -> None:
    """Sizes as in vLLM 0.32: 584 bytes a latent, pages padded to 576 bytes, blocks of 256, 64, 8 and 4 tokens; 30
    layers compress 4 tokens, 31 compress 128, and all 61 have a window. No two pages of a group overlap."""
    model = known("DeepSeek-V4-Pro", dtype="fp8_ds_mla")
    (region,) = model.regions
    assert {(repr(group.attention), group.block_size) for group in model.groups} == {
        ("FullAttention()", 256), ("SlidingWindow(window=128)", 64), ("SlidingWindow(window=128)", 8),
        ("SlidingWindow(window=8)", 4),
    }  # fmt: skip
    pages: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for group in model.groups:
        views = [view for view in region.views if view.group == group.name]
        ends = [view.offset for view in views[1:]] + [region.block_bytes]
        for view, end in zip(views, ends, strict=True):
            assert view.offset % 576 == 0 and view.offset + view.num_bytes <= end
            pages.setdefault((view.holds, view.shape), []).append(view.layer)
    counts = {key: len(layers) for key, layers in pages.items()}
    assert counts == {
        ("compressed latent", (64, 584)): 30, ("compressed latent", (2, 584)): 31, ("indexer keys", (64, 132)): 30,
        ("latent", (64, 584)): 61, ("compressor state", (4, 2048)): 30, ("indexer state", (4, 512)): 30,
        ("compressor state", (8, 1024)): 31,
    }  # fmt: skip
    assert region.block_bytes == 30 * (37440 + 8640) + 31 * 1728
    assert region.is_replicated is False
    assert known("DeepSeek-V4-Pro", tensor_parallel_size=8).regions[0].is_replicated
    with pytest.raises(ConfigError, match=r"^block_size: must be a multiple of 128"):
        known("DeepSeek-V4-Pro", block_size=64)


def test_formats_of_latents() -> None:
    """vLLM's rows of 656 bytes hold scales and rotary elements beside 512 elements of fp8."""
    (spec, index, *_) = known("DeepSeek-V3.2", dtype="fp8_ds_mla").regions
    assert (spec.name, spec.shape, spec.dtype) == ("layer 0 latent", (16, 656), "uint8")
    assert (index.name, index.shape, index.dtype) == ("layer 0 indexer keys", (16, 132), "uint8")
    assert known("DeepSeek-V3", dtype="fp8_e4m3").regions[0].shape == (16, 576)


# -- ranks, scales, layouts ------------------------------------------------------------------------------------------


def test_ranks_divide_heads_and_share_latents() -> None:
    """A rank has its share of the heads, or a copy of one; `num_replicas` counts the ranks with the same bytes."""
    for ranks, heads, replicas in [(1, 8, 1), (2, 4, 1), (8, 1, 1), (16, 1, 2), (32, 1, 4)]:
        spec = known("Llama-3.1-8B", tensor_parallel_size=ranks).regions[0]
        assert (spec.shape, spec.num_replicas, spec.is_replicated) == ((2, 16, heads, 128), replicas, False)
    one_head = groups_of(PLAIN | {"num_key_value_heads": 1}, tensor_parallel_size=8).regions[0]
    assert (one_head.num_replicas, one_head.is_replicated) == (8, True)
    for spec in known("DeepSeek-V3.2", tensor_parallel_size=8).regions:
        assert (spec.num_replicas, spec.is_replicated) == (8, True)
    replicas = [known(name, tensor_parallel_size=16).num_replicas for name in ("DeepSeek-V3.2", "Llama-3.1-8B")]
    assert replicas == [16, 2], "consecutive ranks with the same bytes in all regions"
    found = known("MiniMax-M3", tensor_parallel_size=4).regions
    assert {spec.name.partition(" ")[2].partition(" ")[2]: spec.is_replicated for spec in found} == {
        "keys and values": False, "indexer keys": True,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size: is 3, which neither divides the 8 KV heads"):
        known("Llama-3.1-8B", tensor_parallel_size=3)


def test_ranks_change_the_ratio_of_block_sizes() -> None:
    """Gemma 4 on 4 ranks: a full layer has 1 of 2 heads of 512, twice, and a sliding one 2 of 8 heads of 256. Both
    have equal bytes. Two ranks share the full layers but not the sliding ones, so the region counts as unshared."""
    model = known("gemma-4-26B-A4B", tensor_parallel_size=4)
    assert {group.block_size for group in model.groups} == {16}
    assert {region.num_replicas for region in model.regions} == {1}
    assert {region.num_replicas for region in known("gemma-4-26B-A4B", tensor_parallel_size=16).regions} == {2}


def test_scales_by_token_and_head_are_a_region() -> None:
    """In float32, beside keys and values of one byte. Where kinds of layers have other numbers of heads, the smaller
    one is padded."""
    values, scales = groups_of(PLAIN | {"num_hidden_layers": 1}, dtype="int8").regions
    assert (values.dtype, values.block_bytes) == ("int8", 2 * 16 * 2 * 16)
    assert (scales.name, scales.shape, scales.dtype) == ("layer 0 scales", (2, 16, 2), "float32")
    assert groups_of(PLAIN, dtype="int8", layout="HND").regions[1].shape == (2, 2, 16)
    gemma = known("gemma-4-26B-A4B", dtype="int8").regions[1]
    assert {view.num_bytes for view in gemma.views} == {2 * 16 * 8 * 4, 2 * 32 * 2 * 4}
    assert gemma.block_bytes == 2 * 16 * 8 * 4


def test_layers_with_a_ratio_that_is_not_whole_are_padded() -> None:
    """Three heads beside two: both have blocks of 16 tokens, as long as the larger one."""
    own = {str(layer): {"num_key_value_heads": 3} for layer in (1, 3)}
    model = plain(layer_types=TYPES, sliding_window=32, per_layer_config=own, num_attention_heads=6)
    assert {group.block_size for group in model.groups} == {16}
    for region in model.regions:
        assert sorted(view.num_bytes for view in region.views) == [2 * 16 * 2 * 16 * 2, 2 * 16 * 3 * 16 * 2]
        assert region.block_bytes == 2 * 16 * 3 * 16 * 2


# -- how a configuration is read -------------------------------------------------------------------------------------


def test_a_configuration_may_be_given_in_four_ways(tmp_path: Path) -> None:
    """As a dict, a file, its directory, or an object with `to_dict`."""
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    ways = [PLAIN, tmp_path / "config.json", str(tmp_path), SimpleNamespace(to_dict=lambda: PLAIN)]
    found = [groups_of(way) for way in ways]
    assert all(each == found[0] for each in found)
    nested = {"model_type": "llava", "text_config": {k: v for k, v in PLAIN.items() if k != "torch_dtype"}}
    assert groups_of(nested | {"dtype": "bfloat16"}) == found[0]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [FullAttention()] * 4),
        ({"sliding_window": None}, [FullAttention()] * 4),
        ({"model_type": "qwen3", "sliding_window": 9, "use_sliding_window": False}, [FullAttention()] * 4),
        ({"model_type": "qwen2", "sliding_window": 9, "max_window_layers": 2}, [FullAttention()] * 4),
        (
            {"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3},
            [FullAttention()] * 3 + [SlidingWindow(9)],
        ),
        ({"model_type": "mistral", "sliding_window": 9}, [SlidingWindow(9)] * 4),
        ({"model_type": "mistral"}, [SlidingWindow(4096)] * 4),
        ({"model_type": "mistral", "sliding_window": None}, [FullAttention()] * 4),
        ({"model_type": "gemma2", "sliding_window": 9}, [SlidingWindow(9), FullAttention()] * 2),
        (
            {"model_type": "cohere2", "sliding_window": 9, "sliding_window_pattern": 3},
            [SlidingWindow(9), SlidingWindow(9), FullAttention(), SlidingWindow(9)],
        ),
        ({"layer_types": TYPES, "sliding_window": 9}, [SlidingWindow(9), FullAttention()] * 2),
        ({"model_type": "made-up", "layer_types": TYPES, "sliding_window": 9}, [SlidingWindow(9), FullAttention()] * 2),
        (
            {"model_type": "made-up", "layer_types": ["chunked_attention"] * 4, "attention_chunk_size": 8},
            [ChunkedLocal(8)] * 4,
        ),
        (
            {"model_type": "llama4_text", "no_rope_layers": [1, 0, 0, 1], "attention_chunk_size": 8},
            [ChunkedLocal(8), FullAttention(), FullAttention(), ChunkedLocal(8)],
        ),
        ({"model_type": "llama4_text", "attention_chunk_size": None}, [FullAttention()] * 4),
        (
            {"model_type": "gemma3n_text", "layer_types": TYPES, "sliding_window": 9, "num_kv_shared_layers": 2},
            [SlidingWindow(9), FullAttention()],
        ),
    ],
)
def test_the_attention_of_each_layer(fields: dict[str, Any], expected: list[Any]) -> None:
    """As the configuration says it, by the rule of its type. Layers that share the KV of others store none."""
    assert kinds(plain(**fields)) == expected


def test_layers_with_heads_of_their_own() -> None:
    """transformers 5 writes them into `per_layer_config`, by the number of the layer."""
    own = {"0": {"head_dim": 32}, "02": {"head_dim": 32, "num_key_value_heads": 1}}
    found = plain(per_layer_config=own).regions
    assert [spec.shape for spec in found] == [(2, 16, 2, 32), (2, 16, 2, 16), (2, 16, 1, 32), (2, 16, 2, 16)]
    assert plain(per_layer_config=own, v_head_dim=8).regions[1].shape == (16, 2, 8)
    with pytest.raises(ConfigError, match="layer 2 does not store the same vectors as an earlier layer"):
        plain(per_layer_config={"2": {"head_dim": 32}}, layer_types=TYPES, sliding_window=9)


def test_heads_and_their_sizes() -> None:
    """A missing head size is the hidden size divided by the heads; missing KV heads are as many as the heads."""
    lacking = {name: value for name, value in PLAIN.items() if name not in ("head_dim", "num_key_value_heads")}
    assert groups_of(lacking).regions[0].shape == (2, 16, 8, 16)
    assert plain(v_head_dim=8).regions[1].shape == (16, 2, 8)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, r"recurrent state \(linear_attention in 3 of 4"),
    ({"layers_block_type": ["mamba", "attention"] * 2}, r"recurrent state \(mamba in 2 of 4 layers\)"),
    ({"hybrid_override_pattern": "M*M-"}, r"recurrent state \(Mamba in 2 of 4 layers\)"),
    ({"linear_attn_config": {"kda_layers": [1, 2]}}, r"recurrent state \(linear attention, KDA, in 2 of 4 layers\)"),
    ({"ssm_state_size": 16}, r"recurrent state \(`ssm_state_size` is set\): groups_of does not know the shapes"),
    ({"conv_L_cache": 3}, "recurrent state"),
    ({"is_encoder_decoder": True}, "encoder-decoder: its KV does not depend on the token prefix alone"),
    ({"cross_attention_layers": [1]}, "cross attention .*: its KV does not depend on the token prefix alone"),
    ({"use_bidirectional_attention": True}, "attends to later tokens"),
    ({"is_causal": False}, "attends to later tokens"),
    ({"layer_types": ["indexed_attention"] * 4}, "has layers of indexed_attention"),
    ({"layer_types": TYPES}, "has no `sliding_window`"),
    ({"layer_types": TYPES[:3], "sliding_window": 9}, "has 4 layers, but a `layer_types` for 3"),
    ({"layer_types": [1, 2, 3, 4]}, "has a `layer_types` that is not a list of str"),
    ({"sliding_window": 9}, "neither `layer_types` nor another field says which layers"),
    ({"sliding_window": -1}, "`sliding_window` that is not a positive integer"),
    ({"model_type": "gemma2"}, "gemma2 has no `sliding_window`"),
    ({"model_type": "qwen3", "sliding_window": 9, "use_sliding_window": True}, "no valid `max_window_layers`"),
    ({"layer_types": TYPES, "sliding_window": 9, "use_sliding_window": False}, "`use_sliding_window` is false"),
    ({"num_kv_shared_layers": 2}, "fields that may change what is cached.*: `num_kv_shared_layers`"),
    ({"compress_ratios": [4] * 4}, "fields that may change what is cached.*: `compress_ratios`"),
    ({"index_head_dim": 128}, "fields that may change what is cached.*: `index_head_dim`"),
    ({"index_topk": 64}, "fields that may change what is cached.*: `index_topk`"),
    ({"block_configs": [{"attention": {"no_op": True}}] * 4}, "fields that may change .*: `block_configs`"),
    ({"total_ut_steps": 4}, "fields that may change what is cached.*: `total_ut_steps`"),
    ({"is_causal": 0}, "attends to later tokens"),
    ({"per_layer_config": {"9" * 5000: {}}}, "has a `per_layer_config` with "),
    ({"attention_window_size": 4, "kv_repeat": 2}, "`attention_window_size`, `kv_repeat`"),
    ({"per_layer_config": {"1": {"kv_lora_rank_of_its_own": 4}}}, "layer 1, has fields that may change"),
    ({"per_layer_config": {"9": {"head_dim": 4}}}, "`per_layer_config` with '9'"),
    ({"model_type": None}, "has no `model_type`"),
    ({"num_hidden_layers": None}, "has no `num_hidden_layers`"),
    ({"num_hidden_layers": 10**6}, "has 1000000 layers"),
    ({"num_hidden_layers": "4"}, "`num_hidden_layers` that is not a positive integer: '4'"),
    ({"head_dim": None, "num_attention_heads": 7}, "7 heads do not divide a `hidden_size` of 128"),
    ({"model_type": "gemma", "head_dim": None}, "gemma has no `head_dim`"),
    ({"text_config": 5}, "`text_config` that is not a table"),
    ({"model_type": "deepseek_v3"}, "has no `kv_lora_rank`"),
    (
        {"model_type": "deepseek_v4", "sliding_window": 9, "compress_ratios": [2] * 4},
        "no `compress_ratios` of 0, 1, 4 or 128",
    ),
    ({"model_type": "mimo_v2_flash"}, "no `hybrid_layer_pattern`"),
    ({"model_type": "gemma4_text", "layer_types": TYPES[::-1], "sliding_window": 9}, "end with full_attention"),
    (
        {
            "model_type": "minimax_m3",
            "sparse_attention_config": {"sparse_attention_freq": [1] * 4, "sparse_index_dim": 8},
        },
        "stores index values .* which aoffload cannot cache yet",
    ),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED, ids=[str(fields)[:60] for fields, _ in REFUSED])
def test_a_config_that_groups_of_does_not_understand_is_refused(fields: dict[str, Any], reason: str) -> None:
    """By `ConfigError("config")` with the field and the reason: to ignore a field by mistake would give wrong KV."""
    with pytest.raises(ConfigError, match=reason) as refusal:
        plain(**fields)
    assert refusal.value.argument == "config"


@pytest.mark.parametrize(
    ("options", "argument", "problem"),
    [
        ({"block_size": 0}, "block_size", r"an integer in \[1, 65536\]"),
        ({"block_size": True}, "block_size", "an integer"),
        ({"tensor_parallel_size": 1.0}, "tensor_parallel_size", "an integer"),
        ({"dtype": "bf16"}, "dtype", "one of auto, bfloat16, float16, .*fp8_ds_mla; got 'bf16'"),
        ({"dtype": None}, "dtype", "one of auto"),
        ({"dtype": "fp8_ds_mla"}, "dtype", "a format of latents"),
        ({"scales": "per_tensor"}, "scales", "must be auto or none for bfloat16"),
        ({"dtype": "int8", "scales": "none"}, "scales", "must be auto or per_token_head for int8"),
        ({"dtype": "fp8_e4m3", "scales": ["none"]}, "scales", "must be auto or per_tensor or per_token_head"),
        ({"layout": "nhd"}, "layout", "must be NHD or HND"),
        ({"layout": None}, "layout", "must be NHD or HND"),
    ],
    ids=str,
)
def test_a_bad_argument_is_named(options: dict[str, Any], argument: str, problem: str) -> None:
    """The error names the argument and lists the valid values."""
    with pytest.raises(ConfigError, match=problem) as refusal:
        groups_of(PLAIN, **options)
    assert refusal.value.argument == argument


@pytest.mark.parametrize("config", [None, 5, b"x", [], "no/such/file.json", dict, SimpleNamespace(to_dict=lambda: 5)])
def test_an_object_that_is_no_configuration_is_refused(config: object) -> None:
    """By `ConfigError("config")`."""
    with pytest.raises(ConfigError) as refusal:
        groups_of(config)
    assert refusal.value.argument == "config"


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    """With its path."""
    for text in ("{", "[]", '"x"', "nul"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"config\.json' (is not a JSON file|does not contain a JSON object)"):
            groups_of(tmp_path / "config.json")


def test_a_checkpoint_that_quantizes_kv_needs_a_dtype() -> None:
    """ "auto" would take the dtype of the weights for blocks that an engine stores in fp8."""
    quantized = PLAIN | {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}}
    with pytest.raises(ConfigError, match=r"^dtype: is 'auto', but the checkpoint quantizes KV"):
        groups_of(quantized)
    assert groups_of(quantized, dtype="fp8_e4m3").regions[0].dtype == "float8_e4m3fn"
    with pytest.raises(
        ConfigError, match=r"^dtype: is 'auto', but the config gives no dtype of 16 or 32 bits \(None\)"
    ):
        groups_of(PLAIN | {"torch_dtype": None})


def test_latents_have_no_scales_by_head() -> None:
    """The error names the argument that is wrong."""
    for options, argument in [
        ({"dtype": "int8"}, "dtype"),
        ({"dtype": "fp8_e4m3", "scales": "per_token_head"}, "scales"),
    ]:
        with pytest.raises(ConfigError, match="no heads") as refusal:
            known("DeepSeek-V3", **options)
        assert refusal.value.argument == argument


def test_groups_of_imports_neither_torch_nor_transformers() -> None:
    """A program that plans its memory imports nothing that takes seconds."""
    code = (
        "import sys; from aoffload import groups_of; "
        f"model = groups_of({str(CONFIGS / 'Qwen--Qwen3-8B.json')!r}); "
        "assert model.block_bytes == 2359296; assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_all_that_is_stored_is_in_a_region() -> None:
    """The bytes of a block are those of its regions, and views lie within them."""
    for path in CONFIGS.glob("*.json"):
        try:
            model = groups_of(path)
        except ConfigError:
            continue
        assert model.block_bytes == sum(region.block_bytes for region in model.regions)
        for region in model.regions:
            assert math.prod(region.shape) * region.item_bytes == region.block_bytes
            assert all(view.offset + view.num_bytes <= region.block_bytes for view in region.views)


ODD_VALUES: list[Any] = [
    None,
    -1,
    0,
    1,
    3,
    2**40,
    1.5,
    True,
    "",
    "x",
    [],
    [0],
    [1] * 61,
    ["full_attention"] * 61,
    {},
    {"a": 1},
]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_a_configuration_with_an_odd_value_is_read_or_refused(path: Path) -> None:
    """Whatever a field holds, the answer is a layout or `ConfigError`, and no other error."""
    text = path.read_text()
    names = [(part, name) for part, table in _tables(json.loads(text)) for name in table]
    for part, name in names:
        for value in ODD_VALUES:
            config = json.loads(text)
            dict(_tables(config))[part][name] = value
            for options in ({}, {"dtype": "fp8_ds_mla", "tensor_parallel_size": 2}):
                with contextlib.suppress(ConfigError):
                    model = groups_of(config, **options)
                    assert all(size > 0 for region in model.regions for view in region.views for size in view.shape)


def _tables(config: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The tables of a configuration, by name."""
    found = [("", config)]
    for name, value in config.items():
        if isinstance(value, dict):
            found += [(f"{name}.{below}", table) for below, table in _tables(value)]
    return found
