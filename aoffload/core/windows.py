"""Windows: what a holding gives back when what it has computed has moved on."""

from __future__ import annotations

from .cache import PrefixCache
from .owners import Holding
from .plan import Tier

__all__ = ["slide", "slide_off"]


def slide(cache: PrefixCache, holding: Holding) -> None:
    """Let go of the blocks that are needed no more for computing to go on where `holding` has come to.

    Its own are free, what is cached stays cached as long as there is room. Their positions are null from now on. A
    step that runs may still read them: it slides when it ends.
    """
    if not holding.num_steps and holding.tables:
        slide_off(cache, holding)


def slide_off(cache: PrefixCache, holding: Holding) -> None:
    """The same at the end of a load: a step that runs overlaps it, and reads nothing before its end."""
    for band in cache.layout.windows:
        table = holding.tables[band.number]
        start = min(band.first_needed(holding.num_computed_tokens), holding.num_units)
        if start <= table.start:
            continue
        cache.give(Tier.DEVICE, table.private(holding.published, table.start, start))
        table.null(table.start, start)
        lease = holding.leases.get(Tier.DEVICE)
        if lease is not None:
            cache.slide_lease(lease, band, start)
        holding.slid(band.number, table.start, start)
        table.begin_at(start)
