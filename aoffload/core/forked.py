"""What a fork answers."""

from __future__ import annotations

import attrs

from .owners import Holding

__all__ = ["Fork"]


@attrs.frozen
class Fork:
    """A forked request, and what the engine has to copy before it or its parent goes on."""

    holding: Holding
    copies: tuple[tuple[int, int], ...]
    """(source, destination) device blocks: those that are not full, and others that could not be shared."""
