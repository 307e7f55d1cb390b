"""The tiers below host memory in the scheduler: a disk, a remote store, and what is fetched from both."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs

from aoffload import HostCache, OffloadConfig, PrefixMatch

from .._runtime.costs import PrefillSpeed
from ..ledger import Completion, CopyQueue
from .counts import Counts
from .disk import DiskSide
from .fetches import Fetches
from .messages import Said
from .outbox import TieredOutbox
from .remote import RemoteSide
from .requests import EngineRequest

__all__ = ["Lower"]


@attrs.frozen
class Lower:
    """One per engine with such tiers. All calls come from the thread of vLLM's scheduler, and none waits."""

    ledger: HostCache
    disk: DiskSide | None
    remote: RemoteSide | None
    fetches: Fetches

    @classmethod
    def of(
        cls, config: OffloadConfig, ledger: HostCache, queue: CopyQueue, outbox: TieredOutbox, counts: Counts,
        block_bytes: int, speed: PrefillSpeed, clock: Callable[[], float],
    ) -> Lower:  # fmt: skip
        most_s = config.fetch_bound_s
        disk = remote = None
        if config.disk is not None:
            disk = DiskSide(ledger, queue, outbox, counts, config.disk, block_bytes, clock)
        if config.remote is not None:
            remote = RemoteSide(ledger, queue, outbox, counts, config.remote, block_bytes, most_s, clock)
        fetches = Fetches(ledger, queue, counts, block_bytes, most_s, speed, clock, disk, remote)
        return cls(ledger, disk, remote, fetches)

    @property
    def _sides(self) -> list[DiskSide | RemoteSide]:
        return [side for side in (self.disk, self.remote) if side is not None]

    @property
    def is_busy(self) -> bool:
        """Whether steps have to go on."""
        return self.disk is not None and self.disk.is_busy

    def fetched(self, found: EngineRequest, match: PrefixMatch) -> PrefixMatch:
        return self.fetches.fetched(found, match)

    def hear(self, said: Iterable[Said], completions: Iterable[Completion]) -> None:
        """What the tiers of the worker say, and which copies are over: before these are settled."""
        for side in self._sides:
            side.take(said)
        for completion in completions:
            job = self.ledger.jobs.unsettled.get(completion.job_id)
            if job is not None:
                self.fetches.copied(job.plan)
                for side in self._sides:
                    side.copied(job.plan, completion)

    def look(self) -> None:
        """Store below host memory what is worth it."""
        for side in self._sides:
            side.look()

    def reset(self) -> None:
        """The ledger has forgotten all."""
        for side in self._sides:
            side.reset()

    def gauges(self) -> dict[str, float]:
        return {name: value for side in self._sides for name, value in side.gauges().items()}
