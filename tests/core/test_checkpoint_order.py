"""The eviction order of checkpoints: tails first, then what saves least for its bytes; and the rule by brute force."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from driving import ROOT

from aoffload import KVCacheGroup, OffloadConfig, RecurrentState, SlidingWindow
from aoffload._common.prefix import Prefix
from aoffload._common.tiers import Tier
from aoffload._config.quotas import Quota, Quotas
from aoffload._eviction.checkpoints import BUCKETS_PER_OCTAVE, INNER, MIN_TO_SWEEP, CheckpointOrder
from aoffload._extensions.assembly import Ledger
from aoffload._kernel.cache import PrefixCache
from aoffload._kernel.plans import Completion
from aoffload._kernel.pools import LeastRecentlyUsed
from aoffload._kernel.records import Part, Run
from aoffload._kernel.states import Outcome

NUM_ROWS = 3
"""Blocks of a checkpoint. A unit is one token, with one block."""


def ledger_of(num_device: int, num_host: int, *groups: KVCacheGroup, **config: Any) -> Ledger:
    groups = groups or (KVCacheGroup("full", block_size=1),)
    state = KVCacheGroup("state", RecurrentState(), block_size=1, num_rows=NUM_ROWS)
    return Ledger(OffloadConfig(groups=[*groups, state], num_host_blocks=num_host, **config), num_device + 1)


def land(ledger: Ledger, plans: Any) -> None:
    for plan in tuple(plans):
        ledger.launch(plan.job_id)
        ledger.settle(Completion(plan.job_id, Outcome.LANDED))


def serve(ledger: Ledger, tokens: list[int], *, writes: bool = True, answer: int = 0, salt: str | None = None) -> int:
    """Compute `tokens` and an answer of `answer` tokens, with the planned checkpoints if `writes`. Returns the hit."""
    root = ROOT if salt is None else type(ROOT)(ROOT.namespace, salt)
    request = ledger.admit(Prefix.of(root, tokens))
    ledger.allocate_nowait(request)
    land(ledger, ledger.plan_load(request))
    planned = [one.num_tokens for one in ledger.planned_checkpoints(request)] if writes else []
    for stop in sorted({*planned, len(tokens)}):
        land(ledger, ledger.commit(request, stop, checkpoints=[stop] if stop in planned else []))
    for number in range(answer):
        ledger.extend_nowait(request, len(tokens) + number + 1)
        land(ledger, ledger.commit(request, len(tokens) + number + 1, [7000 + tokens[0] + number]))
    land(ledger, ledger.release(request))
    ledger.check_integrity()
    return request.match.num_device_tokens + request.match.num_host_tokens


def path(name: int, num_units: int) -> list[int]:
    """A prompt whose checkpoint lies at unit `num_units`."""
    return [name * 100 + at for at in range(num_units)] + [9999]


def order_of(ledger: Ledger, tier: Tier = Tier.HOST) -> CheckpointOrder:
    order = ledger.cache.tiers[tier].order
    assert isinstance(order, CheckpointOrder)
    return order


def evicted(ledger: Ledger, tier: Tier = Tier.HOST) -> Iterator[tuple[int, int, int, int]]:
    """Evict one unit after the other. Yields the first token of its prompt as a byte, its component, and its unit."""
    blocks = ledger.cache.tiers[tier]
    while (part := blocks.order.oldest()) is not None:
        yield part.run.whole_path()[0].tokens[0], part.component, part.stop - 1, part.width
        blocks.trim(part, 1)
        ledger.cache.tidy(part.run)


# -- what goes first ----------------------------------------------------------------------------------------------


def test_kv_after_the_last_checkpoint_goes_first() -> None:
    """An answer brings no hit without a checkpoint after it, so its KV goes before an older path with a checkpoint, and
    so does a prompt that wrote none. Of these tails the older one goes first, and each from its end."""
    ledger = ledger_of(64, 64)
    serve(ledger, path(1, 4))
    serve(ledger, path(2, 3), answer=3)
    serve(ledger, path(3, 2), writes=False)
    gone = [(name, component, unit) for name, component, unit, _ in evicted(ledger)]
    of_answer = [(200, 0, unit) for unit in (6, 5, 4, 3)]
    of_third = [(300 % 256, 0, unit) for unit in (2, 1, 0)]
    assert gone[:8] == [(100, 0, 4), *of_answer, *of_third]  # each prompt has one token after its checkpoint
    assert [component for _, component, _ in gone[8:]].count(1) == 2


def test_the_kv_of_a_checkpoint_goes_right_after_it_back_to_the_branch() -> None:
    """A path that has lost its last checkpoint is a tail: it goes next, but no KV before a branch that others use."""
    ledger = ledger_of(64, 64)
    serve(ledger, [*path(1, 4)[:4], *path(2, 4)])
    serve(ledger, [*path(1, 4)[:4], *path(3, 4)])
    serve(ledger, [*path(1, 4)[:4], *path(3, 4)])
    gone = [(component, unit) for _, component, unit, _ in evicted(ledger)]
    gone = gone[next(at for at, one in enumerate(gone) if one[0]) :]
    assert gone[:5] == [(1, 7), (0, 7), (0, 6), (0, 5), (0, 4)]
    assert gone.index((0, 3)) > gone.index((1, 3))


def test_a_checkpoint_inside_a_path_goes_before_an_older_one_at_an_end() -> None:
    """Turns of a conversation go on at the end of the last one, so earlier turns give up their checkpoints first."""
    ledger = ledger_of(200, 200)
    serve(ledger, path(1, 8))
    for turn in (8, 16):
        serve(ledger, path(2, 17)[: turn + 1])
    gone = [(name, unit) for name, component, unit, _ in evicted(ledger) if component]
    assert gone[0] in ((200, 7), (200, 8))  # the end of the first turn, and of its cached KV


def test_a_checkpoint_at_a_branch_stays_longer_than_the_paths_after_it() -> None:
    """Many prompts go on from a branch, so its checkpoint outlives those of all but the last of them."""
    ledger = ledger_of(400, 200)
    system = path(1, 12)[:12]
    for name in range(2, 7):
        serve(ledger, system + path(name, 4))
    gone = [(component, unit) for _, component, unit, _ in evicted(ledger) if component]
    assert gone.index((1, 11)) >= 4


def test_checkpoints_that_save_more_for_their_bytes_stay_longer() -> None:
    """Of checkpoints of about one age the one that saves many units goes after those that save few."""
    ledger = ledger_of(400, 400)
    for name in range(1, 30):
        serve(ledger, path(name, 20 if name == 1 else 2))
    gone = [(name, unit) for name, component, unit, _ in evicted(ledger) if component]
    assert gone[0] == (200, 1) and gone.index((100, 19)) > 3


def test_a_long_time_without_use_outweighs_what_a_checkpoint_saves() -> None:
    """The worth of a checkpoint falls with its age: an old one that saves more goes before new ones that save less."""
    ledger = ledger_of(100, 0)
    serve(ledger, path(1, 12))
    for _ in range(10):
        serve(ledger, path(2, 4))
    gone = [(name, unit) for name, component, unit, _ in evicted(ledger, Tier.DEVICE) if component]
    assert gone == [(100, 11), (200, 3)]


def test_a_checkpoint_whose_kv_is_gone_goes_before_all_else() -> None:
    """It brings no hit, in any tier."""
    ledger = ledger_of(64, 64)
    serve(ledger, path(1, 4), answer=2)
    serve(ledger, path(2, 4))
    last = next(run for run in ledger.cache.index.runs.values() if run.stop == 4 and run.tokens[0] == 200)
    for tier in (Tier.DEVICE, Tier.HOST):
        ledger.cache.withdraw_part(last.part(tier, 0))
    first = order_of(ledger).oldest()
    assert first is last.part(Tier.HOST, 1)


def test_kv_of_a_checkpoint_in_the_other_tier_alone_is_a_tail() -> None:
    """Each tier goes by its own checkpoints: once the host has none on a path, the KV of the path goes first there."""
    ledger = ledger_of(64, 64)
    serve(ledger, path(1, 4))
    serve(ledger, path(2, 4))
    run = next(run for run in ledger.cache.index.runs.values() if run.stop == 4 and run.tokens[0] == 200)
    ledger.cache.withdraw_part(run.part(Tier.HOST, 1))
    gone = [(name, component, unit) for name, component, unit, _ in islice(evicted(ledger), 4)]
    assert gone == [(100, 0, 4), (200, 0, 4), (200, 0, 3), (200, 0, 2)]
    assert run.part(Tier.DEVICE, 1).blocks and run.part(Tier.DEVICE, 0).stop == 4


def test_a_run_ends_at_its_checkpoint() -> None:
    """KV after a checkpoint is evicted for itself, so its run is not merged with that of the checkpoint."""
    ledger = ledger_of(64, 64)
    serve(ledger, path(1, 4), answer=3)
    with_one = [run for run in ledger.cache.index.runs.values() if run.part(Tier.HOST, 1).blocks]
    assert [run.stop for run in with_one] == [4]


# -- beside brute force -------------------------------------------------------------------------------------------


class Checked(CheckpointOrder):
    """Computes all buckets anew before it answers, and compares the answer with the rule by brute force."""

    cache: PrefixCache | None = None
    num_checked = 0

    def oldest(self) -> Part | None:
        self._changed = dict.fromkeys(self._checkpoints)
        found = super().oldest()
        if self.cache is not None and found is not None:
            tier = next(tier for tier in self.cache.tiers if tier.order is self)
            keys = keys_by_rule(self.cache, tier.tier, self._uses.number)
            assert keys[found] == min(keys.values()), (found.run, found.component, keys[found], min(keys.values()))
            type(self).num_checked += 1
        return found


def runs_after(cache: PrefixCache) -> dict[Run | None, list[Run]]:
    after: dict[Run | None, list[Run]] = {}
    for run in cache.index.runs.values():
        after.setdefault(run.before, []).append(run)
    return after


def keys_by_rule(cache: PrefixCache, tier: Tier, now: int) -> dict[Part, tuple[int, float]]:
    """Of each unpinned part a key: the smallest is evicted first."""
    after = runs_after(cache)
    found: dict[Part, tuple[int, float]] = {}
    for run in cache.index.runs.values():
        full, state = run.part(tier, 0), run.part(tier, 1)
        if state.blocks and not state.num_references:
            found[state] = checkpoint_key(run, after, tier, now)
        if full.blocks and not full.num_references:
            found[full] = (1 if is_tail(run, after, tier) else 3), float(full.last_use)
    return found


def is_tail(run: Run, after: dict[Run | None, list[Run]], tier: Tier) -> bool:
    return not run.part(tier, 1).blocks and not any(child.part(tier, 0).blocks for child in after.get(run, ()))


def checkpoint_key(run: Run, after: dict[Run | None, list[Run]], tier: Tier, now: int) -> tuple[int, float]:
    part = run.part(tier, 1)
    if not any(run.part(each, 0).stop >= part.stop for each in (Tier.DEVICE, Tier.HOST)):
        return 0, -1.0
    above = run.whole_path()[:-1]
    start = max((other.stop for other in above if other.part(tier, 1).blocks), default=0)
    branch = max((other.stop for other in above if len(after[other]) > 1), default=0)
    freed, share, children, full = float(NUM_ROWS), 1.0, after.get(run, []), run.part(tier, 0)
    if full.blocks and not full.num_references:
        children = [child for child in children if child.part(tier, 0).blocks]
    if not children:
        freed += max(full.stop, part.stop) - max(start, branch)
    elif len(children) == 1:
        share = INNER
    octaves = math.log2(share * (part.stop - start) / freed)
    return 2, 2.0 ** (math.floor(BUCKETS_PER_OCTAVE * octaves) / BUCKETS_PER_OCTAVE) / (now - part.last_use + 1)


@pytest.mark.parametrize("seed", range(6))
def test_every_eviction_is_that_of_the_rule(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that share prefixes, answers, prompts that write no checkpoint: each eviction in either tier is the one
    that the rule names when it is computed from the whole index."""
    monkeypatch.setattr("aoffload._eviction.checkpoints.CheckpointOrder", Checked)
    monkeypatch.setattr(Checked, "num_checked", 0)
    rng = random.Random(seed)
    ledger = ledger_of(rng.choice((40, 70)), rng.choice((30, 60, 100)))
    monkeypatch.setattr(Checked, "cache", ledger.cache)
    asked = [[rng.randrange(2) for _ in range(3)]]
    for _ in range(150):
        before = rng.choice(asked[-20:])
        tokens = before[: rng.randrange(len(before) + 1)] + [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
        asked.append(tokens[:24])
        serve(ledger, asked[-1], writes=rng.random() < 0.8, answer=rng.choice((0, 0, 2)))
    assert Checked.num_checked > 100


# -- the whole order ----------------------------------------------------------------------------------------------


def test_the_order_lists_what_it_would_evict() -> None:
    """Listing the order names the parts as they are evicted, and changes nothing."""
    ledger = ledger_of(300, 300)
    for name in range(1, 6):
        serve(ledger, path(name, 2 * name), answer=name % 2)
    order = order_of(ledger)
    listed = list(order)
    assert listed == list(order) and set(listed) == set(order.parts())
    gone: list[Part] = []
    blocks = ledger.cache.tiers[Tier.HOST]
    while (part := order.oldest()) is not None:
        gone.append(part)
        blocks.trim(part, part.stop - part.first)
        ledger.cache.tidy(part.run)
    assert gone == listed


def test_an_unused_lease_changes_no_place() -> None:
    """Parts that were pinned without being used return to their place, and are as old as before."""
    ledger = ledger_of(64, 64)
    for name in (1, 2, 3):
        serve(ledger, path(name, 4), answer=1)
    listed = list(order_of(ledger))
    run = next(run for run in ledger.cache.index.runs.values() if run.stop == 4 and run.tokens[0] == 100)
    ledger.cache.release(ledger.cache.lease(Tier.HOST, run, is_use=False))
    assert list(order_of(ledger)) == listed


def test_parts_that_come_and_go_leave_few_entries() -> None:
    """A path that is used again and again is remembered once as a tail, so the order does not grow."""
    ledger = ledger_of(64, 64)
    for _ in range(3 * MIN_TO_SWEEP):
        serve(ledger, path(1, 4), answer=1)
    order = order_of(ledger)
    assert len(order._tails) <= MIN_TO_SWEEP + 4 * len(order._parents)


def test_accounts_share_their_uses() -> None:
    """Tenants compare their first parts, so their uses are numbered together: with equal prompts both keep some."""
    quotas = Quotas({name: Quota(host_floor=2) for name in ("a", "b")})
    ledger = ledger_of(64, 40, quotas=quotas)
    for number in range(12):
        serve(ledger, path(number + 1, 4), salt="ab"[number % 2])
    assert ledger.cache.tiers[Tier.HOST].num_evicted
    assert [account.tiers[0].num_blocks > 10 for account in ledger.quotas.statistics()] == [False, True, True]


@pytest.mark.parametrize("seed", range(6))
def test_windows_and_checkpoints_keep_order(seed: int) -> None:
    """With a sliding window, too, the order has each unpinned part once, whatever is evicted."""
    rng = random.Random(seed)
    ledger = ledger_of(
        60, 50, KVCacheGroup("full", block_size=1), KVCacheGroup("window", SlidingWindow(3), block_size=1)
    )
    asked = [[1, 2, 3]]
    for _ in range(80):
        before = rng.choice(asked[-10:])
        tokens = before[: rng.randrange(len(before) + 1)] + [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
        asked.append(tokens[:12])
        serve(ledger, asked[-1], writes=rng.random() < 0.8)
    assert ledger.cache.tiers[Tier.HOST].num_evicted > 100


def test_only_layouts_with_a_recurrent_state_have_it() -> None:
    """Other layouts keep LRU, and so does a program that names an order of its own."""
    plain = Ledger(OffloadConfig(groups=[KVCacheGroup("full")], num_host_blocks=8), 9)
    assert type(plain.cache.tiers[Tier.HOST].order) is LeastRecentlyUsed
    own = ledger_of(8, 8, eviction=LeastRecentlyUsed)
    assert type(own.cache.tiers[Tier.HOST].order) is LeastRecentlyUsed
