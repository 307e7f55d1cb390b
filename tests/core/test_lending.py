"""Device blocks that stay an engine's own: they come by `lend`, and each goes back once nobody here touches it."""

from __future__ import annotations

from typing import Any

import pytest
from driving import BLOCK, Driven, prompt
from lent_driving import LentDriven
from lent_walk import walks
from test_illegal_calls import refused

from aoffload import Extension, Holding, KVCacheGroup, Outcome, RequestState, SlidingWindow
from aoffload.errors import InvalidArgument, WrongState

A, B = prompt(1, 17), prompt(2, 17)
MUST_HAPPEN = (
    "engine hit", "host hit", "lent to two", "lent again", "forked with copies", "loading", "load landed",
    "load failed", "load corrupt", "load unproven", "load abandoned", "load shared", "proven late", "tainted", "reset",
)  # fmt: skip


@pytest.mark.parametrize("with_windows", [False, True])
def test_right_bytes_or_a_miss_in_an_engines_own_blocks(with_windows: bool) -> None:
    """Whatever is called in whatever order: a request reads its own prefix, no copy touches a block that the engine has
    back, every block comes back once, and all of them when everybody has left."""
    happened = walks(150, 250, with_windows=with_windows)
    must_happen = (*MUST_HAPPEN, "skipped") if with_windows else MUST_HAPPEN
    assert not [event for event in must_happen if not happened[event]], happened


# -- what goes back, and when -------------------------------------------------------------------------------------


def test_blocks_go_back_when_the_request_leaves_and_the_store_has_ended() -> None:
    """Released blocks that nothing copies go back at once, those that a store still reads when it has settled."""
    driven = LentDriven(8)
    holding = driven.running(A)
    driven.land(driven.commit(holding, 8))
    (plan,) = driven.launch(driven.commit(holding))
    driven.release(holding)
    assert driven.given == [5, 1, 2]
    assert driven.ledger.statistics().device.num_blocks == driven.ledger.statistics().device.num_pinned == 2
    driven.end(plan)
    assert sorted(driven.given) == [1, 2, 3, 4, 5]


def test_nothing_is_kept_because_it_might_hit() -> None:
    """A device hit is the engine's own business: what was released hits in the host only."""
    driven = LentDriven(8)
    driven.serve(A)
    assert driven.hit(A) == (0, 16)
    statistics = driven.ledger.statistics().device
    assert (statistics.num_blocks, statistics.num_cached, statistics.num_free) == (0, 0, 0)
    holding = driven.running(A)
    assert driven.hit(A) == (0, 16) and holding.match.num_host_tokens == 16


def test_the_host_is_asked_for_what_lies_behind_the_engines_own_hit() -> None:
    """`num_device_tokens` counts by whole units; what lies behind is loaded into the blocks that were lent."""
    driven = LentDriven(8)
    driven.on_host_only(A)
    holding = driven.admit(A, num_device_tokens=7)
    assert (holding.match.num_device_tokens, holding.match.num_host_tokens) == (4, 12)
    driven.lend(holding, 8)
    (plan,) = driven.ledger.plan_load(holding)
    assert list(plan.destination_ids) == [1, 2, 3]
    driven.land([plan])
    assert holding.state is RequestState.RUNNING and holding.num_computed_tokens == 16
    assert driven.table(holding) == [8, 1, 2, 3, 4] and not driven.given


def test_what_the_engine_had_computed_is_stored_too() -> None:
    """The host may lack what the engine has cached itself."""
    driven = LentDriven(8)
    holding = driven.running(A, 7, 8)
    (plan,) = driven.commit(holding)
    assert list(plan.source_ids) == [7, 8, 1, 2]


