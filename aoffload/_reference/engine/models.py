"""Makes models by name."""

from __future__ import annotations

from pathlib import Path

import torch

from ...errors import InvalidArgument
from .decoder import ONE_BILLION, Decoder, DecoderConfig
from .paged import PagedModel

MODEL_NAMES = ("tiny", "1b", "llama", "qwen3", "gemma3", "gpt-oss", "qwen3-next")
"""The names that `load_model` accepts."""


def load_model(name: str, *, seed: int = 0, device: torch.device | str = "cpu") -> PagedModel:
    """Make `"tiny"` or `"1b"` (plain torch; `1b` in bfloat16, for a GPU), make another of `MODEL_NAMES` (transformers),
    or load a local directory.

    A named model has weights drawn from `seed`. They are the same on every device, and torch's own generator is not
    used. A directory contains a config and safetensors, as `save_pretrained` writes them. Nothing is ever downloaded.
    `InvalidArgument` names `model` for anything else; `MissingExtra` if transformers is needed but not installed. A
    model of transformers is first compared with its own forward. If it does not compute the same with block tables and
    windows, `ConfigError` names `model` and gives the reason.
    """
    if name == "tiny":
        return Decoder(DecoderConfig(), seed=seed, device=device)
    if name == "1b":
        return Decoder(ONE_BILLION, seed=seed, device=device)
    if name in MODEL_NAMES:
        from .pretrained import seeded

        return seeded(name, seed=seed, device=device)
    if name and Path(name).is_dir():
        from .pretrained import from_directory

        return from_directory(name, device=device)
    raise InvalidArgument("model", f"must be one of {', '.join(MODEL_NAMES)} or a local directory, got {name!r}")
