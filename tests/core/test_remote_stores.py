"""Stores to a remote store: whole cells that were requested twice. None is stored twice at the same time, and cells
with invalidated KV are removed."""

from __future__ import annotations

import pytest
from remote_driving import BLOCK, CELL, CELL_UNITS, HUGE, STORE, Remote, cell_of, prompt, spans_of

from aoffload._common.prefix import KeySpan
from aoffload._common.tiers import Tier
from aoffload._eviction import counts as hit_counts
from aoffload._kernel.records import LedgerRequest
from aoffload._kernel.states import JobState, Outcome
from aoffload._tiers.remote import rules as remote_stores
from aoffload._tiers.remote.plans import CellLabel
from aoffload.errors import InvalidArgument

TOKENS = [*prompt(1, 3 * CELL), 7]
OTHER = [*prompt(2, 2 * CELL), 7]
ALL = list(range(CELL_UNITS))


def test_what_was_asked_for_once_stays() -> None:
    """The second request makes it wanted: each whole cell is a job, from the host, in prefix order."""
    remote = Remote()
    remote.serve(TOKENS)
    assert remote.write_behind() == []
    remote.serve(TOKENS)
    plans = remote.write_behind()
    assert {plan.link for plan in plans} == {STORE}
    assert spans_of(plans) == [(0, 4, ALL), (4, 8, ALL), (8, 12, ALL)]
    assert [cell_of(plan) for plan in plans] == list(remote.cells(TOKENS))
    assert remote.ledger.statistics().remote.num_stores == 3
    assert remote.num_pinned()[1] == 12, "the source stays until the copies are over"
    remote.land(plans)
    assert remote.num_pinned()[1] == 0
    assert remote.num_stored_tokens(TOKENS) == 3 * CELL


def test_the_source_is_what_the_host_has() -> None:
    """The blocks of the plan are those that hit."""
    remote = Remote()
    remote.ask_for(TOKENS)
    held = {run.start + at: block for run in remote.ledger.cache.index.runs.values()
            for at, block in enumerate(run.parts[Tier.HOST].blocks)}  # fmt: skip
    for plan in remote.write_behind():
        cell = cell_of(plan)
        assert list(plan.source_ids) == [held[unit] for unit in range(cell.start, cell.stop)]


def test_only_the_part_that_was_asked_for_twice_goes() -> None:
    """A prompt that shares a front with another one: whole cells of that front, not the cell where they part."""
    remote = Remote()
    remote.serve(TOKENS)
    remote.serve([*TOKENS[: 7 * BLOCK], *prompt(3, 9)])
    assert spans_of(remote.write_behind()) == [(0, 4, ALL)]


def test_the_answer_of_a_conversation_goes_with_the_next_turn() -> None:
    """Generated tokens were asked for a second time by the turn that repeats them."""
    remote = Remote()
    request = remote.running(TOKENS[:CELL])
    remote.ledger.extend_nowait(request, 2 * CELL + 1)
    stores = remote.commit(request, CELL, TOKENS[CELL : 2 * CELL + 1])
    stores += remote.commit(request, 2 * CELL)
    remote.land([*stores, *remote.release(request)])
    assert remote.write_behind() == []
    remote.serve(TOKENS)
    assert spans_of(remote.write_behind()) == [(0, 4, ALL), (4, 8, ALL)]


def test_what_was_asked_for_last_goes_first() -> None:
    """Within the bound; whole cells only. The rest comes with the next call."""
    remote = Remote()
    remote.ask_for(TOKENS, OTHER)
    first = remote.write_behind(CELL_UNITS + 1)
    assert [cell_of(plan) for plan in first] == [remote.cells(OTHER)[0]]
    second = remote.write_behind(2 * CELL_UNITS)
    assert [cell_of(plan) for plan in second] == [remote.cells(OTHER)[1], remote.cells(TOKENS)[0]]
    assert remote.write_behind(CELL_UNITS - 1) == [], "no cell fits"
    assert len(remote.write_behind()) == 2
    assert remote.write_behind() == []


def test_what_the_store_has_is_not_stored() -> None:
    """`is_wanted` decides, for each cell; a cell that is evicted there is stored again when it is asked for again."""
    remote = Remote()
    remote.in_store_only(TOKENS)
    remote.serve(TOKENS)
    assert remote.write_behind() == []
    del remote.cells_stored[remote.cells(TOKENS)[1].digest]
    assert remote.write_behind() == [], "nothing has changed that is known of here"
    remote.serve(TOKENS)
    assert spans_of(remote.write_behind()) == [(4, 8, ALL)]


