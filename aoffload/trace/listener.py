"""The interface of reports that are made while a log is read."""

from __future__ import annotations

from .events import Event
from .occupancy import Usage
from .runtimes import RuntimeLife
from .timelines import JobTimeline, Timeline

__all__ = ["Listener"]


class Listener:
    """Receives each timeline when it is over, so only open timelines are kept. The methods here do nothing."""

    def runtime_opened(self, runtime: RuntimeLife) -> None:
        """Also called for a runtime whose beginning the log does not have."""

    def timeline_over(self, timeline: Timeline) -> None: ...

    def job_over(self, job: JobTimeline) -> None: ...

    def usage_changed(self, runtime: RuntimeLife, at_s: float, usage: Usage) -> None: ...

    def refused(self, event: Event, runtime: RuntimeLife) -> None: ...

    def declined(self, event: Event, runtime: RuntimeLife) -> None:
        """A request computes what it could load or fetch."""

    def fetch_skipped(self, event: Event, runtime: RuntimeLife) -> None:
        """A request computes what a tier may have that is left alone."""

    def eviction_switched(self, event: Event, runtime: RuntimeLife) -> None: ...

    def hint(self, event: Event, runtime: RuntimeLife) -> None:
        """One was given, or is over."""

    def store_skipped(self, event: Event, runtime: RuntimeLife) -> None: ...

    def alarm(self, event: Event, runtime: RuntimeLife) -> None:
        """An event that a person should look at."""