def test_a_block_in_two_tables_goes_back_when_the_last_lets_go() -> None:
    """The engine shares a prefix of its own: handles are counted."""
    driven = LentDriven(8, 0)
    first = driven.running(A)
    driven.commit(first)
    second = driven.running(A, *driven.table(first)[:4])
    assert driven.table(second) == [1, 2, 3, 4, 6]
    assert driven.ledger.statistics().device.num_blocks == 6
    driven.release(first)
    assert driven.given == [5]
    driven.release(second)
    assert sorted(driven.given) == [1, 2, 3, 4, 5, 6]


def test_a_leaver_gets_its_blocks_back_though_somebody_has_copies_of_its_own() -> None:
    """Two requests computed the same tokens in different blocks: who stays keeps only what it has lent itself, also
    while a store still reads the leaver's."""
    driven = LentDriven(12)
    first, second = driven.running(A), driven.running(A)
    (plan,) = driven.launch(driven.commit(first))
    driven.commit(second)
    driven.release(first)
    assert driven.given == [5]
    driven.end(plan)
    assert sorted(driven.given) == [1, 2, 3, 4, 5]
    assert driven.table(second) == [6, 7, 8, 9, 10]
    driven.commit(second, 20, [1, 2, 3])
    driven.release(second)
    assert driven.ledger.statistics().device.num_blocks == 1, "the last block is being stored"


def test_positions_that_left_the_window_go_back() -> None:
    """The engine hears which blocks it has back, `Extension` says which positions are null."""
    driven = LentDriven(8, 0, groups=[KVCacheGroup("window", SlidingWindow(8), BLOCK)])
    holding = driven.running(prompt(1, 12))
    driven.commit(holding)
    assert driven.given == [1]
    extension = driven.ledger.lend_more(holding, [driven.fresh(1)], 16)
    assert extension == Extension([[1]], [[0]])
    driven.commit(holding, 16, prompt(3, 4))
    assert driven.given == [1, 2]


def test_a_host_hit_needs_no_blocks_before_its_window() -> None:
    """The null block may stand where the hit makes blocks unneeded; if the load fails, the ledger lets go of
    everything, and the engine lends again."""
    driven = LentDriven(12, groups=[KVCacheGroup("window", SlidingWindow(8), BLOCK)])
    driven.on_host_only(A)
    holding = driven.admit(A)
    driven.ledger.lend(holding, [[0, 0, *driven.fresh(3)]])
    (plan,) = driven.launch(driven.ledger.plan_load(holding))
    driven.end(plan, Outcome.FAILED)
    assert holding.lacks_blocks and sorted(driven.given) == [1, 2, 3]
    driven.lend(holding)
    assert driven.ledger.plan_load(holding) == () and holding.state is RequestState.RUNNING
    assert holding.num_computed_tokens == 0


def test_a_window_is_pinned_from_where_it_begins() -> None:
    """However the path to it is cut: who has lent a window keeps nobody else's blocks before it."""
    driven = LentDriven(30, 0, groups=[KVCacheGroup("window", SlidingWindow(5), BLOCK)])
    for stop in (4, 8):
        driven.commit(driven.running([*A[:stop], *B[:4]]))
    leaver = driven.running(A)
    driven.commit(leaver, 12)
    left = driven.table(leaver)[2]
    holding = driven.admit(A, num_device_tokens=16)
    driven.ledger.lend(holding, [[0, 0, 0, *driven.fresh(2)]])
    driven.ledger.plan_load(holding)
    driven.release(leaver)
    assert left in driven.given


def test_a_host_hit_goes_on_from_the_engines_own_window() -> None:
    """What the host lacks of a window may be in the engine's own blocks."""
    driven = LentDriven(12, groups=[KVCacheGroup("window", SlidingWindow(8), BLOCK)])
    driven.on_host_only(A)
    rotten = driven.lent(A)
    (plan,) = driven.launch(driven.ledger.plan_load(rotten))
    driven.end(plan, Outcome.CORRUPT, 0, (0,))
    driven.release(rotten, "leaves")
    assert driven.admit(A, num_device_tokens=8).match.num_host_tokens == 0
    assert driven.admit(A, num_device_tokens=12).match.num_host_tokens == 4


