"""Hugging Face models on paged tensors, through one function registered with transformers' attention interface.

The function gets the batch and the KV tensor as keyword arguments of the forward, so no model is patched and no state
is kept between calls. Needs the extra: `pip install 'aoffload[transformers]'`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..core.groups import FullAttention, SlidingWindow
from ..errors import AoffloadError, ConfigError, InvalidArgument
from ..extras import needed
from ..kinds import AttentionKind
from .attention import paged_attention
from .decoder import DecoderConfig
from .layers import LayerPlace, group_layers, places_of
from .paged import PagedBatch, SequenceSlice

__all__ = ["ATTENTION_NAME", "TransformersModel"]

# Contains no "/", "|" or "flash", which transformers would interpret. No mask function is registered under this name,
# so transformers builds no mask.
ATTENTION_NAME = "aoffload_paged"

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
}
MAX_POSITIONS = 2**31 - 1
"""`max_positions` of models that name no limit."""
# Attention arguments that paged_attention does not support; ignoring them would give wrong tokens.
_UNSUPPORTED_ARGUMENTS = ("softcap", "position_bias")
# Their frequencies depend on the longest position seen so far, so a cached key is not a function of its prefix.
_UNSUPPORTED_ROPE = ("dynamic", "longrope")


class TransformersModel:
    """A `PagedModel` around a causal language model of transformers whose layers have full or sliding attention."""

    def __init__(self, model: Any) -> None:
        """Take over `model`, a `PreTrainedModel`: its attention implementation is changed, its weights are not.

        Raises `ConfigError` naming `model` if block tables and windows do not describe its attention.
        """
        text = model.config.get_text_config()
        _check_supported(model, text)
        self.groups = group_layers(_attention_kinds(text))
        self._places = places_of(self.groups)
        _import_transformers()
        model.set_attn_implementation(ATTENTION_NAME)
        self.model = model.eval()
        self._has_row_experts = False
        self.vocab_size: int = text.vocab_size
        self.max_positions: int = getattr(text, "max_position_embeddings", None) or MAX_POSITIONS
        self.end_token_ids = _end_token_ids(model)
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        num_kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        self._block_shape = (len(self.groups[0].layers), 2, num_kv_heads, head_dim)

    @classmethod
    def seeded(cls, name: str, *, seed: int, device: torch.device | str = "cpu") -> TransformersModel:
        """`"llama"`, `"qwen3"`, `"gemma3"` or `"gpt-oss"`: the sizes of `DecoderConfig`, random weights in float32."""
        transformers = _import_transformers()
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
        # The constructor draws weights from the global generator; put it back as it was.
        with torch.random.fork_rng(devices=[]):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _draw_weights(model, sizes, seed)
        seeded = cls(model.to(device))
        if hasattr(config, "num_local_experts"):
            seeded._has_row_experts = True
            try:
                seeded.model.set_experts_implementation("grouped_mm")
            except ImportError as error:  # torch is too old for it
                raise ConfigError("model", f"{name!r} has experts: {error}") from error
        return seeded

    @classmethod
    def from_directory(cls, directory: str, *, device: torch.device | str = "cpu") -> TransformersModel:
        """Load what `save_pretrained` wrote, config and safetensors: no pickle, no code from the directory, no network.

        On a CPU the weights become float32, elsewhere they keep their type. Raises `InvalidArgument` naming `model` if
        the directory can't be read or its model can't compute, `ConfigError` if weights are missing or the attention is
        not supported.
        """
        transformers = _import_transformers()
        try:
            found = cls._of_directory(transformers, directory, device)
            found._compute_one_token()
        except AoffloadError:
            raise
        except Exception as error:  # whatever transformers and torch make of files that are cut off, or lie
            problem = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise InvalidArgument("model", f"{directory!r} can't be loaded: {problem:.300}") from error
        return found

    @classmethod
    def _of_directory(cls, transformers: Any, directory: str, device: torch.device | str) -> TransformersModel:
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
        return cls(model.to(device))

    def _compute_one_token(self) -> None:
        """Some mistakes of a config, such as a number of heads, are noticed by nobody before a forward."""
        tables = [[row] for row in range(len(self.groups))]
        batch = PagedBatch.of([SequenceSlice([0], 0, tables)], 1, self.model.device)
        self.forward(batch, self.new_kv_cache(len(self.groups), 1))

    def new_kv_cache(self, num_blocks: int, block_size: int) -> torch.Tensor:
        """See `PagedModel.new_kv_cache`."""
        group_size, two, num_kv_heads, head_dim = self._block_shape
        shape = (num_blocks, group_size, two, block_size, num_kv_heads, head_dim)
        return torch.zeros(shape, dtype=self.model.dtype, device=self.model.device)

    def forward(self, batch: PagedBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        """See `PagedModel.forward`."""
        if self._has_row_experts:
            # A grouped product multiplies all tokens of an expert together, so a row's bits depend on the other rows.
            # One product per token avoids that, but copies the experts' weights: cheap for few tokens of a small model.
            each_alone = batch.num_tokens == batch.num_sequences
            self.model.set_experts_implementation("batched_mm" if each_alone else "grouped_mm")
        with torch.inference_mode():
            output = self.model(
                input_ids=batch.input_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,  # the default, True, would build a second cache
                logits_to_keep=batch.last_rows,
                paged_batch=batch,
                paged_kv_cache=kv_cache,
                paged_places=self._places,
            )
            logits: torch.Tensor = output.logits[0].float()
            return logits


def _attention_function(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged_batch: PagedBatch,
    paged_kv_cache: torch.Tensor,
    paged_places: Mapping[int, LayerPlace],
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer: query [1, heads, T, head_dim] → [1, T, heads, head_dim]."""
    for name in _UNSUPPORTED_ARGUMENTS:
        if others.get(name) is not None:
            raise ConfigError("model", f"layer {module.layer_idx} wants {name}, which paged attention doesn't do")
    place = paged_places[module.layer_idx]
    if sliding_window != place.window:
        raise ConfigError("model", f"layer {module.layer_idx} has window {sliding_window}, its config {place.window}")
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    output = paged_attention(query, key, value, paged_kv_cache, paged_batch, place, scaling=scaling, sinks=s_aux)
    return output[None], None


