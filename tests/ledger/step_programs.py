"""Two programs around a `Ledger`, observed: one whose blocks are the ledger's, and an engine with blocks of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import attrs
from test_step_scheduler import Hostile

from aoffload import HostCache, KVCacheGroup, Ledger, OffloadConfig, OutOfBlocks, RequestState, SlidingWindow
from aoffload.ledger import (
    Completion,
    Direction,
    Event,
    JobMoved,
    JobState,
    LedgerRequest,
    Observer,
    Outcome,
    Pin,
    Prefix,
    RequestMoved,
    Root,
    StoreSkipped,
    TransferPlan,
    Waiter,
)

__all__ = ["PROGRAMS", "EngineSteps", "OwnSteps", "Program", "Seen"]


class Seen:
    """Keeps every request, and counts jobs by direction and last state."""

    def __init__(self) -> None:
        self.records: dict[LedgerRequest, None] = {}
        self.jobs: dict[tuple[Direction, JobState], int] = {}
        self.num_skipped_blocks = 0

    def observe(self, event: Event) -> None:
        match event:
            case RequestMoved():
                self.records[event.request] = None
            case JobMoved():
                key = (event.job.plan.direction, event.new)
                self.jobs[key] = self.jobs.get(key, 0) + 1
            case StoreSkipped():
                self.num_skipped_blocks += event.num_blocks

    def num_jobs(self, state: JobState) -> int:
        return sum(number for (_, its_state), number in self.jobs.items() if its_state is state)


@attrs.define(eq=False)
class Client:
    record: LedgerRequest
    tokens: list[int]
    num_tokens: int
    """Tokens at which it is done."""
    waiter: Waiter | None = None


class OwnSteps:
    """A scheduler whose blocks are the ledger's: requests wait in the ledger's line, compute a token in each step, are
    preempted, leave in the middle of it, or pin their prompt. Copies end some steps later, and some of them fail."""

    NUM_STEPS = 120

    def __init__(self, seed: int, observer: Observer | None, between: Callable[[], object] = lambda: None) -> None:
        self.random, self.between = random.Random(seed), between
        groups = [KVCacheGroup("full", block_size=4), KVCacheGroup("near", SlidingWindow(9), 4)][: 1 + seed % 2]
        config = OffloadConfig(groups=groups, num_host_blocks=self.random.choice([20, 60, 300]), max_job_bytes=3)
        self.ledger = Ledger(config, 30 * len(groups), observer=observer)
        self.stories = [[self.random.randrange(1000) for _ in range(40)] for _ in range(6)]
        self.clients, self.launched = list[Client](), dict[int, TransferPlan]()
        self.pins = list[Pin]()

    def launch(self, plans: Iterable[TransferPlan]) -> None:
        self.launched.update((plan.job_id, plan) for plan in plans if self.ledger.launch(plan.job_id))

    def end_copies(self) -> None:
        for job_id, plan in tuple(self.launched.items()):
            if self.random.random() < 0.5:
                odds = [85, 8, 4 * (plan.direction is Direction.LOAD), 3, 2]
                outcome = self.random.choices(list(Outcome), odds)[0]
                corrupt = (0,) if outcome is Outcome.CORRUPT else ()
                num_landed = plan.num_blocks if outcome is Outcome.LANDED else 0
                self.ledger.settle(Completion(job_id, outcome, num_landed, corrupt))
                if outcome is not Outcome.UNPROVEN:
                    del self.launched[job_id]

    def arrive(self) -> None:
        if len(self.clients) > 6 or self.random.random() < 0.5:
            return
        tokens = [*self.random.choice(self.stories)[: self.random.randint(5, 40)], 1000]
        prefix = Prefix.of(Root("toy"), tokens)
        if self.random.random() < 0.1:
            self.pins.append(self.ledger.pins.hold(prefix))
        record = self.ledger.admit(prefix)
        waiter = self.ledger.queue_allocation(record, len(tokens) + 8)
        self.clients.append(Client(record, tokens, len(tokens) + self.random.randint(1, 8), waiter))

    def take_room(self, client: Client) -> None:
        """Accept what it was granted, and load."""
        waiter = client.record.waiter or client.waiter
        if waiter is None or not waiter.is_over:
            return
        client.waiter = None
        try:
            self.ledger.accept(waiter)
        except OutOfBlocks:
            self.leave(client, "no_room")
            return
        self.launch(self.ledger.plan_load(client.record))

    def compute(self, client: Client) -> None:
        sampled = [self.random.randrange(1000)] if len(client.tokens) < client.num_tokens else []
        self.launch(self.ledger.commit(client.record, len(client.tokens), sampled))
        client.tokens += sampled
        if not sampled:
            self.leave(client, "closed_early")
        elif self.random.random() < 0.05:
            self.launch(self.ledger.preemption.preempt(client.record).plans)

    def leave(self, client: Client, reason: str) -> None:
        self.clients.remove(client)
        self.launch(self.ledger.release(client.record, reason))

    def step(self) -> None:
        self.end_copies()
        for client in tuple(self.clients):
            state = client.record.state
            if self.random.random() < 0.02:
                self.leave(client, "client_gone")
            elif state is RequestState.PREEMPTED:
                self.ledger.preemption.resume(client.record)
                client.waiter = self.ledger.queue_allocation(client.record, len(client.tokens) + 8)
            elif state is RequestState.RUNNING:
                self.compute(client)
            elif state in (RequestState.PINNED, RequestState.REQUEUED):
                self.take_room(client)
        if self.pins and self.random.random() < 0.2:
            self.ledger.pins.release(self.pins.pop())
        self.ledger.check_integrity()
        self.between()

    def drive(self, num_steps: int = NUM_STEPS) -> None:
        """So many steps in which requests arrive, then steps until all are over."""
        for _ in range(num_steps):
            self.arrive()
            self.step()
        for _ in range(400):
            if self.clients or self.launched or self.pins:
                self.step()
        assert not self.clients and not self.launched


class EngineSteps(Hostile):
    """The scheduler of examples/step_scheduler.py among clients that leave and copies that fail, hang or rot."""

    NUM_STEPS = 120

    def __init__(self, seed: int, observer: Observer | None, between: Callable[[], object] = lambda: None) -> None:
        super().__init__(seed)
        self.told_pending: set[LedgerRequest] = set()
        self.between, config = between, self.ledger.config
        self.ledger = HostCache(
            config, self.num_rows, engine_blocks=self.pool, clock=lambda: self.counts["steps"], observer=observer
        )

    def admit(self, request: Any) -> bool:
        is_admitted = super().admit(request)
        if request.record is not None and request.record.match.is_pending:
            self.told_pending.add(request.record)
        return is_admitted

    def step(self) -> None:
        super().step()
        self.between()

    def drive(self, num_steps: int = NUM_STEPS) -> None:
        """So many steps in which requests arrive, then steps until all are over; then the engine shuts down."""
        for _ in range(num_steps):
            self.arrive()
            self.step()
        for _ in range(400):
            if self.requests or self.launched:
                self.step()


Program: TypeAlias = type[OwnSteps] | type[EngineSteps]
PROGRAMS: dict[str, Program] = {"own": OwnSteps, "engine": EngineSteps}
