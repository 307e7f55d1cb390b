"""Models and engines around the runtime: what a program that serves a model would write for itself.

`load_model` gives a model over paged KV tensors, `PagedBatch` packs what one forward computes. Transformers is imported
only when a model of it is asked for.
"""

from .decoder import Decoder, DecoderConfig
from .models import MODEL_NAMES, load_model
from .paged import PagedBatch, PagedModel, SequenceSlice, paged_attention

__all__ = [
    "MODEL_NAMES",
    "Decoder",
    "DecoderConfig",
    "PagedBatch",
    "PagedModel",
    "SequenceSlice",
    "load_model",
    "paged_attention",
]
