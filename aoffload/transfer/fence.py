"""Fences: points in device work, and the only evidence that work is done."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import attrs

__all__ = ["ORDERED", "PASSED", "Fence", "PassedFence"]


@runtime_checkable
class Fence(Protocol):
    """A point in device work. `torch.cuda.Event` satisfies it."""

    def query(self) -> bool:
        """Whether the work before this point is over, without waiting."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread (never the event loop's) until the work before this point is over."""
        ...


@attrs.frozen
class PassedFence:
    """A fence behind work that was already over when it was recorded; on a CPU, all work is."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


PASSED = PassedFence()
ORDERED = PassedFence()
"""Given as `after=`: the engine's own streams order the copy behind all that touches its blocks, so nothing is recorded
for it. Right only where the engine frees blocks behind its streams and hands none out before."""
