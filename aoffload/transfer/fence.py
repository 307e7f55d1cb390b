"""A fence: a point in device work, and the only thing that says "done"."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import attrs

__all__ = ["PASSED", "Fence", "PassedFence"]


@runtime_checkable
class Fence(Protocol):
    """A point in device work. `torch.cuda.Event` satisfies it."""

    def query(self) -> bool:
        """Whether the work before this point is over, without waiting."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread (never the event loop's) until it is."""
        ...


@attrs.frozen
class PassedFence:
    """The fence of work that was over when it was recorded: all work, on a CPU."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


PASSED = PassedFence()
