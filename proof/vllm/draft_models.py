"""Tiny models with draft layers whose drafts are accepted.

A draft layer with random weights guesses no token, and then nothing shows whether its KV is right. So draft layers have
the weights of the target's own layers. They read the next token, and compute what the target computes, but for the
first token, which no draft layer sees, and a share of the target's hidden state. Draft layers that were trained differ
from these in two ways: they are fewer than the target's layers, and the target's embeddings are not normalised.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .models import DENSE, draw, save

__all__ = ["build_eagle", "build_mtp"]

HIDDEN_SHARE = 0.02
"""How much of the target's hidden state a draft layer reads, beside the next token."""
ATTENTION_GAIN = 3.0
"""Attention counts this much more than in other models. Otherwise, its embeddings would decide each next token."""
MTP = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_size": 64, "intermediate_size": 128,
    "moe_intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "partial_rotary_factor": 0.5, "vocab_size": 512, "max_position_embeddings": 4096,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 0, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1,
    "use_qk_norm": False, "attention_bias": False, "torch_dtype": "float32", "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
"""GLM-4 with one layer, and one layer that predicts one token more."""


def build_eagle(folder: Path) -> tuple[Path, Path]:
    """Write a target and an EAGLE head for it. Returns their folders."""
    target, head = folder / "target", folder / "head"
    weights = _drawn(DENSE, target)
    save(weights, target / "model.safetensors")
    of_head = {name.removeprefix("model."): each for name, each in weights.items() if name.startswith("model.layers.")}
    del of_head["layers.0.input_layernorm.weight"]  # a head does not normalise its input
    _configure(DENSE, head)
    save(of_head | {"fc.weight": _reading(DENSE)}, head / "model.safetensors")
    return target, head


def build_mtp(folder: Path) -> Path:
    """Write a model with an MTP layer, by the names of its checkpoints."""
    import torch

    weights: dict[str, Any] = {}
    for name, each in _drawn(MTP, folder).items():
        start, _, kind = name.partition(".experts.")
        if name.endswith("e_score_correction_bias"):
            weights[name] = torch.zeros(each.shape)
        elif kind == "gate_up_proj":
            for number, expert in enumerate(each):
                gate, up = expert.chunk(2)
                weights[f"{start}.experts.{number}.gate_proj.weight"] = gate.contiguous()
                weights[f"{start}.experts.{number}.up_proj.weight"] = up.contiguous()
        elif kind == "down_proj":
            for number, expert in enumerate(each):
                weights[f"{start}.experts.{number}.down_proj.weight"] = expert.contiguous()
        else:
            weights[name] = each
    drafts = {
        name.replace("layers.0", "layers.1"): each.clone() for name, each in weights.items() if "layers.0" in name
    }
    norms = dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), torch.ones(int(MTP["hidden_size"])))  # type: ignore[call-overload]
    of_layer = {f"{name}.weight": each.clone() for name, each in norms.items()} | {
        "eh_proj.weight": _reading(MTP), "shared_head.head.weight": weights["lm_head.weight"].clone(),
        "embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
    }  # fmt: skip
    drafts |= {f"model.layers.1.{name}": each for name, each in of_layer.items()}
    save(weights | drafts, folder / "model.safetensors")
    return folder


def _configure(config: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def _drawn(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Weights of the target, with normalised embeddings and strong attention."""
    _configure(config, folder)
    weights = draw(folder)
    embeddings = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = embeddings / embeddings.pow(2).mean(-1, keepdim=True).sqrt()
    return {name: each * ATTENTION_GAIN if "o_proj" in name else each for name, each in weights.items()}


def _reading(config: dict[str, Any]) -> Any:
    """The matrix with which a draft layer reads the next token's embedding and the target's hidden state."""
    import torch

    identity = torch.eye(int(config["hidden_size"]))
    return torch.cat([identity, HIDDEN_SHARE * identity], dim=1)
