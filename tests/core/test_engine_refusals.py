"""Engine-owned blocks: illegal calls and invalid arguments raise errors that name them, and change nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from engine_driving import BLOCK, Counted, EngineDriven, Finding, prompt
from test_illegal_calls import refused

from aoffload import HostCache, KVCacheGroup, LazyStore, OffloadConfig, RequestState, SlidingWindow, Tier
from aoffload.errors import CommitError, ConfigError, InvalidArgument, WrongState
from aoffload.ledger import Completion, LedgerRequest, Outcome, Prefix, Root

A, B = prompt(1, 17), prompt(2, 17)
S = RequestState
ROOT = Root("test")


# -- when -----------------------------------------------------------------------------------------------------------


def pinned(driven: EngineDriven) -> LedgerRequest:
    driven.serve(A)
    return driven.admit(A)


def pending(driven: EngineDriven) -> LedgerRequest:
    driven.serve(A)
    driven.loading(A)
    return driven.admit(A)


def loading(driven: EngineDriven) -> LedgerRequest:
    driven.serve(A)
    return driven.loading(A)[0]


def running(driven: EngineDriven) -> LedgerRequest:
    request, tables = driven.computed(A)
    driven.offer(request, 9, tables)
    return request


def over(driven: EngineDriven) -> LedgerRequest:
    request = running(driven)
    driven.release(request)
    return request


SITUATIONS = {"PINNED": pinned, "MATCHED": pending, "LOADING": loading, "RUNNING": running, "DONE": over}


def test_the_device_is_the_engine_s_to_forget() -> None:
    """A reset of the device alone is refused: nothing of it is known here."""
    driven = EngineDriven()
    request = running(driven)
    with refused(driven.ledger, request, error=InvalidArgument, says=("tier: ", "HOST")):
        driven.ledger.reset(Tier.DEVICE)


@pytest.mark.parametrize(
    ("call", "legal"),
    [
        ("match_again", "PINNED MATCHED"),
        ("decline", "PINNED"),
        ("load", "PINNED"),
        ("abandon_load", "LOADING"),
        ("offer", "PINNED RUNNING"),
        ("invalidate", "RUNNING"),
        ("release", "PINNED MATCHED LOADING RUNNING"),
    ],
)
def test_each_call_has_its_time(call: str, legal: str) -> None:
    """At any other `WrongState` says which call and which request, and changes nothing."""
    calls: dict[str, Callable[[EngineDriven, LedgerRequest], object]] = {
        "match_again": lambda driven, request: driven.ask(request, 4),
        "decline": lambda driven, request: driven.ledger.decline(request, 4),
        "load": lambda driven, request: driven.load(request, [range(80, 90)]),
        "abandon_load": lambda driven, request: driven.ledger.abandon_load(request),
        "offer": lambda driven, request: driven.offer(request, 16, [range(80, 90)]),
        "invalidate": lambda driven, request: driven.invalidate(request, 8),
        "release": lambda driven, request: driven.ledger.release(request),
    }
    for situation, build in SITUATIONS.items():
        driven = EngineDriven()
        request = build(driven)
        if situation in legal.split():
            calls[call](driven, request)
        else:
            with refused(driven.ledger, request, error=WrongState, says=(f"{call}: ", str(request))):
                calls[call](driven, request)
        driven.check()


def test_requests_of_another_ledger_are_refused() -> None:
    """On both of an engine's calls."""
    driven, foreign = EngineDriven(), EngineDriven().admit(A)
    with refused(driven.ledger, error=InvalidArgument, says=("request: ",)):
        driven.ledger.offer(foreign, 4, [[1]])
    with refused(driven.ledger, error=InvalidArgument, says=("request: ",)):
        driven.ledger.match_again(foreign, num_device_tokens=0)


# -- what a ledger is made with -----------------------------------------------------------------------------------


def made(**options: Any) -> HostCache:
    policy = options.pop("store_policy", "eager")
    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=BLOCK)], num_host_blocks=8, store_policy=policy)
    return HostCache(config, 17, **options)