def test_a_cell_under_way_is_not_stored_twice() -> None:
    """Also if nobody tells that it is on its way; after a failure it may be stored again."""
    remote = Remote()
    remote.ask_for(TOKENS)
    plans = remote.launch(remote.write_behind())
    remote.serve(TOKENS)
    assert remote.write_behind(is_wanted=lambda cell: True) == []
    for plan in plans:
        remote.end(plan, Outcome.FAILED)
    remote.serve(TOKENS)
    assert len(remote.write_behind()) == 3


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.UNPROVEN, Outcome.CORRUPT])
def test_a_store_that_fails_quarantines_nothing(outcome: Outcome) -> None:
    """There is no destination that anybody could reuse: its source is free at once, and a late word is counted."""
    remote = Remote()
    remote.ask_for(TOKENS)
    for plan in remote.launch(remote.write_behind()):
        remote.end(plan, outcome)
    assert (remote.num_pinned()[1], remote.ledger.jobs.quarantined) == (0, {})
    assert remote.hit(TOKENS) == (3 * CELL, 0)
    remote.end(plan)
    assert remote.ledger.statistics().num_late_completions == 1


def test_what_is_not_in_the_host_yet_goes_later() -> None:
    """A prompt asked for twice whose copy in the host is under way: the next call after its end has it."""
    remote = Remote()
    request = remote.running(TOKENS)
    stores = remote.commit(request)
    remote.release(request)
    remote.release(remote.admit(TOKENS), "looked")
    assert remote.write_behind() == []
    assert remote.write_behind() == []
    remote.land(stores)
    assert len(remote.write_behind()) == 3


def test_half_of_it_may_be_in_the_host() -> None:
    """The whole cells before a gap go; those after it when they are there."""
    remote = Remote()
    remote.ask_for(TOKENS)
    remote.ledger.reset(Tier.HOST)
    remote.evict_device()
    remote.serve(TOKENS[: 6 * BLOCK])
    remote.release(remote.admit(TOKENS), "looked")
    assert spans_of(remote.write_behind()) == [(0, 4, ALL)]
    remote.serve(TOKENS)
    assert spans_of(remote.write_behind(is_wanted=lambda cell: cell.start > 0)) == [(4, 8, ALL), (8, 12, ALL)]


def test_another_prompt_in_the_host_is_not_taken_for_it() -> None:
    """The index may hold a run that begins like the prompt and goes on with other tokens."""
    remote = Remote()
    remote.ask_for(TOKENS)
    remote.ledger.reset(Tier.HOST)
    remote.evict_device()
    remote.serve([*TOKENS[: 7 * BLOCK], *prompt(3, 5 * BLOCK)])
    assert spans_of(remote.write_behind()) == [(0, 4, ALL)]


def test_a_request_that_stores_nothing_makes_nothing_wanted() -> None:
    """Its own scope holds for the store, too."""
    remote = Remote()
    remote.ask_for(TOKENS, store="none")
    remote.serve(TOKENS)
    assert remote.write_behind() == []


def test_looking_again_is_cheap() -> None:
    """While nothing changed, nobody is asked about any cell."""
    remote = Remote()
    remote.ask_for(TOKENS, OTHER)
    asked: list[CellLabel] = []

    def is_wanted(cell: CellLabel) -> bool:
        asked.append(cell)
        return False

    assert remote.write_behind(is_wanted=is_wanted) == []
    assert len(asked) > 0
    del asked[:]
    assert remote.write_behind(is_wanted=is_wanted) == []
    assert asked == []


def test_many_prompts_are_looked_at_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call's time is bounded; all have their turn."""
    monkeypatch.setattr(remote_stores, "MAX_SCANNED", 2)
    remote = Remote(num_host=128)
    prompts = [[*prompt(name, CELL), 7] for name in range(1, 6)]
    remote.ask_for(*prompts)
    numbers = [len(remote.write_behind()) for _ in range(4)]
    assert numbers == [2, 2, 1, 0]


