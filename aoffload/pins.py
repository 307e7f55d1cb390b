"""Public names of what the handles of a runtime return. docs/pins.md tells how to use them."""

from ._runtime.handles import PendingDemotion, PendingFetch, PendingPrefetch, PinScope

__all__ = ["PendingDemotion", "PendingFetch", "PendingPrefetch", "PinScope"]
