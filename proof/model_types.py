"""Whether `load_model` serves each type of causal language model of the installed transformers.

    python -m proof.model_types              writes the table of tests/model_types.md (some minutes)
    python -m proof.model_types llama dbrx   prints the result for these types

A tiny model of each type is built from its config, with random weights. If `serve` accepts it, its answers
must be those of the model's own forward. This check shares no code with the proof at loading, and its prompts are
several times as long as the windows.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import attrs
import torch

from aoffload._reference.engine.hybrid import HybridModel
from aoffload._reference.engine.pretrained import serve
from aoffload._reference.engine.recurrent import RecurrentSlice
from aoffload._reference.engine.transformers import TransformersModel
from aoffload.errors import AoffloadError
from aoffload.integrations import PagedBatch, SequenceSlice

__all__ = ["PAGE", "Finding", "examine", "model_types", "page_with", "tiny_model"]

PAGE = Path(__file__).parents[1] / "tests/model_types.md"
BEGIN, END = "<!-- types: python -m proof.model_types -->\n", "<!-- end of types -->\n"
MOST_WEIGHTS = 6_000_000

# The sizes of a tiny model, under all the names that configs use for them.
_NAMES: dict[Any, str] = {
    0.08: "initializer_range",
    256: "max_position_embeddings n_positions n_ctx max_seq_len model_max_length max_target_positions context_length",
    160: "vocab_size vocab_size_per_layer_input",
    150: "unpadded_vocab_size",
    128: "mamba_d_ssm",
    100: "ngram_vocab_size_base",
    64: "hidden_size d_model n_embd emb_dim embedding_dim embedding_size input_embedding_size output_embedding_size "
    "word_embed_proj_dim lru_width attention_hidden_size max_source_positions encoder_hash_byte_group_vocab",
    48: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size dff dim_ff d_inner "
    "intermediate_size_mlp feed_forward_size dense_intermediate_size shared_intermediate_size",
    32: "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size "
    "moe_shared_expert_intermediate_size expert_ffn_hidden_size pronunciation_vocab_size shape_vocab_size",
    24: "qk_head_dim",
    16: "head_dim dim_head d_head kv_channels attention_head_size attention_head_dim global_head_dim swa_head_dim "
    "q_lora_rank kv_lora_rank qk_nope_head_dim v_head_dim index_head_dim o_lora_rank router_hidden_size mamba_d_head "
    "linear_key_head_dim linear_value_head_dim mamba_head_dim mamba_headdim linear_head_dim query_pre_attn_scalar "
    "ple_embed_dim pronunciation_embed_dim shape_embed_dim prompt_mid_dim classifier_proj_size rel_extent "
    "keep_window_size",
    12: "sliding_window sliding_window_size local_attention window_size attention_window_size attention_chunk_size",
    8: "qk_rope_head_dim rotary_dim index_topk mamba_d_state mamba_n_heads state_size ssm_state_size mamba_num_heads "
    "mamba_dt_rank time_step_rank hidden_size_per_layer_input laurel_rank d_rel hc_lowrank gated_norm_rank "
    "adapter_rank",
    6: "num_hidden_layers",
    4: "num_attention_heads n_layer n_layers num_layers decoder_layers num_decoder_layers n_head n_heads num_heads "
    "attention_heads encoder_attention_heads decoder_attention_heads num_encoder_attention_heads "
    "num_decoder_attention_heads moe_num_experts num_experts n_routed_experts num_local_experts linear_num_heads "
    "swa_num_attention_heads loop_layer_index_end",
    2: "num_key_value_heads num_kv_heads encoder_layers num_encoder_layers num_experts_per_tok num_experts_per_token "
    "moe_topk moe_k zero_expert_num index_n_heads o_groups linear_num_key_heads linear_num_value_heads n_groups "
    "n_mamba_heads swa_num_key_value_heads split_ngram_parts num_layers_per_stack loop_layer_index_start num_blocks "
    "n_input_layers n_recurrent_layers n_output_layers",
    1: "moe_num_shared_experts n_shared_experts num_shared_experts n_group topk_group num_expert_group "
    "first_k_dense_replace num_dense_layers",
}
SIZES = {name: value for value, names in _NAMES.items() for name in names.split()}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LATENT = {"head_dim": 8, "num_key_value_heads": 4}
"""Sizes for types whose keys have a separate rotary part."""
ATTEMPTS: tuple[dict[str, Any], ...] = ({}, LATENT, {"head_dim": 16, "num_key_value_heads": 2})
SHARED = {"num_hidden_layers": 12, "num_kv_shared_layers": 6}
WINDOWS = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2}

# Other values that the configs of some types need, so that a tiny model can be built.
_NEEDS: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "bamba": {"attn_layer_indices": [1, 4]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "gemma3n_text": SHARED,
    "gemma4_text": SHARED,
    "gemma4_unified_text": SHARED,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 3},
    "inkling2_loop_text": {"n_layers_per_attn_res_block": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 3},
    "mamba2": {"num_heads": 8},
    "reformer": {"is_decoder": True, "axial_pos_shape": (16, 16), "axial_pos_embds_dim": (32, 32)},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
_DECODER = {"is_decoder": True}
# Variants: types with an option that changes how they attend.
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert, `is_decoder`": ("bert", _DECODER),
    "bert-generation, `is_decoder`": ("bert-generation", _DECODER),
    "electra, `is_decoder`": ("electra", _DECODER),
    "ernie, `is_decoder`": ("ernie", _DECODER),
    "roberta, `is_decoder`": ("roberta", _DECODER),
    "roc_bert, `is_decoder`": ("roc_bert", _DECODER),
    "lfm2, `conv` layers": ("lfm2", {"layer_types": ["conv", "full_attention"] * 3}),
    "llama, `dynamic` rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "qwen2, windows": ("qwen2", WINDOWS),
    "qwen3, windows": ("qwen3", WINDOWS),
}


def model_types() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *_VARIANTS})


@attrs.frozen
class Finding:
    """The result for a type: "served", "refused" or "not built", and the reason. "wrong" means a bug of ours."""

    kind: str
    verdict: str
    reason: str = ""

    @property
    def row(self) -> str:
        return f"{self.kind} | {self.verdict} | {self.reason}\n"


def examine(kind: str) -> Finding:
    """Build a tiny model of this type, or variant, and try to serve it."""
    try:
        plain, ours = tiny_model(kind), tiny_model(kind)
    except Exception as error:  # noqa: BLE001 - transformers may raise anything for a size
        return Finding(kind, "not built", _one_line(f"{type(error).__name__}: {error}"))
    try:
        served = serve(ours)
    except AoffloadError as error:
        return Finding(kind, "refused", _one_line(str(error).removeprefix("model: ")))
    problem = difference(plain, served)
    return Finding(kind, "wrong", problem) if problem else Finding(kind, "served", _groups(served))


def difference(plain: Any, served: TransformersModel) -> str:
    """How the answers of `served` differ from those of the plain model, over two prompts of several blocks, in slices
    and some decoded tokens. Empty if they do not differ."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 150, (size,), generator=generator).tolist() for size in (61, 44)]
    num_decoded, first = 5, 23
    tables = [
        [[1 + i + 2 * (g + len(served.groups) * b) for b in range(8)] for g in range(len(served.groups))]
        for i in (0, 1)
    ]
    num_blocks = 1 + 16 * len(served.groups)
    kv_cache = served.new_kv_cache(num_blocks + _num_state_rows(served) * len(prompts), 8).fill_(torch.nan)
    with torch.inference_mode():
        wanted = [plain(input_ids=torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts]
    sizes = [len(prompt) - num_decoded for prompt in prompts]
    steps = [[(0, first), (0, first)], [(first, size) for size in sizes]]
    steps += [[(size + at, size + at + 1) for size in sizes] for at in range(num_decoded)]
    for step in steps:
        slices = [SequenceSlice(prompts[i][a:b], a, tables[i]) for i, (a, b) in enumerate(step)]
        if isinstance(served, HybridModel):
            slices = [_resuming(served, part, kv_cache, num_blocks, i) for i, part in enumerate(slices)]
        found = served.forward(PagedBatch.of(slices, 8), kv_cache)
        for i, (_, end) in enumerate(step):
            off, size = (found[i] - wanted[i][end - 1]).abs().max(), wanted[i][end - 1].std()
            if not off <= 2e-3 * size or found[i].argmax() != wanted[i][end - 1].argmax():
                return f"after {end} tokens the logits are {float(off / size):.2g} of their size off"
    return ""


def _num_state_rows(served: TransformersModel) -> int:
    return served.states.num_rows(served.new_kv_cache(1, 8)) if isinstance(served, HybridModel) else 0


def _resuming(
    served: HybridModel, part: SequenceSlice, kv_cache: torch.Tensor, first_row: int, number: int
) -> RecurrentSlice:
    """The slice with a fresh slot, which begins with the checkpoint of the slice before, and leaves one."""
    num_rows = _num_state_rows(served)
    rows = [first_row + number * num_rows + at for at in range(num_rows)]
    slot, resume = served.states.new_slot(kv_cache), rows if part.start else ()
    return RecurrentSlice(part.token_ids, part.start, part.block_ids, slot=slot, resume=resume, checkpoint=rows)


def tiny_model(kind: str) -> Any:
    """A working model of transformers of this type or variant, with random weights.

    Raises what transformers raises if none of the sizes fit.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, options = _VARIANTS.get(kind, (kind, {}))
    sizes = _sizes(AutoConfig.for_model(model_type))
    problem: Exception | None = None
    for attempt in ATTEMPTS:
        try:
            config = AutoConfig.for_model(model_type, **(sizes | attempt | _NEEDS.get(model_type, {}) | options))
            with torch.device("meta"):
                num_weights = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
            if num_weights > MOST_WEIGHTS:
                raise ValueError(f"{num_weights:,} weights")
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(3)
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
                for weight in model.parameters():
                    weight.add_(torch.randn(weight.shape) * 0.06)  # biases and norms, too
                model(input_ids=torch.arange(3, 43)[None], use_cache=False)
            return model
        except Exception as error:  # noqa: BLE001 - the next sizes may fit
            problem = problem or error
    assert problem is not None
    raise problem


def _sizes(default: Any) -> dict[str, Any]:
    """The values for a config, and for the configs inside it, under the names that its defaults use."""
    found: dict[str, Any] = {}
    for name, value in SIZES.items():
        if name in type(default).attribute_map or isinstance(getattr(type(default), name, None), property):
            continue
        old = vars(default).get(name)
        if isinstance(old, (int, float, list)) and not isinstance(old, bool):
            found[name] = value
    ids = [
        name for name, old in vars(default).items() if name.endswith(("token_id", "token_index")) and old is not None
    ]
    found |= {name: IDS.get(name, SIZES["vocab_size"] - 1 - at) for at, name in enumerate(ids)}
    for name in default.sub_configs:
        part = getattr(default, name, None)
        if part is not None:
            found[name] = _sizes(part) | _NEEDS.get(part.model_type, {}) | {"model_type": part.model_type}
    return found


def _groups(served: TransformersModel) -> str:
    windows = {group.window for group in served.groups}
    found = ["windows"] if windows - {None} else []
    found += ["recurrent states"] if isinstance(served, HybridModel) else []
    return " and ".join(found + (["full attention"] if None in windows else []))


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[:160]


def page_with(findings: list[Finding]) -> str:
    """The text of tests/model_types.md with this table in place of the old one."""
    import transformers

    text = PAGE.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    counts = [sum(each.verdict == verdict for each in findings) for verdict in ("served", "refused", "not built")]
    head = f"transformers {transformers.__version__}: {counts[0]} served, {counts[1]} refused, {counts[2]} not built.\n"
    rows = "".join(each.row for each in findings)
    return f"{before}{BEGIN}{head}\nType | Is | Why, or how it attends\n---|---|---\n{rows}{END}{after}"


def main(names: list[str]) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    findings = []
    for kind in names or model_types():
        findings.append(examine(kind))
        print(findings[-1].row, end="", flush=True)
    if not names:
        PAGE.write_text(page_with(findings))
    if any(each.verdict == "wrong" for each in findings):
        raise SystemExit("a type is served wrongly")


if __name__ == "__main__":
    main(sys.argv[1:])
