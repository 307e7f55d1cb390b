"""The scheduler of examples/step_scheduler.py, for thousands of steps: any load, copies that fail, blocks that rot."""

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
    "proven late", "lent again", "reset", "left",
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
        for request in [request for request in self.running if request.holding.lacks_blocks]:
            self.counts["lent again"] += 1
            self.preempt(request)
        if self.running and rng.random() < 0.02:
            request = rng.choice(self.running)
            self.launch(self.ledger.release(request.holding, "client_gone"))
            self.running.remove(request)
            self.counts["left"] += 1
        if rng.random() < 0.005:
            self.ledger.reset()
            self.counts["reset"] += 1
        late = [plan for plan in self.in_flight if rng.random() < 0.4]
        self.in_flight = [plan for plan in self.in_flight if plan not in late]
        super().step()
        self.in_flight += late
        self.prove_late()
        self.check()

    def check(self) -> None:
        self.ledger.check_integrity()
        found = self.ledger.statistics().device
        assert found.num_blocks == self.num_rows - 1 - len(self.pool.free)
        for request in self.done:
            assert request.tokens == request.expected(), request.name
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

    def copy(self, plan: TransferPlan) -> Completion:
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
        for plan in [plan for plan in self.lost if self.random.random() < 0.2]:
            self.memory[plan.destination][plan.destination_ids] = -3
            self.ledger.settle(Completion(plan.job_id, Outcome.LANDED))
            self.lost.remove(plan)
            self.counts["proven late"] += 1

    def finish(self) -> None:
        for request in self.running:
            self.launch(self.ledger.release(request.holding, "closed"))
        while self.in_flight or self.lost:
            plans, self.in_flight = self.in_flight, []
            for plan in plans:
                self.ledger.settle(self.copy(plan))
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
