"""Steps that overlap a load: the blocks that they may read, and loads that fail or land only in part."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from typing import Any

import pytest
from driving import BLOCK, Driven, prompt

from aoffload._common.tiers import Tier
from aoffload._config.groups import ChunkedLocal, FullAttention, KVCacheGroup, SlidingWindow
from aoffload._kernel.plans import TransferPlan
from aoffload._kernel.records import LedgerRequest
from aoffload._kernel.states import Outcome, RequestState
from aoffload.errors import CommitError, InvalidArgument, WrongState
from aoffload.ledger import Event, OverlapMoved

A = prompt(1, 17)
"""Four full blocks and a token to compute."""


def on_host(num_device: int = 16, tokens: list[int] = A, **config: Any) -> Driven:
    driven = Driven(num_device, 32, **config)
    driven.on_host_only(tokens)
    return driven


def start(driven: Driven, tokens: list[int] = A, **options: Any) -> tuple[LedgerRequest, list[TransferPlan]]:
    request = driven.allocated(tokens, **options)
    return request, driven.launch(driven.ledger.plan_load(request))


def begin(driven: Driven, *arriving: LedgerRequest) -> AbstractContextManager[None]:
    step = driven.ledger.overlap.step([], arriving)
    step.__enter__()
    driven.ledger.check_integrity()
    return step


def end(driven: Driven, step: AbstractContextManager[None]) -> None:
    step.__exit__(None, None, None)
    driven.ledger.check_integrity()


# -- a load that lands ------------------------------------------------------------------------------------------------


def test_what_an_early_step_reads_is_what_the_load_brings() -> None:
    """The table that it is given is the one that the request has afterwards, and its work can be committed then."""
    driven = on_host()
    request, plans = start(driven)
    step = begin(driven, request)
    assert driven.ledger.overlap.num_expected_tokens(request) == 16
    expected = driven.ledger.overlap.block_ids(request)
    assert 0 not in expected[0] and 0 in driven.ledger.block_ids(request)[0]
    driven.end(plans[0])
    assert driven.ledger.block_ids(request) == expected == driven.ledger.overlap.block_ids(request)
    end(driven, step)
    assert driven.ledger.overlap.begin_again(request) is None
    driven.commit(request)
    assert request.num_computed_tokens == 17


def test_nothing_can_be_committed_before_the_load_is_over() -> None:
    """However ready the forward is: what it has read is proven when the load is settled."""
    driven = on_host()
    request, plans = start(driven)
    end(driven, begin(driven, request))
    with pytest.raises(WrongState, match=r"commit: .* is LOADING"):
        driven.ledger.commit(request, 17)
    driven.end(plans[0])
    driven.commit(request)


def test_a_request_as_such_takes_no_step_while_it_loads() -> None:
    """Only who says that it starts on what is coming is given the table of what is coming."""
    driven = on_host()
    request, _ = start(driven)
    with pytest.raises(WrongState, match=r"step: .* is LOADING"):
        begin_ordinary(driven, request)
    with pytest.raises(WrongState, match="no step of"):
        driven.ledger.overlap.block_ids(request)
    assert request.num_steps == 0 and request not in driven.ledger.overlap


def begin_ordinary(driven: Driven, request: LedgerRequest) -> None:
    with driven.ledger.step([request]):
        pass


def test_a_load_that_is_over_makes_it_an_ordinary_step() -> None:
    """An engine need not look whether the load was faster."""
    driven = on_host()
    request, plans = start(driven)
    driven.end(plans[0])
    step = begin(driven, request)
    assert driven.ledger.overlap.block_ids(request) == driven.ledger.block_ids(request)
    assert driven.ledger.overlap.num_expected_tokens(request) == 16
    driven.commit(request)
    end(driven, step)


def test_a_shared_load_may_be_started_on_by_everybody() -> None:
    """Blocks that another request's job brings are expected where that job puts them."""
    driven = on_host()
    first, plans = start(driven)
    second, none = start(driven)
    assert none == []
    step = begin(driven, second)
    expected = driven.ledger.overlap.block_ids(second)
    assert expected[0][:4] == list(plans[0].destination_ids)
    driven.end(plans[0])
    assert driven.ledger.block_ids(second) == expected
    end(driven, step)
    driven.commit(second)
    driven.commit(first)


