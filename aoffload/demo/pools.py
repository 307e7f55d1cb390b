"""How large the demo's pools are: what was asked for, or what suits the model's groups."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from ..errors import InvalidArgument
from ..integrations.batching import EngineOptions
from ..integrations.layers import LayerGroup
from .options import DemoOptions
from .workload import Workload

__all__ = ["ENGINE", "Pools"]

# Room for every conversation at once: who waits, waits in the runtime's line for blocks.
ENGINE = EngineOptions(block_size=16, prefill_tokens=64, decode_rows=4, max_running=4096)
DEVICE_TOKENS = 2048
"""What the small device pool holds by default: more than the longest request, less than two of them."""
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
        # Every conversation keeps its longest prompt, and may hold it a second time while two compute the same.
        tokens = [conversation.max_tokens for conversation in workload.conversations]
        everything = 2 * sum(map(ENGINE.num_blocks, tokens)) * len(groups)
        return cls(device, host, max(everything, device))


def _default_blocks(group: LayerGroup) -> int:
    """A windowed group gets room for two requests, as the others do for the longest ones."""
    return min(ENGINE.num_blocks(DEVICE_TOKENS), 2 * _window_blocks(group))


def _most_blocks(group: LayerGroup, workload: Workload) -> int:
    """What one request takes at most."""
    answer = max(turn.num_answer_tokens for each in workload.conversations for turn in each.turns)
    return min(ENGINE.num_blocks(workload.max_tokens), _window_blocks(group) + ENGINE.num_blocks(answer))


def _window_blocks(group: LayerGroup) -> int:
    """The window before a slice, the slice itself, and the shorter one behind it, which is never committed."""
    start = -(-MANY_TOKENS // ENGINE.prefill_tokens) * ENGINE.prefill_tokens
    return len(group.attention.required_blocks(start, ENGINE.block_size)) + 2 * ENGINE.num_scratch_blocks


MANY_TOKENS = 2**20
"""Where any window is shorter than what lies before it."""
