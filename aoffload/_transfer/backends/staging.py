"""Copies blocks that are scattered on both sides in few calls, through a buffer that stays in the CPU cache."""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from ..._kernel.states import Direction
from .pieces import element_type
from .rows import RowMover

__all__ = ["STAGE_BYTES", "Staging"]


STAGE_BYTES = 8 * 2**20


@attrs.frozen(eq=False)
class Staging:
    """Copies every byte twice, which is still faster for short stretches under GIL contention."""

    mover: RowMover
    host: NDArray[np.uint8]
    stage: NDArray[np.uint8]
    """`uint8 [blocks that fit, block_bytes]`, used by one direction only."""

    def move(self, direction: Direction, on_device: NDArray[np.int64], on_host: NDArray[np.int64]) -> None:
        """Copy blocks, whose ids are checked, with two calls for as many as fit into the buffer."""
        element = element_type(self.host.shape[1])
        host, stage = self.host.view(element), self.stage.view(element)
        for start in range(0, len(on_host), len(stage)):
            part = slice(start, start + len(stage))
            num_blocks = len(on_host[part])
            if direction is Direction.LOAD:
                np.take(host, on_host[part], axis=0, out=stage[:num_blocks], mode="clip")
                self.mover.scatter(on_device[part], [self.stage[:num_blocks]])
            else:
                self.mover.gather(on_device[part], [self.stage[:num_blocks]])
                host[on_host[part]] = stage[:num_blocks]
