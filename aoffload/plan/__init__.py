"""How much host memory is worth buying: `python -m aoffload.plan TRACE`, and the `Recorder` of such traces."""

from __future__ import annotations

from .recorder import Recorder

__all__ = ["Recorder"]
