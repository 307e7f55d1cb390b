"""Engine-owned blocks: partial and abandoned loads, retries, and the limit on quarantined blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from engine_driving import EngineDriven, Seen, destinations, loaded, prompt

from aoffload import HostCache, KVCacheGroup, OffloadConfig, RecurrentState, RequestState, SlidingWindow, Tier
from aoffload.errors import ConfigError, InvalidArgument
from aoffload.host_cache import LoadsPaused, LoadsResumed
from aoffload.ledger import Completion, Event, LedgerRequest, Outcome, Prefix, Root, TransferPlan

A, B, C = (prompt(seed, 17) for seed in (1, 2, 3))
S = RequestState


class Heard(Seen):
    """An observer that keeps what it is told of pauses."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []

    def observe(self, event: Event) -> None:
        super().observe(event)
        match event:
            case LoadsPaused(num_quarantined):
                self.events.append(("paused", num_quarantined))
            case LoadsResumed(num_quarantined):
                self.events.append(("resumed", num_quarantined))


# -- what a next try needs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.UNPROVEN])
def test_an_engine_that_tries_again_comes_to_an_end(outcome: Outcome) -> None:
    """A copy that never succeeds is not tried for ever: each next try, with what the request before it says, asks for
    less, and the last one for nothing."""
    driven = EngineDriven(max_job_bytes=1, max_quarantined_share=1.0)
    driven.serve(A)
    limit: int | None = None
    tried = []
    for _ in range(10):
        request = driven.admit(A, max_hit_tokens=limit)
        tried.append(request.match.num_host_tokens)
        if not tried[-1]:
            break
        *fine, last = driven.launch(driven.load(request, driven.fresh(17)))
        driven.land(fine)
        driven.end(last, outcome)
        assert (request.num_computed_tokens, request.num_lost_tokens) == (tried[-1] - 4, 4)
        limit = request.retry_max_hit_tokens
        driven.release(request, "again")
    assert tried == [16, 12, 8, 4, 0]


@pytest.mark.parametrize("is_lost", [lambda plan: plan.num_blocks == 3, lambda plan: plan.num_blocks == 1])
def test_a_load_that_lacks_its_checkpoint_or_kv_counts_for_nothing(is_lost: Callable[[TransferPlan], bool]) -> None:
    """With a recurrent state, an engine continues only from a checkpoint: the only one that was loaded lies after the
    KV that is lost, or is lost itself."""
    state = KVCacheGroup("state", RecurrentState(), block_size=4, num_rows=3)
    driven = EngineDriven(max_job_bytes=1, groups=[KVCacheGroup("full", block_size=4), state])
    request = driven.admit(A)
    driven.memory[Tier.DEVICE] |= dict.fromkeys(range(1, 8), "computed")
    driven.land(driven.offer(request, 16, [[1, 2, 3, 4], []], checkpoints={16: [5, 6, 7]}))
    driven.release(request, "over")
    request = driven.admit(A)
    plans = driven.launch(driven.load(request, [[11, 12, 13, 14], []], into_checkpoint=[15, 16, 17]))
    lost = [plan for plan in plans if is_lost(plan)][-1]
    driven.land([plan for plan in plans if plan is not lost])
    driven.end(lost, Outcome.FAILED)
    assert (request.state, request.num_computed_tokens, request.num_lost_tokens) == (S.RUNNING, 0, 16)


def test_who_has_lost_nothing_has_no_limit() -> None:
    """Neither a load that has landed, nor one that was declined in part, limits the next try."""
    driven = EngineDriven()
    driven.serve(A)
    for most in (None, 8, 0):
        request = driven.admit(A)
        driven.land(driven.load(request, driven.fresh(17), max_tokens=most))
        assert (request.num_lost_tokens, request.retry_max_hit_tokens) == (0, None)
        driven.release(request, "preempted")


# -- giving up a load ---------------------------------------------------------------------------------------------


def test_giving_up_a_load_leaves_its_blocks_to_the_copies() -> None:
    """What has landed counts. A copy that was launched goes on writing, so its blocks stay held, are refused, and the
    request computes into others; a copy that was not launched gives its blocks back."""
    driven, woken = EngineDriven(max_job_bytes=1), list[str]()
    driven.serve(A)
    request, into = driven.admit(A), driven.fresh(17)
    landed, launched, queued, last = driven.load(request, into, wake=lambda: woken.append("it"))
    driven.launch([landed, launched])
    driven.end(landed)
    retried = driven.pending(A, woken)
    driven.ledger.abandon_load(request)
    driven.check()
    assert (request.state, request.num_computed_tokens, request.num_lost_tokens) == (S.RUNNING, 4, 12)
    assert request.retry_max_hit_tokens == 4 and woken == ["it", "asker"]
    assert driven.held() == [into[0][1]] == list(launched.destination_ids)
    assert not driven.launch([queued, last])
    assert driven.ask(retried)[2] == "pending", "its first block has landed"
    tables = [[into[0][0], *driven.fresh(16)[0]]]
    driven.compute(A, tables, 4)
    assert not driven.wrong(A, tables, 0, 16)
    driven.end(launched)
    assert driven.held() == []
    driven.land(driven.offer(request, 17, tables))
    assert driven.ask(retried, 16) == (16, 0, "hit")
    for one in (request, retried):
        driven.release(one)
    driven.assert_at_rest()
    assert loaded(driven, A) == 16


