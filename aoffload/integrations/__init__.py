"""Reference models and a reference engine on the runtime, which a serving program would otherwise have to write.

`load_model` makes a model over paged KV tensors. `PagedBatch` packs the tokens of one forward. `PagedEngine` serves a
model. Transformers is imported only when one of its models is loaded.
"""

from .._reference.engine.batching import EngineOptions, PrefillStart
from .._reference.engine.decoder import Decoder, DecoderConfig
from .._reference.engine.engine import PagedEngine
from .._reference.engine.layers import LayerFences, LayerGroup, LayerPlace, group_layers, kv_cache_groups, layer_regions
from .._reference.engine.loop import EngineClosed, StepFailed
from .._reference.engine.models import MODEL_NAMES, load_model
from .._reference.engine.paged import PagedBatch, PagedModel, SequenceSlice, paged_attention
from .._reference.engine.recurrent import RecurrentSlice, Slot, StateLayout
from .._reference.engine.sequence import Generation

__all__ = [
    "MODEL_NAMES",
    "Decoder",
    "DecoderConfig",
    "EngineClosed",
    "EngineOptions",
    "Generation",
    "LayerFences",
    "LayerGroup",
    "LayerPlace",
    "PagedBatch",
    "PagedEngine",
    "PagedModel",
    "PrefillStart",
    "RecurrentSlice",
    "SequenceSlice",
    "Slot",
    "StateLayout",
    "StepFailed",
    "group_layers",
    "kv_cache_groups",
    "layer_regions",
    "load_model",
    "paged_attention",
]
