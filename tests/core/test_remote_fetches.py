"""Fetches from a remote store: whole cells after the local prefix, one job for each cell, shared, and bounded."""

from __future__ import annotations

import pytest
from remote_driving import BLOCK, CELL, CELL_UNITS, LOAD, Remote, prompt, spans_of

from aoffload import KVCacheGroup, RequestState, SlidingWindow
from aoffload._common.prefix import KeySpan, Root
from aoffload._common.tiers import Tier
from aoffload._extensions.transfers import CacheTransferState
from aoffload._kernel.states import Outcome
from aoffload._tiers.remote.rules import cells_of
from aoffload.errors import ConfigError, InvalidArgument

TOKENS = [*prompt(1, 3 * CELL), 7]
ALL = list(range(CELL_UNITS))


def test_cells_are_whole_aligned_and_leave_a_token_to_compute() -> None:
    """Of 16 tokens each: a prompt that ends with a cell does not hit that one, as it hits no whole prompt at all."""
    remote = Remote()
    assert [(cell.start, cell.stop) for cell in remote.cells(TOKENS)] == [(0, 4), (4, 8), (8, 12)]
    assert remote.cells(TOKENS[:-1]) == remote.cells(TOKENS)[:2]
    assert remote.cells(TOKENS[:CELL]) == ()
    assert remote.cells(TOKENS[: CELL + 1]) == remote.cells(TOKENS)[:1]


def test_a_cell_is_told_by_everything_before_its_end() -> None:
    """Tokens, root and key spans enter the digest: no cell stands for two prefixes."""
    remote = Remote()
    first, second, _ = remote.cells(TOKENS)
    other = [*TOKENS[:CELL], *prompt(2, CELL + 1)]
    assert remote.cells(other)[0] == first and remote.cells(other)[1].digest != second.digest
    salted = remote.cells(TOKENS, root=Root("test", "salt"))
    assert not {cell.digest for cell in salted} & {cell.digest for cell in remote.cells(TOKENS)}
    image, another = (remote.cells(TOKENS, key_spans=(KeySpan(18, 22, digest),)) for digest in (b"a", b"b"))
    assert image[0] == another[0] == first
    assert len({image[1].digest, another[1].digest, second.digest}) == 3
    assert len({image[2].digest, another[2].digest}) == 2, "what is behind them differs, too"


def test_a_digest_is_that_of_the_index() -> None:
    """However runs were cut, spans included: the digest of a cell is the key that the index would give what follows."""
    remote = Remote()
    spans = (KeySpan(5, 9, b"x"), KeySpan(18, 40, b"y"))
    sequence = remote.admit(TOKENS, key_spans=spans).sequence
    for cell in remote.cells(TOKENS, key_spans=spans):
        hasher = sequence.root.hasher
        for unit in range(cell.stop):
            key = sequence.key_at(hasher, unit)
            hasher = sequence.hash_on(hasher, unit, unit + 1)
        assert cell.digest == key


@pytest.mark.parametrize(("unit_tokens", "cell_units", "argument"), [(0, 4, "unit_tokens"), (4, 3, "cell_units")])
def test_a_cell_of_no_size_is_refused(unit_tokens: int, cell_units: int, argument: str) -> None:
    """The error names the argument."""
    with pytest.raises(InvalidArgument, match=argument):
        cells_of(Remote.prefix(TOKENS), unit_tokens, cell_units)


def test_a_fetch_loads_cell_by_cell() -> None:
    """A job for each, with the places in the cell on the side of the store; then it is a hit in the host."""
    remote = Remote()
    remote.in_store_only(TOKENS)
    assert remote.hit(TOKENS) == (0, 0)
    fetch = remote.fetch(TOKENS)
    assert {plan.link for plan in fetch.plans} == {LOAD}
    assert spans_of(fetch.plans) == [(0, 4, ALL), (4, 8, ALL), (8, 12, ALL)]
    assert [plan.payload for plan in fetch.plans] == list(remote.cells(TOKENS))
    assert (fetch.num_blocks, remote.ledger.statistics().remote.num_loads) == (12, 3)
    remote.land(fetch.plans)
    assert (fetch.state, fetch.num_tokens) == (CacheTransferState.DONE, 3 * CELL)
    assert remote.hit(TOKENS) == (0, 3 * CELL)


