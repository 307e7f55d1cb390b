"""Models of transformers, from a seed or from a local directory, as the kind of `PagedModel` that their layers need."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...errors import AoffloadError, ConfigError, InvalidArgument
from .decoder import DecoderConfig
from .hybrid import HybridModel, is_hybrid
from .proving import first_line
from .transformers import TransformersModel, import_transformers

WINDOW = 128
"""Window of the sliding layers in the seeded models, in tokens."""

# The config class, and its arguments besides the sizes that all seeded models share.
_SEEDED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    # Five sliding layers, then a full one: Gemma's own pattern.
    "gemma3": ("Gemma3TextConfig", {"sliding_window": WINDOW, "query_pre_attn_scalar": DecoderConfig().head_dim}),
    # Sliding and full layers alternate; number and width of the experts make it as fast as the other models.
    "gpt-oss": (
        "GptOssConfig",
        {
            "sliding_window": WINDOW,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 192,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 2.0,
                "original_max_position_embeddings": DecoderConfig().max_positions // 2,
            },
        },
    ),
    # Three layers with a recurrent state (gated delta rule), then one with full attention: Qwen3-Next's own pattern.
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            "num_hidden_layers": 8,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 192,
            "shared_expert_intermediate_size": 192,
            "pad_token_id": None,
        },
    ),
}
HALF_LIVES = (8.0, 1024.0)
"""Range of the half-lives of the recurrent states in the seeded models, in tokens, from the first head to the last one.
With the decay of usual random weights, a state is forgotten after a few tokens, and nobody would notice a lost one."""


def serve(model: Any) -> TransformersModel:
    """Take over `model`, a `PreTrainedModel`, as the kind of `PagedModel` that its layers need.

    Raises `ConfigError` naming `model` if it cannot be served.
    """
    import_transformers()
    return (HybridModel if is_hybrid(model.config.get_text_config()) else TransformersModel)(model)


def seeded(name: str, *, seed: int, device: torch.device | str = "cpu") -> TransformersModel:
    """A name of `_SEEDED`: the sizes of `DecoderConfig`, random weights in float32."""
    transformers = import_transformers()
    sizes = DecoderConfig()
    config_class, others = _SEEDED[name]
    shared = {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": sizes.max_positions,
        "initializer_range": sizes.initializer_range,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = getattr(transformers, config_class)(**(shared | others))
    # The constructor draws weights from the global generator, so restore its state afterwards.
    with torch.random.fork_rng(devices=[]):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _draw_weights(model, sizes, seed)
    has_experts = hasattr(config, "num_local_experts") or hasattr(config, "num_experts")
    if has_experts:
        try:
            model.set_experts_implementation("grouped_mm")
        except ImportError as error:  # this torch is too old for it
            raise ConfigError("model", f"{name!r} has experts: {error}") from error
    served = serve(model.to(device))
    served.has_row_experts = has_experts
    return served


def from_directory(directory: str, *, device: torch.device | str = "cpu") -> TransformersModel:
    """Load config and safetensors that `save_pretrained` wrote: no pickle, no code from the directory, no network.

    On a CPU the weights become float32, elsewhere they retain their type. Raises `InvalidArgument` naming `model`
    if the directory can't be read or its model can't compute, `ConfigError` if weights are missing or the attention
    is not supported.
    """
    transformers = import_transformers()
    try:
        return _of_directory(transformers, directory, device)
    except AoffloadError:
        raise
    except Exception as error:  # any error of transformers and torch for truncated or wrong files
        raise InvalidArgument("model", f"{directory!r} can't be loaded: {first_line(error)}") from error


def _of_directory(transformers: Any, directory: str, device: torch.device | str) -> TransformersModel:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        dtype=torch.float32 if torch.device(device).type == "cpu" else "auto",
        output_loading_info=True,
    )
    if info["missing_keys"]:
        # Transformers would draw them at random and only warn.
        raise ConfigError("model", f"{directory!r} lacks weights: {', '.join(sorted(info['missing_keys'])[:3])}…")
    for weights in model.parameters():
        weights.data = weights.data.clone()  # mapped from a file they are unaligned, and kernels round differently
    return serve(model.to(device))


def _draw_weights(model: Any, sizes: DecoderConfig, seed: int) -> None:
    """Draw all weights except the norms from `seed`. Norms are neutral already: one or zero, depending on the model."""
    generator = torch.Generator().manual_seed(seed)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                continue
            if name.endswith("A_log"):
                # The step is about softplus(0) = log 2, so a state halves in exp(-A_log) tokens.
                first, last = (-math.log(half_life) for half_life in HALF_LIVES)
                weight.copy_(torch.linspace(first, last, len(weight)))
                continue
            if weight is head:
                std = sizes.logit_std / sizes.hidden_size**0.5
            else:
                # Sinks compete with scores. If they were as small as the weights, they would all be nearly equal. The
                # weights of a convolution have no sum over many inputs that would make the outputs larger.
                std = 1.0 if name.endswith(("sinks", "conv1d.weight")) else sizes.initializer_range
            weight.normal_(0.0, std, generator=generator)
