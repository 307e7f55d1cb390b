"""Rules that an attention kind must follow: kinds that follow them hit as in an exhaustive search, and others are
refused."""

from __future__ import annotations

import random
from collections import Counter
from itertools import accumulate
from typing import Any

import attrs
import pytest
import random_walk
import test_window_match
from hypothesis import given, settings
from hypothesis import strategies as st

from aoffload import ChunkedLocal, ConfigError, FullAttention, KVCacheGroup, SlidingWindow, Tier
from aoffload._kernel.index import find_hit
from aoffload.ledger import AttentionKind

NUM_TOKENS = 40
"""The first tokens, of which the check tries each."""


@attrs.frozen
class Reads:
    """The first token that computing goes on from, token by token, and the same as the last one from there on."""

    first: tuple[int, ...]

    def first_read(self, token: int) -> int:
        return min(token, self.first[min(token, len(self.first) - 1)])

    def required_blocks(self, hit_end: int, block_size: int) -> range:
        return range(self.first_read(hit_end) // block_size, hit_end // block_size)

    def free_end(self, hit_end: int) -> int:
        return next(token for token in range(min(hit_end, NUM_TOKENS), -1, -1) if self.first_read(token) == token)


@st.composite
def steps(draw: st.DrawFn) -> Reads:
    """Windows, chunks, and whatever else never goes back."""
    moves = draw(st.lists(st.sampled_from((0, 0, 0, 1, 1, 2, 5)), min_size=NUM_TOKENS, max_size=NUM_TOKENS))
    return Reads(tuple(min(token, first) for token, first in enumerate(accumulate(moves))))


class Case(test_window_match.Case):
    """A path with holes, of groups of a kind that was drawn, some of them beside one of full attention."""

    def __init__(self, seed: int, kind: AttentionKind) -> None:
        rng = random.Random(seed)
        kinds = rng.choice([[kind], [FullAttention(), kind], [kind, kind]])
        super().__init__(seed, [KVCacheGroup(f"g{i}", one, rng.choice([1, 2, 3])) for i, one in enumerate(kinds)])
        self.kind = kind
        self.attention = []  # as drawn without us; the search asks `kind`

    def may_end(self, stop: int, tiers: tuple[Tier, ...]) -> bool:
        unit = self.layout.unit_tokens
        needed = range(self.kind.required_blocks(stop * unit, 1).start // unit, stop)
        components = [component.number for component in self.layout.windows]
        held = all(
            any(at in self.present[tier, component] for tier in tiers) for component in components for at in needed
        )
        return held and super().may_end(stop, tiers)


def hits_agree(kind: AttentionKind, seed: int) -> None:
    case = Case(seed, kind)
    limit = min(case.num_units, (NUM_TOKENS - 1) // case.layout.unit_tokens)
    hit = find_hit(case.index, case.sequence, case.layout, limit)
    assert (hit.device_stop, hit.stop) == case.search(limit, 1), f"{kind}, case {seed}"


@settings(max_examples=150, deadline=None)
@given(kind=steps(), seed=st.integers(0, 2**32))
def test_kinds_that_keep_the_rules_hit_as_by_search(kind: Reads, seed: int) -> None:
    """Whatever stretch a token reads, as long as it never goes back: the index finds the longest hit, and no other."""
    for number in range(8):
        hits_agree(kind, seed + number)


@settings(max_examples=25, deadline=None)
@given(kind=steps(), seed=st.integers(0, 2**32))
def test_kinds_that_keep_the_rules_read_what_was_written(kind: Reads, seed: int) -> None:
    """A random walk over the calls of a ledger with a group of that kind: what is read has the tag of its prefix."""
    groups = [KVCacheGroup("drawn", kind, random_walk.UNIT), KVCacheGroup("half", kind, random_walk.UNIT // 2)]
    if seed % 2:
        groups[1] = KVCacheGroup("full", FullAttention(), random_walk.UNIT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_walk, "groups_of", lambda _: groups)
        walked = random_walk.Walk(seed, with_windows=True, is_plain=True)
    assert walked.run(120)


@attrs.frozen
class Answers:
    """A kind that keeps the rules, but for one answer."""

    kind: Reads
    at: tuple[int, int]
    answer: range | None
    free: int

    def required_blocks(self, hit_end: int, block_size: int) -> range:
        is_other = (hit_end, block_size) == self.at and self.answer is not None
        return self.answer if is_other else self.kind.required_blocks(hit_end, block_size)  # type: ignore[return-value]

    def free_end(self, hit_end: int) -> int:
        is_other = hit_end == self.at[0] and self.answer is None
        return self.free if is_other else self.kind.free_end(hit_end)


def test_one_answer_that_breaks_a_rule_is_met() -> None:
    """Kinds with one answer changed: those that are accepted hit as by search all the same."""
    rng, happened = random.Random(1), Counter[str]()
    for seed in range(600):
        moves = rng.choices((0, 0, 0, 1, 1, 2, 5), k=NUM_TOKENS)
        kind = Reads(tuple(min(token, first) for token, first in enumerate(accumulate(moves))))
        token, size = rng.randrange(1, NUM_TOKENS), rng.choice((1, 1, 2, 3))
        answer = range(
            rng.randint(0, token // size), token // size - rng.choice((0, 0, 0, 1)), rng.choice((1, 1, 1, 2))
        )
        changed = Answers(kind, (token, size), rng.choice((answer, answer, None)), rng.randint(-1, token + 1))
        try:
            for block_size in (1, 2, 3):
                KVCacheGroup("changed", changed, block_size)
        except ConfigError as error:
            assert "in group 'changed', Answers " in str(error)  # noqa: PT017 - most are refused
            happened["refused"] += 1
        else:
            happened["accepted"] += 1
            for number in range(4):
                hits_agree(changed, seed * 10 + number)
    assert happened["refused"] > 200 and happened["accepted"] > 20, happened


# -- states, and other kinds that are none -------------------------------------------------------------------------


class State:
    """Recurrent state: one block, which ends at the hit, stands for all tokens before it."""

    def required_blocks(self, hit_end: int, block_size: int) -> range:
        return range(max(0, hit_end // block_size - 1), hit_end // block_size)

    def free_end(self, hit_end: int) -> int:
        return 0


class StateOfTheLastToken(State):
    """The same, as the block that the state after the last token lies in."""

    def required_blocks(self, hit_end: int, block_size: int) -> range:
        last = -(-hit_end // block_size)
        return range(max(0, last - 1), last)


class StateWhenever(State):
    """The same, with nothing that it would go on from elsewhere."""

    def free_end(self, hit_end: int) -> int:
        return hit_end


class StateAtCheckpoints(State):
    """A state every 64 tokens."""

    def required_blocks(self, hit_end: int, block_size: int) -> range:
        end = hit_end // 64 * 64 // block_size
        return range(max(0, end - 1), end)


@pytest.mark.parametrize("block_size", [2, 16, 64, 256, 65_536])
@pytest.mark.parametrize("kind", [State, StateOfTheLastToken, StateWhenever, StateAtCheckpoints])
def test_a_recurrent_state_is_refused(kind: type[State], block_size: int) -> None:
    """Whose only block is the one at the end of a hit would have blocks published that nobody wrote."""
    with pytest.raises(ConfigError, match=rf"^groups\.attention: in group 'mamba', {kind.__name__} must "):
        KVCacheGroup("mamba", kind(), block_size)


class Full(State):
    def required_blocks(self, hit_end: int, block_size: int) -> range:
        return range(hit_end // block_size)


class Raises(Full):
    def required_blocks(self, hit_end: int, block_size: int) -> range:
        raise KeyError(hit_end)


class Sinks(Full):
    """The first tokens and a window: two stretches."""

    def required_blocks(self, hit_end: int, block_size: int) -> Any:
        return [0, *range(max(1, hit_end // block_size - 2), hit_end // block_size)]


class Shrinks(Full):
    """A window that grows with the position, so that more is needed later than was kept before."""

    def required_blocks(self, hit_end: int, block_size: int) -> range:
        return range((hit_end % 100) * 9 // 10 // block_size, hit_end // block_size)


class Wide(SlidingWindow):
    """Free where it is not."""

    def free_end(self, hit_end: int) -> int:
        return hit_end


class Early(State):
    """Not free where it is: a chunk."""

    def required_blocks(self, hit_end: int, block_size: int) -> range:
        return ChunkedLocal(7).required_blocks(hit_end, block_size)


REFUSED = {
    "raises": (Raises(), r"raised KeyError: "),
    "several stretches": (Sinks(), r"must return from required_blocks\("),
    "goes back": (Shrinks(), r"requires token 24 at token 127, but an earlier token requires nothing before 35"),
    "free where it is not": (Wide(7), r"must return from free_end\(1\) the last token"),
    "not free where it is": (Early(), r"must return from free_end\(7\) the last token"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_kind_that_breaks_a_rule_is_refused(name: str) -> None:
    """By the group's name, and with the token at which it does."""
    kind, problem = REFUSED[name]
    with pytest.raises(ConfigError, match=rf"^groups\.attention: in group 'odd', .*{problem}") as refused:
        KVCacheGroup("odd", kind, 4)
    assert refused.value.argument == "groups.attention"


@pytest.mark.parametrize("reach", [1, 2, 3, 5, 16, 100, 4096, 2**31 - 1])
@pytest.mark.parametrize("block_size", [1, 3, 16, 4096, 65_536])
def test_kinds_of_ours_keep_the_rules(reach: int, block_size: int) -> None:
    """Every window and every chunk, in blocks of every size."""
    for kind in (FullAttention(), SlidingWindow(reach), ChunkedLocal(reach)):
        assert KVCacheGroup("ours", kind, block_size).attention == kind