def _import_transformers() -> Any:
    """Import transformers and register the attention function."""
    with needed("transformers", "the model"):
        import transformers
    transformers.AttentionInterface.register(ATTENTION_NAME, _attention_function)
    return transformers


def _draw_weights(model: Any, sizes: DecoderConfig, seed: int) -> None:
    """Draw all weights but the norms from `seed`. Norms are neutral already: one or zero, depending on the model."""
    generator = torch.Generator().manual_seed(seed)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                continue
            if weight is head:
                std = sizes.logit_std / sizes.hidden_size**0.5
            else:
                # Sinks compete with scores; drawn as small as the weights, they would all be nearly equal.
                std = 1.0 if name.endswith("sinks") else sizes.initializer_range
            weight.normal_(0.0, std, generator=generator)


def _attention_kinds(text: Any) -> list[AttentionKind]:
    """What each layer of a config reads. Raises `ConfigError` naming `model` for what a block table can't describe."""
    window = getattr(text, "sliding_window", None)
    layer_types = getattr(text, "layer_types", None)
    if layer_types is None:
        layer_types = ["full_attention" if window is None else "sliding_attention"] * text.num_hidden_layers
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ConfigError("model", f"has layers of {', '.join(sorted(unknown))}; only full and sliding ones are known")
    if "sliding_attention" not in layer_types:
        return [FullAttention() for _ in layer_types]
    if window is None:
        raise ConfigError("model", "has sliding layers and no sliding_window")
    return [FullAttention() if kind == "full_attention" else SlidingWindow(window) for kind in layer_types]


def _end_token_ids(model: Any) -> frozenset[int]:
    """The `eos_token_id` of `generation_config`, which is one id, several or none, as a set."""
    found = getattr(model.generation_config, "eos_token_id", None)
    return frozenset() if found is None else frozenset([found] if isinstance(found, int) else found)


def _check_supported(model: Any, text: Any) -> None:
    """Raise `ConfigError` for a model that would give wrong tokens."""
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError("model", f"{type(model).__name__} doesn't use transformers' attention interface")
    if getattr(text, "use_bidirectional_attention", False):
        raise ConfigError("model", "attends to later tokens, so a cached key depends on more than its prefix")
    for rope_type in _rope_types(getattr(text, "rope_parameters", None) or {}):
        if rope_type in _UNSUPPORTED_ROPE:
            raise ConfigError("model", f"has {rope_type!r} rotary positions: its keys depend on more than their prefix")


def _rope_types(parameters: Mapping[str, Any]) -> Iterator[str]:
    """The rope types in transformers' `rope_parameters`: one mapping, or one for each kind of layer."""
    for name, value in parameters.items():
        if name == "rope_type":
            yield value
        elif isinstance(value, Mapping):
            yield from _rope_types(value)
