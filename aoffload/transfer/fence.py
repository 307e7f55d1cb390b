"""Fences: points in device work, and the only evidence that work is done."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import attrs

__all__ = ["ORDERED", "PASSED", "Behind", "Fence", "PassedFence"]


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


@attrs.frozen
class Behind:
    """Given as `after=`: a copy waits for `fences` and for nothing else, because they are behind all that touches its
    blocks. `LocalTransport` then records no fence of its own for a load. Any other transport may take it for an
    ordinary fence, and waits for more than is needed."""

    fences: tuple[Fence, ...] = ()

    def query(self) -> bool:
        return all(fence.query() for fence in self.fences)

    def synchronize(self) -> None:
        for fence in self.fences:
            fence.synchronize()


PASSED = PassedFence()
ORDERED = Behind()
"""The engine's own streams order the copy behind all that touches its blocks. Right only where the engine frees blocks
behind its streams and hands none out before."""