@pytest.mark.parametrize("most", [CELL_UNITS, HUGE])
def test_what_has_failed_has_no_second_turn(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """More prompts than a call looks at, of which the host lacks the end, and whose stores all fail: each cell is tried
    once, then nobody is asked any more. After the next request each has one more turn."""
    monkeypatch.setattr(remote_stores, "MAX_SCANNED", 2)
    remote = Remote(num_host=128)
    prompts = [[*prompt(name, 3 * CELL), 7] for name in range(1, 6)]
    for tokens in prompts:
        remote.ask_for(tokens[: 2 * CELL])
        ask_once_more(remote, tokens)
        ask_once_more(remote, tokens)
    wanted = {cell for tokens in prompts for cell in remote.cells(tokens)[:2]}
    for _ in range(2):
        tried: list[CellLabel] = []
        for _ in range(30):
            for plan in remote.launch(remote.write_behind(most)):
                tried.append(cell_of(plan))
                remote.end(plan, Outcome.FAILED)
        assert len(tried) == len(wanted) and set(tried) == wanted
        assert remote.write_behind(most, is_wanted=_nobody_asks) == []
        ask_once_more(remote, prompts[0])


def _nobody_asks(cell: CellLabel) -> bool:
    raise AssertionError(cell)


def test_what_is_remembered_of_prompts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts that were asked for first are dropped: by their number, and by their tokens."""
    for name, most in (("MAX_RECENT", 2), ("MAX_RECENT_TOKENS", 2 * (CELL + 1))):
        monkeypatch.undo()
        monkeypatch.setattr(hit_counts, name, most)
        remote = Remote()
        prompts = [[*prompt(number, CELL), 7] for number in range(1, 6)]
        remote.ask_for(*prompts)
        stored = [cell_of(plan) for plan in remote.write_behind()]
        assert stored == [remote.cells(tokens)[0] for tokens in (prompts[4], prompts[3])]


def test_a_long_prompt_alone_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than all that is kept otherwise."""
    monkeypatch.setattr(hit_counts, "MAX_RECENT_TOKENS", CELL)
    remote = Remote()
    remote.ask_for(OTHER, TOKENS)
    assert len(remote.write_behind()) == 3


def test_whoever_is_asked_may_raise() -> None:
    """Nothing is planned then that nobody would launch; what is asked for again is stored."""
    remote = Remote()
    remote.ask_for(TOKENS)

    def is_wanted(cell: CellLabel) -> bool:
        return {0: True, 4: True}[cell.start]

    with pytest.raises(KeyError):
        remote.write_behind(is_wanted=is_wanted)
    assert (remote.ledger.statistics().num_jobs, remote.num_pinned()[1]) == (0, 0)
    remote.serve(TOKENS)
    assert len(remote.write_behind()) == 3


@pytest.mark.parametrize(("max_blocks", "is_wanted"), [(-1, bool), ("1", bool), (True, bool), (1, None)])
def test_wrong_arguments_are_refused(max_blocks: object, is_wanted: object) -> None:
    """The error names the argument."""
    with pytest.raises(InvalidArgument, match="is_wanted" if is_wanted is None else "max_blocks"):
        Remote().ledger.remote.plan_stores(max_blocks, is_wanted)  # type: ignore[arg-type]


# -- taking back ------------------------------------------------------------------------------------------------------


def computed(remote: Remote, tokens: list[int]) -> LedgerRequest:
    """A live request that has computed and stored all of `tokens`."""
    request = remote.running(tokens)
    remote.land(remote.commit(request, len(tokens)))
    return request


def ask_once_more(remote: Remote, tokens: list[int]) -> None:
    remote.release(remote.admit(tokens), "looked")


def invalidate(remote: Remote, request: LedgerRequest, from_token: int) -> None:
    remote.ledger.invalidation.invalidate(request, from_token)
    remote.ledger.check_integrity()


def test_cells_of_a_failed_forward_are_taken_back() -> None:
    """From the cell that holds the first wrong token on; once."""
    remote = Remote()
    request = computed(remote, TOKENS)
    ask_once_more(remote, TOKENS)
    remote.land(remote.write_behind())
    invalidate(remote, request, CELL + 5)
    assert remote.ledger.statistics().remote.num_forgotten == 2
    assert remote.removed() == list(remote.cells(TOKENS)[1:])
    assert remote.removed() == []
    assert remote.num_stored_tokens(TOKENS) == CELL


def test_nothing_is_taken_back_without_wrong_units() -> None:
    """A token of a unit that was not published is wrong: no cell holds it."""
    remote = Remote()
    request = computed(remote, TOKENS)
    ask_once_more(remote, TOKENS)
    remote.land(remote.write_behind())
    invalidate(remote, request, 3 * CELL)
    assert remote.removed() == []


def test_cells_of_a_later_request_go_with_those_that_it_read() -> None:
    """It has gone on from wrong KV, is over, and is gone from the index: what it stored would be found again."""
    remote = Remote()
    front = TOKENS[: 6 * BLOCK]
    longer = [*front, *prompt(3, 2 * CELL), 7]
    request = computed(remote, front)
    remote.ask_for(longer)
    remote.land(remote.write_behind())
    assert remote.num_stored_tokens(longer) == 3 * CELL
    remote.ledger.reset(Tier.HOST)
    remote.evict_device()
    assert sum(run.stop for run in remote.ledger.cache.index.runs.values()) == 6, "only what is live"
    invalidate(remote, request, CELL)
    assert set(remote.removed()) == set(remote.cells(longer)[1:])


def test_what_was_there_already_hands_the_wrong_on() -> None:
    """A cell in the middle that somebody else has stored: those after it were computed from what is wrong."""
    remote = Remote()
    longer = [*TOKENS[:BLOCK], *prompt(3, 2 * CELL), 7]
    request = computed(remote, TOKENS[:BLOCK])
    remote.ask_for(longer)
    stored = remote.write_behind(is_wanted=lambda cell: cell.start > 0)
    assert [cell_of(plan) for plan in stored] == [remote.cells(longer)[1]]
    remote.land(stored)
    remote.ledger.reset(Tier.HOST)
    remote.evict_device()
    invalidate(remote, request, 0)
    assert remote.cells(longer)[1] in remote.removed()


def test_other_prompts_keep_theirs() -> None:
    """Cells before the wrong one, and those of other prompts, stay."""
    remote = Remote()
    request = computed(remote, TOKENS)
    ask_once_more(remote, TOKENS)
    remote.ask_for(OTHER)
    remote.land(remote.write_behind())
    invalidate(remote, request, CELL)
    remote.removed()
    assert (remote.num_stored_tokens(TOKENS), remote.num_stored_tokens(OTHER)) == (CELL, 2 * CELL)


def test_a_queued_store_is_given_up() -> None:
    """It never begins; the cell may have been there before, so it is to be removed all the same."""
    remote = Remote()
    request = computed(remote, TOKENS)
    ask_once_more(remote, TOKENS)
    plans = remote.write_behind()
    invalidate(remote, request, CELL)
    assert remote.launch(plans) == plans[:1]
    assert remote.removed() == list(remote.cells(TOKENS)[1:])
    remote.end(plans[0])
    assert remote.num_pinned()[1] == 0


@pytest.mark.parametrize("outcome", [Outcome.LANDED, Outcome.FAILED, Outcome.UNPROVEN])
def test_a_store_under_way_is_waited_for(outcome: Outcome) -> None:
    """Removed before it ends, the cell would be there again right after."""
    remote = Remote()
    request = computed(remote, TOKENS)
    ask_once_more(remote, TOKENS)
    first, second, third = remote.launch(remote.write_behind())
    invalidate(remote, request, CELL)
    assert remote.removed() == []
    remote.end(third, outcome)
    assert remote.removed() == [cell_of(third)]
    remote.end(second, outcome)
    remote.end(first)
    assert remote.removed() == [cell_of(second)]
    assert remote.num_stored_tokens(TOKENS) == CELL


def test_a_fetch_takes_no_cell_that_is_to_be_removed() -> None:
    """The store has it still: the hit ends before it."""
    remote = Remote()
    request = computed(remote, TOKENS)
    ask_once_more(remote, TOKENS)
    remote.land(remote.write_behind())
    invalidate(remote, request, CELL)
    remote.release(request, "failed")
    remote.forget_all()
    assert spans_of(remote.fetch(TOKENS, 3 * CELL).plans) == [(0, 4, ALL)]
    remote.removed()
    assert remote.num_stored_tokens(TOKENS) == CELL


def test_a_load_of_a_wrong_cell_publishes_nothing() -> None:
    """It was on its way when its KV was invalidated."""
    remote = Remote()
    request = computed(remote, TOKENS)
    ask_once_more(remote, TOKENS)
    remote.land(remote.write_behind())
    remote.ledger.reset(Tier.HOST)
    longer = [*TOKENS[:-1], *prompt(3, CELL), 7]
    remote.cells_stored |= {cell.digest: cell for cell in remote.cells(longer)}
    plans = remote.launch(remote.fetch(longer).plans)
    assert len(plans) == 4
    invalidate(remote, request, CELL)
    for plan in plans:
        remote.end(plan)
    assert remote.hit(longer)[1] == 0 and sum(remote.hit(longer)) == CELL


def test_it_is_stored_again_once_it_is_right() -> None:
    """Computed anew, asked for again: not before the wrong one is removed."""
    remote = Remote()
    request = computed(remote, TOKENS)
    ask_once_more(remote, TOKENS)
    remote.land(remote.write_behind())
    invalidate(remote, request, CELL)
    remote.land(remote.commit(request, len(TOKENS)))
    ask_once_more(remote, TOKENS)
    assert remote.write_behind(is_wanted=lambda cell: cell.start > 0) == [], "to be removed first"
    remote.removed()
    ask_once_more(remote, TOKENS)
    remote.land(remote.write_behind())
    assert remote.num_stored_tokens(TOKENS) == 3 * CELL


def test_a_reset_in_between_changes_nothing() -> None:
    """The store still has it under the same digest."""
    remote = Remote()
    request = computed(remote, TOKENS)
    ask_once_more(remote, TOKENS)
    remote.land(remote.write_behind())
    remote.ledger.reset()
    invalidate(remote, request, CELL)
    assert remote.removed() == list(remote.cells(TOKENS)[1:])


def test_key_spans_enter_the_cells_that_are_taken_back() -> None:
    """The digests are those of the request's own tokens and spans."""
    remote = Remote()
    spans = (KeySpan(18, 22, b"image"),)
    request = remote.running(TOKENS, key_spans=spans)
    remote.land(remote.commit(request, len(TOKENS)))
    remote.release(remote.admit(TOKENS, key_spans=spans), "looked")
    remote.land(remote.write_behind())
    invalidate(remote, request, 2 * CELL)
    assert remote.removed() == [remote.cells(TOKENS, key_spans=spans)[2]]


def test_memory_lasts_as_long_as_somebody_may_take_back() -> None:
    """Cells are remembered while a request is live that was admitted before they were stored, and no longer."""
    remote = Remote()
    request = remote.admit([5])
    remote.ask_for(TOKENS)
    remote.land(remote.write_behind())
    stores = remote.ledger.remote.stores
    assert stores is not None and remote.write_behind() == [] and len(stores._known) == 3
    remote.release(request, "over")
    remote.ask_for(OTHER)
    remote.land(remote.write_behind())
    assert len(stores._known) == 2, "of the requests of this call: nobody was live"
    remote.write_behind()
    assert (len(stores._known), len(stores._stores)) == (0, 0)


def test_beyond_the_memory_nothing_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be taken back is not put there."""
    monkeypatch.setattr(remote_stores, "MAX_KNOWN", 4)
    remote = Remote()
    request = remote.admit([5])
    remote.ask_for(TOKENS, OTHER)
    assert len(remote.write_behind()) == 4
    remote.release(request, "over")
    remote.serve(TOKENS)
    assert len(remote.write_behind(HUGE)) == 1


def test_taking_back_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody removes the cells: nothing more is stored, and no more than a prompt's worth is added to them."""
    monkeypatch.setattr(remote_stores, "MAX_KNOWN", 2)
    remote = Remote()
    for name in range(1, 6):
        tokens = [*prompt(name, 3 * CELL), 7]
        request = computed(remote, tokens)
        ask_once_more(remote, tokens)
        remote.land(remote.write_behind())
        invalidate(remote, request, 0)
        remote.release(request, "failed")
    forgotten = remote.ledger.statistics().remote
    assert forgotten is not None and forgotten.num_forgotten == 3


def test_jobs_of_cells_end_like_others() -> None:
    """A store that is discarded by hand lets its source go."""
    remote = Remote()
    remote.ask_for(TOKENS)
    plans = remote.write_behind()
    jobs = [remote.ledger.jobs.unsettled[plan.job_id] for plan in plans]
    for plan in plans:
        remote.ledger.discard(plan.job_id)
        remote.ledger.check_integrity()
    assert {job.state for job in jobs} == {JobState.DISCARDED}
    assert remote.num_pinned()[1] == 0
