"""Steps, resets, commits, several groups, roots and key spans of a `Ledger`. See test_invalidation.py, too."""

from __future__ import annotations

import pytest
from driving import BLOCK, ROOT, Driven, Tier, prompt

from aoffload._common.prefix import TOKEN_BYTES, KeySpan, Root
from aoffload._config.groups import KVCacheGroup
from aoffload._kernel.states import Outcome, RequestState
from aoffload.errors import CommitError, InvalidArgument, WrongState

A = prompt(1, 17)


# -- steps --------------------------------------------------------------------------------------------------------


def test_a_step_holds_what_it_touches() -> None:
    """A released request's blocks are nobody's until the forward that touches them has ended."""
    driven = Driven(8)
    request = driven.running(prompt(1, 32))
    with driven.ledger.step([request]):
        driven.release(request, "cancelled")
        assert request.state is RequestState.ABORTED
        assert driven.ledger.statistics().device.num_free == 0
    assert driven.ledger.statistics().device.num_free == 8
    driven.ledger.check_integrity()


def test_the_last_of_several_steps_lets_go() -> None:
    """Steps may overlap; published blocks stay pinned as long as any of them runs."""
    driven = Driven(8, num_host=0)
    request = driven.running(prompt(1, 8))
    driven.commit(request)
    outer, inner = driven.ledger.step([request]), driven.ledger.step([request])
    outer.__enter__()
    inner.__enter__()
    driven.release(request)
    outer.__exit__(None, None, None)
    assert driven.num_pinned()[0] == 2
    inner.__exit__(None, None, None)
    assert driven.num_pinned()[0] == 0
    assert driven.ledger.statistics().device.num_cached == 2


def test_a_step_that_raises_lets_go_too() -> None:
    """An exception in the forward ends the step like anything else."""
    driven = Driven(8)
    request = driven.running(prompt(1, 8))
    with pytest.raises(ZeroDivisionError), driven.ledger.step([request]):
        raise ZeroDivisionError
    driven.release(request)
    assert driven.num_pinned() == (0, 0)


def test_a_step_takes_all_its_requests_or_none() -> None:
    """If one of them can't be stepped, no other is held for ever."""
    driven = Driven(8)
    good, bad = driven.running(prompt(1, 8)), driven.admit(prompt(2, 8))
    with pytest.raises(WrongState, match="step"), driven.ledger.step([good, bad]):
        pass
    driven.release(good)
    assert driven.ledger.statistics().device.num_free == 8


def test_no_load_starts_under_a_step() -> None:
    """A load gives blocks back that a forward may be writing: while a step runs it is refused."""
    driven = Driven(16)
    driven.on_host_only(A)
    request = driven.allocated(A)
    with driven.ledger.step([request]), pytest.raises(WrongState, match="step"):
        driven.ledger.plan_load(request)
    driven.land(driven.ledger.plan_load(request))
    assert request.num_computed_tokens == 16


# -- reset --------------------------------------------------------------------------------------------------------


def test_reset_forgets_everything_cached() -> None:
    """Nothing is findable any more, on any tier, and what nobody pins is free."""
    driven = Driven(8)
    driven.serve(A)
    driven.ledger.reset()
    assert driven.hit(A) == (0, 0)
    statistics = driven.ledger.statistics()
    assert (statistics.device.num_free, statistics.host.num_free) == (8, 16)
    driven.serve(A)
    assert driven.hit(A) == (16, 0)


def test_requests_from_before_a_reset_keep_their_blocks_and_publish_nothing() -> None:
    """They go on in their own blocks; what they commit is neither found nor stored, before or after they leave."""
    driven = Driven(16)
    driven.serve(prompt(1, 8))
    request = driven.running(A)
    table = list(request.table)
    driven.ledger.reset()
    driven.ledger.check_integrity()
    assert driven.commit(request) == []
    assert list(request.table) == table and driven.hit(A) == (0, 0)
    assert driven.release(request) == []
    assert driven.ledger.statistics().device.num_free == 16


