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

from .._config.config import MAX_BLOCKS

Checkpoints: TypeAlias = Mapping[int, Mapping[int, int]]
"""By vLLM's number of a group, for each checkpoint of a request: the position in tokens, and the block."""
NO_CHECKPOINTS: Checkpoints = {}


class StateTable(Sequence[int]):
    """The block table of recurrent layers for an offer: null but for the blocks that hold a checkpoint. It is longer
    than any request."""

    __slots__ = ("_blocks",)

    def __init__(self, blocks: Mapping[int, int], block_size: int) -> None:
        """`blocks`: by position in tokens. A position inside a block of `block_size` tokens is left out, because no hit
        ends there."""
        self._blocks = {
            position // block_size - 1: block_id for position, block_id in blocks.items() if not position % block_size
        }

    def __len__(self) -> int:
        return MAX_BLOCKS

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self._blocks.get(place, 0) for place in range(at.start or 0, min(at.stop, MAX_BLOCKS))]
        return self._blocks.get(at, 0)


class LastOfEach(Sequence[int]):
    """The last block of each `number` blocks of `table`: the states at which a hit may end."""

    __slots__ = ("_number", "_table")

    def __init__(self, table: Sequence[int], number: int) -> None:
        self._table, self._number = table, number

    def __len__(self) -> int:
        return len(self._table) // self._number

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[place] for place in range(*at.indices(len(self)))]
        return self._table[(at + 1) * self._number - 1]


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


def move_junction(request: Any, num_tokens: int) -> None:
    """Have vLLM make a checkpoint at token `num_tokens` of `request`, where host memory has KV and no state. The
    deepest junction wins, because vLLM keeps one for each request."""
    request.shared_prefix_boundary = max(request.shared_prefix_boundary, num_tokens)
