"""Tiny models whose outputs hang on every key and value: a config.json, and weights drawn by a seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["DENSE", "GPT_OSS", "HYBRID", "LARGER", "LATENTS", "LLAMA4", "QWEN3_NEXT", "build", "draw", "save"]

SPREAD = 0.08
"""Standard deviation of the weights. With those of `load_format="dummy"` outputs would hardly depend on KV."""
DENSE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
    "max_position_embeddings": 4096, "torch_dtype": "float32", "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LARGER = DENSE | {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 8,
}  # fmt: skip
"""Five million weights. A token costs about ten million operations, and its KV has 12 KiB."""
HYBRID = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
    "max_position_embeddings": 4096, "torch_dtype": "float32", "rms_norm_eps": 1e-6, "sliding_window": 96,
    "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 32,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
"""One layer with a window of three blocks, one that attends to everything."""
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
    "max_position_embeddings": 4096, "torch_dtype": "float32", "rms_norm_eps": 1e-5, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "num_local_experts": 4, "num_experts_per_tok": 2,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 128,
    },
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
"""Layers with a window of four blocks alternate with layers that attend to everything. Every head has an attention
sink. The experts have plain weights, not MXFP4."""

LLAMA4 = {
    "architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "hidden_size": 64, "intermediate_size": 64,
    "intermediate_size_mlp": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 512, "max_position_embeddings": 4096, "torch_dtype": "float32", "rms_norm_eps": 1e-5,
    "attention_chunk_size": 128, "no_rope_layers": [1, 1, 1, 0], "num_local_experts": 4, "num_experts_per_tok": 1,
    "layer_types": [*["chunked_attention"] * 3, "full_attention"], "interleave_moe_layer_step": 2, "use_qk_norm": True,
    "attn_temperature_tuning": True, "floor_scale": 128, "attn_scale": 0.1, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
"""Three layers that attend to chunks of four blocks, and one without positions that attends to everything. Experts in
every second layer."""

LATENTS = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 64,
    "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "topk_method": "greedy", "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32, "v_head_dim": 32, "head_dim": 64, "first_k_dense_replace": 2, "moe_layer_freq": 1,
    "vocab_size": 512, "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Latents of 512 and 64 elements, the only size that the CPU kernels know."""

QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 512,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 1,
    "linear_num_value_heads": 1, "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "mlp_only_layers": [0, 1, 2], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1, "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
"""Three layers with a recurrent state (a gated delta net), and one that attends to everything. The state of a layer is
as large as the KV of 34 tokens, so vLLM chooses blocks of 64. The CPU kernels know heads of 128 only, in bfloat16."""
SLOW_DECAY = -4.0
"""Logarithm of the speed at which a state decays: by about one percent with each token. With random weights, a state
would be forgotten after a few tokens, and outputs would not hang on it."""


def build(config: dict[str, Any], folder: Path) -> Path:
    """Write the model into `folder`, unless it is there."""
    weights = folder / "model.safetensors"
    text = json.dumps(config, indent=1)
    if weights.exists() and (folder / "config.json").read_text() == text:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(text)
    written = folder / "model.new"
    save(draw(folder), written)
    name_tokens(int(config["vocab_size"]), folder)
    written.replace(weights)
    return folder


def save(weights: dict[str, Any], file: Path) -> None:
    from safetensors.torch import save_file

    save_file(weights, file, metadata={"format": "pt"})


def draw(folder: Path) -> dict[str, Any]:
    """Weights for the configuration in `folder`, by the names of transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).state_dict()
    random = torch.Generator().manual_seed(0)
    drawn = {
        name: torch.ones(shape.shape) if _is_norm(name) else torch.randn(shape.shape, generator=random) * SPREAD
        for name, shape in shapes.items()
    }
    is_recurrent = any(name.endswith("A_log") for name in drawn)
    return _of_checkpoint(drawn) if is_recurrent else drawn


def _of_checkpoint(drawn: dict[str, Any]) -> dict[str, Any]:
    """The weights of a recurrent model, with the experts one by one, as checkpoints and vLLM have them."""
    import torch

    found: dict[str, Any] = {}
    for name, weight in drawn.items():
        experts, _, part = name.rpartition(".")
        if name.endswith("A_log"):
            found[name] = torch.full_like(weight, SLOW_DECAY)
        elif part in ("gate_up_proj", "down_proj") and experts.endswith("experts"):
            parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            for number, of_expert in enumerate(weight):
                for each, piece in zip(parts, of_expert.chunk(len(parts)), strict=True):
                    found[f"{experts}.{number}.{each}.weight"] = piece.contiguous()
        else:
            found[name] = weight
    return found


def _is_norm(name: str) -> bool:
    """Whether these weights scale a normalised vector. The models have no biases there."""
    return name.endswith("norm.weight")


def name_tokens(number: int, folder: Path) -> None:
    """A tokenizer with a word for each id, for servers that have to have one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    names = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{each}": each for each in range(3, number)}
    tokenizer = Tokenizer(WordLevel(names, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<pad>"
    )
    whole.save_pretrained(folder)