@pytest.mark.parametrize("direction", ["load", "store"])
@pytest.mark.parametrize("outcome", [Outcome.LANDED, Outcome.FAILED, Outcome.CORRUPT])
def test_what_lands_after_a_reset_is_only_freed(direction: str, outcome: Outcome) -> None:
    """A transfer that was in flight publishes nothing into the new index; its request goes on by computing."""
    driven = Driven(16)
    driven.on_host_only(A)
    if direction == "load":
        request = driven.allocated(A)
        plans = driven.launch(driven.ledger.plan_load(request))
    else:
        request = driven.running(prompt(2, 17))
        plans = driven.launch(driven.commit(request))
    driven.ledger.reset()
    driven.ledger.check_integrity()
    driven.end(plans[0], outcome, corrupt=[0] if outcome is Outcome.CORRUPT else ())
    assert request.state is RequestState.RUNNING
    assert 0 not in request.table
    if direction == "load":
        assert request.num_computed_tokens == 0
        driven.commit(request)
    driven.release(request)
    statistics = driven.ledger.statistics()
    assert (statistics.device.num_free, statistics.host.num_free) == (16, 16)


def test_a_waiter_from_before_a_reset_is_served_without_a_hit() -> None:
    """It stays in the wait queue; its match is nothing, since nothing is cached for it any more."""
    driven = Driven(8)
    driven.serve(A)
    blocker = driven.allocated(prompt(2, 16))
    request = driven.admit([*A, *range(12)])
    waiter = driven.ledger.queue_allocation(request, None, lambda: None)
    driven.ledger.reset()
    driven.release(blocker)
    driven.ledger.accept(waiter)
    assert request.match.num_tokens == 0 and len(request.table) == 8


# -- commits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_computed", "new", "named"),
    [
        (3, [], "goes back"),
        (25, list(range(30)), "beyond the 20 tokens that were allocated"),
        (18, [], "beyond the 17 tokens that are known"),
        (True, [], "must be an integer"),
        (8.0, [], "must be an integer"),
    ],
)
def test_a_bad_commit_changes_nothing(num_computed: object, new: list[int], named: str) -> None:
    """A commit backwards, past what was allocated or past what is known is refused, and appends no token."""
    driven = Driven(16)
    request = driven.running(A)
    driven.commit(request, 8)
    before = driven.picture()
    with pytest.raises(CommitError, match=named) as refusal:
        driven.ledger.commit(request, num_computed, new)  # type: ignore[arg-type]
    assert refusal.value.argument == "num_computed_tokens"
    assert driven.picture() == before and request.sequence.num_tokens == 17


@pytest.mark.parametrize("new", [[-1], [2**31], [1.5], [[1]], "ab", 7, [None]], ids=repr)
def test_bad_new_tokens_are_named(new: object) -> None:
    """`new_token_ids` is checked like a prompt, by name."""
    driven = Driven(16)
    request = driven.running(A)
    with pytest.raises(InvalidArgument, match="new_token_ids") as refusal:
        driven.ledger.commit(request, 8, new)
    assert refusal.value.argument == "new_token_ids"
    assert request.num_computed_tokens == 0


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda d, h: d.ledger.allocate_nowait(h, 0), "num_tokens"),
        (lambda d, h: d.ledger.allocate_nowait(h, 1.5), "num_tokens"),
        (lambda d, h: d.ledger.queue_allocation(h, -4, lambda: None), "num_tokens"),
        (lambda d, h: d.admit(A, max_hit_tokens=-1), "max_hit_tokens"),
        (lambda d, h: d.admit(A, hit_alignment=0), "hit_alignment"),
        (lambda d, h: d.admit(A, request_id=7), "request_id"),
    ],
)
def test_bad_numbers_are_named(call: object, argument: str) -> None:
    """Every number at the face of the ledger is checked by name, and a refusal admits nobody."""
    driven = Driven(16)
    request = driven.admit(A)
    with pytest.raises(InvalidArgument) as refusal:
        call(driven, request)  # type: ignore[operator]
    assert refusal.value.argument == argument
    assert len(driven.ledger.live_requests) == 1