def test_a_shared_job_of_another_branch_brings_only_what_both_have() -> None:
    """A job that goes on along another prompt says nothing about where ours goes on."""
    driven = Driven(32, 32)
    b = [*A[:8], *prompt(2, 13)]
    driven.on_host_only(A)
    driven.on_host_only(b)
    first, of_first = start(driven)
    second, of_second = start(driven, b)
    step = begin(driven, second)
    expected = driven.ledger.overlap.block_ids(second)
    ids = [*of_first[0].destination_ids[:2], *of_second[0].destination_ids]
    assert expected[0][: len(ids)] == ids
    for plan in (*of_first, *of_second):
        driven.end(plan)
    assert driven.ledger.block_ids(second) == expected
    end(driven, step)
    driven.commit(second)
    driven.release(first)


# -- a load that ends otherwise ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CORRUPT, Outcome.UNPROVEN])
def test_work_on_a_load_that_fell_short_can_not_be_committed(outcome: Outcome) -> None:
    """The first invalid token is named; it counts again what a step computes that begins after that was heard."""
    driven = on_host()
    request, plans = start(driven)
    step = begin(driven, request)
    corrupt = (2,) if outcome is Outcome.CORRUPT else ()
    num_landed = 0 if outcome is Outcome.UNPROVEN else 2
    driven.end(plans[0], outcome, num_landed, corrupt)
    end(driven, step)
    ready = num_landed * BLOCK
    assert request.state is RequestState.RUNNING and request.num_computed_tokens == ready
    for texts in (False, True):
        with pytest.raises(CommitError, match=rf"brought fewer tokens .* from token {ready} on") as refusal:
            driven.ledger.commit(request, 17)
        assert refusal.value.argument == "num_computed_tokens"
        if not texts:
            assert driven.ledger.overlap.begin_again(request) == ready
    with driven.ledger.step([request]):
        pass
    assert driven.ledger.overlap.begin_again(request) is None
    driven.land([*driven.commit(request), *driven.release(request)])
    assert driven.num_pinned() == (0, 0)


def test_a_load_that_is_waited_for_no_longer_refutes() -> None:
    """What has landed counts; what is still under way was read too early, however it ends."""
    driven = on_host(max_job_bytes=2)
    request, plans = start(driven)
    assert len(plans) == 2
    step = begin(driven, request)
    driven.end(plans[0])
    driven.ledger.abandon_load(request)
    end(driven, step)
    assert request.state is RequestState.RUNNING and request.num_computed_tokens == 8
    with pytest.raises(CommitError, match="from token 8 on"):
        driven.ledger.commit(request, 17)
    driven.end(plans[1])
    assert driven.ledger.overlap.begin_again(request) == 8


def test_steps_that_go_on_without_having_heard_are_refused_as_well() -> None:
    """Slice after slice, each on what the one before has computed: all of them are wrong."""
    driven = on_host(tokens=[*A, *prompt(3, 16)])
    request, plans = start(driven, [*A, *prompt(3, 16)])
    first = begin(driven, request)
    driven.end(plans[0], Outcome.FAILED, 1)
    end(driven, first)
    end(driven, begin(driven, request))
    begin_ordinary(driven, request)
    with pytest.raises(CommitError, match="from token 4 on"):
        driven.ledger.commit(request, 32)


def test_a_copy_of_somebody_else_that_stays_refutes() -> None:
    """Another request computes the same while it is loaded: its blocks stay, and those that the step reads are free, so
    what it has read may be anybody's bytes."""
    driven = on_host()
    request, plans = start(driven)
    step = begin(driven, request)
    taken = driven.ledger.overlap.block_ids(request)[0][:4]
    other = driven.running(A, reads_cache=False)
    driven.commit(other)
    driven.end(plans[0])
    assert driven.ledger.block_ids(request)[0][:4] == driven.ledger.block_ids(other)[0][:4] != taken
    writer = driven.allocated(prompt(5, 28))
    assert set(taken) & set(writer.table), "or this shows nothing"
    end(driven, step)
    with pytest.raises(CommitError, match="from token 16 on"):
        driven.ledger.commit(request, 17)
    assert driven.ledger.overlap.begin_again(request) == 16