def clock() -> float:
    return 0.0


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"engine_blocks": Counted(), "clock": 3.0}, InvalidArgument, "clock: "),
        ({"engine_blocks": Counted, "clock": clock}, ConfigError, "engine_blocks: "),
        ({"engine_blocks": [1, 2, 3], "clock": clock}, ConfigError, "engine_blocks: "),
        ({"engine_blocks": Counted(), "clock": clock, "store_policy": "lazy"}, ConfigError, "store_policy: "),
        ({"engine_blocks": Counted(), "clock": clock, "store_policy": LazyStore(4)}, ConfigError, "store_policy: "),
    ],
)
def test_what_a_host_cache_is_made_with(options: dict[str, Any], error: type[Exception], says: str) -> None:
    """Blocks of an engine's come with a clock, and without a policy that needs to know what the device evicts next."""
    with pytest.raises(error, match=f"^{says}"):
        made(**options)
    assert made(engine_blocks=Counted(), clock=clock).statistics().device.num_blocks == 0


# -- numbers ------------------------------------------------------------------------------------------------------

NO_COUNT: tuple[Any, ...] = (-1, -(2**70), True, 1.0, float("nan"), "4", b"4", [4], (), 4j, None)


def test_wrong_numbers_are_refused_by_name() -> None:
    """At least one token is left to compute, nothing goes back, nothing is computed that is not known."""
    driven = EngineDriven()
    driven.serve(B)
    request = pinned(driven)
    own = running(driven)
    for wrong in (*NO_COUNT, 17, 2**70):
        with refused(driven.ledger, request, error=InvalidArgument, says=("num_device_tokens: ",)):
            driven.ledger.admit(Prefix.of(ROOT, A), num_device_tokens=wrong)
        with refused(driven.ledger, request, error=InvalidArgument, says=("num_device_tokens: ",)):
            driven.ledger.match_again(request, num_device_tokens=wrong)
    for wrong in NO_COUNT:
        with refused(driven.ledger, request, error=InvalidArgument, says=("from_token: ",)):
            driven.ledger.decline(request, wrong)
    for wrong in (*NO_COUNT[:-1], -1):
        with refused(driven.ledger, request, error=InvalidArgument, says=("max_tokens: ",)):
            driven.ledger.plan_load(request, wrong, into=[range(5)])
    for wrong in (*NO_COUNT, 8, 18, 2**70):
        with refused(driven.ledger, own, error=CommitError, says=("num_computed_tokens: ",)):
            driven.ledger.offer(own, wrong, [range(1, 20)])
    for wrong in (*NO_COUNT, 10, 2**70):
        with refused(driven.ledger, own, error=InvalidArgument, says=("from_token: ",)):
            driven.ledger.invalidate(own, wrong)


def test_nothing_goes_back_behind_what_the_engine_has() -> None:
    """The first offer counts from what was said at the match."""
    driven = EngineDriven()
    request = driven.admit(A, 9)
    with refused(driven.ledger, request, error=CommitError, says=("num_computed_tokens: ", "9")):
        driven.ledger.offer(request, 8, [range(1, 6)])
    driven.offer(request, 9, [range(1, 6)])


def test_other_wrong_arguments_are_refused_by_name() -> None:
    """Tokens, wakes, flags."""
    driven = EngineDriven()
    request, own = pinned(driven), running(driven)
    for tokens in ([-1], [2**31], [1.5], "12", [None], 7, None):
        with refused(driven.ledger, own, error=InvalidArgument, says=("new_token_ids",)):
            driven.ledger.offer(own, 9, [range(1, 9)], tokens)  # type: ignore[arg-type]
    for flag in (None, 1, "yes"):
        with refused(driven.ledger, own, error=InvalidArgument, says=("is_last: ",)):
            driven.ledger.offer(own, 9, [range(1, 9)], is_last=flag)  # type: ignore[arg-type]
    for wake in (None, 3, "wake"):
        with refused(driven.ledger, request, error=InvalidArgument, says=("wake: ",)):
            driven.ledger.match_again(request, num_device_tokens=0, wake=wake)  # type: ignore[arg-type]
        with refused(driven.ledger, request, error=InvalidArgument, says=("wake: ",)):
            driven.ledger.plan_load(request, wake=wake, into=[range(1, 6)])  # type: ignore[arg-type]
        with refused(driven.ledger, request, error=InvalidArgument, says=("wake: ",)):
            driven.ledger.admit(Prefix.of(ROOT, A), wake=wake)  # type: ignore[arg-type]