def test_giving_up_a_load_over_a_window() -> None:
    """Of a window only the end was asked for: without all of it nothing of the load counts."""
    driven = EngineDriven(64, groups=[KVCacheGroup("full", block_size=4), KVCacheGroup("w", SlidingWindow(9), 4)])
    driven.serve(A)
    request, plans = driven.loading(A)
    driven.end(plans[0])
    driven.ledger.abandon_load(request)
    assert (request.num_computed_tokens, request.retry_max_hit_tokens) == (0, 0)
    assert sorted(driven.held()) == sorted(block_id for ids in destinations(plans[1:]) for block_id in ids)
    driven.land(plans[1:])
    driven.release(request, "looked")
    driven.assert_at_rest()


# -- how much quarantine may take ---------------------------------------------------------------------------------


def lost(driven: EngineDriven, tokens: list[int]) -> tuple[LedgerRequest, TransferPlan]:
    """A load of 16 tokens, 4 blocks, that nobody can prove over."""
    request, (plan,) = driven.loading(tokens)
    driven.end(plan, Outcome.UNPROVEN)
    return request, plan


def test_above_the_share_nothing_is_loaded() -> None:
    """Hits are misses, what was pinned is not loaded any more, nobody waits for anybody's load, and stores go on. Said
    once; late proof that brings it below ends it."""
    heard = Heard()
    driven = EngineDriven(64, max_quarantined_share=0.004, observer=heard)  # 3 of 999 blocks
    for tokens in (A, B, C):
        driven.serve(tokens)
    waiting = driven.admit(B)
    _, first = lost(driven, A)
    assert heard.events == [("paused", 4)] and driven.ledger.statistics().loads_paused
    assert driven.admit(C).match.num_tokens == 0 and driven.hit(C) == 0
    assert driven.load(waiting) == [] and waiting.num_computed_tokens == 0 and waiting.num_lost_tokens == 0
    assert driven.num_pinned() == 0
    behind = driven.admit(C, 8)
    assert driven.ask(behind, 8) == (8, 0, "hit") and driven.load(behind) == []
    driven.serve(prompt(4, 17))
    driven.end(first, Outcome.FAILED)
    assert heard.events == [("paused", 4), ("resumed", 0)] and not driven.ledger.statistics().loads_paused
    for tokens in (B, C, prompt(4, 17)):
        assert loaded(driven, tokens) == 16


def test_a_pinned_request_asks_again_while_nothing_is_loaded() -> None:
    """Its pins end; when loading goes on, it asks for more than it was told meanwhile with another number."""
    driven = EngineDriven(64, max_quarantined_share=0.0)
    for tokens in (A, B):
        driven.serve(tokens)
    request = driven.admit(B, 4)
    _, plan = lost(driven, A)
    assert driven.ask(request, 4) == (4, 0, "hit") and driven.num_pinned() == 0
    driven.end(plan)
    assert driven.ask(request, 4) == (4, 0, "hit"), "what it was told stays true"
    assert driven.ask(request, 8) == (8, 8, "hit")


def test_who_waits_for_a_load_that_brings_the_pause_is_woken() -> None:
    """And finds a miss: it computes."""
    driven, woken = EngineDriven(max_quarantined_share=0.0), list[str]()
    driven.serve(A)
    _, (plan,) = driven.loading(A)
    retried = driven.pending(A, woken)
    driven.end(plan, Outcome.UNPROVEN)
    assert woken == ["asker"] and driven.ask(retried) == (0, 0, "miss")


def test_each_crossing_is_said_once() -> None:
    """More of it, or less, on the same side of the bound, is no news; nor are stores that cannot be proven."""
    heard = Heard()
    driven = EngineDriven(64, max_quarantined_share=0.005, observer=heard)  # 4 of 999 blocks
    for tokens in (A, B, C):
        driven.serve(tokens)
    store, tables = driven.computed(prompt(5, 17))
    driven.end(driven.launch(driven.offer(store, 17, tables))[0], Outcome.UNPROVEN)
    loads = [driven.loading(tokens)[1][0] for tokens in (A, B, C)]
    driven.end(loads[0], Outcome.UNPROVEN)
    assert heard.events == []
    for plan in loads[1:]:
        driven.end(plan, Outcome.UNPROVEN)
    assert heard.events == [("paused", 8)]
    for plan in loads:
        driven.ledger.settle(Completion(plan.job_id, Outcome.LANDED, plan.num_blocks))
    assert heard.events == [("paused", 8), ("resumed", 4)]


