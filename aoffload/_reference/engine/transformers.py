"""Hugging Face models on paged tensors, through one function registered with transformers' attention interface.

The function gets the batch and the KV tensor as keyword arguments of the forward, so no model is patched and no state
is kept between calls. Needs the extra: `pip install 'aoffload[transformers]'`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..._common.extras import needed
from ..._config.groups import AttentionKind, FullAttention, SlidingWindow
from ...errors import AoffloadError, ConfigError
from .layers import LayerGroup, LayerPlace, group_layers, places_of
from .paged import PagedBatch, paged_attention
from .proving import AttentionCall, MaskRule, first_line, prove

# Contains no "/", "|" or "flash", which transformers would interpret. No mask function is registered under this name,
# so transformers builds no mask.
ATTENTION_NAME = "aoffload_paged"
# The same attention function, for the proof: its mask function attaches its rule to the mask.
DESCRIBED_NAME = "aoffload_described"

MAX_POSITIONS = 2**31 - 1
"""`max_positions` of models that name no limit."""
# Attention arguments that paged_attention may ignore. Any other one is refused, because ignoring it would give wrong
# tokens. Arguments that request another output, such as the scores of a router, are refused, too.
_KNOWN_ARGUMENTS = {"is_causal", "dropout", "position_ids", "use_cache", "logits_to_keep"}
# Types of rotary frequencies that are the same at every length. "dynamic" and "longrope" frequencies depend on the
# longest position so far, so a cached key would not be a function of its prefix. The proof is too short to notice that,
# so types that are not listed here are refused.
_FIXED_ROPE = {"default", "linear", "llama3", "proportional", "yarn"}


class TransformersModel:
    """A `PagedModel` around a causal language model of transformers whose layers have full or sliding attention."""

    def __init__(self, model: Any) -> None:
        """Take over `model`, a `PreTrainedModel`: its attention implementation is changed, its weights are not.

        Raises `ConfigError` naming `model` if block tables and windows cannot express its attention.
        """
        try:
            self._read_config(model, model.config.get_text_config())
        except AoffloadError:
            raise
        except Exception as error:  # transformers cannot give one value for layers that differ
            raise ConfigError("model", f"has a config that does not fit all its layers: {first_line(error)}") from error
        import_transformers()
        self._own_attention = model.config._attn_implementation
        self.model = model.eval()
        self.has_row_experts = False
        """Whether the experts are computed token by token in a decode step. Set after construction."""
        model.set_attn_implementation(ATTENTION_NAME)
        self._prove()

    def _prove(self) -> None:
        prove(self)

    def _read_config(self, model: Any, text: Any) -> None:
        _check_supported(model, text, self._needs_backend_flag)
        self.groups = self._groups_of(text)
        self.places = places_of(self.groups)
        self.vocab_size: int = text.vocab_size
        self.max_positions: int = getattr(text, "max_position_embeddings", None) or MAX_POSITIONS
        self.end_token_ids = _end_token_ids(model)
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        num_kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        self._block_shape = (len(self.groups[0].layers), 2, num_kv_heads, head_dim)

    _needs_backend_flag = True
    """Whether a model must say of itself that its attention goes through transformers' attention interface."""

    def _groups_of(self, text: Any) -> tuple[LayerGroup, ...]:
        return group_layers(_attention_kinds(text))

    @contextmanager
    def own_attention(self) -> Iterator[None]:
        """See `Provable.own_attention`."""
        self.model.set_attn_implementation(self._own_attention)
        try:
            yield
        finally:
            self.model.set_attn_implementation(ATTENTION_NAME)

    def attention_calls(self, batch: PagedBatch, kv_cache: torch.Tensor) -> dict[int, AttentionCall]:
        """See `Provable.attention_calls`."""
        self.model.set_attn_implementation(DESCRIBED_NAME)
        try:
            return self._run(batch, kv_cache)[1]
        finally:
            self.model.set_attn_implementation(ATTENTION_NAME)

    def new_kv_cache(self, num_blocks: int, block_size: int) -> torch.Tensor:
        """See `PagedModel.new_kv_cache`."""
        group_size, two, num_kv_heads, head_dim = self._block_shape
        shape = (num_blocks, group_size, two, block_size, num_kv_heads, head_dim)
        return torch.zeros(shape, dtype=self.model.dtype, device=self.model.device)

    def forward(self, batch: PagedBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        """See `PagedModel.forward`."""
        if self.has_row_experts:
            # A grouped product multiplies all tokens of an expert together, so a row's bits depend on the other rows.
            # One product per token avoids that, but it copies the experts' weights, which is cheap for few tokens of a
            # small model.
            each_alone = batch.num_tokens == batch.num_sequences
            self.model.set_experts_implementation("batched_mm" if each_alone else "grouped_mm")
        return self._run(batch, kv_cache)[0]

    def _run(
        self, batch: PagedBatch, kv_cache: torch.Tensor, **more: Any
    ) -> tuple[torch.Tensor, dict[int, AttentionCall]]:
        """The logits, and the attention call of each layer. `more` goes to the model's forward."""
        calls: dict[int, AttentionCall] = {}
        with torch.inference_mode():
            output = self.model(
                input_ids=batch.input_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,  # the default, True, would build a second cache
                logits_to_keep=batch.last_rows,
                paged_batch=batch,
                paged_kv_cache=kv_cache,
                paged_places=self.places,
                paged_calls=calls,
                **more,
            )
            logits: torch.Tensor = output.logits[0].float()
        missing = self.places.keys() - calls.keys()
        if missing:
            raise ConfigError("model", f"layer {min(missing)} does not call transformers' attention interface")
        if len(logits) != batch.num_sequences:
            raise ConfigError(
                "model", "gives logits of all tokens, although only those of the last tokens are requested"
            )
        return logits, calls


def _attention_function(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    paged_batch: PagedBatch | None = None,
    paged_kv_cache: torch.Tensor | None = None,
    paged_places: Mapping[int, LayerPlace] | None = None,
    paged_calls: dict[int, AttentionCall] | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls in each layer: query [1, heads, T, head_dim] → [1, T, heads, head_dim].

    Raises `ConfigError` naming `model` for every argument that `paged_attention` would ignore.
    """
    if paged_batch is None or paged_kv_cache is None or paged_places is None or paged_calls is None:
        raise ConfigError("model", "does not pass the arguments of a forward on to its layers' attention")
    layer: Any = getattr(module, "layer_idx", None)
    place = paged_places.get(layer)
    if place is None:
        raise ConfigError("model", f"has attention in layer {layer}, which its config does not have")
    if layer in paged_calls:
        raise ConfigError(
            "model", f"layer {layer} attends twice in a forward, but a block has space for one KV per layer"
        )
    rule = getattr(attention_mask, "aoffload_rule", None)
    if attention_mask is not None and rule is None:
        raise ConfigError("model", f"layer {layer} builds its own attention mask")
    paged_calls[layer] = AttentionCall(module, rule)
    if not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        raise ConfigError("model", f"layer {layer} attends to later tokens")
    if others.get("dropout"):
        raise ConfigError("model", f"layer {layer} uses dropout: the model is in training mode")
    for name, argument in others.items():
        if argument is not None and name not in _KNOWN_ARGUMENTS and not name.startswith("output_"):
            raise ConfigError("model", f"layer {layer} uses {name}, which paged attention does not support")
    if sliding_window != place.window:
        raise ConfigError("model", f"layer {layer} has window {sliding_window}, but its config has {place.window}")
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    wanted = paged_kv_cache.shape[-2:]
    if not key.shape[1:] == value.shape[1:] == wanted:
        raise ConfigError(
            "model",
            f"layer {layer} has keys of {_heads(key.shape)} and values of {_heads(value.shape)}; all layers must have "
            f"those of the config, {_heads(wanted)}",
        )
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    output = paged_attention(query, key, value, paged_kv_cache, paged_batch, place, scaling=scaling, sinks=s_aux)
    return output[None], None


def _heads(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape[-2:]))


def _described_mask(*, mask_function: MaskRule, **_: Any) -> torch.Tensor:
    """A mask that carries its rule and masks no token."""
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    mask.aoffload_rule = mask_function  # type: ignore[attr-defined]
    return mask


def import_transformers() -> Any:
    """Import transformers and register the attention function."""
    with needed("transformers", "the model"):
        import transformers
    for name in (ATTENTION_NAME, DESCRIBED_NAME):
        transformers.AttentionInterface.register(name, _attention_function)
    transformers.AttentionMaskInterface.register(DESCRIBED_NAME, _described_mask)
    return transformers


def _attention_kinds(text: Any) -> list[AttentionKind]:
    """The attention kind of each layer of a config. Raises `ConfigError` naming `model` for attention that a block
    table can't express."""
    window = getattr(text, "sliding_window", None)
    layer_types = getattr(text, "layer_types", None)
    if layer_types is None:
        layer_types = ["full_attention" if window is None else "sliding_attention"] * text.num_hidden_layers
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ConfigError(
            "model", f"has layers of {', '.join(sorted(unknown))}; only full and sliding attention are supported"
        )
    if "sliding_attention" not in layer_types:
        return [FullAttention() for _ in layer_types]
    if window is None:
        raise ConfigError("model", "has sliding layers, but no sliding_window")
    return [FullAttention() if kind == "full_attention" else SlidingWindow(window) for kind in layer_types]


def _end_token_ids(model: Any) -> frozenset[int]:
    """The `eos_token_id` of `generation_config`, which is one id, several or none, as a set."""
    found = getattr(model.generation_config, "eos_token_id", None)
    return frozenset() if found is None else frozenset([found] if isinstance(found, int) else found)


def _check_supported(model: Any, text: Any, needs_backend_flag: bool) -> None:
    """Raise `ConfigError` for a model that would give wrong tokens."""
    if needs_backend_flag and not getattr(model, "_supports_attention_backend", False):
        raise ConfigError("model", f"{type(model).__name__} doesn't use transformers' attention interface")
    if getattr(text, "use_bidirectional_attention", False):
        raise ConfigError("model", "attends to later tokens, so a cached key depends on more than its prefix")
    for rope_type in _rope_types(getattr(text, "rope_parameters", None) or {}):
        if rope_type not in _FIXED_ROPE:
            raise ConfigError("model", f"has {rope_type!r} rotary positions, which may depend on the length so far")


def _rope_types(parameters: Mapping[str, Any]) -> Iterator[str]:
    """The rope types in transformers' `rope_parameters`: one mapping, or one for each kind of layer."""
    for name, value in parameters.items():
        if name == "rope_type":
            yield value
        elif isinstance(value, Mapping):
            yield from _rope_types(value)