# -- block ids ----------------------------------------------------------------------------------------------------

TABLES: dict[str, Any] = {
    "no tables": 7, "none": None, "no table for each group": [], "too many tables": [[4, 5, 6, 7], [8, 9, 10, 11]],
    "too few ids": [[4, 5, 6]], "no ids at all": [[]], "no sequence": [7], "negative": [[4, 5, -1, 7]],
    "beyond the tensors": [[4, 5, 1000, 7]], "huge": [[4, 5, 2**70, 7]], "text": ["abcd"], "bytes": [b"abcd"],
    "texts": [["4", "5", "6", "7"]], "fractions": [[4.0, 5.0, 6.0, 7.0]], "nothing": [[4, None, 6, 7]],
    "lists of lists": [[[4], [5], [6], [7]]], "numpy fractions": [np.ones(4)], "two axes": [np.ones((4, 2), np.int32)],
}  # fmt: skip


@pytest.mark.parametrize("wrong", TABLES)
def test_wrong_tables_are_refused_by_name(wrong: str) -> None:
    """By both calls, before anything is changed: the right ones are taken afterwards."""
    driven = EngineDriven()
    request = pinned(driven)
    with refused(driven.ledger, request, error=InvalidArgument, says=("into: ",)):
        driven.ledger.plan_load(request, into=TABLES[wrong])
    assert len(driven.load(request, [[4, 5, 6, 7]])) == 1
    fresh = driven.admit(B)
    with refused(driven.ledger, fresh, error=InvalidArgument, says=("block_ids: ",)):
        driven.ledger.offer(fresh, 18, TABLES[wrong], [70, 71])
    assert len(driven.offer(fresh, 18, [[8, 9, 10, 11]], [70, 71])) == 1


def test_tables_of_several_groups_have_lengths_of_their_own() -> None:
    """Each has to reach as far as the tokens do, in blocks of its own group."""
    groups = [KVCacheGroup("small", block_size=2), KVCacheGroup("large", block_size=8)]
    driven = EngineDriven(groups=groups)
    tokens = prompt(1, 17)
    request = driven.admit(tokens)
    for wrong in ([range(1, 8), range(20, 22)], [range(1, 9), range(20, 21)], [range(1, 9)]):
        with refused(driven.ledger, request, error=InvalidArgument, says=("block_ids: ", "[8, 2]")):
            driven.ledger.offer(request, 17, wrong)
    assert len(driven.offer(request, 17, [range(1, 9), range(20, 22)])) == 1


def test_a_load_writes_nowhere_twice() -> None:
    """Neither to one block for two positions or groups, nor to the null block, nor where another copy may still write;
    what it has no need to bring may be null."""
    driven = EngineDriven(64, groups=[KVCacheGroup("full", block_size=4), KVCacheGroup("w", SlidingWindow(5), 4)])
    driven.serve(A)
    request = driven.admit(A)
    for tables, why in (
        ([[4, 5, 4, 7], [0, 0, 0, 9]], "twice"),
        ([[4, 5, 6, 7], [0, 0, 0, 6]], "twice"),
        ([[4, 5, 0, 7], [0, 0, 0, 9]], "null"),
        ([[4, 5, 6, 7], [1, 2, 3, 0]], "null"),
    ):
        with refused(driven.ledger, request, error=InvalidArgument, says=("into: ", why)):
            driven.ledger.plan_load(request, into=tables)
    driven.load(request, [[4, 5, 6, 7], [0, 0, 0, 9]])
    assert driven.held() == [4, 5, 6, 7, 9]


