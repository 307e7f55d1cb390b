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

from aoffload import RequestState, Tier
from aoffload.ledger import Completion, Direction, Outcome, TransferPlan

EXAMPLE = Path(__file__).parents[2] / "examples/step_scheduler.py"
NUM_SEEDS, NUM_STEPS = 8, 130
MAX_STEPS_TO_END = 400
FILLED, FAILED, ROTTEN, STRAY = -1, -2, -3, -4
"""KV values that are nobody's: of a block that was taken, of a copy that did not land, of a block that rotted in the
host, and of a copy that was given up."""
MUST_HAPPEN = (
    "own", "host", "preempted", "no_room", "forked", "accepted", "pending", "load", "store", "load failed",
    "load corrupt", "load unproven", "load hung", "store failed", "store unproven", "store hung", "rot found", "lost",
    "lost in part", "retried shorter", "load over late", "store over late", "client_gone", "reset", "rejected",
)  # fmt: skip


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("step_scheduler", EXAMPLE)
    assert spec is not None and spec.loader is not None
    sys.modules["step_scheduler"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


engine = load_example()


class Checked(engine.Scheduler):  # type: ignore[misc]
    """The example's scheduler. Every KV value that a forward reads is compared with the one that was computed for this
    token, and every block is in the hands that say so. A block that is taken loses its content at once."""

    def __init__(self, num_rows: int, num_host: int, **options: Any) -> None:
        super().__init__(num_rows, num_host, **options)
        self.right: dict[tuple[Any, ...], int] = {}
        self.num_rows, take = num_rows, self.pool.take

        def take_and_fill(num_blocks: int) -> list[int]:
            block_ids: list[int] = take(num_blocks)
            self.memory[Tier.DEVICE][block_ids] = FILLED
            return block_ids

        self.pool.take = take_and_fill

    def step(self) -> None:
        super().step()
        self.ledger.check_integrity()
        in_tables = Counter(block_id for r in self.requests for table in r.tables for block_id in table if block_id)
        num_held = self.ledger.statistics().device.num_blocks
        assert sum(self.pool.num_holders) == in_tables.total() + num_held, "requests and copies are who holds blocks"
        assert all(self.pool.num_holders[block_id] >= number for block_id, number in in_tables.items())
        assert {0, *self.pool.free} == {at for at, number in enumerate(self.pool.num_holders) if not number}
        for request in self.requests:
            if request.tables and request.record.has_committed:
                first = engine.seen(1, request.record.num_computed_tokens) // engine.BLOCK
                assert not any(request.tables[1][:first]), "what has left the window is given back"
        for request in self.done:
            assert request.error is not None or request.tokens == request.expected(), request.name

    def attend(self, table: list[int], group: int, at: int, token: int) -> int:
        for position in range(engine.seen(group, at), at):
            found = self.memory[Tier.DEVICE][table[position // engine.BLOCK], position % engine.BLOCK]
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

    def run(self, *requests: Any) -> None:
        """All that waits, to its end, and copies until they have ended or were given up."""
        self.requests += requests
        for _ in range(MAX_STEPS_TO_END + 100 * len(requests)):
            if self.requests:
                self.step()
        assert not self.requests, "it spins"
        for _ in range(engine.PATIENCE):
            self.step()

    def forget(self) -> None:
        """The engine uses all its free blocks for something else."""
        self.pool.give(self.pool.take(len(self.pool.free)))

    def check_all_given_back(self) -> None:
        found = self.ledger.statistics()
        assert len(self.pool.free) == self.num_rows - 1 and found.device.num_blocks == 0, "everything was given back"
        assert found.host.num_pinned == found.host.num_quarantined == found.num_jobs == found.num_requests == 0
        self.ledger.check_integrity()


class Hostile(Checked):
    """Clients come and leave, copies end late and in every way they can."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        num_rows, num_host = self.random.choice([14, 24, 36, 60]), self.random.choice([20, 60, 300])
        super().__init__(num_rows, num_host, max_job_bytes=self.random.choice([1, 3, 1000]))
        self.hung: set[int] = set()
        self.num_arrived = 0
        self.stories = [[self.random.randrange(engine.VOCABULARY) for _ in range(40)] for _ in range(4)]

    def arrive(self) -> None:
        if len(self.requests) > 7 or self.random.random() < 0.6:
            return
        rng, self.num_arrived = self.random, self.num_arrived + 1
        tokens = [*rng.choice(self.stories)[: rng.randint(1, 24)], rng.randrange(engine.VOCABULARY)]
        num_tokens = len(tokens) + rng.randint(1, 10)
        fork_at = rng.choice([0, rng.randint(len(tokens) + 1, num_tokens)])
        self.requests.append(engine.Request(f"r{self.num_arrived}", tokens, num_tokens, rng.randrange(3), fork_at))

    def step(self) -> None:
        rng = self.random
        if self.requests and rng.random() < 0.03:
            request = rng.choice(self.requests)
            if request.record is not None:
                self.leave(request, "client_gone")
            self.requests.remove(request)
        if rng.random() < 0.2:
            self.memory[Tier.HOST][rng.randrange(len(self.memory[Tier.HOST]))] = ROTTEN
        if rng.random() < 0.01:
            self.ledger.reset(rng.choice([None, Tier.HOST]))
            self.counts["reset"] += 1
        super().step()
        self.counts["rejected"] += sum(request.error is not None for request in self.done)
        self.done.clear()

    def admit(self, request: Any) -> bool:
        self.counts["retried shorter"] += request.max_hit is not None
        return bool(super().admit(request))

    def end_copies(self) -> None:
        asked = [request.record for request in self.requests if request.record is not None]
        loading = [record for record in asked if record.state is RequestState.LOADING]
        super().end_copies()
        for record in loading:
            self.counts["lost"] += record.num_lost_tokens > 0
            is_partial = record.num_lost_tokens and record.num_computed_tokens > record.match.num_device_tokens
            self.counts["lost in part"] += is_partial

    def copy(self, plan: TransferPlan) -> Completion | None:
        rng, into, source = self.random, self.memory[plan.destination], self.memory[plan.source]
        if plan.job_id in self.hung:
            return self.end_late(plan)
        if rng.random() < 0.4:
            return None
        if rng.random() < 0.03:
            self.hung.add(plan.job_id)
            self.counts[f"{plan.direction.value} hung"] += 1
            return None
        rotten = np.flatnonzero((source[plan.source_ids] == ROTTEN).any(axis=1)).tolist()
        outcome = rng.choices(list(Outcome), [80, 8, 8 * (plan.direction is Direction.LOAD), 3, 2])[0]
        if outcome is Outcome.REFUSED:
            return Completion(plan.job_id, outcome)
        num_landed = rng.randrange(min([*rotten, plan.num_blocks - 1]) + 1)
        if outcome is Outcome.LANDED:
            if not rotten:
                return super().copy(plan)  # type: ignore[no-any-return]
            outcome, num_landed = Outcome.CORRUPT, rotten[0]
            self.counts["rot found"] += 1
        self.counts[f"{plan.direction.value} {outcome.value}"] += 1
        into[plan.destination_ids[:num_landed]] = source[plan.source_ids[:num_landed]]
        into[plan.destination_ids[num_landed:]] = FAILED
        if outcome is Outcome.UNPROVEN:
            self.hung.add(plan.job_id)
        if outcome is not Outcome.CORRUPT:
            return Completion(plan.job_id, outcome, num_landed)
        source[plan.source_ids[num_landed]] = ROTTEN
        return Completion(plan.job_id, outcome, num_landed, (num_landed,))

    def end_late(self, plan: TransferPlan) -> Completion | None:
        """A copy that was given up still writes; at last it says that it is over."""
        if self.counts["steps"] - self.launched[plan.job_id][1] <= engine.PATIENCE:
            return None
        self.memory[plan.destination][plan.destination_ids] = STRAY
        if self.random.random() < 0.7:
            return None
        self.counts[f"{plan.direction.value} over late"] += 1
        return Completion(plan.job_id, Outcome.LANDED, plan.num_blocks)


def test_thousands_of_steps_read_right_bytes() -> None:
    """Chunks, drafts, forks, preemptions and clients that leave, over copies that fail: every value that is read is the
    right one, every output that of a run without offload, all requests come to an end, and every block is the engine's
    again then."""
    happened: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        scheduler = Hostile(seed)
        for _ in range(NUM_STEPS):
            scheduler.arrive()
            scheduler.step()
        scheduler.run()
        while scheduler.launched:
            scheduler.step()
        scheduler.check_all_given_back()
        happened += scheduler.counts
    assert not [event for event in MUST_HAPPEN if not happened[event]], happened


def requests_of(number: int, num_tokens: int, num_more: int = 9) -> list[Any]:
    """`number` of them, of three prompts that differ in their last token."""
    found = []
    for at in range(number):
        tokens = [*((at % 3 + position) % engine.VOCABULARY for position in range(num_tokens)), at % engine.VOCABULARY]
        found.append(engine.Request(f"r{at}", tokens, len(tokens) + num_more))
    return found


@pytest.mark.parametrize("num_rows", [24, 36, 200])
def test_the_outputs_do_not_depend_on_the_room(num_rows: int) -> None:
    """With little room much is preempted, with much of it nothing: the tokens are the same."""
    scheduler = Checked(num_rows, 100)
    scheduler.run(*requests_of(8, 12))
    assert len(scheduler.done) == 8 and not any(request.error for request in scheduler.done)
    assert (scheduler.counts["preempted"] == 0) == (num_rows == 200)
    scheduler.check_all_given_back()


def test_what_can_never_fit_is_rejected() -> None:
    """A request that the whole pool is too small for ends with an error that says so, whether its prompt is too long or
    what it generates; those after it go on."""
    scheduler = Checked(17, 100)
    too_long, grows_too_long = engine.Request("a", [1] * 60, 61), engine.Request("b", [2] * 20, 90)
    scheduler.run(too_long, grows_too_long, *requests_of(4, 12))
    assert [request.name for request in scheduler.done if request.error is not None] == ["a", "b"]
    assert not too_long.error.retryable and not grows_too_long.error.retryable
    assert len(scheduler.done) == 6
    scheduler.check_all_given_back()


def test_one_load_is_for_all() -> None:
    """Of prompts that begin alike one loads; the others are told to ask again, and hit what it has loaded."""
    scheduler, tokens = Checked(200, 100), [at % engine.VOCABULARY for at in range(26)]
    scheduler.run(engine.Request("first", tokens, 27))
    scheduler.forget()
    scheduler.run(*(engine.Request(f"r{number}", [*tokens, number], 33) for number in range(5)))
    assert scheduler.counts["load"] == 6 + 2, "full attention needs six blocks, the window two"
    assert scheduler.counts["host"] == 24 and scheduler.counts["own"] == 4 * 24
    assert scheduler.counts["pending"] >= 4
    scheduler.check_all_given_back()


class Broken(Checked):
    """Every copy in one direction ends in one way (None: not at all); the others land. What ends without proof is
    proven over late, if at all."""

    def __init__(
        self, direction: Direction, outcome: Outcome | None, num_rows: int = 24, max_quarantined_share: float = 0.25
    ) -> None:
        super().__init__(num_rows, 100, max_quarantined_share=max_quarantined_share)
        self.direction, self.outcome, self.broken = direction, outcome, Counter[int]()

    def copy(self, plan: TransferPlan) -> Completion | None:
        if plan.direction is not self.direction or (self.outcome is Outcome.LANDED and plan.job_id not in self.broken):
            return super().copy(plan)  # type: ignore[no-any-return]
        if self.outcome is Outcome.LANDED:
            return Completion(plan.job_id, self.outcome, plan.num_blocks)
        self.memory[plan.destination][plan.destination_ids] = STRAY
        self.broken[plan.job_id] += 1
        if self.outcome is None or self.broken[plan.job_id] > 1:
            return None
        corrupt = tuple(range(plan.num_blocks)) if self.outcome is Outcome.CORRUPT else ()
        return Completion(plan.job_id, self.outcome, 0, corrupt)


each_end = pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CORRUPT, Outcome.UNPROVEN, None])


@pytest.mark.parametrize("share", [0.25, 1.0])
@each_end
def test_loads_that_never_land(outcome: Outcome | None, share: float) -> None:
    """Whatever becomes of loads, the scheduler comes to an end, and every output is the right one. Where quarantine
    has no bound, or many hang at once, a request may be rejected because copies that are not proven over hold too many
    blocks. Once they are, all blocks are back, and who was rejected fits."""
    scheduler = Broken(Direction.LOAD, outcome, max_quarantined_share=share)
    scheduler.run(*requests_of(30, 14))
    rejected = [request for request in scheduler.done if request.error is not None]
    assert len(scheduler.done) == 30 and scheduler.broken
    assert all(request.error.retryable for request in rejected)
    assert len(rejected) < 30 and bool(rejected) == (outcome is None or (outcome is Outcome.UNPROVEN and share == 1.0))
    found = scheduler.ledger.statistics().device
    assert 23 - len(scheduler.pool.free) == found.num_blocks == found.num_quarantined
    scheduler.outcome = Outcome.LANDED  # all of them are over after all
    scheduler.step()
    scheduler.check_all_given_back()
    scheduler.run(*(engine.Request(r.name, r.tokens, r.num_tokens, r.taste) for r in rejected))
    assert not [request for request in scheduler.done[30:] if request.error is not None]


@each_end
def test_stores_that_never_land(outcome: Outcome | None) -> None:
    """Whatever becomes of stores, every output is the right one: nobody is rejected, for what a store that hangs may
    still read is the engine's again, and nothing is loaded that has not landed."""
    scheduler = Broken(Direction.STORE, outcome)
    scheduler.run(*requests_of(30, 14))
    assert len(scheduler.done) == 30 and not any(request.error for request in scheduler.done)
    assert scheduler.broken and not scheduler.counts["load"]
    assert len(scheduler.pool.free) == 23
    scheduler.outcome = Outcome.LANDED
    scheduler.step()
    scheduler.check_all_given_back()


@each_end
def test_nobody_waits_long_for_a_load_that_never_lands(outcome: Outcome | None) -> None:
    """Requests that were told to ask again, since another one was loading the same, go on when that load is lost or has
    taken too long."""
    scheduler, tokens = Broken(Direction.LOAD, outcome, num_rows=200), [at % engine.VOCABULARY for at in range(26)]
    scheduler.run(engine.Request("first", tokens, 27))
    scheduler.forget()
    began = scheduler.counts["steps"]
    scheduler.run(*(engine.Request(f"r{number}", [*tokens, number], 33) for number in range(5)))
    assert scheduler.counts["pending"] and scheduler.broken
    assert scheduler.counts["steps"] - began < 6 * engine.PATIENCE
    assert len(scheduler.done) == 6 and not any(request.error for request in scheduler.done)
