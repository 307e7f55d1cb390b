"""Models and engines around the runtime: what a program that serves a model would write for itself.

`load_model` gives a model over paged KV tensors, `PagedBatch` packs what one forward computes. Transformers is imported
only when a model of it is asked for.
"""

from .attention import paged_attention
from .decoder import Decoder, DecoderConfig
from .layer_fences import LayerFences, layer_regions
from .layers import LayerGroup, LayerPlace, group_layers, kv_cache_groups
from .models import MODEL_NAMES, load_model
from .paged import PagedBatch, PagedModel, SequenceSlice

__all__ = [
    "MODEL_NAMES",
    "Decoder",
    "DecoderConfig",
    "LayerFences",
    "LayerGroup",
    "LayerPlace",
    "PagedBatch",
    "PagedModel",
    "SequenceSlice",
    "group_layers",
    "kv_cache_groups",
    "layer_regions",
    "load_model",
    "paged_attention",
]
