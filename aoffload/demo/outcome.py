"""Results of the runs, filled in during the runs, so that an interrupted demo can report its results so far."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

import attrs

from .. import DiskTier, RemoteTier, Tier
from .._reference.engine.batching import PrefillStart
from .._reference.engine.loop import EngineStatistics
from .._reference.engine.sequence import Generation
from .backends import Tampering
from .options import DemoOptions
from .workload import Pools

# -- comparison ------------------------------------------------------------------------------------------------------
#
# Compares the results of two runs bit for bit: tokens, and the logits from which each was chosen.


@attrs.frozen
class Difference:
    turn_id: str
    num_tokens: int
    """Tokens of the answer that differ."""
    num_logits: int
    """Positions whose logits differ. The first position is the prompt's last token."""
    prompt_logits_differ: bool


def find_differences(
    reference: Mapping[str, Generation], generations: Mapping[str, Generation]
) -> tuple[Difference, ...]:
    """The differences between `generations` (of completed requests, by turn id) and those of the reference run."""
    found = (_compare(turn_id, reference[turn_id], given) for turn_id, given in sorted(generations.items()))
    return tuple(difference for difference in found if difference is not None)


def _compare(turn_id: str, expected: Generation, given: Generation) -> Difference | None:
    pairs = zip(expected.token_ids, given.token_ids, strict=True)
    num_tokens = sum(left != right for left, right in pairs)
    logits = [left != right for left, right in zip(expected.logits_digests, given.logits_digests, strict=True)]
    if not num_tokens and not any(logits):
        return None
    return Difference(turn_id, num_tokens, sum(logits), logits[0])


# -- outcome ---------------------------------------------------------------------------------------------------------


@attrs.frozen
class RunKind:
    """One of the runs: the same requests on another pool."""

    name: str
    num_device_blocks: int
    num_host_blocks: int
    store: str
    prefill_start: PrefillStart = PrefillStart.LOADED
    disk: DiskTier | None = None
    remote: RemoteTier | None = None
    load: str = "always"
    eviction: str = "lru"

    @property
    def has_offload(self) -> bool:
        return self.num_host_blocks > 0


@attrs.define(eq=False)
class RunOutcome:
    kind: RunKind
    generations: dict[str, Generation] = attrs.field(factory=dict)
    """Completed requests by turn id."""
    num_requests: int = 0
    num_aborted: int = 0
    wall_s: float = 0.0
    is_over: bool = False
    num_pinned: int = 0
    """Blocks of both tiers that are still pinned after all requests have ended and stores have settled."""
    num_quarantined: int = 0
    integrity_error: str = ""
    transfers: Mapping[str, Any] = attrs.field(factory=dict)
    """Counts of the transport."""
    disk_transfers: Mapping[str, Any] = attrs.field(factory=dict)
    """Counts of the disk. Empty without one."""
    remote_transfers: Mapping[str, Any] = attrs.field(factory=dict)
    """Counts of the remote store. Empty without one."""
    num_declined: int = 0
    """Loads that were not worth their time."""
    num_fetches_declined: int = 0
    """Fetches from the disk and the remote store that were not worth their time."""
    num_host_free: int = 0
    learned: tuple[Tier, ...] = ()
    """Tiers that used learned eviction at the end."""
    num_restored: int = 0
    """Blocks that were on the disk at the start."""
    engine: EngineStatistics | None = None
    block_bytes: int = 0

    @classmethod
    def nothing(cls) -> RunOutcome:
        """A run that never began."""
        return cls(RunKind("", 0, 0, ""))

    def sum_of(self, field: str) -> int:
        """A count of tokens over the completed requests."""
        return sum(getattr(generation, field) for generation in self.generations.values())

    def bytes_of(self, field: str) -> int:
        """Device bytes of a count of blocks in the engine's statistics."""
        return getattr(self.engine, field) * self.block_bytes if self.engine is not None else 0

    def rate(self, direction: str) -> float | None:
        """Payload of all loads or stores, divided by their duration, in GB/s."""
        seconds = self.transfers.get(f"{direction}_seconds", 0.0)
        num_bytes = self.transfers.get("bytes_loaded" if direction == "load" else "bytes_stored", 0)
        return num_bytes / seconds / 1e9 if seconds else None

    def times(self, since: str, but_not: frozenset[str]) -> list[float]:
        """Times to the first token since "arrived_s" or "admitted_s", as `since` says, of the turns that are not in
        `but_not`."""
        return [
            generation.first_token_s - getattr(generation, since)
            for turn_id, generation in self.generations.items()
            if turn_id not in but_not
        ]


@attrs.define(eq=False)
class DemoOutcome:
    options: DemoOptions
    first_turn_ids: frozenset[str] = frozenset()
    num_conversations: int = 0
    pools: Pools | None = None
    """None until the model is known."""
    runs: list[RunOutcome] = attrs.field(factory=list)
    tampering: Tampering | None = None
    was_interrupted: bool = False
    wall_s: float = 0.0

    def run(self, index: int) -> RunOutcome | None:
        return self.runs[index] if index < len(self.runs) else None

    @property
    def reference(self) -> RunOutcome | None:
        return self.run(0)

    @property
    def without_offload(self) -> RunOutcome | None:
        return self.run(1)

    @property
    def with_offload(self) -> RunOutcome | None:
        return self.run(2)

    @property
    def by_layer(self) -> RunOutcome | None:
        """The run that `--layered` adds."""
        return self.run(3)

    def differences(self, run: RunOutcome) -> tuple[Difference, ...]:
        assert self.reference is not None
        return find_differences(self.reference.generations, run.generations)

    @property
    def num_corrupt(self) -> int:
        return sum(run.transfers.get("blocks_corrupt", 0) for run in self.runs)

    @property
    def outputs_identical(self) -> bool | None:
        """Whether every completed request of the run with offload gave the reference's tokens and logits, bit for bit,
        and every loaded block had the bytes that were stored. None: that run has not completed a request."""
        return self._is_identical(self.with_offload)

    @property
    def by_layer_identical(self) -> bool | None:
        """The same for the run that begins prompts layer by layer."""
        return self._is_identical(self.by_layer)

    def _is_identical(self, run: RunOutcome | None) -> bool | None:
        if run is None or not run.generations:
            return None
        return not self.differences(run) and not self.num_corrupt

    def ttft_share(self, since: str) -> float | None:
        """Median time to the first token with offload, divided by that without, of all turns except the first ones."""
        runs = (self.with_offload, self.without_offload)
        found = [median(times) for run in runs if run and (times := run.times(since, self.first_turn_ids))]
        return found[0] / found[1] if len(found) == 2 else None

    @property
    def nothing_is_left(self) -> bool:
        return not any(run.num_pinned or run.num_quarantined or run.integrity_error for run in self.runs)

    @property
    def exit_status(self) -> int:
        if self.was_interrupted:
            return 130
        untouched = self.without_offload is not None and not self.differences(self.without_offload)
        untouched = untouched and (not self.options.layered or bool(self.by_layer_identical))
        return 0 if self.outputs_identical and untouched and self.nothing_is_left and not self.tampering else 1
