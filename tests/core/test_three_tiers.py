"""Three tiers: the parts of the core, and the verbs of requests, with a disk below the device and the host.

The disk stores blocks that the host holds, and loads them back into the host. Neither kind of job involves the device.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from aoffload._common.prefix import Prefix, Root
from aoffload._common.tiers import Tier
from aoffload._config.groups import FullAttention, KVCacheGroup, SlidingWindow
from aoffload._extensions.integrity import check_integrity
from aoffload._kernel.cache import PrefixCache
from aoffload._kernel.hooks import Hooks
from aoffload._kernel.index import Stretch, find_hit, held_stop, jobs_bringing, present_stop
from aoffload._kernel.jobs import JobBook, Stores
from aoffload._kernel.layout import Component, Layout
from aoffload._kernel.leases import RequestLeases, publish, slide_windows
from aoffload._kernel.loads import Loads
from aoffload._kernel.moves import Moves
from aoffload._kernel.plans import Completion, TransferPlan
from aoffload._kernel.pools import ExtentPool, FreeList, LastUses, LeastRecentlyUsed, TierBlocks
from aoffload._kernel.records import Job, LedgerRequest, Part, Run
from aoffload._kernel.states import Direction, JobState, Outcome, RequestState
from aoffload._kernel.tokens import TokenSequence
from aoffload._kernel.waiting import Admission

UNIT = 4
ROT = ("rot",)


DISK = Tier.DISK
TIERS = (Tier.DEVICE, Tier.HOST, DISK)
LAYOUTS = {
    "full": [KVCacheGroup("full", block_size=UNIT)],
    "window": [
        KVCacheGroup("full", block_size=UNIT),
        KVCacheGroup("window", attention=SlidingWindow(2 * UNIT + 1), block_size=UNIT),
    ],
    "window only": [KVCacheGroup("window", attention=SlidingWindow(3 * UNIT), block_size=UNIT)],
    "wide": [KVCacheGroup("one", block_size=UNIT), KVCacheGroup("two", FullAttention(), block_size=UNIT // 2)],
}


class Parts:
    """What a ledger is made of, with three tiers, and what each block holds."""

    def __init__(
        self, layout: str = "full", num_device: int = 40, num_host: int = 40, num_disk: int = 60,
        third: type[TierBlocks] = TierBlocks,
    ) -> None:  # fmt: skip
        self.layout = Layout.of(LAYOUTS[layout])
        pools = (FreeList(num_device + 1), ExtentPool(num_host), ExtentPool(num_disk))
        kinds = zip((TierBlocks, TierBlocks, third), TIERS, pools, strict=True)
        blocks = tuple(kind(tier, pool, LeastRecentlyUsed()) for kind, tier, pool in kinds)
        self.cache = PrefixCache(self.layout, blocks, lambda _: LeastRecentlyUsed(), LastUses(0))
        self.moves = Moves(None)
        self.hooks = Hooks(lambda: None)
        self.leases = RequestLeases(self.cache, self.hooks)
        self.jobs = JobBook(self.cache, self.moves, self.hooks, [3 for _ in self.layout.components])
        self.admission = Admission(self.cache, self.leases, self.moves, lambda: True, self.hooks)
        self.loads = Loads(self.cache, self.leases, self.moves, self.jobs, self.admission, self.hooks)
        ways = [(Tier.DEVICE, Tier.HOST), (Tier.HOST, DISK), (DISK, Tier.HOST)]
        self.copies = {way: Stores(self.cache, self.jobs, self.moves, *way) for way in ways}
        self.content: dict[tuple[Tier, int], object] = {}
        self.live: list[LedgerRequest] = []
        self.num_requests = 0

    # -- a request ------------------------------------------------------------------------------------------------

    def sequence(self, tokens: list[int]) -> TokenSequence:
        return TokenSequence(Prefix.of(Root("test"), tokens), self.layout.unit_tokens)

    def begin(self, tokens: list[int]) -> tuple[LedgerRequest, list[TransferPlan]] | None:
        """Match, pin, take room and plan the load; None without room."""
        self.num_requests += 1
        number = self.num_requests
        record = LedgerRequest(f"r{number}", self.sequence(tokens), self.cache.epoch, number, 10**6, 1, ledger=self)
        self.moves.request(record, RequestState.MATCHED)
        self.leases.pin(record)
        self.moves.request(record, RequestState.PINNED)
        missing = self.leases.num_fresh(record, record.published, record.hit_stop, self._num_units(record))
        if missing > self.admission.num_available or not self.admission.queue.is_empty:
            self.leases.release_all(record)
            return None
        self.admission.allocate_nowait(record)
        self.live.append(record)
        return record, list(self.loads.plan(record))

    def _num_units(self, record: LedgerRequest) -> int:
        return self.layout.num_units(record.sequence.num_tokens)

    def compute(self, record: LedgerRequest) -> None:
        """Write what it has not loaded, and publish it; not if its load is under way."""
        if record.state is not RequestState.RUNNING:
            return
        stop = record.sequence.num_tokens // self.layout.unit_tokens
        for component in self.layout.components:
            table = record.tables[component.number]
            for unit in range(record.published, stop) if component.width else ():
                for at, block_id in enumerate(table.at(unit, unit + 1)):
                    if block_id:
                        prefix = record.sequence.first_bytes(0, (unit + 1) * self.layout.unit_tokens)
                        self.content[Tier.DEVICE, block_id] = (prefix, component.number, at)
        if record.epoch == self.cache.epoch:
            publish(self.leases, record, stop)
        record.num_computed_tokens = record.sequence.num_tokens
        slide_windows(self.cache, record)

    def end(self, record: LedgerRequest) -> None:
        for job in self.jobs.abandon(record.load) if record.load is not None else ():
            assert job.state is JobState.DISCARDED
        if record.waiter is not None:
            self.admission.leave(record.waiter)
        self.leases.release_all(record)
        self.live.remove(record)

    def serve(self, tokens: list[int]) -> LedgerRequest:
        """A whole life. Returns what is left of the request."""
        begun = self.begin(tokens)
        assert begun is not None
        record = begun[0]
        self.land()
        self.compute(record)
        self.end(record)
        return record

    # -- copies ---------------------------------------------------------------------------------------------------

    def copy(self, source: Tier, destination: Tier, tokens: list[int]) -> list[Job]:
        """Copy what is in `source` of the prompt and not in `destination`."""
        path = list(self.cache.index.walk(self.sequence(tokens), len(tokens) // self.layout.unit_tokens))
        if not path:
            return []
        run = self.cache.cut(path[-1][0], path[-1][1])
        pin = self.cache.lease(source, run, self.layout.starts_of(self.layout.full, 0, run.stop), is_use=False)
        copies, jobs = self.copies[source, destination], list[Job]()
        for component in self.layout.components:
            jobs += copies.offer(None, run, component, 0, run.stop)
        self.cache.release(pin)
        return jobs

    def settle(self, job: Job, outcome: Outcome, num_landed: int = 0) -> None:
        plan = job.plan
        if job.state is JobState.QUEUED:
            self.jobs.launch(job)
        content = [self.content.get((plan.source, block_id)) for block_id in plan.source_ids]
        corrupt = [at for at, what in enumerate(content) if what is ROT]
        if outcome is Outcome.LANDED and corrupt:
            outcome, num_landed = Outcome.CORRUPT, corrupt[0]
        upto = plan.num_blocks if outcome is Outcome.LANDED else num_landed
        for block_id, what in zip(plan.destination_ids[:upto], content, strict=False):
            self.content[plan.destination, block_id] = what
        for block_id in plan.destination_ids[upto:]:
            self.content[plan.destination, block_id] = "torn"
        at = tuple(corrupt) if outcome is Outcome.CORRUPT else ()
        settled = self.jobs.settle(Completion(plan.job_id, outcome, num_landed, at))
        self.jobs.end_claims(settled)

    def land(self) -> None:
        while self.jobs.unsettled:
            for job in [job for job in self.jobs.unsettled.values() if job.parked is None]:
                if not job.is_settled:
                    self.settle(job, Outcome.LANDED)

    def evict(self, tier: Tier, num_blocks: int | None = None) -> None:
        num_available = self.cache.tiers[tier].num_available
        self.cache.give(
            tier, self.cache.take(tier, num_available if num_blocks is None else min(num_available, num_blocks))
        )

    # -- looking --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """The conservation laws, and that each findable block holds what it is found for."""
        whole: Any = SimpleNamespace(
            cache=self.cache, jobs=self.jobs, hooks=self.hooks, live_requests=dict(enumerate(self.live)), closing=set()
        )
        check_integrity(whole, self.admission.queue)
        for part in self.parts():
            ids = part.ids(part.first, part.stop)
            for at, block_id in enumerate(ids):
                unit = part.first + at // part.width
                found = self.content[part.tier, block_id]
                assert found in (ROT, (_prefix(part.run, unit), part.component, at % part.width)), (part.run, part.tier)

    def parts(self) -> Iterator[Part]:
        for run in self.cache.index.runs.values():
            yield from (part for part in run.parts if part.blocks)

    def hit(self, tokens: list[int]) -> tuple[int, int]:
        hit = find_hit(self.cache.index, self.sequence(tokens), self.layout, len(tokens) // self.layout.unit_tokens)
        return hit.device_stop, hit.stop

    def path(self, tokens: list[int]) -> list[Run]:
        walked = self.cache.index.walk(self.sequence(tokens), len(tokens) // self.layout.unit_tokens)
        return [run for run, _ in walked]


def _prefix(run: Run, unit: int) -> bytes:
    whole = b"".join(current.tokens for current in run.whole_path())
    return whole[: (unit + 1) * (len(run.tokens) // (run.stop - run.start))]


def prompt(name: int, num_units: int) -> list[int]:
    return [name * 1000 + at for at in range(num_units * UNIT + 1)]


each_layout = pytest.mark.parametrize("layout", LAYOUTS)


@each_layout
def test_a_prefix_comes_back_from_the_third_tier(layout: str) -> None:
    """Two links down, two links up: what the third tier alone holds is no hit, and one again once it is fetched."""
    parts, tokens = Parts(layout), prompt(1, 8)
    parts.serve(tokens)
    for source, destination in ((Tier.DEVICE, Tier.HOST), (Tier.HOST, DISK)):
        jobs = parts.copy(source, destination, tokens)
        assert {job.plan.link for job in jobs} == {(source, destination)}
        assert {job.plan.direction for job in jobs} == {Direction.STORE}
        parts.land()
        parts.evict(source)
        parts.check()
    path = parts.path(tokens)
    assert parts.hit(tokens) == (0, 0)
    assert held_stop(parts.layout, path, DISK, 0, 8) == 8
    assert held_stop(parts.layout, path, Tier.HOST, 0, 8) == 0
    jobs = parts.copy(DISK, Tier.HOST, tokens)
    assert {job.plan.direction for job in jobs} == {Direction.LOAD}
    assert parts.copy(DISK, Tier.HOST, tokens) == [], "a second fetch finds these jobs"
    parts.check()
    parts.land()
    parts.check()
    assert parts.hit(tokens) == (0, 8)
    begun = parts.begin(tokens)
    assert begun is not None and {plan.link for plan in begun[1]} == {(Tier.HOST, Tier.DEVICE)}
    parts.land()
    assert begun[0].state is RequestState.RUNNING and begun[0].published == 8
    parts.check()


def test_jobs_into_the_second_tier_are_found() -> None:
    """Who wants what another fetch brings finds its jobs, and where they end."""
    parts, tokens = Parts(), prompt(1, 8)
    parts.serve(tokens)
    for way in ((Tier.DEVICE, Tier.HOST), (Tier.HOST, DISK)):
        parts.copy(*way, tokens)
        parts.land()
        parts.evict(way[0])
    jobs = parts.copy(DISK, Tier.HOST, tokens)
    (run,) = parts.path(tokens)
    assert present_stop([run], Tier.HOST, 0, 8) == 0
    assert jobs_bringing([(run, 0, 8)], Tier.HOST, 0) == (jobs[::-1], 8)
    assert jobs_bringing([(run, 0, 8)], Tier.DEVICE, 0) == ([], 0)


def test_stores_are_counted_where_they_read() -> None:
    """What is on its way to the third tier takes nothing from what may be on its way to the second."""
    parts, tokens = Parts(), prompt(1, 8)
    parts.serve(tokens)
    parts.copy(Tier.DEVICE, Tier.HOST, tokens)
    assert [parts.jobs.num_stored_now(tier) for tier in TIERS] == [8, 0, 0]
    parts.land()
    parts.copy(Tier.HOST, DISK, tokens)
    assert [parts.jobs.num_stored_now(tier) for tier in TIERS] == [0, 8, 0]
    parts.check()
    parts.land()
    parts.evict(Tier.HOST)
    parts.copy(DISK, Tier.HOST, tokens)
    assert [parts.jobs.num_stored_now(tier) for tier in TIERS] == [0, 0, 0]


@pytest.mark.pure("derives from a class of the core")
def test_a_tier_makes_the_payload_of_each_store() -> None:
    """A plan that copies to the tier carries it, one for each job. Plans to other tiers have none."""

    class Named(TierBlocks):
        def payload_of(self, pieces: list[Stretch], component: Component) -> object:
            return component.number, pieces[0][1], pieces[-1][2]

    parts, tokens = Parts(third=Named), prompt(1, 8)
    parts.serve(tokens)
    assert {job.plan.payload for job in parts.copy(Tier.DEVICE, Tier.HOST, tokens)} == {None}
    parts.land()
    jobs = parts.copy(Tier.HOST, DISK, tokens)
    assert [job.plan.payload for job in jobs] == [(0, 0, 3), (0, 3, 6), (0, 6, 8)]
    parts.land()
    parts.evict(Tier.HOST)
    assert {job.plan.payload for job in parts.copy(DISK, Tier.HOST, tokens)} == {None}


@each_layout
def test_a_rotten_block_of_the_third_tier_is_forgotten_there(layout: str) -> None:
    """A corrupt fetch forgets its source alone: the second tier gets nothing wrong, and what is above stays."""
    parts, tokens = Parts(layout), prompt(1, 8)
    parts.serve(tokens)
    for way in ((Tier.DEVICE, Tier.HOST), (Tier.HOST, DISK)):
        parts.copy(*way, tokens)
        parts.land()
    parts.evict(Tier.HOST)
    rotten = max(block_id for tier, block_id in parts.content if tier is DISK)
    parts.content[DISK, rotten] = ROT
    parts.copy(DISK, Tier.HOST, tokens)
    parts.land()
    parts.check()
    assert ROT not in [parts.content[part.tier, block_id] for part in parts.parts() for block_id in part.blocks]
    assert parts.hit(tokens) == (8, 8), "the device has it still"


def test_the_third_tier_evicts_by_its_own_order() -> None:
    """It is full: the least recently used there goes, whatever the tiers above use."""
    parts = Parts(num_disk=8)
    for name in (1, 2, 3):
        parts.serve(prompt(name, 4))
        for way in ((Tier.DEVICE, Tier.HOST), (Tier.HOST, DISK)):
            parts.copy(*way, prompt(name, 4))
            parts.land()
            parts.check()
    held = [present_stop(parts.path(prompt(name, 4)), DISK, 0, 4) for name in (1, 2, 3)]
    assert held == [0, 4, 4]
    assert parts.cache.tiers[DISK].num_evicted == 4
    assert [parts.hit(prompt(name, 4)) for name in (1, 2, 3)] == [(4, 4)] * 3


def _outcomes(chance: random.Random, job: Job) -> tuple[Outcome, int]:
    outcome = chance.choice([Outcome.LANDED] * 6 + [Outcome.FAILED, Outcome.UNPROVEN])
    return outcome, chance.randrange(job.plan.num_blocks) if outcome is Outcome.FAILED else 0


def _step(parts: Parts, chance: random.Random) -> None:
    """One random call."""
    tokens = prompt(chance.randrange(3), 12)[: chance.randint(1, 48)]
    if chance.random() < 0.5:
        tokens = tokens[: len(tokens) // 2] + [9_000 + chance.randrange(2)] * chance.randint(1, 12)
    ready = [job for job in parts.jobs.unsettled.values() if job.parked is None]
    match chance.randrange(16):
        case 0 | 1:
            if begun := parts.begin(tokens):
                parts.compute(begun[0])
        case 2 | 3 if parts.live:
            record = chance.choice(parts.live)
            parts.compute(record)
            parts.end(record)
        case 4 | 5 | 6 | 7 | 8:
            if runs := list(parts.cache.index.runs.values()):
                held = b"".join(run.tokens for run in chance.choice(runs).whole_path())
                parts.copy(*chance.choice(list(parts.copies)), list(array("i", held)))
        case 9 | 10 | 11 | 12 if ready:
            for job in chance.sample(ready, chance.randint(1, len(ready))):
                if not job.is_settled and job.parked is None:
                    parts.settle(job, *_outcomes(chance, job))
        case 13 | 14:
            parts.evict(chance.choice(TIERS[:2]), chance.randrange(30))
        case _:
            _seldom(parts, chance)


def _seldom(parts: Parts, chance: random.Random) -> None:
    runs = list(parts.cache.index.runs.values())
    doubtful = list(parts.jobs.quarantined.values())
    match chance.randrange(6):
        case 0 if chance.random() < 0.3:
            tier = chance.choice(TIERS[1:])
            parts.cache.reset_tier(tier, parts.jobs.unsettled.values())
            parts.admission.match_again(parts.live)
        case 1 if chance.random() < 0.2:
            parts.cache.reset(parts.cache.new_orders())
        case 2 if doubtful:
            for job in doubtful:
                parts.jobs.settle(Completion(job.job_id, Outcome.LANDED))
        case 3 if chance.random() < 0.5 and (below := [part for part in parts.parts() if part.tier is DISK]):
            parts.content[DISK, chance.choice(chance.choice(below).blocks)] = ROT
        case 4 if runs and not parts.live:
            parts.cache.withdraw_all([chance.choice(runs)], parts.jobs.unsettled.values())
        case _:
            queued = [job for job in parts.jobs.unsettled.values() if job.state is JobState.QUEUED and not job.claims]
            for job in reversed(queued):
                if not job.is_settled:
                    parts.jobs.discard(job)


def _finish(parts: Parts, records: Iterable[LedgerRequest]) -> None:
    for record in tuple(records):
        parts.end(record)
    parts.land()
    for job in tuple(parts.jobs.quarantined.values()):
        parts.jobs.settle(Completion(job.job_id, Outcome.LANDED))


@each_layout
@pytest.mark.parametrize("seed", range(12))
def test_random_lives_over_three_tiers(layout: str, seed: int) -> None:
    """Requests, copies down and up again, evictions, resets, corrupt, failed and unproven copies, in any order: every
    block has one owner, every findable block holds what it is found for, and nothing is left."""
    chance = random.Random(f"{layout} {seed}")
    parts = Parts(layout, num_host=30, num_disk=12)
    for _ in range(300):
        _step(parts, chance)
        parts.check()
    _finish(parts, parts.live)
    parts.check()
    for tier in parts.cache.tiers:
        found = tier.statistics()
        assert (found.num_pinned, found.num_quarantined) == (0, 0), tier
        parts.evict(tier.tier)
    assert not parts.cache.index.runs
