"""Models of transformers in which some layers have a recurrent state: Qwen3-Next, Granite 4, Falcon-H1, LFM2.

Attention layers run over the KV tensor like those of any other model. A recurrent layer has no such interface: its
module takes the states from the cache object of transformers, and it computes sequences of equal length only, because
padding would advance the states. So `HybridModel` replaces the `forward` of these modules (in the instance; the class
is unchanged) by a function that calls the module once for each sequence of a batch, with a cache that contains the
sequence's slot. The other layers compute on the packed tokens of all sequences.

The recurrent modules are found by watching which module asks the cache for states. No model is known by name. What a
module does with a state that it did not compute itself is proven at construction, see `proving_states`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from ..._config.groups import AttentionKind, FullAttention, SlidingWindow
from ...errors import AoffloadError, ConfigError
from .layers import LayerGroup, group_layers
from .paged import PagedBatch, Span
from .proving import AttentionCall, first_line, ordinary_ids, prove
from .proving_states import RecurrentProbe, prove_resuming
from .recurrent import Slot, StateLayout, recurrent_slices
from .transformers import TransformersModel

RECURRENT_TYPES = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
"""`layer_types` of transformers whose layers have a recurrent state. Hybrid layers have attention, too."""
ATTENTION_TYPES = {"full_attention", "sliding_attention", "hybrid", "hybrid_sliding"}
NO_CACHE_TYPES = {"mlp", "moe"}
NUM_LEARNING_TOKENS = 30
"""Tokens of the forward from which the layout of the states is learned."""


def is_hybrid(text: Any) -> bool:
    """Whether a config of transformers has layers with a recurrent state."""
    return bool(RECURRENT_TYPES.intersection(getattr(text, "layer_types", None) or ()))


class HybridModel(TransformersModel):
    """A `PagedModel` around a causal language model with recurrent layers.

    All slices of a batch are `RecurrentSlice`. A slice of `n` tokens leaves its slot `n` tokens further. After a
    forward that raised, the slots of its slices are broken.
    """

    states: StateLayout
    """The states of a sequence; `states.new_slot(kv_cache)` makes a slot."""
    mixers: Mapping[int, Any]
    """The recurrent module of each layer that has a state."""

    def __init__(self, model: Any) -> None:
        """As `TransformersModel`. Also raises `ConfigError` naming `model` if a layer cannot resume from its state."""
        try:
            with torch.inference_mode():
                learned = _learn(model.eval())
                self.states, self.mixers = learned.layout, learned.mixers
                prove_resuming(
                    learned.mixers, learned.inputs, learned.layout, functools.partial(self._compute, learned)
                )
        except (AoffloadError, MemoryError):
            raise
        except Exception as error:  # the model's code may raise anything in a call that it was not written for
            if not ATTENTION_TYPES.intersection(model.config.get_text_config().layer_types):
                raise _no_attention() from error
            raise ConfigError("model", f"can't compute its recurrent layers in slices: {first_line(error)}") from error
        for mixer in self.mixers.values():
            mixer.forward = functools.partial(_by_sequence, mixer.forward)
        self._cache_name = learned.cache_name
        super().__init__(model)

    _needs_backend_flag = False  # most of these models lack it, and the proof shows what it promises

    def _prove(self) -> None:
        prove(self, RecurrentProbe)

    def _groups_of(self, text: Any) -> tuple[LayerGroup, ...]:
        kinds = _attention_kinds(text)
        if not kinds:
            raise _no_attention()
        layers = list(kinds)
        groups = group_layers(list(kinds.values()))
        return tuple(attrs.evolve(each, layers=tuple(layers[at] for at in each.layers)) for each in groups)

    def _run(
        self, batch: PagedBatch, kv_cache: torch.Tensor, **more: Any
    ) -> tuple[torch.Tensor, dict[int, AttentionCall]]:
        parts = recurrent_slices(batch.slices)
        for part in parts:
            part.enter(kv_cache)
        caches = [None if part.slot is None else self._cache_of(part.slot, part.start) for part in parts]
        packed = PackedStates(list(zip(batch.spans, caches, strict=True)))
        result = super()._run(batch, kv_cache, **more, **{self._cache_name: packed})
        missing = self.mixers.keys() - packed.computed
        if missing:
            raise ConfigError("model", f"layer {min(missing)} does not compute its recurrent state")
        with torch.inference_mode():
            for part in parts:
                part.leave(kv_cache)
        return result

    def _compute(self, learned: _Learned, mixer: Any, hidden: torch.Tensor, slot: Slot) -> torch.Tensor:
        """Call one recurrent module by itself."""
        output = mixer(hidden, **{learned.mixer_cache_name: self._cache_of(slot, slot.num_tokens)})
        found: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return found

    def _cache_of(self, slot: Slot, num_tokens: int) -> Any:
        """A cache of transformers whose states are those of `slot`, at position `num_tokens`."""
        from transformers.cache_utils import Cache, DummyLayer, LinearAttentionLayer

        layers: list[Any] = [DummyLayer() for _ in range(max(self.states.layers) + 1)]
        # "At position 0" in the eyes of transformers: the states are unset, and a layer begins anew.
        has_state = num_tokens > 0
        for piece, view in zip(self.states.pieces, slot.views, strict=True):
            if not isinstance(layers[piece.layer], LinearAttentionLayer):
                numbers = [each.index for each in self.states.pieces if each.layer == piece.layer]
                layers[piece.layer] = LinearAttentionLayer(number_of_states=max(numbers) + 1)
            layer = layers[piece.layer]
            layer.device, layer.dtype = view.device, view.dtype
            layer.has_previous_state[piece.index] = has_state
            if piece.name == "conv":
                layer.conv_states[piece.index] = view
                layer.is_conv_states_initialized[piece.index] = True
                layer.conv_kernel_size[piece.index] = view.shape[-1]
            else:
                layer.recurrent_states[piece.index] = view
                layer.is_recurrent_states_initialized[piece.index] = True
        return Cache(layers=layers)


@attrs.define(eq=False)
class PackedStates:
    """What the layers of a model get as their cache: the cache of each sequence of the batch.

    Attention layers put their keys and values into the KV tensor themselves, so `update` returns them as they are.
    """

    sequences: list[tuple[Span, Any]]
    """Each sequence's rows of the packed tokens, and its cache. None: a dummy."""
    computed: set[int] = attrs.field(factory=set)
    """The layers whose states were computed."""

    is_compileable = False

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return key, value

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, *_: Any, **__: Any) -> tuple[int, int]:
        return query_length, 0


