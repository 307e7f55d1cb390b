"""Windows: a request gives back the blocks that its windows have left behind."""

from __future__ import annotations

from .cache import PrefixCache
from .hops import Tier
from .owners import Holding

__all__ = ["slide", "slide_off"]


def slide(cache: PrefixCache, holding: Holding) -> None:
    """Release the blocks that computing on from `num_computed_tokens` needs no more.

    Private blocks are freed; cached ones stay cached as long as there is room. Their positions become null. Does
    nothing in a step, which may still read them: the end of the step slides.
    """
    if not holding.num_steps and holding.tables:
        slide_off(cache, holding)


def slide_off(cache: PrefixCache, holding: Holding) -> None:
    """The same even in a step, at the end of a load: a step that overlaps it reads nothing that slides off."""
    for band in cache.layout.windows:
        table = holding.tables[band.number]
        start = min(band.first_needed(holding.num_computed_tokens), holding.num_units)
        if start <= table.start:
            continue
        cache.last_uses.gave_up(holding, table.at(table.start, start))
        cache.give(Tier.DEVICE, table.private(holding.published, table.start, start))
        table.null(table.start, start)
        lease = holding.leases.get(Tier.DEVICE)
        if lease is not None:
            cache.slide_lease(lease, band, start)
        holding.slid(band.number, table.start, start)
        table.begin_at(start)
