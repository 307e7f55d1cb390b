"""What decides whether bytes that lie outside of this process are KV of this model in this layout."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .._kernel.layout import Layout
from .region import KVRegion

__all__ = ["identity_of"]


def identity_of(layout: Layout, namespace: str, regions: Sequence[KVRegion]) -> str:
    """As text that is the same in every process. Sizes of units and blocks come on top."""
    kinds = [_described(band.kind) for band in layout.bands]
    shapes = [(str(region.tensor.dtype), tuple(region.block_shape), region.block_bytes) for region in regions]
    places = [tuple(place) for place in layout.places]
    return repr((namespace, kinds, places, shapes, sys.byteorder))


def _described(kind: object) -> str:
    """An attention kind as text that is the same in every process."""
    name = f"{type(kind).__module__}.{type(kind).__qualname__}"
    return name if type(kind).__repr__ is object.__repr__ else f"{name} {kind!r}"
