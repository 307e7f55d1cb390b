"""What the connector's host memory has, and how it is compared with what another engine computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from aoffload import Tier
from aoffload._kernel.index import held_ids

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .engines import Engine

__all__ = ["Blocks", "host_blocks", "num_different"]

MOST_APART = 1e-3
"""Most by which elements of KV may differ between batches of other sizes. KV of another token differs by 0.1."""

Blocks = Mapping[bytes, "NDArray[np.float32]"]
"""By all tokens that identify a block: its numbers."""


def host_blocks(engine: Engine) -> Blocks:
    """The blocks of full attention in host memory."""
    ledger, host = engine.connector.ledger, engine.worker_connector._worker._transport.backend._host
    found: dict[bytes, NDArray[np.float32]] = {}
    for run in ledger.cache.index.runs.values():
        before, each = b"", run.before
        while each is not None:
            before, each = bytes(each.tokens) + before, each.before
        part = run.parts[run.place(Tier.HOST, 0)]
        unit_bytes = len(run.tokens) // (run.stop - run.start)
        for at in range(part.stop - run.start):
            (block_id,) = held_ids(run, Tier.HOST, 0, run.start + at, run.start + at + 1)
            found[before + bytes(run.tokens[: (at + 1) * unit_bytes])] = host[block_id].view(np.float32).copy()
    return found


def num_different(blocks: Blocks, right: Blocks) -> int:
    """The number of `blocks` that have other numbers than the same blocks of `right`, or are not there."""
    return sum(
        tokens not in right or not np.allclose(block, right[tokens], rtol=0, atol=MOST_APART)
        for tokens, block in blocks.items()
    )