def test_a_window_is_lent_after_a_reset() -> None:
    """What was lent as computed is there, though nothing of it is published any more."""
    driven = LentDriven(12, groups=[KVCacheGroup("window", SlidingWindow(8), BLOCK)])
    holding = driven.admit(A, num_device_tokens=16)
    driven.ledger.reset()
    driven.ledger.lend(holding, [[0, 0, 3, 4, 5]])
    assert driven.ledger.plan_load(holding) == () and holding.state is RequestState.RUNNING
    assert holding.num_computed_tokens == 16
    driven.ledger.check_integrity()


# -- loads that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CORRUPT])
def test_a_failed_load_leaves_the_lent_blocks_in_the_table(outcome: Outcome) -> None:
    """The copy is over: what it has not brought is computed in the same blocks."""
    driven = LentDriven(8)
    driven.on_host_only(A)
    holding = driven.lent(A)
    (plan,) = driven.launch(driven.ledger.plan_load(holding))
    driven.end(plan, outcome, 1, (1,) if outcome is Outcome.CORRUPT else ())
    assert (holding.state, holding.num_computed_tokens) == (RequestState.RUNNING, 4)
    assert driven.table(holding) == [1, 2, 3, 4, 5] and not driven.given


def test_what_a_copy_may_still_write_to_stays_ours() -> None:
    """Unproven destinations are not given back before they are proven; the engine lends others."""
    driven = LentDriven(12)
    driven.on_host_only(A)
    woken: list[int] = []
    holding = driven.lent(A)
    (plan,) = driven.launch(driven.ledger.plan_load(holding, wake=lambda: woken.append(1)))
    driven.end(plan, Outcome.UNPROVEN)
    assert holding.lacks_blocks and woken == [1] and driven.given == [5]
    statistics = driven.ledger.statistics().device
    assert (statistics.num_blocks, statistics.num_quarantined, statistics.num_pinned) == (4, 4, 0)
    with refused(driven.ledger, holding, error=InvalidArgument, says=("block_ids", "still write")):
        driven.ledger.lend(holding, [[1, 6, 7, 8, 9]])
    driven.lend(holding)
    driven.ledger.plan_load(holding)
    driven.commit(holding)
    driven.end(plan)
    assert sorted(driven.given) == [1, 2, 3, 4, 5]


def test_who_lost_its_load_has_nothing_computed() -> None:
    """What the engine had computed went back with everything else, unless it says that it lends that again."""
    for told, computed in ((None, 0), (4, 4)):
        driven = LentDriven(12)
        driven.on_host_only(A)
        holding = driven.lent(A, 8)
        driven.end(driven.launch(driven.ledger.plan_load(holding))[0], Outcome.UNPROVEN)
        assert holding.lacks_blocks and driven.given == [4, 8]
        driven.lend(holding, 8, num_device_tokens=told)
        assert driven.ledger.plan_load(holding) == () and holding.num_computed_tokens == computed


def test_a_request_that_leaves_a_load_gets_back_what_nobody_copies() -> None:
    """Destinations stay the job's until it is settled."""
    driven = LentDriven(8)
    driven.on_host_only(A)
    holding = driven.lent(A)
    (plan,) = driven.launch(driven.ledger.plan_load(holding))
    driven.release(holding, "cancelled")
    assert driven.given == [5]
    driven.end(plan)
    assert sorted(driven.given) == [1, 2, 3, 4, 5]


def test_two_requests_share_one_load() -> None:
    """Who waits for somebody else's copy uses that one's blocks, and gets its own back."""
    driven = LentDriven(12)
    driven.on_host_only(A)
    first, second = driven.lent(A), driven.lent(A)
    plans = driven.ledger.plan_load(first)
    assert driven.ledger.plan_load(second) == ()
    driven.land(plans)
    assert driven.table(second) == [1, 2, 3, 4, 10] and sorted(driven.given) == [6, 7, 8, 9]
    driven.release(first)
    assert sorted(driven.given) == [5, 6, 7, 8, 9]