@pytest.mark.parametrize("share", [-0.1, 1.1, "a quarter", None, True])
def test_the_share_is_a_share(share: object) -> None:
    with pytest.raises(ConfigError, match="max_quarantined_share"):
        OffloadConfig(groups=[KVCacheGroup("full", block_size=4)], num_host_blocks=4, max_quarantined_share=share)  # type: ignore[arg-type]


# -- when to ask --------------------------------------------------------------------------------------------------


def test_a_ledger_says_until_when_it_answers_pending() -> None:
    """At that time asking gives another answer, not before; nobody else has such a time."""
    driven, woken = EngineDriven(pending_timeout_s=3.0), list[str]()
    driven.serve(A)
    driven.now = 0.1
    bringer, _ = driven.loading(A)
    retried = driven.pending(A, woken)
    until = driven.ledger.pending_until(retried)
    assert until == 0.1 + 3.0 and driven.ledger.pending_until(bringer) == float("inf")
    driven.now = 2.0
    driven.ask(retried)
    assert driven.ledger.pending_until(retried) == until
    driven.now = until
    assert driven.ask(retried) == (0, 16, "hit") and driven.ledger.pending_until(retried) == float("inf")
    assert driven.ledger.lookup(Prefix.of(retried.sequence.root, A)).num_host_tokens == 16


class NoBlocks:
    """The blocks of an engine, which keeps them all."""

    def hold(self, block_ids: object) -> None: ...

    def give(self, block_ids: object) -> None: ...


@pytest.mark.parametrize("is_right", [True, False])
def test_blocks_that_were_right_for_the_match_are_right_after_a_corrupt_copy(is_right: bool) -> None:
    """Another request's copy finds a corrupt block of a hit that was matched before. A load whose `into` has window
    blocks at the end of that hit loads nothing, and the request computes. A wrong `into` is refused, as before."""
    groups = [KVCacheGroup("full", block_size=2), KVCacheGroup("window", SlidingWindow(3), block_size=2)]
    cache = HostCache(OffloadConfig(groups=groups, num_host_blocks=64), 100, NoBlocks(), clock=lambda: 0.0)
    tokens = list(range(17))

    def land(plans: Sequence[TransferPlan], bad: int = -1) -> None:
        for number, plan in enumerate(plans):
            cache.launch(plan.job_id)
            outcome, corrupt = (Outcome.CORRUPT, (0,)) if number == bad else (Outcome.LANDED, ())
            cache.settle(Completion(plan.job_id, outcome, corrupt=corrupt))

    for stop in range(4, 18, 2):  # each stores the window at its end
        request = cache.admit(Prefix.of(Root("m"), tokens[: stop + 1]), num_device_tokens=stop)
        land(cache.plan_load(request))
        tables = [range(1, stop // 2 + 1), range(20, 20 + stop // 2)]
        land(cache.offer(request, stop, tables, is_last=True))
        cache.release(request)
    first = cache.admit(Prefix.of(Root("m"), tokens))
    second = cache.admit(Prefix.of(Root("m"), [*tokens[:14], 77, 78]), num_device_tokens=2)
    assert second.match.num_tokens == 14
    land(cache.plan_load(first, into=[range(1, 9), range(20, 28)], max_job_bytes=1), bad=4)
    window = [0] * 5 + [65, 66]  # what is read to go on at token 14
    full = list(range(40, 47)) if is_right else [40, 41, 0, 43, 44, 45, 46]
    if is_right:
        assert not cache.plan_load(second, into=[full, window])
        assert (second.state, second.num_computed_tokens) == (S.RUNNING, 2)
    else:
        with pytest.raises(InvalidArgument, match="into"):
            cache.plan_load(second, into=[full, window])
        assert second.state is S.PINNED
    cache.check_integrity()


def test_after_a_load_that_failed_a_window_is_computed_by_the_request() -> None:
    """Blocks before the window of a load are nobody's bytes only as long as the load counts: a request that computes
    all of it may invalidate from any token on, and its windows are stored."""
    driven = EngineDriven(60, groups=[KVCacheGroup("full", block_size=4), KVCacheGroup("window", SlidingWindow(9), 4)])
    long = prompt(1, 40)
    driven.serve(long)
    request, plans = driven.loading([*long, 7])
    for plan in plans:
        driven.end(plan, Outcome.FAILED)
    assert request.num_computed_tokens == 0
    tables = driven.fresh(41)
    driven.compute([*long, 7], tables)
    driven.land(driven.offer(request, 20, tables))
    driven.land(driven.offer(request, 40, tables))
    assert driven.invalidate(request, 30) == []
    driven.release(request)
    driven.assert_at_rest()