@pytest.mark.parametrize("outcome", [Outcome.CORRUPT, Outcome.FAILED])
def test_a_block_that_comes_back_to_its_place_refutes(outcome: Outcome) -> None:
    """One of two jobs brings nothing; another request is given its blocks, computes the same tokens in them, and has
    them cached where the load was to bring them. The table is as it was taken for, but what was read was not there."""
    driven = on_host()
    request = driven.allocated(A)
    of_both = driven.launch(driven.ledger.plan_load(request, max_job_bytes=2))
    step = begin(driven, request)
    expected = driven.ledger.overlap.block_ids(request)
    driven.end(of_both[0], outcome, 0, (0,) if outcome is Outcome.CORRUPT else ())
    assert driven.ledger.overlap.block_ids(request) == expected, "it is asked for in the middle of a step"
    other = driven.allocated(A[:8], reads_cache=False)
    driven.commit(other)
    driven.end(of_both[1])
    assert driven.ledger.block_ids(request) == expected, "or this shows nothing"
    end(driven, step)
    with pytest.raises(CommitError, match="from token 16 on"):
        driven.ledger.commit(request, 17)
    assert driven.ledger.overlap.begin_again(request) == 16


@pytest.mark.parametrize("tier", [None, Tier.DEVICE, Tier.HOST])
def test_a_reset_before_the_step_leaves_nothing_to_start_on(tier: Tier | None) -> None:
    """What the job brings is entered nowhere any more: a table with holes is nothing to compute on, and must not be
    found to have come true when the load has brought nothing."""
    driven = on_host()
    request, plans = start(driven)
    driven.ledger.reset(tier)
    began = driven.ledger.overlap.can_start(request)
    if began:
        with driven.ledger.overlap.step([], [request]):
            assert 0 not in driven.ledger.overlap.block_ids(request)[0]
    else:
        with pytest.raises(WrongState, match="no step can overlap"):
            begin(driven, request)
    driven.end(plans[0])
    fell_short = began and request.num_computed_tokens < 16
    assert driven.ledger.overlap.begin_again(request) == (0 if fell_short else None)


def test_a_forward_keeps_what_it_writes_when_there_is_no_room_to_go_on() -> None:
    """A load whose destinations are in doubt leaves no room: its request has to release everything, but not of what the
    forward of its step still writes to."""
    driven = on_host(10)
    request, plans = start(driven)
    crowd = driven.running(prompt(2, 20))
    step = begin(driven, request)
    written = driven.ledger.overlap.block_ids(request)[0][4:]
    driven.end(plans[0], Outcome.UNPROVEN)
    assert request.state is RequestState.DRAINING and request.load is not None
    assert not driven.ledger.overlap.can_start(request), "a second step would compute into null blocks"
    with pytest.raises(WrongState, match="DRAINING"):
        begin(driven, request)
    assert set(written) <= set(request.private_blocks())
    end(driven, step)
    assert request.waiter is not None and not request.tables, "it waits in the line, with nothing in its hands"
    driven.release(crowd)
    assert request.waiter.granted


def test_room_that_came_meanwhile_ends_the_wait_with_the_step() -> None:
    """It goes on where it is, if somebody left before its forward was through."""
    woken: list[str] = []
    driven = on_host(10)
    request = driven.allocated(A)
    plans = driven.launch(driven.ledger.plan_load(request, None, lambda: woken.append("request")))
    crowd = driven.running(prompt(2, 20))
    step = begin(driven, request)
    driven.end(plans[0], Outcome.UNPROVEN)
    driven.release(crowd)
    assert request.state is RequestState.DRAINING and not woken
    end(driven, step)
    assert request.state is RequestState.RUNNING and woken == ["request"]
    assert driven.ledger.overlap.begin_again(request) == 0
    assert 0 not in driven.ledger.block_ids(request)[0]


