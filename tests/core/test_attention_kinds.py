"""The attention kinds: which blocks have to be there for computing to go on."""

from __future__ import annotations

from typing import Any

import pytest

from aoffload._config.groups import ChunkedLocal, FullAttention, SlidingWindow
from aoffload.errors import ConfigError


def naive_blocks(block_size: int, hit_end: int, first_read: int) -> list[int]:
    """The whole blocks before `hit_end` that hold a token from `first_read` on."""
    return [at for at in range(hit_end // block_size) if (at + 1) * block_size > first_read]


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16])
def test_a_window_needs_what_its_next_token_reads(block_size: int) -> None:
    """Blocks with a token in (t - window, t), whole; with the window a block or less, the last one or none."""
    for window in range(1, 40):
        for hit_end in range(0, 100, block_size):
            found = list(SlidingWindow(window).required_blocks(hit_end, block_size))
            assert found == naive_blocks(block_size, hit_end, hit_end - window + 1)
            assert len(found) == min(-(-(window - 1) // block_size), hit_end // block_size)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16])
def test_a_chunk_needs_its_own_beginning(block_size: int) -> None:
    """Blocks with a token of the next token's chunk; none when that token begins a chunk."""
    for chunk in range(1, 40):
        for hit_end in range(0, 100, block_size):
            found = list(ChunkedLocal(chunk).required_blocks(hit_end, block_size))
            wanted = naive_blocks(block_size, hit_end, hit_end - hit_end % chunk)
            assert found == (wanted if hit_end % chunk else [])


def test_full_attention_needs_everything() -> None:
    """Every whole block before the position."""
    assert list(FullAttention().required_blocks(70, 16)) == [0, 1, 2, 3]


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "8", None])
def test_bad_sizes_are_named(value: Any) -> None:
    """A window or chunk that is none is refused by its name."""
    with pytest.raises(ConfigError, match=r"^window: must be a positive integer"):
        SlidingWindow(value)
    with pytest.raises(ConfigError, match=r"^chunk: must be a positive integer"):
        ChunkedLocal(value)
