"""Hugging Face models on paged tensors: one function registered with transformers' own attention interface is enough.

The function gets the batch and the KV tensor as keyword arguments of the forward, so no model is patched and nothing is
kept between calls. Needs the extra: `pip install aoffload[transformers]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors import ConfigError, InvalidArgument
from .decoder import DecoderConfig
from .paged import PagedBatch, paged_attention

__all__ = ["ATTENTION_NAME", "TransformersModel"]

# Without "/", "|" or "flash" in it, which transformers would read. It has no mask function of that name either, so it
# builds no mask.
ATTENTION_NAME = "aoffload_paged"

_CONFIG_CLASSES = {"llama": "LlamaConfig", "qwen3": "Qwen3Config"}
# What a layer may ask of its attention that paged_attention doesn't do: silence would mean wrong tokens.
_UNSUPPORTED_ARGUMENTS = ("sliding_window", "softcap", "s_aux", "position_bias")
# Their frequencies depend on the longest position seen so far, so a cached key is not a function of its prefix.
_UNSUPPORTED_ROPE = ("dynamic", "longrope")


class TransformersModel:
    """A `PagedModel` around a causal language model of transformers whose layers all have full attention."""

    def __init__(self, model: Any) -> None:
        """Take over `model`, a `PreTrainedModel`: its attention implementation is changed, its weights are not.

        Raises `ConfigError` naming `model` if its attention is more than a block table describes.
        """
        text = model.config.get_text_config()
        _check_supported(model, text)
        _import_transformers()
        model.set_attn_implementation(ATTENTION_NAME)
        self.model = model.eval()
        self.vocab_size: int = text.vocab_size
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        num_kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        self._block_shape = (text.num_hidden_layers, 2, num_kv_heads, head_dim)

    @classmethod
    def seeded(cls, name: str, *, seed: int, device: torch.device | str = "cpu") -> TransformersModel:
        """`"llama"` or `"qwen3"`: the sizes of `DecoderConfig`, random weights in float32."""
        transformers = _import_transformers()
        sizes = DecoderConfig()
        config = getattr(transformers, _CONFIG_CLASSES[name])(
            vocab_size=sizes.vocab_size,
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.intermediate_size,
            num_hidden_layers=sizes.num_layers,
            num_attention_heads=sizes.num_heads,
            num_key_value_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            max_position_embeddings=sizes.max_positions,
            initializer_range=sizes.initializer_range,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        # The constructor draws weights from the global generator; put it back as it was.
        with torch.random.fork_rng(devices=[]):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _draw_weights(model, sizes, seed)
        return cls(model.to(device))

    @classmethod
    def from_directory(cls, directory: str, *, device: torch.device | str = "cpu") -> TransformersModel:
        """Load what `save_pretrained` wrote, config and safetensors: no pickle, no code from there, no network.

        On a CPU the weights become float32, elsewhere they keep their type. Raises `InvalidArgument` naming `model` if
        the directory can't be read, `ConfigError` if weights are missing or the attention is not supported.
        """
        transformers = _import_transformers()
        try:
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                directory,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=torch.float32 if torch.device(device).type == "cpu" else "auto",
                output_loading_info=True,
            )
        except (OSError, ValueError) as error:
            raise InvalidArgument("model", f"{directory!r} can't be loaded: {error}") from error
        if info["missing_keys"]:
            # Transformers would draw them at random and only warn.
            raise ConfigError("model", f"{directory!r} lacks weights: {', '.join(sorted(info['missing_keys'])[:3])}…")
        for weights in model.parameters():
            weights.data = weights.data.clone()  # mapped from a file, they lie unaligned, and kernels round otherwise
        return cls(model.to(device))

    def new_kv_cache(self, num_blocks: int, block_size: int) -> torch.Tensor:
        """See `PagedModel.new_kv_cache`."""
        num_layers, two, num_kv_heads, head_dim = self._block_shape
        shape = (num_blocks, num_layers, two, block_size, num_kv_heads, head_dim)
        return torch.zeros(shape, dtype=self.model.dtype, device=self.model.device)

    def forward(self, batch: PagedBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        """See `PagedModel.forward`."""
        with torch.inference_mode():
            output = self.model(
                input_ids=batch.input_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,  # it defaults to True and would build a cache of its own beside ours
                logits_to_keep=batch.last_rows,
                paged_batch=batch,
                paged_kv_cache=kv_cache,
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
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer: query [1, heads, T, head_dim] → [1, T, heads, head_dim]."""
    for name in _UNSUPPORTED_ARGUMENTS:
        if others.get(name) is not None:
            raise ConfigError("model", f"layer {module.layer_idx} wants {name}, which paged attention doesn't do")
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    output = paged_attention(query, key, value, paged_kv_cache[:, module.layer_idx], paged_batch, scaling)
    return output[None], None


def _import_transformers() -> Any:
    """The package, knowing our attention function."""
    try:
        import transformers
    except ImportError as error:
        problem = "needs transformers, which is not installed: pip install aoffload[transformers]"
        raise ConfigError("model", problem) from error
    transformers.AttentionInterface.register(ATTENTION_NAME, _attention_function)
    return transformers


def _draw_weights(model: Any, sizes: DecoderConfig, seed: int) -> None:
    """Matrices from `seed`, everything else (the norms) one."""
    generator = torch.Generator().manual_seed(seed)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.fill_(1.0)
            else:
                std = sizes.logit_std / sizes.hidden_size**0.5 if weight is head else sizes.initializer_range
                weight.normal_(0.0, std, generator=generator)


def _check_supported(model: Any, text: Any) -> None:
    """Refuse at the door what would give wrong tokens later."""
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError("model", f"{type(model).__name__} doesn't use transformers' attention interface")
    layer_types = getattr(text, "layer_types", None)
    kinds = set(layer_types) if layer_types else {"full_attention"}
    if layer_types is None and getattr(text, "sliding_window", None) is not None:
        kinds = {"sliding_attention"}
    if kinds != {"full_attention"}:
        raise ConfigError("model", f"has layers of {', '.join(sorted(kinds))}; only full attention is supported here")
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
