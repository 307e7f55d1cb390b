"""The pools under every order of calls: state machines against sets."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aoffload._common.prefix import Prefix, Root
from aoffload._config.config import OffloadConfig
from aoffload._config.groups import KVCacheGroup
from aoffload._extensions.assembly import Ledger
from aoffload._kernel.plans import Completion, TransferPlan
from aoffload._kernel.pools import ExtentPool, FreeList, extents
from aoffload._kernel.protocols import DevicePool
from aoffload._kernel.records import LedgerRequest
from aoffload._kernel.states import Outcome
from aoffload.errors import OutOfBlocks

SIZES = st.one_of(st.integers(1, 12), st.integers(1, 70))
QUICK = settings(max_examples=60, stateful_step_count=40)


def sizes_of(ids: Iterable[int]) -> list[int]:
    """How long the stretches of neighbours in `ids` are, the longest first."""
    lengths: list[int] = []
    last = None
    for block_id in sorted(ids):
        if last is None or block_id != last + 1:
            lengths.append(0)
        lengths[-1] += 1
        last = block_id
    return sorted(lengths, reverse=True)


class PoolMachine(RuleBasedStateMachine):
    """A pool beside two sets: what is free, and what somebody has."""

    pool: DevicePool

    def start(self, pool: DevicePool, ids: Iterable[int]) -> None:
        self.pool, self.every = pool, frozenset(ids)
        self.free, self.held = set(self.every), list[int]()

    def take_blocks(self, count: int) -> array[int]:
        taken = self.pool.take(count)
        assert len(taken) == len(set(taken)) == count, "as many as asked for, and no id twice"
        assert set(taken) <= self.free, "only what was free"
        self.free.difference_update(taken)
        self.held += taken
        return taken

    def give_blocks(self, ids: array[int]) -> None:
        given = array("i", ids)
        self.pool.give(given)
        assert given == ids, "what is given back is read, not changed"
        self.free.update(ids)
        self.held = [block_id for block_id in self.held if block_id not in self.free]

    @precondition(lambda self: self.held)
    @rule(order=st.randoms(use_true_random=False), count=SIZES)
    def give_some(self, order, count) -> None:
        """Any of what is held, in any order: requests do not end in the order they came."""
        order.shuffle(self.held)
        self.give_blocks(array("i", self.held[:count]))

    @precondition(lambda self: self.held)
    @rule(first=st.integers(0, 99), count=SIZES)
    def give_neighbours(self, first: int, count: int) -> None:
        """A stretch of neighbours, as a run that is evicted gives them back."""
        first %= len(self.held)
        self.give_blocks(array("i", sorted(self.held)[first : first + count]))

    @rule()
    def give_nothing(self) -> None:
        """No blocks are a legal number of blocks."""
        self.give_blocks(array("i"))
        assert list(self.take_blocks(0)) == []

    @rule(more=st.integers(1, 3))
    def take_too_much(self, more: int) -> None:
        """Callers look at the room first; what is not there is not handed out, and nothing is lost by asking."""
        with pytest.raises(AssertionError, match="more than is free"):
            self.pool.take(len(self.free) + more)

    @invariant()
    def every_block_is_in_exactly_one_hand(self) -> None:
        if not hasattr(self, "every"):
            return
        found = list(self.pool.free_ids())
        assert len(found) == len(set(found)) == self.pool.num_free == len(self.free)
        assert set(found) == self.free
        assert self.free.isdisjoint(self.held) and self.free.union(self.held) == self.every
        assert self.pool.num_blocks == len(self.every)
        assert f"{self.pool.num_free}/{self.pool.num_blocks} free" in repr(self.pool)


class FreeListMachine(PoolMachine):
    @initialize(num_blocks=SIZES)
    def open(self, num_blocks: int) -> None:
        self.start(FreeList(num_blocks + 1), range(1, num_blocks + 1))

    @rule(count=SIZES)
    def take(self, count: int) -> None:
        self.take_blocks(min(count, len(self.free)))

    @precondition(lambda self: self.held)
    @rule(order=st.randoms(use_true_random=False), count=SIZES)
    def use_again(self, order, count) -> None:
        """Last in, first out: what was given back last is handed out first, in the same order."""
        order.shuffle(self.held)
        last_used = array("i", self.held[:count])
        self.give_blocks(last_used)
        assert self.take_blocks(len(last_used)) == last_used


class ExtentPoolMachine(PoolMachine):
    @initialize(num_blocks=st.integers(0, 70))
    def open(self, num_blocks: int) -> None:
        self.start(ExtentPool(num_blocks), range(num_blocks))

    @rule(count=SIZES)
    def take(self, count: int) -> None:
        """One extent if any is long enough. If none is: whole extents, and at most twice as many as there have to be,
        since they are chosen by size class."""
        count = min(count, len(self.free))
        lengths = sizes_of(self.free)
        pieces = list(extents(self.take_blocks(count)))
        fewest, found = 0, 0
        while found < count:
            found += lengths[fewest]
            fewest += 1
        assert len(pieces) <= (fewest if fewest < 2 else 2 * fewest), (pieces, lengths)

    @rule(lengths=st.lists(st.integers(4, 7), min_size=5, max_size=9))
    def shatter(self, lengths: list[int]) -> None:
        """Many extents of one size class, none of which touches the next."""
        self.take_blocks(len(self.free))
        at = 0
        for length in lengths:
            self.give_blocks(array("i", sorted(set(range(at, at + length)) & set(self.held))))
            at += length + 1

    @precondition(lambda self: self.free)
    @rule()
    def take_the_longest(self) -> None:
        """An extent that fits to the block is found, however many of its size class are too short."""
        longest = sizes_of(self.free)[0]
        taken = self.take_blocks(longest)
        assert list(taken) == list(range(taken[0], taken[0] + longest))

    @precondition(lambda self: self.held)
    @rule()
    def give_everything(self) -> None:
        """When all is back it is one extent again, whatever pieces it came back in."""
        self.give_blocks(array("i", self.held))
        assert sizes_of(self.pool.free_ids()) == [self.pool.num_blocks]

    @invariant()
    def extents_that_touch_are_one(self) -> None:
        if hasattr(self, "every"):
            num_extents = len(sizes_of(self.free))
            assert repr(self.pool) == f"<ExtentPool {len(self.free)}/{len(self.every)} free in {num_extents} extents>"


class EnginePool:
    """An engine's own blocks: ids with gaps, handed out from the highest. It notices what is not its own."""

    def __init__(self, ids: range) -> None:
        self.ids, self.free = ids, set(ids)

    @property
    def num_blocks(self) -> int:
        return len(self.ids)

    @property
    def num_free(self) -> int:
        return len(self.free)

    def take(self, num_blocks: int) -> array[int]:
        assert 0 <= num_blocks <= len(self.free), "the ledger has looked at the room"
        taken = array("i", sorted(self.free, reverse=True)[:num_blocks])
        self.free.difference_update(taken)
        return taken

    def give(self, block_ids: array[int]) -> None:
        assert len(set(block_ids)) == len(block_ids), "given back twice in one call"
        assert self.free.isdisjoint(block_ids), "given back twice"
        assert set(block_ids) <= set(self.ids), "given back to the wrong pool"
        self.free.update(block_ids)

    def free_ids(self) -> Iterable[int]:
        return iter(self.free)