def _by_sequence(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call `forward` of a recurrent module for each sequence of a batch: [1, T, hidden] → [1, T, hidden].

    Without `PackedStates` among the options it is the model's own call, which stays as it is.
    """
    name = next((name for name, value in options.items() if isinstance(value, PackedStates)), None)
    if name is None:
        return forward(*args, **options)
    packed: PackedStates = options[name]
    hidden, passed = _hidden_of(args, options)
    rows: list[torch.Tensor] = []
    for span, cache in packed.sequences:
        tokens = hidden[:, span.first : span.stop]
        rows.append(torch.zeros_like(tokens) if cache is None else forward(tokens, **passed, **{name: cache}))
    packed.computed.add(forward.__self__.layer_idx)  # type: ignore[attr-defined]
    return torch.cat(rows, dim=1)


def _hidden_of(args: Sequence[Any], options: Mapping[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """The hidden states of a call of a recurrent module, and the other options without those of this package."""
    passed = {
        name: value
        for name, value in options.items()
        if name != "hidden_states" and not name.startswith("paged_") and not isinstance(value, PackedStates)
    }
    hidden = [*args, *([options["hidden_states"]] if "hidden_states" in options else [])]
    per_token = sorted(name for name, value in passed.items() if isinstance(value, torch.Tensor))
    if len(hidden) != 1 or per_token:
        what = ", ".join(per_token) or "arguments without names"
        raise ConfigError("model", f"passes {what} to its recurrent layers, which cannot be divided by sequence")
    return hidden[0], passed


def _no_attention() -> ConfigError:
    return ConfigError("model", "has no attention layer, but the engine needs blocks of attention layers")


def _attention_kinds(text: Any) -> dict[int, AttentionKind]:
    """The attention kind of each layer that has attention."""
    unknown = set(text.layer_types) - RECURRENT_TYPES - ATTENTION_TYPES - NO_CACHE_TYPES
    if unknown:
        raise ConfigError("model", f"has layers of {', '.join(sorted(unknown))}, which are not supported")
    window = getattr(text, "sliding_window", None)
    kinds: dict[int, AttentionKind] = {}
    for layer, kind in enumerate(text.layer_types):
        if kind in {"full_attention", "hybrid"}:
            kinds[layer] = FullAttention()
        elif kind in {"sliding_attention", "hybrid_sliding"}:
            if window is None:
                raise ConfigError("model", "has sliding layers, but no sliding_window")
            kinds[layer] = SlidingWindow(window)
    return kinds


# -- learning --------------------------------------------------------------------------------------------------------
#
# One forward of the model with its own attention and its own cache, watched: which modules have states, and of which
# shapes.


@attrs.frozen(eq=False)
class _Learned:
    layout: StateLayout
    mixers: dict[int, Any]
    inputs: dict[int, torch.Tensor]
    """The hidden states that each mixer got, [1, T, hidden]."""
    cache_name: str
    """The parameter of the model's forward that takes the cache."""
    mixer_cache_name: str
    """The same of the recurrent modules."""


def _learn(model: Any) -> _Learned:
    from transformers.cache_utils import DynamicCache

    cache_name = next((name for name in ("cache", "past_key_values") if name in _parameters(model)), None)
    cache = DynamicCache(config=model.config)
    if cache_name is None or not hasattr(cache, "get_recurrent_state"):
        raise ConfigError(
            "model", "has recurrent layers, but this version of transformers has no common cache for their states"
        )
    ids = ordinary_ids(model, model.config.get_text_config().vocab_size)
    drawn = torch.randint(len(ids), (NUM_LEARNING_TOKENS,), generator=torch.Generator().manual_seed(2)).tolist()
    tokens = torch.tensor([[ids[at] for at in drawn]], device=model.device)
    where = torch.arange(NUM_LEARNING_TOKENS, device=model.device)[None]
    with _calls_watched(model, cache) as (mixers, inputs, names):
        model(input_ids=tokens, position_ids=where, use_cache=True, **{cache_name: cache})
    found = list(_states_of(cache))
    wanted = {layer for layer, kind in enumerate(model.config.get_text_config().layer_types) if kind in RECURRENT_TYPES}
    missing = wanted - {layer for layer, *_ in found} | wanted - mixers.keys()
    if missing:
        raise ConfigError("model", f"layer {min(missing)} keeps its recurrent state outside of transformers' cache")
    for layer, _, _, state in found:
        if state.shape[:1] != (1,):
            raise ConfigError("model", f"layer {layer} has a state of shape {tuple(state.shape)} for one sequence")
    if len(names) != 1 or "" in names:
        raise ConfigError("model", "does not pass its cache to all recurrent layers under the same name")
    [mixer_cache_name] = names
    return _Learned(StateLayout.of(found, model.device), mixers, inputs, cache_name, mixer_cache_name)


def _parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters


def _states_of(cache: Any) -> Iterator[tuple[int, str, int, torch.Tensor]]:
    for number, layer in enumerate(cache.layers):
        for name in ("conv", "recurrent"):
            for index, state in getattr(layer, f"{name}_states", {}).items():
                if state is not None:
                    yield number, name, index, state


@contextmanager
def _calls_watched(model: Any, cache: Any) -> Iterator[tuple[dict[int, Any], dict[int, torch.Tensor], set[str]]]:
    """Inside this block, record which module asks `cache` for the states of each layer, that module's input, and the
    names by which such modules get the cache."""
    stack: list[tuple[Any, torch.Tensor | None, str]] = []
    names: set[str] = set()
    mixers: dict[int, Any] = {}
    inputs: dict[int, torch.Tensor] = {}

    def enter(module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        hidden = options.get("hidden_states", args[0] if args else None)
        name = next((name for name, value in options.items() if value is cache), "")
        stack.append((module, hidden if isinstance(hidden, torch.Tensor) else None, name))

    def leave(*_: Any) -> None:
        stack.pop()

    def asked(ask: Callable[..., Any], layer_of: Callable[..., int], *args: Any, **options: Any) -> Any:
        layer = layer_of(*args, **options)
        module, hidden, name = stack[-1]
        names.add(name)
        if mixers.setdefault(layer, module) is not module:
            raise ConfigError("model", f"layer {layer} has a recurrent state that two modules share")
        if hidden is None:
            raise ConfigError("model", f"the recurrent module of layer {layer} gets no hidden states")
        inputs.setdefault(layer, hidden.clone())
        return ask(*args, **options)

    def read(layer_idx: int, *_: Any, **__: Any) -> int:
        return layer_idx

    def write(_: torch.Tensor, layer_idx: int, *__: Any, **___: Any) -> int:
        return layer_idx

    for name, layer_of in (("get", read), ("update", write)):
        for kind in ("conv", "recurrent"):
            method = f"{name}_{kind}_state"
            setattr(cache, method, functools.partial(asked, getattr(cache, method), layer_of))
    handles = [each.register_forward_pre_hook(enter, with_kwargs=True) for each in model.modules()]
    handles += [each.register_forward_hook(leave) for each in model.modules()]
    try:
        yield mixers, inputs, names
    finally:
        for handle in handles:
            handle.remove()
