"""The recurrent states that `groups_of` describes, beside those in the caches of transformers' models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aoffload import ModelLayout, groups_of

transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 24):
    pytest.skip("older versions lack some of these models, and keep states otherwise", allow_module_level=True)

COMMON: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LINEAR: dict[str, Any] = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 32, "mamba_expand": 2,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
TYPES = ["linear_attention"] * 3 + ["full_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "falcon_h1": MAMBA | {"head_dim": 16, "mamba_d_ssm": 128},
    "granitemoehybrid": MAMBA | {
        "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 4, "shared_intermediate_size": 32,
    },
    "kimi_linear": {
        "layer_types": TYPES, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 16, "num_local_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": EXPERTS | {"layer_types": ["conv", "full_attention"] * 2},
    "nemotron_h": {
        "layers_block_type": ["mamba", "mlp", "attention", "mamba"], "head_dim": 16, "mamba_num_heads": 8,
        "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 32,
    },
    "olmo_hybrid": LINEAR | {"layer_types": TYPES},
    "qwen3_5_moe_text": LINEAR | EXPERTS,
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR | EXPERTS,
}  # fmt: skip


def computed(kind: str) -> tuple[ModelLayout, Any, Any]:
    """The layout of a small model with random weights in bfloat16; the model; its cache after a prompt."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **COMMON | MODELS[kind])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        cache = model(input_ids=torch.arange(3, 40)[None], use_cache=True).past_key_values
    return groups_of(config, dtype="bfloat16"), model, cache


def tensors_of(cache: Any, layer: int) -> dict[str, Any]:
    found = {}
    for holds, name in (("convolution inputs", "conv_states"), ("recurrent state", "recurrent_states")):
        tensor = getattr(cache.layers[layer], name, {}).get(0)
        if tensor is not None:
            found[holds] = tensor[0]
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_states_are_those_of_transformers(kind: str) -> None:
    """The same layers have a state, in the same dtypes, and the same layers have keys and values. Transformers keeps
    one convolution input more, and the state of a delta rule with keys before values."""
    layout, _, cache = computed(kind)
    attention, recurrent = layout.layers
    numbers = range(len(cache.layers))
    assert recurrent == tuple(layer for layer in numbers if tensors_of(cache, layer))
    assert attention == tuple(layer for layer in numbers if getattr(cache.layers[layer], "keys", None) is not None)
    described: dict[int, dict[str, Any]] = {}
    for state in layout.states:
        described.setdefault(state.layer, {})[state.holds] = state
    for layer, states in described.items():
        found = tensors_of(cache, layer)
        assert found.keys() == states.keys()
        for holds, state in states.items():
            shape = tuple(found[holds].shape)
            if holds == "convolution inputs":
                shape = (shape[1] - 1, shape[0])
            elif MODELS[kind].keys() >= LINEAR.keys():
                shape = (shape[0], shape[2], shape[1])
            assert (state.shape, f"torch.{state.dtype}") == (shape, str(found[holds].dtype))


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@pytest.mark.parametrize("kind", MODELS)
def test_the_oldest_convolution_input_is_never_read(kind: str) -> None:
    """Transformers keeps as many inputs as its kernel is long. With the oldest one overwritten, the next token is the
    same; with the next one overwritten, it is not."""
    logits = []
    for columns in (0, 1, 2):
        _, model, changed = computed(kind)
        for layer in range(len(changed.layers)):
            if "convolution inputs" in tensors_of(changed, layer):
                changed.layers[layer].conv_states[0][..., :columns] = 50.0
        with torch.no_grad():
            step = {"input_ids": torch.tensor([[77]]), "position_ids": torch.tensor([[37]])}
            logits.append(model(past_key_values=changed, use_cache=True, **step).logits)
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
