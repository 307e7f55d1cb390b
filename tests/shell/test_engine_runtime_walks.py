"""Random requests over engine-owned blocks: shared prefixes, copies that end in any way and order, cancellations and
preemptions at any time. Every request has the right bytes, and every block is returned."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import anyio
import pytest
from clocks import JUMPING, jumping_backend
from engine_serving import OwnEngine, own_engine
from serving import turns

from aoffload import RequestState

pytestmark = pytest.mark.anyio

NUM_SEEDS, NUM_LIVES = 12, 40


@pytest.fixture(params=JUMPING)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return jumping_backend(request.param)


class Walk:
    """Clients, and one who ends their copies."""

    def __init__(self, engine: OwnEngine, rng: random.Random) -> None:
        self.engine, self.random, self.counts = engine, rng, Counter[str]()
        self.stems = [[100 * stem + at for at in range(24)] for stem in range(3)]
        self.is_over = False

    async def live(self, number: int) -> None:
        stem = self.random.choice(self.stems)
        tokens = [*stem[: self.random.randint(1, 24)], *([1000 + number] * self.random.randint(0, 6))]
        name, limit = f"r{number}", None
        for _ in range(3):  # comes again after a preemption
            if self.random.random() < 0.3:
                await anyio.sleep(self.random.random() * 3)
            options = {"deadline_s": self.random.random() * 2} if self.random.random() < 0.3 else {}
            with anyio.CancelScope() as scope:
                if self.random.random() < 0.2:
                    scope.deadline = anyio.current_time() + self.random.random() * 2
                try:
                    num_ready = await self.engine.serve(
                        tokens, request_id=f"r{number}", max_hit_tokens=limit, **options
                    )
                except IndexError:  # the pool has no room: come again later
                    await anyio.sleep(1)
                    self.counts["no room"] += 1
                    continue
                self.counts["cancelled" if num_ready < 0 else "served"] += 1
                self.counts["found"] += max(0, num_ready)
            self.counts["left"] += scope.cancelled_caught
            request = next(one for one in reversed(self.engine.asked) if one.request_id == name)
            limit = request.retry_max_hit_tokens
            if request.reason != "preempted":
                return

    async def end_copies(self) -> None:
        """In any order and way, and sometimes not for longer than anybody waits."""
        transport = self.engine.transport
        while not self.is_over:
            await turns(self.random.randint(1, 6))
            copies = self.engine.in_flight()
            if self.random.random() < 0.05:
                await anyio.sleep(self.random.choice([1, 6, 40]))
            self.preempt(0.6)
            if not copies:
                await anyio.sleep(0.1)
                continue
            job_id = self.random.choice(copies)
            num_blocks = transport.in_flight[job_id].plan.num_blocks
            (end,) = self.random.choices(
                ["land", "fail", "corrupt", "lose"], [9, 2, 2, 2 * (job_id not in transport.lost)]
            )
            self.counts[end] += 1
            if end == "fail":
                transport.fail(job_id, self.random.randint(0, num_blocks - 1))
            elif end == "corrupt":
                transport.corrupt(job_id, self.random.randrange(num_blocks))
            else:
                getattr(transport, end)(job_id)
        while self.engine.in_flight():
            transport.land(self.engine.in_flight()[0])
            await turns(2)
        await anyio.sleep(0.1)  # time passes once nobody has anything left to do: all that was reported is settled

    def preempt(self, odds: float) -> None:
        records = list(self.engine.runtime.ledger.live_requests)
        if records and self.random.random() < odds:
            self.counts["preempted"] += self.engine.runtime.cancel(self.random.choice(records), "preempted")

    async def run(self) -> None:
        async with anyio.create_task_group() as ending:
            ending.start_soon(self.end_copies)
            async with anyio.create_task_group() as living:
                for number in range(NUM_LIVES):
                    living.start_soon(self.live, number)
                    await turns(self.random.randint(0, 5))
                    self.preempt(0.2)
                    self.engine.runtime.check_integrity()
            self.is_over = True


async def test_random_lives() -> None:
    """Wrong bytes, a block that is lost or free twice, a request that never ends: none of them, whatever happens."""
    counts: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        rng = random.Random(f"async engine {seed}")
        options: dict[str, Any] = {
            "num_host_blocks": rng.choice([6, 24, 64]), "max_job_bytes": rng.choice([1, 3, 100]),
            "max_jobs_in_flight": rng.choice([1, 4]), "max_quarantined_share": rng.choice([0.1, 1.0]),
            "load_timeout_s": 10.0, "transfer_timeout_s": 30.0, "pending_timeout_s": 3.0,
        }  # fmt: skip
        async with own_engine(rng.choice([20, 60]), auto=False, **options) as engine:
            walk = Walk(engine, rng)
            await walk.run()
            await engine.assert_at_rest()
            assert all(request.state in (RequestState.DONE, RequestState.ABORTED) for request in engine.asked)
            counts.update(walk.counts, pending=engine.num_pending)
    met = {"served", "found", "cancelled", "left", "preempted", "land", "fail", "corrupt", "lose", "pending", "no room"}
    assert not [name for name in met if not counts[name]], counts
