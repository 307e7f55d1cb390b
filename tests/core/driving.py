"""A ledger driven by hand, as a step-based engine would: every call where the test says so, copies on demand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aoffload._common.prefix import Prefix, Root
from aoffload._common.tiers import Tier
from aoffload._config.config import OffloadConfig
from aoffload._config.groups import KVCacheGroup
from aoffload._extensions.assembly import Ledger
from aoffload._kernel.plans import Completion, TransferPlan
from aoffload._kernel.records import LedgerRequest
from aoffload._kernel.states import Direction, Outcome, RequestState

ROOT = Root("test")
BLOCK = 4


def prompt(name: int, num_tokens: int) -> list[int]:
    """Tokens that no prompt of another name shares a block with."""
    return [name * 1000 + i for i in range(num_tokens)]


def write_back(ledger: Ledger) -> tuple[TransferPlan, ...]:
    """Stores of what is about to be evicted, if the store policy has a watermark."""
    return ledger.write_back.plan() if ledger.writes_back else ()


class Driven:
    """Blocks of 4 tokens, unless told otherwise. After every call of its own it checks integrity."""

    def __init__(
        self, num_device: int, num_host: int = 16, *, observer: Any = None, clock: Any = None, **config: Any
    ) -> None:
        config.setdefault("groups", [KVCacheGroup("full", block_size=BLOCK)])
        settings = OffloadConfig(num_host_blocks=num_host, **config)
        self.ledger = Ledger(settings, num_device + 1, observer=observer, clock=clock)

    @staticmethod
    def prefix(tokens: list[int], root: Root = ROOT, key_spans: Any = ()) -> Prefix:
        return Prefix.of(root, tokens, key_spans)

    # -- one call after the other ---------------------------------------------------------------------------------

    def admit(self, tokens: list[int], **options: Any) -> LedgerRequest:
        prefix = self.prefix(tokens, options.pop("root", ROOT), options.pop("key_spans", ()))
        request = self.ledger.admit(prefix, **options)
        self.ledger.check_integrity()
        return request

    def allocated(self, tokens: list[int], **options: Any) -> LedgerRequest:
        request = self.admit(tokens, **options)
        self.ledger.allocate_nowait(request)
        self.ledger.check_integrity()
        return request

    def running(self, tokens: list[int], **options: Any) -> LedgerRequest:
        """Admitted, allocated, and loaded if there was something to load."""
        request = self.allocated(tokens, **options)
        self.land(self.ledger.plan_load(request))
        return request

    def run_on(self, request: LedgerRequest) -> None:
        """Make the calls that are left until the request may compute."""
        if request.state is RequestState.PINNED:
            if request.waiter is None:
                self.ledger.allocate_nowait(request)
            else:
                self.ledger.accept(request.waiter)
        for _ in range(4):
            if request.state is RequestState.RUNNING:
                break
            self.land(self.ledger.plan_load(request))
            for job in tuple(self.ledger.jobs.unsettled.values()):
                self.ledger.launch(job.job_id)
                self.end(job.plan)
            if request.waiter is not None:
                self.ledger.accept(request.waiter)
        assert request.state is RequestState.RUNNING
        self.ledger.check_integrity()

    def commit(
        self, request: LedgerRequest, num_tokens: int | None = None, new: Iterable[int] = ()
    ) -> list[TransferPlan]:
        count = request.sequence.num_tokens if num_tokens is None else num_tokens
        plans = list(self.ledger.commit(request, count, list(new)))
        self.ledger.check_integrity()
        return plans

    def launch(self, plans: Iterable[TransferPlan]) -> list[TransferPlan]:
        return [plan for plan in plans if self.ledger.launch(plan.job_id)]

    def end(
        self, plan: TransferPlan, outcome: Outcome = Outcome.LANDED, num_landed: int = 0, corrupt: Any = ()
    ) -> None:
        self.ledger.settle(Completion(plan.job_id, outcome, num_landed, tuple(corrupt)))
        self.ledger.check_integrity()

    def land(self, plans: Iterable[TransferPlan]) -> None:
        for plan in self.launch(plans):
            self.end(plan)

    def release(self, request: LedgerRequest, reason: str = "closed_early") -> list[TransferPlan]:
        plans = list(self.ledger.release(request, reason))
        self.ledger.check_integrity()
        return plans

    # -- whole lives ----------------------------------------------------------------------------------------------

    def serve(self, tokens: list[int], **options: Any) -> LedgerRequest:
        """A whole life: computed, stored, gone."""
        request = self.running(tokens, **options)
        stores = self.commit(request)
        self.land([*stores, *self.release(request)])
        return request

    def evict_device(self) -> None:
        """Everything unpinned leaves the device."""
        request = self.admit([9_999_999], max_hit_tokens=0)
        num_unpinned = self.ledger.statistics().device.num_free + self.ledger.statistics().device.num_cached
        unit = self.ledger.layout.unit_tokens
        if num_unpinned >= self.ledger.layout.width:
            self.ledger.allocate_nowait(request, num_unpinned // self.ledger.layout.width * unit)
        self.release(request, "filler")

    def on_host_only(self, tokens: list[int], **options: Any) -> None:
        self.serve(tokens, **options)
        self.evict_device()

    # -- looking --------------------------------------------------------------------------------------------------

    def hit(self, tokens: list[int], root: Root = ROOT, key_spans: Any = ()) -> tuple[int, int]:
        found = self.ledger.lookup(self.prefix(tokens, root, key_spans))
        return found.num_device_tokens, found.num_host_tokens

    def num_pinned(self) -> tuple[int, int]:
        statistics = self.ledger.statistics()
        return statistics.device.num_pinned, statistics.host.num_pinned

    def picture(self) -> Any:
        """Everything a refusal must not change."""
        tiers = [(tier.statistics(), [part.run.key for part in tier.order]) for tier in self.ledger.cache.tiers]
        runs = {key: repr(run) for key, run in self.ledger.cache.index.runs.items()}
        wait_queue = self.ledger.admission.queue
        return tiers, runs, list(wait_queue.extending), list(wait_queue.allocating), set(self.ledger.jobs.unsettled)


__all__ = ["BLOCK", "ROOT", "Direction", "Driven", "Tier", "prompt", "write_back"]
