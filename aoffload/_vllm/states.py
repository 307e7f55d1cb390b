"""Recurrent states in vLLM's blocks: which blocks hold a checkpoint, and where a prompt should get one more.

vLLM caches recurrent states only in its cache mode `align`. A group of recurrent layers then has a block table like any
other group, and a block holds one state:

    running state    in the last block of the table. The next forward overwrites it, or copies it into a new block
    checkpoint       a block whose last forward ended exactly at the end of the block. It is not written again
    null             every other place. vLLM frees the states before the running one

A table does not tell the position of a state. Some layers (Mamba 2) also write the state of a position inside a chunk,
and with hits inside blocks that position may be inside a block. So the connector reads states only from the blocks that
vLLM hands over with a step, each with its position. They hold their checkpoints once the forward of that step is over.
vLLM may reuse them from the next step on, unless a copy holds them.

A load needs one block of each group: the one that ends with the last loaded token. vLLM allocates it, with null blocks
before it, and continues from its state.

vLLM makes two checkpoints of a prompt: at its last whole block, and at the junction, where the prompt leaves those that
vLLM's own cache knows. vLLM's own cache may have forgotten a prompt that host memory still knows, so the connector may
move the junction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Checkpoints: TypeAlias = Mapping[int, Mapping[int, int]]
"""By vLLM's number of a group, for each checkpoint of a request: the position in tokens, and the block."""
NO_CHECKPOINTS: Checkpoints = {}


def handed_over(output: Any) -> dict[str, Checkpoints]:
    """The checkpoints that vLLM hands over with the step `output`, by request."""
    state = output.kv_connector_block_state
    if state is None or not state.boundary_state_offloads:
        return {}  # in most steps
    found: dict[str, Checkpoints] = {}
    for request_id, entries in state.boundary_state_offloads.items():
        groups: dict[int, dict[int, int]] = {}
        for group, block_id, position in entries:
            groups.setdefault(group, {})[position] = block_id
        found[request_id] = groups
    return found


def move_junction(request: Any, planned: Sequence[int]) -> None:
    """Have vLLM make a checkpoint at the first of two positions that `HostCache.planned_checkpoints` returns: there,
    host memory has KV and no state. vLLM makes one at the last position anyway, the end of the prompt. The deepest
    junction wins, because vLLM keeps one for each request."""
    if len(planned) > 1:
        request.shared_prefix_boundary = max(request.shared_prefix_boundary, planned[0])
