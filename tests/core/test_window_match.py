"""The match over several groups beside a search over all lengths."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Sequence

import pytest

from aoffload import ChunkedLocal, ConfigError, FullAttention, KVCacheGroup, SlidingWindow, Tier
from aoffload._common.tiers import HIT_TIERS
from aoffload._config.groups import AttentionKind
from aoffload._kernel.index import RunIndex, find_hit
from aoffload._kernel.layout import Layout
from aoffload._kernel.records import Run
from aoffload._kernel.tokens import TokenSequence
from aoffload.ledger import Prefix, Root

NUM_CASES = 4_000
MUST_HAPPEN = (
    "no hit", "whole", "shrunk", "on the device", "further in the host", "without a spine", "several windows",
)  # fmt: skip


def attended(kind: AttentionKind, token: int) -> set[int]:
    """The tokens before `token` that it reads, from the kind's definition alone."""
    if isinstance(kind, SlidingWindow):
        return {other for other in range(token) if token - other < kind.window}
    if isinstance(kind, ChunkedLocal):
        return {other for other in range(token) if other // kind.chunk == token // kind.chunk}
    return set(range(token))


class Case:
    """Groups, and one path of runs with holes in it."""

    def __init__(self, seed: int, groups: Sequence[KVCacheGroup] = ()) -> None:
        self.random = rng = random.Random(seed)
        kinds = [SlidingWindow(rng.randint(1, 24)), SlidingWindow(rng.randint(1, 6)), ChunkedLocal(rng.randint(1, 24))]
        self.attention = rng.choices([FullAttention(), FullAttention(), *kinds], k=rng.randint(1, 4))
        sizes = rng.choices([1, 2, 3, 4, 6], k=4)
        drawn = [KVCacheGroup(f"g{i}", kind, sizes[i]) for i, kind in enumerate(self.attention)]
        self.layout = Layout.of(groups or drawn)
        self.num_units = rng.randint(1, 12)
        num_tokens = self.num_units * self.layout.unit_tokens
        self.sequence = TokenSequence(Prefix.of(Root("m"), range(num_tokens)), self.layout.unit_tokens)
        self.index = RunIndex(self.layout, 0, HIT_TIERS)
        self.present: dict[tuple[int, int], set[int]] = {
            (tier, component.number): set() for tier in HIT_TIERS for component in self.layout.components
        }
        self._fill()

    def _fill(self) -> None:
        run: Run | None = None
        start = 0
        while start < self.num_units:
            stop = self.random.randint(start + 1, self.num_units)
            run = self.index.insert(self.sequence, run, start, stop)
            for part in run.parts:
                first, last = self._stretch(start, stop, is_spine=not part.component)
                part.blocks = array("i", [1] * ((last - first) * part.width))
                if part.blocks:
                    part.first, part.stop = first, last
                    self.present[part.tier, part.component].update(range(first, last))
            start = stop

    def _stretch(self, start: int, stop: int, *, is_spine: bool) -> tuple[int, int]:
        """Mostly all of it, or a leading part, or (of a window) anything."""
        if self.random.random() < 0.6:
            return start, stop
        if is_spine or self.random.random() < 0.3:
            return start, self.random.randint(start, stop)
        first = self.random.randint(start, stop)
        return first, self.random.randint(first, stop)

    # -- the search over all lengths ------------------------------------------------------------------------------

    def may_end(self, stop: int, tiers: tuple[Tier, ...]) -> bool:
        """Whether every group has what computing the token after `stop` units reads."""
        unit = self.layout.unit_tokens
        for number, kind in enumerate(self.attention):
            component = self.layout.places[number][0]
            needed = {token // unit for token in attended(kind, stop * unit)}
            if component and not all(any(at in self.present[tier, component] for tier in tiers) for at in needed):
                return False
        if not self.layout.full.width:
            return True
        device, host = self.present[Tier.DEVICE, 0], self.present[Tier.HOST, 0]
        near = next((at for at in range(stop) if at not in device), stop)
        return near == stop or (Tier.HOST in tiers and all(at in host for at in range(near, stop)))

    def search(self, limit: int, alignment: int) -> tuple[int, int]:
        ends = range(min(limit, self.num_units), -1, -1)
        stop = next(end for end in ends if end % alignment == 0 and self.may_end(end, HIT_TIERS))
        return next(end for end in range(stop, -1, -1) if self.may_end(end, (Tier.DEVICE,))), stop


def test_a_hit_is_the_longest_that_every_group_accepts() -> None:
    """Whatever is where: a hit is the longest prefix of which every group has what it needs, and of it on the device
    the longest that the device alone could go on with."""
    happened: Counter[str] = Counter()
    for seed in range(NUM_CASES):
        case = Case(seed)
        limit, alignment = case.random.randint(0, case.num_units + 1), case.random.choice([1, 1, 1, 2, 3])
        hit = find_hit(case.index, case.sequence, case.layout, min(limit, case.num_units), alignment)
        expected = case.search(limit, alignment)
        assert (hit.device_stop, hit.stop) == expected, f"case {seed}"
        happened["no hit"] += not hit.stop
        happened["whole"] += hit.stop == case.num_units
        happened["shrunk"] += 0 < hit.stop < min(limit, case.num_units)
        happened["on the device"] += hit.device_stop > 0
        happened["further in the host"] += 0 < hit.device_stop < hit.stop
        happened["without a spine"] += hit.stop > 0 and not case.layout.full.width
        happened["several windows"] += hit.stop > 0 and len(case.layout.windows) > 1
    assert all(happened[event] > 300 for event in MUST_HAPPEN), happened


@pytest.mark.parametrize("kind", [FullAttention(), *map(SlidingWindow, range(1, 20)), *map(ChunkedLocal, range(1, 20))])
@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 8])
def test_what_is_required_is_what_attention_reads(kind: AttentionKind, block_size: int) -> None:
    """A kind requires the whole blocks that hold what is read before a position, and nothing at a free end."""
    for token in range(60):
        read = attended(kind, token)
        blocks = [at for at in range(token // block_size) if read & set(range(at * block_size, (at + 1) * block_size))]
        assert list(kind.required_blocks(token, block_size)) == blocks
        assert not attended(kind, kind.free_end(token))
        assert all(attended(kind, later) for later in range(kind.free_end(token) + 1, token + 1))


@pytest.mark.parametrize("wrong", [None, "full", FullAttention, object()])
def test_an_attention_kind_says_what_it_requires(wrong: object) -> None:
    """What is no attention kind is refused by name."""
    with pytest.raises(ConfigError, match=r"groups\.attention"):
        KVCacheGroup("g", wrong)  # type: ignore[arg-type]
