"""Labels: what the blocks of a store to the disk hold, so that a restart can prove it from the tokens."""

from __future__ import annotations

from collections.abc import Iterator

from .groups import Band
from .paths import Stretch
from .plan import BlockLabel
from .tokens import hash_run, unit_digests

__all__ = ["labels_of"]


def labels_of(over: list[Stretch], band: Band) -> tuple[BlockLabel | None, ...]:
    """A label for each block of `band` in the stretches, in prefix order.

    None from the first unit on that a span touches: what the span stands for is not in the tokens."""
    if any(run.spans for run in over[0][0].path()):
        return (None,) * (sum(stop - start for _, start, stop in over) * band.width)
    found: list[BlockLabel | None] = []
    for stretch in over:
        if stretch[0].spans:
            left = sum(stop - start for _, start, stop in over) * band.width - len(found)
            return (*found, *(None,) * left)
        found += _labels(stretch, band)
    return tuple(found)


def _labels(stretch: Stretch, band: Band) -> Iterator[BlockLabel]:
    run, start, stop = stretch
    unit_bytes = len(run.tokens) // (run.stop - run.start)
    first, last = (start - run.start) * unit_bytes, (stop - run.start) * unit_bytes
    tokens, root = bytes(run.tokens[first:last]), run.root.digest
    hasher = hash_run(run.hash_before, run.tokens[:first], (), unit_bytes)
    before = hasher.digest() if start else b""
    for number, digest in enumerate(unit_digests(hasher, tokens, unit_bytes)):
        of_unit = tokens[number * unit_bytes : (number + 1) * unit_bytes]
        for place in range(band.width):
            yield BlockLabel(band.number, place, start + number, root, digest, before, of_unit)
        before = digest