@pytest.mark.parametrize("is_over", [False, True])
def test_blocks_that_a_copy_may_still_write_to_are_refused(is_over: bool) -> None:
    """Under way, or in quarantine until late proof."""
    driven = EngineDriven(pending_timeout_s=1.0)
    driven.serve(A)
    first, (plan,) = driven.loading(A)
    if is_over:
        driven.end(plan, Outcome.UNPROVEN)
        driven.release(first)
    second = driven.admit(A)
    driven.now = 5.0
    driven.ask(second)
    into = [[90, 91, 92, plan.destination_ids[0]]]
    with refused(driven.ledger, second, error=InvalidArgument, says=("into: ", str(plan.destination_ids[0]))):
        driven.ledger.plan_load(second, into=into)
    driven.ledger.settle(Completion(plan.job_id, Outcome.FAILED))
    driven.land(driven.load(second, into))
    assert not driven.wrong(A, into, 0, 16)


@pytest.mark.parametrize("found", [[1, 2], [1, 2, 3, 4, 5], [1, 2, -3, 4], [1, 2, 1000, 4], ["1"] * 4, 7, None])
def test_a_find_that_answers_wrongly_is_refused(found: Any) -> None:
    """As if the table had named it; the tokens that came with the offer are not kept."""

    class Wrong(Finding):
        def find(self, request_id: str, group: int, start: int, stop: int) -> Sequence[int]:
            return found  # type: ignore[no-any-return]

    driven = EngineDriven(engine=Wrong())
    request = driven.admit(A)
    with refused(driven.ledger, request, error=InvalidArgument, says=("block_ids: ",)):
        driven.ledger.offer(request, 18, [[4, 0, 6, 7]], [70])
    assert driven.offer(request, 18, [[4, 5, 6, 7]], [70])


def test_what_a_store_still_reads_is_not_loaded_into() -> None:
    """An engine that names a block which a store still reads would have the store send other bytes than were offered:
    refused, and nothing is changed; free again when the store is over."""
    driven = EngineDriven()
    driven.serve(A)
    other, (table,) = driven.computed(B)
    (store,) = driven.offer(other, 16, [table])
    request, (fresh,) = driven.admit(A), driven.fresh(17)
    with refused(driven.ledger, request, error=InvalidArgument, says=("into: ", str(table[0]), "still reads")):
        driven.ledger.plan_load(request, into=[[table[0], *fresh[1:]]])
    driven.land([store])
    driven.land(driven.load(request, [[table[0], *fresh[1:]]]))


def test_what_another_load_is_writing_is_not_stored() -> None:
    """An engine that names a block which another request's load still writes to would store bytes that nobody has
    proven: refused, and nothing is changed."""
    driven = EngineDriven()
    driven.serve(A)
    _, (plan,) = driven.loading(A)
    writing = list(plan.destination_ids)
    other, (table,) = driven.computed(B)
    with refused(driven.ledger, other, error=InvalidArgument, says=("block_ids: ", str(writing[0]))):
        driven.ledger.offer(other, 16, [[*table[:3], writing[0]]])
    assert driven.offer(other, 16, [table])
    driven.land([plan])


def test_what_a_copy_may_still_write_to_is_not_stored() -> None:
    """After an unproven load the engine computes in other blocks; those of the load are refused until late proof."""
    driven = EngineDriven()
    driven.serve(A)
    request, (plan,) = driven.loading(A)
    doubtful = list(plan.destination_ids)
    driven.end(plan, Outcome.UNPROVEN)
    driven.reset(Tier.HOST)
    with refused(driven.ledger, request, error=InvalidArgument, says=("block_ids: ", str(doubtful[0]))):
        driven.ledger.offer(request, 16, [doubtful])
    tables = driven.fresh(17)
    driven.compute(A, tables)
    driven.land(driven.offer(request, 16, tables))
    driven.end(plan, Outcome.FAILED)
    assert driven.hit(A) == 16
