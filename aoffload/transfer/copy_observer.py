"""Who is told of stalls, and of a cache that turns itself off."""

from __future__ import annotations

from typing import Protocol

from ..core.hops import Tier

__all__ = ["OBSERVES", "CopyObserver", "NullCopyObserver"]

OBSERVES = "transport_stalled transport_recovered worker_failed cache_turned_off"
"""The methods of a `CopyObserver`."""


class CopyObserver(Protocol):
    """Receives events that concern no single job. It must not call the queue. Its exceptions are dropped."""

    def transport_stalled(self, source: Tier, destination: Tier, num_jobs: int) -> None:
        """`num_jobs` copies of this hop took too long: the hop launches nothing until they are over."""

    def transport_recovered(self, source: Tier, destination: Tier) -> None:
        """They are: the hop launches again."""

    def worker_failed(self, error: BaseException) -> None:
        """The ledger raised what it never should."""

    def cache_turned_off(self, reason: str) -> None:
        """Nothing is launched any more."""


class NullCopyObserver:
    """Does nothing."""

    def transport_stalled(self, source: Tier, destination: Tier, num_jobs: int) -> None: ...
    def transport_recovered(self, source: Tier, destination: Tier) -> None: ...
    def worker_failed(self, error: BaseException) -> None: ...
    def cache_turned_off(self, reason: str) -> None: ...
