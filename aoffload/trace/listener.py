"""Who wants to know what is in a log while it is read."""

from __future__ import annotations

from .events import Event
from .occupancy import Usage
from .runtimes import RuntimeLife
from .stories import JobStory, Story

__all__ = ["Listener"]


class Listener:
    """Told of each story when it is over, so that only what is under way has to be kept. Does nothing by itself."""

    def runtime_opened(self, runtime: RuntimeLife) -> None:
        """Also of one whose beginning the log does not have."""

    def story_over(self, story: Story) -> None: ...

    def job_over(self, job: JobStory) -> None: ...

    def usage_changed(self, runtime: RuntimeLife, at_s: float, usage: Usage) -> None: ...

    def store_skipped(self, event: Event, runtime: RuntimeLife) -> None: ...

    def alarm(self, event: Event, runtime: RuntimeLife) -> None:
        """Something that a person should look at."""