def test_who_has_lost_its_load_starts_on_nothing_before_it_has_heard() -> None:
    """The next load is another one: its engine still has the blocks of the first in its hands."""
    driven = on_host(8)
    request, plans = start(driven)
    crowd = driven.running(prompt(2, 12))
    step = begin(driven, request)
    driven.end(plans[0], Outcome.UNPROVEN)
    end(driven, step)
    assert not driven.ledger.overlap.can_start(request)
    with pytest.raises(WrongState, match=r"step: .* is REQUEUED"):
        begin(driven, request)
    driven.release(crowd)


@pytest.mark.parametrize("reason", ["cancelled", "deadline"])
def test_leaving_in_the_middle_gives_everything_back_with_the_step(reason: str) -> None:
    """Its blocks go when its forward is through, and the copy when it lands."""
    driven = on_host(8)
    request, plans = start(driven)
    step = begin(driven, request)
    driven.release(request, reason)
    assert driven.num_pinned()[0] == 5
    end(driven, step)
    driven.end(plans[0])
    assert driven.num_pinned() == (0, 0)


def test_preempted_and_resumed_it_may_start_early_again() -> None:
    """A refuted start belongs to its load: after the engine has heard, the next load is as good as any."""
    driven = on_host()
    request, plans = start(driven)
    end(driven, begin(driven, request))
    driven.end(plans[0], Outcome.FAILED, 2)
    assert driven.ledger.overlap.begin_again(request) == 8
    driven.ledger.preemption.preempt(request)
    driven.evict_device()
    driven.ledger.preemption.resume(request)
    driven.ledger.allocate_nowait(request)
    (plan,) = driven.launch(driven.ledger.plan_load(request))
    step = begin(driven, request)
    expected = driven.ledger.overlap.block_ids(request)
    driven.end(plan)
    assert driven.ledger.block_ids(request) == expected
    end(driven, step)
    driven.commit(request)


def test_who_was_preempted_needs_not_hear_of_what_it_has_lost_anyway() -> None:
    """Resumed by an engine that knows of no early start, it computes in a step of its own, and that counts; what it
    had computed before still does not."""
    driven = on_host()
    request, plans = start(driven)
    end(driven, begin(driven, request))
    driven.end(plans[0], Outcome.FAILED, 2)
    driven.land(driven.ledger.preemption.preempt(request).plans)
    driven.ledger.preemption.resume(request)
    driven.ledger.allocate_nowait(request)
    driven.land(driven.ledger.plan_load(request))
    with pytest.raises(CommitError, match="compute again"):
        driven.ledger.commit(request, 17)
    begin_ordinary(driven, request)
    driven.commit(request)


def test_every_turn_of_an_early_start_is_told() -> None:
    """The trace says when a forward began early, and how that ended."""
    texts: list[str] = []

    class Witness:
        def observe(self, event: Event) -> None:
            if isinstance(event, OverlapMoved):
                texts.append(f"{event.old.name}>{event.new.name} {event.overlap.num_tokens}")

    driven = on_host(observer=Witness())
    for outcome in (Outcome.LANDED, Outcome.FAILED):
        request, plans = start(driven)
        end(driven, begin(driven, request))
        driven.end(plans[0], outcome)
        driven.ledger.overlap.begin_again(request)
        driven.release(request)
        driven.evict_device()
    assert texts == ["NEW>SPECULATIVE 16", "SPECULATIVE>CONFIRMED 16", "NEW>SPECULATIVE 16", "SPECULATIVE>INVALID 16",
                    "INVALID>ACKNOWLEDGED 16"]  # fmt: skip


# -- windows ----------------------------------------------------------------------------------------------------------

KINDS = [FullAttention(), SlidingWindow(6), SlidingWindow(13), ChunkedLocal(8)]


def test_in_any_layout_the_expected_table_is_the_one_that_comes() -> None:
    """Groups of every kind, hits that the device has in part, loads that others share: where everything lands, and
    nobody else computed the same, what an early step took for its table is the table."""
    assert sum(num_early_starts(random.Random(seed)) for seed in range(80)) > 160


