"""Cells: what a remote store keeps as one object, a power of two of units, aligned from a prompt's first token."""

from __future__ import annotations

from array import array

from ..errors import InvalidArgument
from ..prefix import Prefix
from .arguments import check_int, check_prefix
from .plan import CellLabel
from .tokens import TokenSequence

__all__ = ["cells_before", "cells_of", "places_in_cells"]


def cells_of(prefix: Prefix, unit_tokens: int, cell_units: int) -> tuple[CellLabel, ...]:
    """The labels of the whole cells that a request for `prefix` may hit, in prefix order. It always computes one token
    at least. May be called in any thread."""
    check_int("unit_tokens", unit_tokens, 1)
    if check_int("cell_units", cell_units, 1) & (cell_units - 1):
        raise InvalidArgument("cell_units", f"must be a power of two, got {cell_units}")
    sequence = TokenSequence(check_prefix(prefix), unit_tokens)
    return cells_before(sequence, (sequence.num_tokens - 1) // unit_tokens, cell_units)


def cells_before(sequence: TokenSequence, stop: int, cell_units: int) -> tuple[CellLabel, ...]:
    """The labels of the whole cells of `sequence` before unit `stop`."""
    hasher, found = sequence.root.hasher, list[CellLabel]()
    for start in range(0, stop - cell_units + 1, cell_units):
        hasher = sequence.hash_on(hasher, start, start + cell_units)
        found.append(CellLabel(0, hasher.digest(), start, start + cell_units))
    return tuple(found)


def places_in_cells(start: int, stop: int, cell_units: int, width: int) -> array[int]:
    """The places in their cells of the blocks of units `[start, stop)`, each of which has `width` of them."""
    num_blocks = cell_units * width
    return array("i", [at % num_blocks for at in range(start * width, stop * width)])
