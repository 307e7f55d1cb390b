"""The pools: no block lost, none twice, and extents as long as can be."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aoffload._kernel.pools import ExtentPool, FreeList, extents

calls = st.lists(st.tuples(st.booleans(), st.integers(1, 24), st.randoms(use_true_random=False)), max_size=60)


def longest(pool: ExtentPool) -> int:
    found = list(extents(array("i", sorted(pool.free_ids()))))
    return max((stop - start for start, stop in found), default=0)


@settings(max_examples=300)
@given(size=st.integers(1, 64), plan=calls)
def test_an_extent_pool_conserves_blocks_and_keeps_them_together(
    size: int, plan: list[tuple[bool, int, object]]
) -> None:
    """Whatever is taken and given back, in whatever pieces: each block is in one hand, neighbours become one extent
    again, and a take that fits in one extent comes as one extent."""
    pool = ExtentPool(size)
    held: list[int] = []
    for takes, count, random in plan:
        if takes and count <= pool.num_free:
            fits = count <= longest(pool)
            taken = pool.take(count)
            assert len(taken) == count and not set(taken) & set(held)
            assert not fits or len(list(extents(taken))) == 1
            held += taken
        elif held:
            random.shuffle(held)  # type: ignore[attr-defined]
            pool.give(array("i", held[:count]))
            del held[:count]
        free = list(pool.free_ids())
        assert len(free) == len(set(free)) == pool.num_free == size - len(held)
        assert set(free) | set(held) == set(range(size))
        assert len(pool._stop_of) == len(list(extents(array("i", sorted(free)))))


@settings(max_examples=100)
@given(size=st.integers(1, 64), plan=calls)
def test_a_free_list_conserves_blocks_and_never_hands_out_the_null_block(
    size: int, plan: list[tuple[bool, int, object]]
) -> None:
    """The same for the device; block 0 is nobody's."""
    pool = FreeList(size + 1)
    held: list[int] = []
    for takes, count, _ in plan:
        if takes and count <= pool.num_free:
            held += pool.take(count)
        else:
            pool.give(array("i", held[:count]))
            del held[:count]
        assert sorted([*pool.free_ids(), *held]) == list(range(1, size + 1))


def test_the_last_block_used_is_the_first_reused() -> None:
    """A block that was just used is the warmest."""
    pool = FreeList(9)
    first = pool.take(3)
    pool.give(first)
    assert list(pool.take(3)) == list(first)


def test_a_take_finds_the_one_extent_that_fits() -> None:
    """Even if many extents of the same size class are too small: one copy call instead of several."""
    pool = ExtentPool(64)
    everything = pool.take(64)
    for start in range(0, 48, 6):
        pool.give(everything[start : start + 5])
    pool.give(everything[50:57])
    assert list(extents(pool.take(7))) == [(50, 57)]


def test_taking_more_than_is_free_is_a_bug_of_the_caller() -> None:
    """Callers look at the room first; the pool does not hand out what it has not."""
    for pool in (FreeList(3), ExtentPool(2)):
        with pytest.raises(AssertionError):
            pool.take(3)
        assert pool.num_free == 2


def test_an_empty_host_pool() -> None:
    """No host memory is a legal size."""
    pool = ExtentPool(0)
    assert pool.num_free == 0 and list(pool.take(0)) == [] and list(pool.free_ids()) == []