def num_early_starts(rng: random.Random) -> int:
    groups = [
        KVCacheGroup(f"g{number}", attention=kind, block_size=BLOCK)
        for number, kind in enumerate(rng.sample(KINDS, rng.randint(1, 3)))
    ]
    driven = Driven(400, 400, groups=groups)
    base = prompt(1, 60)
    prompts = [[*base[: rng.randint(0, 50)], *prompt(name, rng.randint(9, 50))] for name in range(2, 6)]
    for tokens in prompts:
        driven.serve(tokens)
    driven.evict_device()
    for tokens in rng.sample(prompts, rng.randint(0, 2)):  # some of it is on the device again
        driven.land(driven.release(driven.running(tokens[: rng.randint(9, len(tokens))])))
    under_way = [start(driven, tokens) for tokens in rng.choices(prompts, k=3)]
    early = [request for request, _ in under_way if driven.ledger.overlap.can_start(request)]
    step = begin(driven, *early)
    expected = [driven.ledger.overlap.block_ids(request) for request in early]
    stops = [driven.ledger.overlap.num_expected_tokens(request) for request in early]
    plans = [plan for _, plans in under_way for plan in plans]
    rng.shuffle(plans)
    for plan in plans:
        driven.end(plan)
    for request, tables, stop in zip(early, expected, stops, strict=True):
        assert request not in driven.ledger.overlap and request.num_computed_tokens == stop
        assert driven.ledger.block_ids(request) == tables
    end(driven, step)
    for request, _ in under_way:
        driven.commit(request)
        driven.release(request)
    return len(early)


def test_a_load_that_takes_less_than_its_windows_were_made_for_is_waited_for() -> None:
    """Blocks after it are missing until it is over, so nobody could write there."""
    groups = [KVCacheGroup("full", block_size=BLOCK), KVCacheGroup("w", attention=SlidingWindow(5), block_size=BLOCK)]
    tokens = prompt(1, 33)
    driven = Driven(64, 64, groups=groups)
    driven.on_host_only(tokens[:17])
    driven.on_host_only(tokens)
    request = driven.allocated(tokens)
    assert request.match.num_host_tokens == 32
    driven.launch(driven.ledger.plan_load(request, 16))
    assert request.state is RequestState.LOADING and driven.ledger.overlap.num_expected_tokens(request) == 16
    assert not driven.ledger.overlap.can_start(request)
    with pytest.raises(WrongState, match="no step can overlap"):
        begin(driven, request)


def test_windows_are_moved_on_where_a_load_falls_short_under_a_step() -> None:
    """One group's copy lands and another's fails, and nothing is left to compute the rest in: until the step ends, the
    tables name what the request still leases, and nothing that was before its windows."""
    kinds = (SlidingWindow(17), ChunkedLocal(8), SlidingWindow(5))
    groups = [KVCacheGroup(f"g{number}", attention=kind, block_size=BLOCK) for number, kind in enumerate(kinds)]
    driven = on_host(56, groups=groups)
    request = driven.allocated(A)
    num_unpinned = driven.ledger.statistics().device.num_free + driven.ledger.statistics().device.num_cached
    driven.allocated(prompt(2, (num_unpinned // len(groups) - 1) * BLOCK), max_hit_tokens=0)
    landed, failed = driven.launch(driven.ledger.plan_load(request))
    step = begin(driven, request)
    driven.end(landed)
    driven.end(failed, Outcome.FAILED)
    assert request.state is RequestState.DRAINING
    end(driven, step)
    assert request.state is RequestState.REQUEUED


def test_what_is_no_holding_of_this_ledger_is_refused() -> None:
    """By name, like everywhere."""
    driven, other = on_host(), on_host()
    request, _ = start(other)
    with pytest.raises(InvalidArgument, match="request"):
        begin(driven, request)
    with pytest.raises(InvalidArgument, match="request"):
        driven.ledger.overlap.begin_again(request)