def test_released_and_lent_again() -> None:
    """An engine preempts: it releases the request, and admits it again with all its tokens; the host has kept them."""
    driven = LentDriven(8)
    holding = driven.running(A)
    driven.land(driven.commit(holding, 17))
    driven.land(driven.commit(holding, 20, prompt(5, 3)))
    driven.land(driven.release(holding, "preempted"))
    assert sorted(driven.free) == list(range(1, 9))
    again = driven.running([*A, *prompt(5, 4)])
    assert again.num_computed_tokens == 20


def test_a_reset_gives_nothing_back_that_is_used() -> None:
    """Requests keep their blocks; they publish nothing, and give everything back when they leave."""
    driven = LentDriven(12)
    holding, waiting = driven.running(A), driven.admit(A, num_device_tokens=8)
    driven.commit(holding)
    driven.ledger.reset()
    driven.lend(waiting, *driven.table(holding)[:2])
    assert driven.ledger.plan_load(waiting) == () and waiting.num_computed_tokens == 8
    assert driven.commit(waiting) == [] and not driven.given
    driven.release(holding)
    driven.release(waiting)
    assert driven.given and driven.ledger.statistics().device.num_blocks == 4, "its store still runs"


# -- what is refused ----------------------------------------------------------------------------------------------


def unlent(driven: LentDriven) -> Holding:
    """A request that may be lent 3 blocks; another of the same tokens has 1, 2 and 3, and has computed 1 and 2."""
    other = driven.running(A[:12], request_id="other")
    driven.commit(other, 8)
    return driven.admit(A[:12], num_device_tokens=4)


