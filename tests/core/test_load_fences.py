"""The fences of a load: all steps that used its destinations, and no later ones."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
from driving import BLOCK, Driven, prompt

from aoffload._common.tiers import Tier
from aoffload._config.groups import FullAttention, KVCacheGroup, SlidingWindow
from aoffload._kernel.plans import TransferPlan
from aoffload._kernel.pools import MIN_FOR_NUMPY, LastUses
from aoffload._kernel.records import LedgerRequest
from aoffload._kernel.states import RequestState
from aoffload.errors import InvalidArgument, OutOfBlocks

A, B, C = (prompt(name, 4 * BLOCK + 1) for name in (1, 2, 3))
HALF = [KVCacheGroup("full", FullAttention(), BLOCK), KVCacheGroup("window", SlidingWindow(2 * BLOCK), BLOCK)]


class Stepping(Driven):
    """Computes in steps only, and notes which step has really touched which block last."""

    def __init__(self, num_device: int, num_host: int = 64, **config: Any) -> None:
        super().__init__(num_device, num_host, **config)
        self.truth: dict[int, int] = {}

    def compute(self, request: LedgerRequest, num_tokens: int | None = None, new: tuple[int, ...] = ()) -> None:
        touched = {block_id for table in request.tables for block_id in table.ids if block_id}
        with self.ledger.step([request]):
            pass
        self.truth.update(dict.fromkeys(touched, self.ledger.num_steps_ended))
        self.land(self.commit(request, num_tokens, new))

    def serve(self, tokens: list[int]) -> LedgerRequest:
        request = self.running(tokens)
        self.compute(request)
        return request

    def loads(self, tokens: list[int]) -> tuple[LedgerRequest, tuple[TransferPlan, ...]]:
        request = self.allocated(tokens)
        return request, self.ledger.plan_load(request)

    def check(self, plans: tuple[TransferPlan, ...]) -> int:
        """No step later than the last one that is named has touched a destination. Returns that one."""
        found = self.ledger.last_step(plans)
        latest = max((self.truth.get(block_id, 0) for plan in plans for block_id in plan.destination_ids), default=0)
        assert not found or latest <= found, f"step {latest} has touched a destination, and {found} is waited for"
        return found


def on_host(num_device: int = 10) -> Stepping:
    """A was computed in step 1 and evicted by B, of step 2."""
    driven = Stepping(num_device)
    driven.land(driven.release(driven.serve(A)))
    driven.land(driven.release(driven.serve(B)))
    return driven


def test_a_load_waits_for_the_last_step_of_its_destinations() -> None:
    """A step that has touched other blocks is not waited for, although it ended later."""
    driven = on_host(num_device=5)
    request = driven.serve(A)  # step 3, in blocks of step 2
    assert driven.ledger.num_steps_ended == 3
    driven.land(driven.release(request))
    request, plans = driven.loads(B)
    assert plans and driven.check(plans) == 3
    driven = Stepping(11)
    driven.land(driven.release(driven.serve(A)))  # step 1
    other = driven.serve(B)  # step 2
    driven.ledger.reset(Tier.DEVICE)
    driven.compute(other)  # step 3, which holds no block of A
    request, plans = driven.loads(A)
    assert plans and driven.check(plans) == 1


def test_a_step_that_shares_blocks_counts_for_whoever_frees_them_first() -> None:
    """Two requests read the same blocks; the one with the earlier step lets go last."""
    driven = Stepping(7)
    first = driven.serve(A)  # step 1
    second = driven.serve(A)  # step 2, on the blocks of the first
    driven.land(driven.release(second))
    driven.land(driven.release(first))
    driven.ledger.reset(Tier.DEVICE)
    _, plans = driven.loads(A)
    assert plans and driven.check(plans) == 2


def test_without_steps_nothing_is_known() -> None:
    """An engine that never calls `step` has its loads wait for all compute so far."""
    driven = Driven(5)
    driven.on_host_only(A)
    request = driven.allocated(A)
    assert driven.ledger.last_step(driven.ledger.plan_load(request)) == 0


def test_a_forward_in_vain_is_waited_for_by_the_load_of_its_own_request() -> None:
    """A step before the load is allowed, and its forward may fail: the load gets blocks that it may still write to."""
    driven = on_host(num_device=5)
    request = driven.allocated(A)
    with driven.ledger.step([request]):
        pass  # nothing of it is committed
    plans = driven.ledger.plan_load(request)
    assert plans and driven.ledger.last_step(plans) == driven.ledger.num_steps_ended == 3


@pytest.mark.parametrize("plans", [None, 7, [None], ["job"]])
def test_plans_that_are_none_are_refused(plans: Any) -> None:
    """The error names the argument."""
    with pytest.raises(InvalidArgument) as raised:
        Driven(5).ledger.last_step(plans)
    assert raised.value.argument == "plans"


def test_a_commit_that_no_step_covers_ends_it_for_good() -> None:
    """A program that computes outside of steps once may do so again, and may have touched any block."""
    driven = on_host(num_device=5)
    request = driven.running(C)
    driven.land(driven.commit(request))  # no step
    driven.land(driven.release(request))
    driven.land(driven.release(driven.serve(A)))
    _, plans = driven.loads(B)
    assert plans and driven.ledger.last_step(plans) == 0


def test_a_commit_of_new_tokens_alone_needs_no_step() -> None:
    """A sampled token has no KV yet: appending it is no sign of compute outside of steps."""
    driven = on_host(num_device=6)
    request = driven.serve(A)
    driven.commit(request, len(A), (7,))
    driven.land(driven.release(request))
    _, plans = driven.loads(B)
    assert plans and driven.check(plans) > 0


def test_what_was_never_in_a_step_waits_for_the_next_one() -> None:
    """A cancelled request may have computed after its load. A load into its blocks waits for the next step's fence."""
    driven = on_host(num_device=5)
    leaving = driven.running(C)
    driven.release(leaving, "cancelled")
    request, plans = driven.loads(A)
    assert plans and driven.ledger.last_step(plans) == 0, "no fence recorded so far is late enough"
    driven.land(plans)
    driven.land(driven.release(request, "cancelled"))
    driven.ledger.reset(Tier.DEVICE)
    with driven.ledger.step([]):
        pass
    _, plans = driven.loads(A)
    assert driven.ledger.last_step(plans) == driven.ledger.num_steps_ended