class EnginePoolMachine(RuleBasedStateMachine):
    """A ledger over an engine's pool: it hands back what it was given, once, and touches nothing else."""

    @initialize(num_blocks=st.integers(2, 9), step=st.integers(1, 5), num_host=st.sampled_from([0, 3, 20]))
    def open(self, num_blocks: int, step: int, num_host: int) -> None:
        self.pool = EnginePool(range(1, 1 + num_blocks * step, step))
        config = OffloadConfig(groups=[KVCacheGroup("full", block_size=2)], num_host_blocks=num_host)
        self.ledger = Ledger(config, num_blocks * step + 1, device_pool=self.pool)
        self.live: list[LedgerRequest] = []
        self.plans: list[TransferPlan] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def serve(self, tokens: list[int]) -> None:
        request = self.ledger.admit(Prefix.of(Root("m"), tokens))
        try:
            self.ledger.allocate_nowait(request)
        except OutOfBlocks:
            self.plans += self.ledger.release(request)
            return
        self.live.append(request)
        self.plans += self.ledger.plan_load(request)
        if request.load is None:
            self.plans += self.ledger.commit(request, len(tokens))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        request = self.live.pop(which % len(self.live))
        self.plans += self.ledger.release(request)

    @precondition(lambda self: self.plans)
    @rule(which=st.integers(0, 9), outcome=st.sampled_from([Outcome.LANDED, *Outcome]))
    def end_a_job(self, which: int, outcome: Outcome) -> None:
        plan = self.plans.pop(which % len(self.plans))
        if self.ledger.launch(plan.job_id):
            corrupt = (0,) if outcome is Outcome.CORRUPT else ()
            self.ledger.settle(Completion(plan.job_id, outcome, corrupt=corrupt))

    @rule()
    def everybody_leaves(self) -> None:
        """After a reset and the last completion every block that is not quarantined is the engine's again."""
        while self.live:
            self.release(0)
        while self.plans:
            self.end_a_job(0, Outcome.LANDED)
        self.ledger.reset()
        assert self.pool.num_free == self.pool.num_blocks - self.ledger.statistics().device.num_quarantined

    @invariant()
    def a_table_names_only_what_the_engine_has_lent(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.ledger.check_integrity()
        for request in self.live:
            own = set(request.table) - {0}
            assert own <= set(self.pool.ids) - self.pool.free, request


class TestFreeList(FreeListMachine.TestCase):
    """Every device block is in exactly one hand, the null block in none, and the warmest goes out first."""

    settings = QUICK


class TestExtentPool(ExtentPoolMachine.TestCase):
    """Every host block is in exactly one hand, neighbours are one extent, and a take that fits comes as one."""

    settings = settings(QUICK, max_examples=120)


class TestEnginePool(EnginePoolMachine.TestCase):
    """Blocks that an engine lends come back to it once each, whatever becomes of requests and transfers."""

    settings = QUICK
