"""Links: the pairs of tiers that jobs copy between, and tiers in words. Both follow from `TIERS`."""

from __future__ import annotations

from typing import Any

import attrs

from .._kernel.states import BELOW, TIERS, Direction, Tier
from .events import Event, FieldError

__all__ = ["LINKS", "HopRow", "link_of", "in_words", "name_of", "pool_field"]

_WORDS = {
    Tier.HOST: ("in", "host memory"),
    Tier.DISK: ("on", "the disk"),
    Tier.CUSTOM: ("in", "the custom tier"),
    Tier.REMOTE: ("in", "the remote store"),
}


def name_of(tier: Tier) -> str:
    """As events call it."""
    return tier.name.lower()


def tier_words(tier: Tier) -> str:
    return _WORDS[tier][1] if tier in _WORDS else f"the {name_of(tier)}"


def in_words(tier: Tier) -> str:
    """Where blocks lie: `in host memory`."""
    return " ".join(_WORDS.get(tier, ("in", tier_words(tier))))


def pool_field(tier: Tier) -> str:
    """The field of events with the size of its pool."""
    return f"num_{name_of(tier)}_blocks"


@attrs.frozen
class HopRow:
    tier: Tier
    """The lower one of the two: loads come from it, stores go to it."""
    direction: Direction
    source: Tier
    destination: Tier
    name: str
    """`load from disk`."""

    def of(self, blocks: str) -> str:
        """In a sentence: `load of 7 blocks from the disk`."""
        way = "from" if self.direction is Direction.LOAD else "to"
        return f"{self.direction.value} of {blocks} {way} {tier_words(self.tier)}"


def _hops_of(tier: Tier, above: Tier) -> tuple[HopRow, HopRow]:
    return (
        HopRow(tier, Direction.LOAD, tier, above, f"load from {name_of(tier)}"),
        HopRow(tier, Direction.STORE, above, tier, f"store to {name_of(tier)}"),
    )


LINKS = tuple(link for row in TIERS if row.above is not None for link in _hops_of(row.tier, row.above))
"""Nearest to the compute first, loads before stores."""
_BY_ENDS = {(name_of(link.source), name_of(link.destination)): link for link in LINKS}
_BY_DIRECTION = {link.direction.value: link for link in LINKS if link.tier is BELOW}
"""Of older logs, whose jobs do not name tiers: all of them are of the tier below the device."""


def link_of(event: Event) -> HopRow:
    """Of the job of an event. May raise `FieldError`."""
    fields = event.fields
    if "source" not in fields and "destination" not in fields:
        return _found(_BY_DIRECTION, fields.get("direction"), "direction")
    link = _found(_BY_ENDS, (fields.get("source"), fields.get("destination")), "source")
    if fields.get("direction") != link.direction.value:
        raise FieldError("direction")
    return link


def _found(rows: dict[Any, HopRow], key: object, field: str) -> HopRow:
    try:
        return rows[key]
    except (KeyError, TypeError):  # a list, say
        raise FieldError(field) from None