def test_a_fork_copies_outside_of_steps() -> None:
    """The engine copies the parent's blocks after its step, so freed blocks wait for the step after that."""
    driven = Stepping(12)
    parent = driven.serve(A)  # step 1
    child = driven.ledger.forks.fork(parent).request
    driven.release(child, "cancelled")
    with driven.ledger.step([]):
        pass  # later than all that the child may have computed
    driven.release(parent, "cancelled")
    driven.ledger.reset(Tier.DEVICE)
    _, plans = driven.loads(A)
    assert plans and driven.ledger.last_step(plans) == 0


@pytest.mark.parametrize("groups", [HALF[:1], HALF], ids=["full", "windows"])
@pytest.mark.parametrize("seed", range(12))
def test_no_step_is_missed(seed: int, groups: Any) -> None:
    """Random lives of requests that share prefixes, slide, wait, are preempted and cancelled: whatever a load writes
    to, no later step has touched it."""
    rng = random.Random(seed)
    driven = Stepping(14 * len(groups), groups=groups)
    live: list[LedgerRequest] = []
    num_known = 0
    for _ in range(300):
        act = rng.choice(("begin", "begin", "compute", "compute", "end", "preempt", "reset"))
        if act == "begin" and len(live) < 4:
            name = rng.randrange(4)
            tokens = prompt(name, 2 * BLOCK) + prompt(rng.randrange(10, 13), rng.randrange(1, 5) * BLOCK + 1)
            request = driven.admit(tokens)
            try:
                driven.ledger.allocate_nowait(request)
            except OutOfBlocks:
                driven.release(request, "cancelled")
                continue
            plans = driven.ledger.plan_load(request)
            num_known += driven.check(plans) > 0
            driven.land(plans)
            live.append(request)
        elif act == "compute" and live:
            request = rng.choice(live)
            if request.state is not RequestState.RUNNING:
                continue
            try:
                driven.ledger.extend_nowait(request, request.sequence.num_tokens + 1)
            except OutOfBlocks:
                continue
            driven.compute(request, request.sequence.num_tokens, (rng.randrange(50),))
        elif act == "end" and live:
            request = live.pop(rng.randrange(len(live)))
            driven.land(driven.release(request, rng.choice(("closed_early", "cancelled"))))
        elif act == "preempt" and live:
            request = rng.choice(live)
            if request.state is RequestState.RUNNING:
                driven.land(driven.ledger.preemption.preempt(request).plans)
        elif act == "reset" and rng.random() < 0.1:
            driven.ledger.reset(Tier.DEVICE)
    assert num_known > 5, "nothing was learned: every load waited for all compute"


@pytest.mark.pure("a stand-in takes the place of a request")
def test_many_blocks_are_noted_like_few() -> None:
    """Where the numbers are handled as arrays, each block has the same number as one by one."""

    class Used:
        last_step, state = 0, RequestState.DONE

    ids = array("i", random.Random(1).sample(range(1, 999), 3 * MIN_FOR_NUMPY))
    few, many = LastUses(1000), LastUses(1000)
    for step, part in ((1, ids), (3, ids[: 2 * MIN_FOR_NUMPY]), (2, ids[MIN_FOR_NUMPY:])):
        few.num_ended = many.num_ended = 3
        Used.last_step = step
        many.gave_up(Used, part)  # type: ignore[arg-type]
        for block_id in part:
            few.gave_up(Used, array("i", [block_id]))  # type: ignore[arg-type]
    assert [many.latest(array("i", [block_id])) for block_id in ids] == [few.latest(array("i", [i])) for i in ids]
    assert many.latest(ids) == 3 and few.latest(ids[2 * MIN_FOR_NUMPY :]) == 2
