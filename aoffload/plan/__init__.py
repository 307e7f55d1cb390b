"""A forecast of the benefit of more host memory: `python -m aoffload.plan TRACE`. Also the `Recorder` of such
traces."""

from __future__ import annotations

from .recorder import Recorder

__all__ = ["Recorder"]
