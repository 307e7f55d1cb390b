"""Sizes of the demo's pools: as asked for, or as suits the model's groups."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from ..errors import InvalidArgument
from .._reference.engine.batching import EngineOptions
from .._reference.engine.layers import LayerGroup
from .options import DemoOptions
from .workload import Workload

__all__ = ["ENGINE", "Pools"]

# Room for every conversation at once: requests wait only in the runtime's line for blocks.
ENGINE = EngineOptions(block_size=16, prefill_tokens=64, decode_rows=4, max_running=4096)
DEVICE_TOKENS = 2048
"""Default size of the small device pool: more than the longest request, less than two of them."""
HOST_TOKENS = 32_768


@attrs.frozen
class Pools:
    """Blocks of the small device pool, of host memory, and of the pool that keeps everything."""

    num_device_blocks: int
    num_host_blocks: int
    num_reference_blocks: int

    @classmethod
    def of(cls, options: DemoOptions, workload: Workload, groups: Sequence[LayerGroup]) -> Pools:
        """Raises `InvalidArgument` naming `device_blocks` if the longest request does not fit."""
        device = options.num_device_blocks or sum(_default_blocks(group) for group in groups)
        host = options.num_host_blocks or ENGINE.num_blocks(HOST_TOKENS) * len(groups)
        needed = sum(_most_blocks(group, workload) for group in groups)
        if needed > device:
            raise InvalidArgument("device_blocks", f"{device} is too few: the longest request takes {needed} blocks")
        # Every conversation keeps its longest prompt, and may hold it twice while two requests compute the same.
        tokens = [conversation.max_tokens for conversation in workload.conversations]
        everything = 2 * sum(map(ENGINE.num_blocks, tokens)) * len(groups)
        return cls(device, host, max(everything, device))


def _default_blocks(group: LayerGroup) -> int:
    """Blocks for `DEVICE_TOKENS`; in a windowed group blocks for two windows, if those are fewer."""
    return min(ENGINE.num_blocks(DEVICE_TOKENS), 2 * _window_blocks(group))


def _most_blocks(group: LayerGroup, workload: Workload) -> int:
    """The most blocks of the group that one request takes."""
    answer = max(turn.num_answer_tokens for each in workload.conversations for turn in each.turns)
    return min(ENGINE.num_blocks(workload.max_tokens), _window_blocks(group) + ENGINE.num_blocks(answer))


def _window_blocks(group: LayerGroup) -> int:
    """Blocks of the window before a slice, of the slice, and of the shorter one after it, which is not committed."""
    start = -(-MANY_TOKENS // ENGINE.prefill_tokens) * ENGINE.prefill_tokens
    return len(group.attention.required_blocks(start, ENGINE.block_size)) + 2 * ENGINE.num_scratch_blocks


MANY_TOKENS = 2**20
"""A position with more tokens before it than any window has."""
