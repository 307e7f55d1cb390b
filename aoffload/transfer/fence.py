"""Fences: points in device work, and the only evidence that work is done."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import attrs

from ..arguments import as_tuple, check_has

__all__ = ["ORDERED", "PASSED", "OnlyAfter", "Fence", "PassedFence"]


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


def _as_fences(fences: Iterable[Fence]) -> tuple[Fence, ...]:
    found = as_tuple("fences", fences, "Fence")
    for fence in found:
        check_has("fences", fence, "Fence", "query synchronize")
    return found


@attrs.frozen
class OnlyAfter:
    """Given as `after=`: the copy waits for `fences` and for nothing else. Use it if all work that touches the copy's
    blocks is over once these fences have passed. `LocalTransport` then records no fence of its own. Other transports
    may wait for more."""

    fences: tuple[Fence, ...] = attrs.field(default=(), converter=_as_fences)

    def query(self) -> bool:
        return all(fence.query() for fence in self.fences)

    def synchronize(self) -> None:
        for fence in self.fences:
            fence.synchronize()


PASSED = PassedFence()
ORDERED = OnlyAfter()
"""Your own streams run the copy after all work that touches its blocks. Use it only if a block is freed after that work
in stream order, and is not handed out earlier."""