# -- groups -------------------------------------------------------------------------------------------------------

TWO = [KVCacheGroup("a", block_size=4), KVCacheGroup("b", block_size=8)]


def test_groups_of_different_block_sizes_share_a_hit() -> None:
    """A hit is one for every group at once; each gets its own table, null-free, over the whole trip."""
    driven = Driven(24, 24, groups=TWO)
    tokens = prompt(1, 21)
    request = driven.running(tokens)
    first, second = driven.ledger.block_ids(request)
    assert (len(first), len(second)) == (6, 3)
    (store,) = driven.commit(request)
    assert store.num_blocks == 2 * 3
    driven.land([store])
    driven.release(request)
    driven.evict_device()
    assert driven.hit(tokens) == (0, 16)
    again = driven.allocated(tokens)
    (load,) = driven.ledger.plan_load(again)
    assert list(load.source_ids) == list(store.destination_ids)
    driven.land([load])
    tables = driven.ledger.block_ids(again)
    assert [tables[0][:2] + tables[1][:1], tables[0][2:4] + tables[1][1:2]] == [
        list(load.destination_ids[:3]),
        list(load.destination_ids[3:]),
    ]
    assert again.num_computed_tokens == 16


def test_a_failed_load_of_two_groups_keeps_whole_units() -> None:
    """Proven blocks count only as far as every group has them."""
    driven = Driven(24, 24, groups=TWO)
    driven.on_host_only(prompt(1, 17))
    request = driven.allocated(prompt(1, 17))
    plans = driven.launch(driven.ledger.plan_load(request))
    driven.end(plans[0], Outcome.FAILED, num_landed=5)
    assert request.num_computed_tokens == 8
    driven.release(request)


def test_no_commit_goes_beyond_what_several_groups_were_given() -> None:
    """Room is counted in tokens that every group has blocks for, and a commit past it changes nothing."""
    driven = Driven(24, 24, groups=TWO)
    request = driven.running(prompt(1, 9))
    before = driven.picture()
    with pytest.raises(CommitError, match="beyond the 16 tokens that were allocated"):
        driven.ledger.commit(request, 17, list(range(8)))
    assert driven.picture() == before and request.sequence.num_tokens == 9


def test_extensions_are_told_by_group() -> None:
    """`extend` returns what was appended to each table."""
    driven = Driven(24, 24, groups=TWO)
    request = driven.running(prompt(1, 8))
    added = driven.ledger.extend_nowait(request, 17)
    assert [len(ids) for ids in added.added] == [4, 2]
    tables = driven.ledger.block_ids(request)
    assert [table[-len(ids) :] for table, ids in zip(tables, added.added, strict=True)] == added.added


# -- what identifies KV -------------------------------------------------------------------------------------------

SALTS = [None, "a", b"a", "b", ""]


