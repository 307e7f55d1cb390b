"""Shared prefixes in models with windows: the window before a branch point is stored once a second prompt reveals
it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from disk_driving import Disk
from driving import BLOCK, ROOT, Driven, prompt
from engine_driving import EngineDriven

from aoffload import ChunkedLocal, KVCacheGroup, SlidingWindow
from aoffload._kernel.layout import Layout
from aoffload.ledger import Prefix

FULL = KVCacheGroup("full", block_size=BLOCK)
LAYOUTS = {
    "window": [FULL, KVCacheGroup("window", SlidingWindow(18), BLOCK)],
    "chunk": [FULL, KVCacheGroup("chunk", ChunkedLocal(40), BLOCK)],
    "two windows": [
        FULL, KVCacheGroup("short", SlidingWindow(7), BLOCK), KVCacheGroup("long", SlidingWindow(30), 2 * BLOCK)
    ],
    "windows alone": [KVCacheGroup("a", SlidingWindow(11), BLOCK), KVCacheGroup("b", SlidingWindow(40), BLOCK)],
}  # fmt: skip
each_layout = pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
STEP = 24


def steps(computed: int, num_tokens: int) -> Iterator[int]:
    yield from range(computed + STEP, num_tokens, STEP)
    yield num_tokens


class Own:
    """A ledger whose device forgets each prompt before the next one comes. A prompt is computed in steps."""

    def __init__(self, groups: Sequence[KVCacheGroup], **config: Any) -> None:
        self.driven = Driven(400, 4000, groups=groups, **config)
        self.num_stored = 0

    def serve(self, tokens: list[int], **options: Any) -> int:
        """Returns the tokens that were hit in the host."""
        driven = self.driven
        request = driven.running(tokens, **options)
        for stop in steps(request.num_computed_tokens, len(tokens)):
            self.land(driven.commit(request, stop))
        self.land(driven.release(request))
        driven.evict_device()
        return request.match.num_host_tokens

    def land(self, plans: Any) -> None:
        self.num_stored += sum(plan.num_blocks for plan in plans)
        self.driven.land(plans)


class Engine:
    """The same for an engine that keeps its own blocks. Units that a window has left before a step are null."""

    def __init__(self, groups: Sequence[KVCacheGroup], **config: Any) -> None:
        self.driven = EngineDriven(4000, groups=groups, **config)
        self.driven.ledger._num_rows = 10**6  # no block is used twice

    def serve(self, tokens: list[int], ends: Sequence[int] = (), **options: Any) -> int:
        """`ends`: the tokens at which its offers end."""
        driven = self.driven
        request, tables = driven.admit(tokens, **options), driven.fresh(len(tokens))
        driven.land(driven.load(request, tables))
        computed = request.num_computed_tokens
        assert not driven.wrong(tokens, tables, 0, computed), "the load has brought other bytes"
        for stop in [end for end in ends if end > computed] or steps(computed, len(tokens)):
            for component in driven.ledger.layout.windows:
                gone = component.first_needed(computed)
                for number, positions in driven.ledger.layout.positions(component.number, 0, gone):
                    tables[number][: len(positions)] = [0] * len(positions)
            driven.compute(tokens[:stop], tables, computed)
            driven.land(driven.offer(request, stop, tables, is_last=stop == len(tokens)))
            computed = stop
        driven.release(request)
        return request.match.num_host_tokens


each_face = pytest.mark.parametrize("face", [Own, Engine], ids=["own blocks", "an engine's blocks"])


@each_face
@each_layout
@pytest.mark.parametrize("shared", [16, 51, 88, 130])
@pytest.mark.parametrize("question", [1, 33, 70])
def test_the_third_user_of_a_prefix_hits_all_of_it(
    face: type[Own | Engine], groups: list[KVCacheGroup], shared: int, question: int
) -> None:
    """However long the questions are, and wherever steps end: the second user shows that the prefix is shared."""
    users, unit = face(groups), Layout.of(groups).unit_tokens
    hits = [users.serve([*prompt(1, shared), *prompt(user, question)]) for user in (2, 3, 4, 5)]
    whole = min(shared, shared + question - 1) // unit * unit
    assert hits[0] == 0 and hits[2:] == [whole, whole]


@pytest.mark.parametrize("end", range(44, 60))
def test_wherever_an_offer_ends_an_engine_s_window_is_stored(end: int) -> None:
    """If an offer ends at the unit after which prompts diverge, the next tokens of the prompt tell so: at the next
    offer, the first block of the window may be null."""
    users = Engine(LAYOUTS["window"])
    hits = []
    for user in (2, 3, 4):
        tokens = [*prompt(1, 51), *prompt(user, 60)]
        hits.append(users.serve(tokens, ends=(end, len(tokens))))
    assert hits == [0, 0, 48]


@each_face
@pytest.mark.parametrize("policy", ["eager", "selective"])
def test_windows_are_stored_where_aligned_hits_end(face: type[Own | Engine], policy: str) -> None:
    """A hit that has to end at a multiple of three blocks needs the window before that, not the one before the branch
    point."""
    users = face(LAYOUTS["window"], store_policy=policy)
    options = {"hit_alignment": 3 * BLOCK}
    hits = [users.serve([*prompt(1, 80), *prompt(user, 40)], **options) for user in (2, 3, 4, 5)]
    assert hits[2:] == [72, 72]


@each_face
def test_selective_hits_a_shared_prefix_from_the_third_request_on(face: type[Own | Engine]) -> None:
    """`selective` stores the prefix from its second request on, so the third one hits."""
    users = face(LAYOUTS["window"], store_policy="selective")
    assert [users.serve([*prompt(1, 96), *prompt(user, 60)]) for user in (2, 3, 4, 5)] == [0, 0, 96, 96]


def test_the_window_where_the_policy_ends_is_stored_while_the_request_has_it() -> None:
    """A full device evicts what a window has left for other requests, while the question is still being computed."""
    driven = Driven(2 * 27, 400, groups=LAYOUTS["window"], store_policy="selective")
    for user in (2, 3):
        request = driven.running([*prompt(1, 48), *prompt(user, 60)])
        for stop in (48, 72):
            driven.land(driven.commit(request, stop))
        driven.release(driven.allocated(prompt(90 + user, 24)), "filler")
        driven.land(driven.commit(request, 108))
        driven.land(driven.release(request))
        driven.evict_device()
    assert driven.hit([*prompt(1, 48), 7]) == (0, 48)


def test_lazy_has_the_window_of_a_shared_prefix() -> None:
    """`lazy` stores a window at its commit, because the device evicts it before `lazy` would store it."""
    users = Own(LAYOUTS["window"], store_policy="lazy")
    ledger = users.driven.ledger
    for user in (2, 3, 4, 5):
        request = users.driven.running([*prompt(1, 96), *prompt(user, 60)])
        found = request.match.num_tokens
        for stop in steps(request.num_computed_tokens, 156):
            users.land([*users.driven.commit(request, stop), *ledger.write_back.plan()])
        users.land([*users.driven.release(request), *ledger.write_back.plan()])
        filler = users.driven.running(prompt(90 + user, 700))  # evicts what the others had
        users.driven.release(filler, "filler")
    assert found == 96


def test_the_disk_has_the_window_of_a_shared_prefix() -> None:
    """A shared prefix ends inside the paths of its prompts; the disk stores its window, too."""
    driven = Disk(400, 400, 400, groups=LAYOUTS["window"])
    driven.on_disk_only(*[[*prompt(1, 48), *prompt(user, 48)] for user in (2, 3, 4)])
    assert driven.fetched([*prompt(1, 48), *prompt(8, 48)]) == 48


class HostModel:
    """A model of the host: the sets of prefixes that it holds if nothing is evicted and every copy lands."""

    def __init__(self, groups: Sequence[KVCacheGroup], face: type[Own | Engine], interval_tokens: int = 0) -> None:
        self.layout = Layout.of(groups)
        self.interval = -(-interval_tokens // self.layout.unit_tokens)
        self.has_margin = face is Own
        """An engine has no margin before a window: these blocks are null."""
        self.held: dict[int, set[tuple[int, ...]]] = {each.number: set() for each in self.layout.components}
        self.paths: set[tuple[int, ...]] = set()
        """Every prefix of whole units that was computed."""

    def unit(self, tokens: Sequence[int], stop: int) -> tuple[int, ...]:
        return tuple(tokens[: stop * self.layout.unit_tokens])

    def hit(self, tokens: Sequence[int]) -> int:
        """The last unit up to which the host has what each component needs."""
        layout, most = self.layout, (len(tokens) - 1) // self.layout.unit_tokens
        for end in range(most, 0, -1):
            needed = (
                self.unit(tokens, unit + 1) in self.held[component.number]
                for component in layout.components if component.width
                for unit in range(component.first_unit(end), end)
            )  # fmt: skip
            if all(needed):
                return end
        return 0

    def serve(self, tokens: Sequence[int]) -> int:
        """The hit. Then everything that a later hit may need is stored, as far as the request has it."""
        layout, hit = self.layout, self.hit(tokens)
        num_units = len(tokens) // layout.unit_tokens
        last = min(num_units, (len(tokens) - 1) // layout.unit_tokens)
        ends = [end for end in range(max(hit, 1), num_units) if self.diverges_at(tokens, end)]
        ends += [end for end in range(hit + 1, num_units + 1) if self.interval and not end % self.interval]
        for component in layout.components:
            needed = component.first_unit(last)
            first = max(0, needed - -(-(last - needed) // 4)) if component.number else 0
            if component.number and not self.has_margin:
                computed = hit * layout.unit_tokens
                *_, begun, _ = computed, *steps(computed, len(tokens))
                first = max(first, component.first_needed(begun))
            wanted = {*range(first, num_units)}
            if component.number:
                wanted.update(unit for end in ends for unit in range(component.first_unit(end), end))
            there = range(component.first_unit(hit), num_units)
            self.held[component.number].update(self.unit(tokens, unit + 1) for unit in wanted if unit in there)
        self.paths.update(self.unit(tokens, stop) for stop in range(1, num_units + 1))
        return hit * layout.unit_tokens

    def diverges_at(self, tokens: Sequence[int], end: int) -> bool:
        """Whether another prompt goes on differently after unit `end`."""
        own, size = self.unit(tokens, end), (end + 1) * self.layout.unit_tokens
        return any(
            len(path) == size and path[: len(own)] == own and path != self.unit(tokens, end + 1) for path in self.paths
        )


@each_face
@each_layout
@pytest.mark.parametrize("interval", [0, 1, 24, 50])
@pytest.mark.parametrize("seed", range(2))
def test_random_prompts_hit_exactly_what_the_rule_says(
    face: type[Own | Engine], groups: list[KVCacheGroup], seed: int, interval: int
) -> None:
    """Prompts that diverge anywhere from each other: each hits as much as a model that keeps a set of prefixes says, no
    unit more and none less."""
    rng = random.Random(seed)
    users, model = face(groups, window_interval_tokens=interval), HostModel(groups, face, interval)
    prompts: list[list[int]] = [[]]
    for number in range(1, 22):
        known = rng.choice(prompts)
        tokens = [*known[: rng.randint(0, len(known))], *prompt(number, rng.randint(1, 60))]
        prompts.append(tokens)
        assert users.serve(tokens) == model.serve(tokens), f"prompt {number}"


@each_face
@pytest.mark.parametrize(("interval", "second"), [(0, 0), (1, 88), (24, 72), (40, 80), (45, 48), (96, 0)])
def test_the_second_user_hits_up_to_a_multiple_of_the_interval(
    face: type[Own | Engine], interval: int, second: int
) -> None:
    """The interval counts whole blocks: 45 tokens are twelve of them."""
    users = face(LAYOUTS["window"], window_interval_tokens=interval)
    assert [users.serve([*prompt(1, 88), *prompt(user, 70)]) for user in (2, 3, 4)] == [0, second, 88]


@each_face
def test_windows_at_intervals_cost_their_blocks(face: type[Own | Engine]) -> None:
    """A window of five blocks at every tenth one stores half of the window blocks; at every block, all of them."""
    held = {}
    for interval in (0, 10 * BLOCK, 1):
        users = face(LAYOUTS["window"], window_interval_tokens=interval)
        users.serve(prompt(1, 50 * BLOCK + 1))
        held[interval] = users.driven.ledger.statistics().host.num_cached - 50
    assert held == {0: 5 + 2, 10 * BLOCK: 5 * 5 + 2, 1: 50}, "the margin at the end of the prompt is two blocks"


@each_face
def test_a_prefix_that_nobody_shares_costs_no_window(face: type[Own | Engine]) -> None:
    """One prompt, and the same prompt again: the window at its end, and no other one."""
    users = face(LAYOUTS["window"])
    for _ in range(3):
        users.serve(prompt(1, 130))
    statistics = users.driven.ledger.statistics().host
    assert statistics.num_cached == 32 + 5 + 2, "all of full attention, a window, and its margin"


def test_lookup_counts_a_shared_prefix() -> None:
    """`lookup` says the same as a match, and takes nothing."""
    users = Own(LAYOUTS["window"])
    for user in (2, 3):
        users.serve([*prompt(1, 48), *prompt(user, 48)])
    ledger = users.driven.ledger
    assert ledger.lookup(Prefix.of(ROOT, [*prompt(1, 48), 7])).num_host_tokens == 48