def test_whoever_waited_matches_what_came() -> None:
    """In one step with the end of the fetch, and loads it onto the device like any host hit."""
    remote = Remote()
    remote.in_store_only(TOKENS)
    request = remote.admit(TOKENS)
    prefix = remote.prefix(TOKENS)
    wake = lambda: remote.ledger.fetches.match_again(request)  # noqa: E731
    fetch = remote.ledger.fetches.fetch(prefix, wake, num_remote_tokens=3 * CELL)
    remote.land(fetch.plans)
    assert request.match.num_host_tokens == 3 * CELL
    remote.ledger.allocate_nowait(request)
    remote.land(remote.ledger.plan_load(request))
    assert (request.state, request.num_computed_tokens) == (RequestState.RUNNING, 3 * CELL)


def test_only_what_was_told_is_loaded() -> None:
    """The caller says how far the store goes: without a word, nothing is; and never more than the prompt."""
    remote = Remote()
    remote.in_store_only(TOKENS)
    assert remote.fetch(TOKENS, 0).plans == ()
    assert spans_of(remote.fetch(TOKENS, CELL).plans) == [(0, 4, ALL)]
    other = Remote()
    other.cells_stored = remote.cells_stored
    assert spans_of(other.fetch(TOKENS[: CELL + 3], 3 * CELL).plans) == [(0, 4, ALL)]


def test_a_load_begins_in_the_middle_of_a_cell() -> None:
    """What the host has is not loaded again."""
    remote = Remote()
    remote.in_store_only(TOKENS)
    remote.on_host_only(TOKENS[: 6 * BLOCK])
    assert remote.hit(TOKENS) == (0, 6 * BLOCK)
    fetch = remote.fetch(TOKENS)
    assert spans_of(fetch.plans) == [(4, 8, [2, 3]), (8, 12, ALL)]
    remote.land(fetch.plans)
    assert remote.hit(TOKENS) == (0, 3 * CELL)


def test_the_disk_goes_first() -> None:
    """What it has is fetched from there; the store is for what follows."""
    remote = Remote(num_slots=64)
    remote.in_store_only(TOKENS)
    remote.ledger.reset()
    remote.serve(TOKENS[: 5 * BLOCK + 1])
    remote.evict_device()
    remote.land(remote.ledger.disk.plan_flush(10**6))
    remote.forget_all()
    fetch = remote.fetch(TOKENS)
    assert [plan.link for plan in fetch.plans] == [(Tier.DISK, Tier.HOST), LOAD, LOAD]
    assert spans_of(fetch.plans[1:]) == [(4, 8, [1, 2, 3]), (8, 12, ALL)]
    remote.land([*fetch.plans[1:], fetch.plans[0]])
    assert (fetch.num_tokens, remote.hit(TOKENS)) == (3 * CELL, (0, 3 * CELL))


def test_what_the_disk_fails_to_bring_ends_the_hit() -> None:
    """Cells behind a gap are not published: they go back, and leave no run behind."""
    remote = Remote(num_slots=64)
    remote.in_store_only(TOKENS)
    remote.ledger.reset()
    remote.serve(TOKENS[: 5 * BLOCK + 1])
    remote.evict_device()
    remote.land(remote.ledger.disk.plan_flush(10**6))
    remote.forget_all()
    disk, *cells = remote.launch(remote.fetch(TOKENS).plans)
    remote.end(disk, Outcome.FAILED, 3)
    for plan in cells:
        remote.end(plan)
    assert remote.hit(TOKENS) == (0, 3 * BLOCK)
    assert remote.ledger.statistics().host.num_free == 64 - 3


def test_a_longer_device_hit_needs_no_store() -> None:
    """A request would hit no more than it does: nothing is loaded."""
    remote = Remote()
    remote.in_store_only(TOKENS)
    request = remote.running(TOKENS)
    remote.commit(request)
    remote.ledger.reset(Tier.HOST)
    assert remote.fetch(TOKENS).plans == (), "the device has it"


