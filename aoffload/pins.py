"""Public names of pins, prefetches, fetches and demotions of a runtime. docs/pins.md tells how to use them."""

from ._runtime.pins import PendingDemotion, PendingFetch, PendingPrefetch, PinScope

__all__ = ["PendingDemotion", "PendingFetch", "PendingPrefetch", "PinScope"]
