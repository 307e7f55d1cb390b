"""Events of a `HostCache`."""

from __future__ import annotations

import attrs

from .._kernel.events import Event


@attrs.frozen
class LoadsPaused(Event):
    """Of a `HostCache`: more than `max_quarantined_share` of the blocks are in quarantine, so nothing is loaded."""

    num_quarantined: int


@attrs.frozen
class LoadsResumed(Event):
    """Enough of these copies have ended for certain, and loading goes on."""

    num_quarantined: int