def test_the_host_gets_no_island() -> None:
    """The host lacks what the device has before the cells: the load begins where the host ends, or nobody finds it."""
    remote = Remote()
    remote.in_store_only(TOKENS)
    request = remote.running(TOKENS[: 6 * BLOCK])
    remote.commit(request)
    remote.ledger.reset(Tier.HOST)
    fetch = remote.fetch(TOKENS)
    assert spans_of(fetch.plans) == [(0, 4, ALL), (4, 8, ALL), (8, 12, ALL)]
    remote.land(fetch.plans)
    assert sum(remote.hit(TOKENS)) == 3 * CELL


def test_two_fetches_share_their_copies() -> None:
    """The second waits for the jobs of the first, and loads only what these do not bring."""
    remote = Remote()
    remote.in_store_only(TOKENS)
    first, second, third = remote.fetch(TOKENS[: CELL + 1]), remote.fetch(TOKENS), remote.fetch(TOKENS)
    assert [len(fetch.plans) for fetch in (first, second, third)] == [1, 2, 0]
    remote.land(second.plans)
    assert not (first.is_over or second.is_over or third.is_over), "published in prefix order"
    remote.land(first.plans)
    assert [fetch.num_tokens for fetch in (first, second, third)] == [CELL, 3 * CELL, 3 * CELL]


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CORRUPT])
def test_a_cell_that_is_gone_ends_the_hit(outcome: Outcome) -> None:
    """The cells before it hit; those after it are given back, and no run stays for them."""
    remote = Remote()
    remote.in_store_only(TOKENS)
    first, second, third = remote.launch(remote.fetch(TOKENS).plans)
    remote.end(third)
    remote.end(second, outcome, 0, (0,) if outcome is Outcome.CORRUPT else ())
    remote.end(first)
    assert remote.hit(TOKENS) == (0, CELL)
    host = remote.ledger.statistics().host
    assert (host.num_free, host.num_cached) == (64 - 4, 4)
    assert sum(run.stop - run.start for run in remote.ledger.cache.index.runs.values()) == 4


def test_nothing_stays_of_a_fetch_that_brought_nothing() -> None:
    """No block, no run."""
    remote = Remote()
    remote.in_store_only(TOKENS)
    assert not remote.ledger.cache.index.runs
    for plan in remote.launch(remote.fetch(TOKENS).plans):
        remote.end(plan, Outcome.FAILED)
    assert remote.ledger.statistics().host.num_free == 64
    assert not remote.ledger.cache.index.runs


def test_the_front_of_a_cell_may_land() -> None:
    """Blocks that are proven count, whatever became of the others."""
    remote = Remote()
    remote.in_store_only(TOKENS)
    first, *others = remote.launch(remote.fetch(TOKENS).plans)
    remote.end(first, Outcome.FAILED, 3)
    for plan in others:
        remote.end(plan)
    assert remote.hit(TOKENS) == (0, 3 * BLOCK)


def test_a_cancelled_fetch_discards_what_is_queued() -> None:
    """Launched loads go on and are published."""
    remote = Remote()
    remote.in_store_only(TOKENS)
    fetch = remote.fetch(TOKENS)
    assert remote.launch(fetch.plans[:1])
    remote.ledger.transfers.cancel(fetch)
    remote.ledger.check_integrity()
    assert not remote.launch(fetch.plans[1:])
    remote.end(fetch.plans[0])
    assert remote.hit(TOKENS) == (0, CELL)
    assert sum(run.stop - run.start for run in remote.ledger.cache.index.runs.values()) == 4


def test_fetches_take_no_more_than_their_share() -> None:
    """Whole cells, from the front; the share is that of all fetches together."""
    remote = Remote(num_host=32, max_fetch_share=0.25)
    other = [*prompt(2, CELL), 7]
    remote.ask_for(TOKENS, other)
    remote.land(remote.write_behind())
    remote.forget_all()
    first = remote.fetch(TOKENS[: CELL + 1])
    second = remote.fetch(TOKENS)
    third = remote.fetch(other)
    assert [spans_of(fetch.plans) for fetch in (first, second, third)] == [[(0, 4, ALL)], [(4, 8, ALL)], []]
    assert third.is_over
    remote.land([*first.plans, *second.plans])
    assert remote.fetched(other) == CELL, "the share is free again"


