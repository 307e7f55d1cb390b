"""A forecast of the benefit of more host memory: `aoffload plan`. `Recorder` writes the traces that it reads."""

from __future__ import annotations

from .recorder import Recorder

__all__ = ["Recorder"]
