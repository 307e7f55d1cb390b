"""The scheduler of examples/step_scheduler.py, as it is, for thousands of steps: any load, copies that fail or hang,
blocks that rot."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aoffload import Completion, Direction, Outcome, TransferPlan

EXAMPLE = Path(__file__).parents[2] / "examples/step_scheduler.py"
NUM_STEPS = 2500
MUST_HAPPEN = (
    "own", "host", "preempted", "forked", "copied", "accepted", "load", "store", "failed", "corrupt", "unproven",
    "proven late", "hung", "load lost", "reset", "left",
)  # fmt: skip


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("step_scheduler", EXAMPLE)
    assert spec is not None and spec.loader is not None
    sys.modules["step_scheduler"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


engine = load_example()


class Hostile(engine.Scheduler):  # type: ignore[misc]
    """The example's scheduler; every KV value that a forward reads is compared with the one that was computed for this
    token, copies end late and in every way they can, and what is lent no more is overwritten when it is used again."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.num_rows = self.random.randint(24, 60)
        super().__init__(self.num_rows, self.random.choice([20, 60, 300]))
        self.right: dict[tuple[Any, ...], int] = {}
        self.lost: list[TransferPlan] = []
        self.hung: dict[int, TransferPlan] = {}
        self.hang_rate = 0.03
        self.num_requests = 0
        self.stories = [[self.random.randrange(engine.VOCABULARY) for _ in range(40)] for _ in range(4)]

    # -- the load -------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        if len(self.waiting) + len(self.running) > 7 or self.random.random() < 0.6:
            return
        rng, self.num_requests = self.random, self.num_requests + 1
        tokens = [*rng.choice(self.stories)[: rng.randint(1, 24)], rng.randrange(engine.VOCABULARY)]
        num_tokens = len(tokens) + rng.randint(1, 10)
        fork_at = rng.choice([0, rng.randint(len(tokens) + 1, num_tokens)])
        self.waiting.append(engine.Request(f"r{self.num_requests}", tokens, num_tokens, rng.randrange(3), fork_at))

    def step(self) -> None:
        rng = self.random
        self.arrive()
        if self.running and rng.random() < 0.02:
            request = rng.choice(self.running)
            self.launch(self.ledger.release(request.holding, "client_gone"))
            self.running.remove(request)
            self.counts["left"] += 1
        if rng.random() < 0.005:
            self.ledger.reset()
            self.counts["reset"] += 1
        super().step()
        self.prove_late()
        self.check()

    def preempt(self, victim: Any) -> Any:
        self.counts["load lost"] += victim.holding.lacks_blocks
        return super().preempt(victim)

    def check(self) -> None:
        self.ledger.check_integrity()
        found = self.ledger.statistics().device
        assert found.num_blocks == self.num_rows - 1 - len(self.pool.free)
        for request in self.done:
            assert request.error is not None or request.tokens == request.expected(), request.name
        self.done.clear()

    def attend(self, table: list[int], group: int, at: int, token: int) -> int:
        """Right bytes at every read."""
        first = engine.seen(group, at)
        for position in range(first, at):
            found = self.memory[engine.Tier.DEVICE][table[position // engine.BLOCK], position % engine.BLOCK]
            assert found == self.expected_kv(group, position), f"wrong bytes at {position} of {group}"
        return int(super().attend(table, group, at, token))

    def forward(self, request: Any) -> Any:
        drafts = [(request.tokens[-1] + at) % engine.VOCABULARY for at in range(engine.NUM_DRAFTS)]
        self.computing = [*request.tokens, *drafts]
        return super().forward(request)

    def expected_kv(self, group: int, position: int) -> int:
        key = (group, *self.computing[: position + 1])
        if key not in self.right:
            before = [self.expected_kv(group, at) for at in range(engine.seen(group, position), position)]
            self.right[key] = engine.kv_of(self.computing[position], position, np.array(before, np.int64))
        return self.right[key]

    # -- copies ---------------------------------------------------------------------------------------------------

    def copy(self, plan: TransferPlan) -> Completion | None:
        if plan.job_id in self.hung or self.random.random() < 0.4:
            return None
        if self.random.random() < self.hang_rate:
            self.hung[plan.job_id] = plan
            self.counts["hung"] += 1
            return None
        outcome = self.random.choices(list(Outcome), [80, 8, 8 * (plan.direction is Direction.LOAD), 3])[0]
        if outcome is Outcome.LANDED:
            return super().copy(plan)  # type: ignore[no-any-return]
        self.counts[outcome.value] += 1
        into, source = self.memory[plan.destination], self.memory[plan.source]
        num_landed = self.random.randrange(plan.num_blocks)
        into[plan.destination_ids[:num_landed]] = source[plan.source_ids[:num_landed]]
        into[plan.destination_ids[num_landed:]] = -1
        if outcome is Outcome.CORRUPT:
            source[plan.source_ids[num_landed]] = -2
            return Completion(plan.job_id, outcome, num_landed, (num_landed,))
        if outcome is Outcome.UNPROVEN:
            self.lost.append(plan)
        return Completion(plan.job_id, outcome, num_landed)

    def prove_late(self) -> None:
        """A copy that nobody could tell the end of still writes, then says that it is over."""
        for job_id in self.hung.keys() - self.in_flight.keys():  # given up
            self.lost.append(self.hung.pop(job_id))
        for plan in [plan for plan in self.lost if self.random.random() < 0.2]:
            self.memory[plan.destination][plan.destination_ids] = -3
            self.ledger.settle(Completion(plan.job_id, Outcome.LANDED))
            self.lost.remove(plan)
            self.counts["proven late"] += 1

    def finish(self) -> None:
        for request in self.running:
            self.launch(self.ledger.release(request.holding, "closed"))
        while self.in_flight or self.lost:
            self.end_copies()
            self.counts["steps"] += 1
            self.prove_late()
        self.ledger.check_integrity()
        found = self.ledger.statistics()
        assert len(self.pool.free) == self.num_rows - 1 and found.device.num_blocks == 0, "everything was given back"
        assert found.host.num_pinned == found.num_jobs == found.num_requests == 0


def test_thousands_of_steps_read_right_bytes() -> None:
    """Chunks, drafts, forks, preemptions and clients that leave, over copies that fail: every value that is read is the
    right one, every output that of a run without offload, and every block is the engine's again at the end."""
    happened: Counter[str] = Counter()
    for seed in range(10):
        scheduler = Hostile(seed)
        for _ in range(NUM_STEPS // 10):
            scheduler.step()
        scheduler.finish()
        happened += scheduler.counts
    assert not [event for event in MUST_HAPPEN if not happened[event]], happened


@pytest.mark.parametrize("num_rows", [24, 36, 200])
def test_the_outputs_do_not_depend_on_the_room(num_rows: int) -> None:
    """With little room much is preempted, with much of it nothing: the tokens are the same."""
    scheduler = engine.Scheduler(num_rows, 100)
    for number in range(8):
        tokens = [(number % 3 + at) % engine.VOCABULARY for at in range(9 + number)]
        scheduler.waiting.append(engine.Request(f"r{number}", tokens, len(tokens) + 9))
    for _ in range(400):
        if scheduler.waiting or scheduler.running:
            scheduler.step()
    assert len(scheduler.done) == 8
    assert all(request.tokens == request.expected() for request in scheduler.done)
    assert (scheduler.counts["preempted"] == 0) == (num_rows == 200)


class Broken(engine.Scheduler):  # type: ignore[misc]
    """Every load ends in one way; stores land. What ends without proof is never proven over."""

    def __init__(self, outcome: Outcome | None) -> None:
        super().__init__(24, 100)
        self.outcome, self.num_loads = outcome, 0

    def copy(self, plan: TransferPlan) -> Completion | None:
        if plan.direction is Direction.STORE:
            return super().copy(plan)  # type: ignore[no-any-return]
        self.memory[plan.destination][plan.destination_ids] = -1
        self.num_loads += 1
        if self.outcome is None:
            return None
        corrupt = tuple(range(plan.num_blocks)) if self.outcome is Outcome.CORRUPT else ()
        return Completion(plan.job_id, self.outcome, 0, corrupt)


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CORRUPT, Outcome.UNPROVEN, None])
def test_loads_that_never_land(outcome: Outcome | None) -> None:
    """Whatever becomes of loads, the scheduler comes to an end: every output is the right one, or the request was
    rejected because blocks whose copy is not proven over are lost to the pool."""
    scheduler = Broken(outcome)
    for number in range(30):
        tokens = [(number % 3 + at) % engine.VOCABULARY for at in range(14)] + [number % engine.VOCABULARY]
        scheduler.waiting.append(engine.Request(f"r{number}", tokens, len(tokens) + 9))
    for _ in range(5000):
        if not (scheduler.waiting or scheduler.running or scheduler.in_flight):
            break
        scheduler.step()
        scheduler.ledger.check_integrity()
    assert not (scheduler.waiting or scheduler.running or scheduler.in_flight), "it spins"
    rejected = [request for request in scheduler.done if request.error is not None]
    assert len(scheduler.done) == 30 and scheduler.num_loads
    assert all(request.tokens == request.expected() for request in scheduler.done if request not in rejected)
    assert all(not request.error.retryable for request in rejected)
    assert bool(rejected) == (outcome in (Outcome.UNPROVEN, None))
    assert len(rejected) < 30