def test_no_half_of_a_cell_is_fetched() -> None:
    """A share that ends in the middle of a cell ends before it: a cell is loaded as a whole."""
    remote = Remote(num_host=32, max_fetch_share=6 / 32)
    remote.in_store_only(TOKENS)
    assert spans_of(remote.fetch(TOKENS).plans) == [(0, 4, ALL)]


@pytest.mark.parametrize(("num_host", "share"), [(32, 3 / 32), (3, 1.0), (15, 0.25)])
def test_a_cell_larger_than_the_share_is_refused(num_host: int, share: float) -> None:
    """It could be stored and asked for, and never be loaded."""
    with pytest.raises(ConfigError, match="cell_bytes: makes cells of 4 blocks, which could never be loaded"):
        Remote(num_host=num_host, max_fetch_share=share)


def test_a_share_of_nothing_fetches_nothing() -> None:
    """A process that only stores for others may be meant."""
    remote = Remote(num_host=32, max_fetch_share=0.0)
    remote.in_store_only(TOKENS)
    assert remote.fetch(TOKENS).plans == ()


def test_a_reset_meanwhile_publishes_nothing() -> None:
    """What lands afterwards is given back."""
    for tier in (None, Tier.HOST):
        remote = Remote()
        remote.in_store_only(TOKENS)
        plans = remote.launch(remote.fetch(TOKENS).plans)
        remote.ledger.reset(tier)
        for plan in plans:
            remote.end(plan)
        assert remote.hit(TOKENS) == (0, 0)
        assert remote.ledger.statistics().host.num_free == 64


def test_a_request_may_compute_what_a_fetch_brings() -> None:
    """The first one publishes, and the blocks of the other one are freed. No block has two owners."""
    remote = Remote()
    remote.in_store_only(TOKENS)
    fetch = remote.fetch(TOKENS)
    stores = remote.commit(remote.running(TOKENS))
    assert stores == [], "on its way from the store, so it is not stored a second time"
    remote.land(fetch.plans)
    assert remote.hit(TOKENS) == (3 * CELL, 0)


@pytest.mark.parametrize("num_tokens", [-CELL, 1, CELL - BLOCK, "16", True, 1.0, None])
def test_tokens_that_are_no_cells_are_refused(num_tokens: object) -> None:
    """The error names the argument, and nothing changes."""
    remote = Remote()
    before = remote.picture()
    with pytest.raises(InvalidArgument, match="num_remote_tokens"):
        remote.ledger.fetches.fetch(remote.prefix(TOKENS), num_remote_tokens=num_tokens)  # type: ignore[arg-type]
    assert remote.picture() == before


def test_a_ledger_without_a_store_refuses_its_tokens() -> None:
    """With a disk alone, or with neither."""
    from disk_driving import Disk
    from driving import Driven

    with pytest.raises(InvalidArgument, match="num_remote_tokens"):
        Disk().ledger.fetches.fetch(Remote.prefix(TOKENS), num_remote_tokens=CELL)
    with pytest.raises(ConfigError, match=r"^disk: "):
        Driven(8).ledger.fetches.fetch(Remote.prefix(TOKENS))
    assert Driven(8).ledger.statistics().remote is None


def test_windows_are_refused() -> None:
    """A store keeps full attention only: a layout with windows says so when the ledger is made."""
    groups = [KVCacheGroup("full", block_size=BLOCK), KVCacheGroup("w", SlidingWindow(8), block_size=BLOCK)]
    with pytest.raises(ConfigError, match="remote"):
        Remote(groups=groups)


def test_a_remote_store_needs_a_namespace() -> None:
    """Or models would read one another's KV."""
    from remote_driving import remote_tier

    from aoffload import OffloadConfig

    with pytest.raises(ConfigError, match="namespace"):
        OffloadConfig(groups=[KVCacheGroup("full", block_size=BLOCK)], num_host_blocks=8, remote=remote_tier())
    with pytest.raises(ConfigError, match="remote"):
        OffloadConfig(groups=[KVCacheGroup("full", block_size=BLOCK)], num_host_blocks=8, remote="redis://")  # type: ignore[arg-type]


def test_a_reset_of_the_store_is_refused() -> None:
    """It is not this ledger's alone: another namespace finds nothing in it."""
    remote = Remote()
    with pytest.raises(InvalidArgument, match="tier"):
        remote.ledger.reset(Tier.REMOTE)