WRONG: dict[str, Any] = {
    "no lists": 7, "no list for each group": [], "too many lists": [[4, 5, 6], [7, 8, 9]], "too few ids": [[4, 5]],
    "too many ids": [[4, 5, 6, 7]], "negative": [[4, 5, -1]], "beyond the tensors": [[4, 5, 13]],
    "huge": [[4, 5, 2**70]], "no ids": [["4", "5", "6"]], "fractions": [[4.0, 5.0, 6.0]], "the null block": [[4, 0, 6]],
    "the null block at the front": [[0, 5, 6]], "twice in a table": [[4, 5, 4]], "lent, and not computed": [[1, 2, 4]],
    "lent for another place": [[2, 5, 6]], "not computed by who has it": [[3, 5, 6]],
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_blocks_are_refused_by_name(wrong: str) -> None:
    """What can't be right raises, names `block_ids`, and changes nothing."""
    driven = LentDriven(12)
    holding = unlent(driven)
    with refused(driven.ledger, holding, error=InvalidArgument, says=("block_ids: ",)):
        driven.ledger.lend(holding, WRONG[wrong])
    driven.ledger.lend(holding, [[1, 5, 6]])
    driven.ledger.check_integrity()


def test_a_block_of_other_tokens_is_refused() -> None:
    """The engine's own prefix cache is wrong: nobody reads somebody else's KV for it."""
    driven = LentDriven(12)
    driven.commit(driven.running(A))
    holding = driven.admit(B, num_device_tokens=4)
    with refused(driven.ledger, holding, error=InvalidArgument, says=("block_ids: ", "other tokens")):
        driven.ledger.lend(holding, [[1, 6, 7, 8, 9]])


def test_a_block_that_is_not_computed_yet_is_refused() -> None:
    """Who has the block has committed less than the engine says is in it."""
    driven = LentDriven(12)
    driven.commit(driven.running(A[:12]), 11)
    holding = driven.admit(A, num_device_tokens=12)
    with refused(driven.ledger, holding, error=InvalidArgument, says=("block_ids: ", "not computed")):
        driven.ledger.lend(holding, [[1, 2, 3, 4, 5]])


def test_a_block_before_the_window_is_refused() -> None:
    """What nobody reads is not lent: the engine would wait for it."""
    driven = LentDriven(12, groups=[KVCacheGroup("window", SlidingWindow(8), BLOCK)])
    holding = driven.admit(A, num_device_tokens=16)
    with refused(driven.ledger, holding, error=InvalidArgument, says=("block_ids: ", "null")):
        driven.ledger.lend(holding, [[1, 2, 3, 4, 5]])
    driven.ledger.lend(holding, [[0, 0, 3, 4, 5]])
    driven.ledger.check_integrity()


def test_more_blocks_are_checked_as_well() -> None:
    """`lend_more` takes what nobody has, as many as it takes."""
    driven = LentDriven(12)
    holding = driven.running(A)
    for wrong in ([[5]], [[0]], [[6, 7]], [[]], [[13]]):
        with refused(driven.ledger, holding, error=InvalidArgument, says=("block_ids: ",)):
            driven.ledger.lend_more(holding, wrong, 24)
    for tokens in (0, -1, True, None, "24"):
        with refused(driven.ledger, holding, error=InvalidArgument, says=("num_tokens: ",)):
            driven.ledger.lend_more(holding, [[6]], tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [-1, True, 17, 1.0, "4"])
def test_at_least_one_token_is_left_to_compute(number: Any) -> None:
    """What the engine says to have computed is checked by name, on both calls."""
    driven = LentDriven(12)
    with refused(driven.ledger, error=InvalidArgument, says=("num_device_tokens: ",)):
        driven.admit(A, num_device_tokens=number)
    holding = driven.admit(A)
    with refused(driven.ledger, holding, error=InvalidArgument, says=("num_device_tokens: ",)):
        driven.ledger.lend(holding, [[1, 2, 3, 4, 5]], num_device_tokens=number)


def test_each_ledger_takes_blocks_in_its_own_way() -> None:
    """Where blocks are lent none can be allocated, and the other way round; lending twice is refused."""
    driven = LentDriven(12)
    holding = driven.admit(A)
    for call in (driven.ledger.allocate_nowait, driven.ledger.queue_allocation):
        with refused(driven.ledger, holding, error=WrongState, says=("allocate: ", "lend")):
            call(holding)
    driven.lend(holding)
    with refused(driven.ledger, holding, error=WrongState, says=("lend: ", "ALLOCATED")):
        driven.ledger.lend(holding, [[6, 7, 8, 9, 10]])
    for extend in (driven.ledger.extend_nowait, driven.ledger.queue_extension):
        with refused(driven.ledger, holding, error=WrongState, says=("extend: ", "lend")):
            extend(holding, 24)
    own = Driven(12)
    pinned, running = own.admit(A), own.running(B)
    with refused(own.ledger, pinned, error=WrongState, says=("lend: ", "its own")):
        own.ledger.lend(pinned, [[1, 2, 3, 4, 5]])
    with refused(own.ledger, running, error=WrongState, says=("lend_more: ", "its own")):
        own.ledger.lend_more(running, [[9]], 24)
    with refused(own.ledger, error=InvalidArgument, says=("num_device_tokens: ",)):
        own.admit(A, num_device_tokens=4)


def test_rejected_drafts_leave_their_blocks_for_the_next_step() -> None:
    """`commit` takes accepted tokens only; the blocks that were lent for drafts are used by what comes next."""
    driven = LentDriven(12)
    holding = driven.running(prompt(1, 7))
    driven.commit(holding)
    driven.ledger.lend_more(holding, [driven.fresh(2)], 16)
    table = driven.table(holding)
    plans = driven.commit(holding, 8, [70])  # of eight drafts one was accepted
    assert [list(plan.source_ids) for plan in plans] == [table[1:2]] and driven.table(holding) == table
    plans = driven.commit(holding, 12, [71, 72, 73, 74])
    assert [list(plan.source_ids) for plan in plans] == [table[2:3]] and not driven.given