@pytest.mark.parametrize("on_host", [False, True])
def test_another_root_is_never_a_hit(on_host: bool) -> None:
    """Namespace, salt and adapter separate caches, on every tier; `"a"`, `b"a"` and `""` are three salts."""
    driven = Driven(8, 64)
    roots = [Root("m", salt, adapter) for salt in SALTS for adapter in (None, "x")]
    roots += [Root("n"), Root(""), Root("ma"), Root("m", "ax"), Root("max")]
    driven.serve(A, root=roots[0])
    if on_host:
        driven.evict_device()
    assert sum(driven.hit(A, root=roots[0])) == 16
    for root in roots[1:]:
        assert driven.hit(A, root=root) == (0, 0), root


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([KeySpan(6, 10, b"cat")], 16),
        ([KeySpan(6, 10, b"dog")], 4),
        ([], 4),
        ([KeySpan(5, 10, b"cat")], 4),
        ([KeySpan(6, 11, b"cat")], 4),
        ([KeySpan(6, 10, b"cat"), KeySpan(12, 13, b"x")], 12),
        ([KeySpan(0, 1, b"cat"), KeySpan(6, 10, b"cat")], 0),
        ([KeySpan(6, 8, b"cat"), KeySpan(8, 10, b"cat")], 4),
        ([KeySpan(6, 10, b"cat"), KeySpan(16, 17, b"x")], 16),
    ],
)
def test_key_spans_are_part_of_the_prefix(spans: list[KeySpan], expected: int, on_host: bool) -> None:
    """Equal placeholder tokens with another image after them never hit from the first block it touches on."""
    driven = Driven(16)
    driven.serve(A, key_spans=[KeySpan(6, 10, b"cat")])
    if on_host:
        driven.evict_device()
    assert sum(driven.hit(A, key_spans=spans)) == expected
    driven.serve(A, key_spans=spans)
    assert driven.hit(A, key_spans=spans) == (16, 0)
    if on_host:
        driven.evict_device()
    assert sum(driven.hit(A, key_spans=[KeySpan(6, 10, b"cat")])) == 16


def test_a_digest_does_not_depend_on_how_runs_were_cut() -> None:
    """The key of a block is the digest of root, tokens and spans up to it, however prompts came, grew and branched."""
    driven = Driven(32)
    spans = [KeySpan(4, 14, b"cat"), KeySpan(21, 22, b"dog")]
    tokens = prompt(1, 33)
    request = driven.running(tokens[:24], key_spans=spans)
    for upto in (3, 6, 11, 17, 24):
        driven.commit(request, upto)
    for upto in range(25, 33):
        if upto > len(request.table) * BLOCK:
            driven.ledger.extend_nowait(request, upto)
        driven.commit(request, upto, [tokens[upto - 1]])
    driven.release(request)
    for at in (28, 12, 8, 20, 4):
        driven.serve([*tokens[:at], *prompt(at, 33 - at)], key_spans=spans)
    runs = driven.ledger.cache.index.runs
    assert len(runs) > 10
    for run in runs.values():
        path = b"".join(each.tokens for each in reversed(list(run.path())))
        hasher = ROOT.hasher.copy()
        for position in range(run.start + 1):
            hasher.update(path[position * BLOCK * TOKEN_BYTES : (position + 1) * BLOCK * TOKEN_BYTES])
            for span in spans:
                if span.start < (position + 1) * BLOCK and span.stop > position * BLOCK:
                    hasher.update(span.record())
        assert run.key == hasher.digest(), run


def test_a_caller_may_reuse_its_array() -> None:
    """Token ids are copied at the door: writing into the array afterwards changes no prefix."""
    np = pytest.importorskip("numpy")
    driven = Driven(16)
    tokens = np.asarray(A, dtype=np.int32)
    request = driven.running(tokens)
    tokens[:] = 0
    driven.commit(request)
    assert driven.hit(A) == (16, 0)


def test_statistics_add_up() -> None:
    """free + cached + pinned + quarantined = total, on each tier; the null block is in none of them."""
    driven = Driven(8, 8)
    driven.serve(prompt(1, 8))
    driven.running(prompt(2, 8))
    for tier in (Tier.DEVICE, Tier.HOST):
        found = driven.ledger.cache.tiers[tier].statistics()
        assert found.num_blocks == 8
        assert found.num_free + found.num_cached + found.num_pinned + found.num_quarantined == 8
    assert repr(driven.ledger) == "<Ledger device 4/8 free, host 6/8 free, 1 requests>"
    assert driven.ledger.statistics().num_requests == 1


def test_lookup_takes_nothing_and_splits_nothing() -> None:
    """Asking what is cached leaves no trace."""
    driven = Driven(8)
    driven.serve(A)
    before = driven.picture()
    assert driven.hit([*A[:9], *prompt(2, 4)]) == (2 * BLOCK, 0)
    assert driven.picture() == before
