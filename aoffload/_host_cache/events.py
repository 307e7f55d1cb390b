"""Events of a `HostCache`."""

from __future__ import annotations

import attrs

from .._kernel.events import Event


@attrs.frozen
class LoadsPaused(Event):
    """A `HostCache` has paused all loads, because more than `max_quarantined_share` of the blocks are in quarantine."""

    num_quarantined: int


@attrs.frozen
class LoadsResumed(Event):
    """A `HostCache` loads again, because enough blocks have left quarantine. The copies of those blocks are proven
    over."""

    num_quarantined: int
