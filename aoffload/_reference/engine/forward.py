"""One forward pass, from slices to tokens: the part of a step that runs in the worker thread."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence

import attrs
import torch

from .layer_fences import NOTHING_TO_WAIT_FOR, LayerFences
from .paged import PagedBatch, PagedModel, SequenceSlice
from .sequence import RowOutput

__all__ = ["Forward"]


@attrs.define(eq=False)
class Forward:
    """One forward: made and finished in the event loop's thread, run in a worker thread."""

    model: PagedModel
    kv_cache: torch.Tensor
    block_size: int
    slices: Sequence[SequenceSlice]
    num_rows: int
    """Rows whose token is wanted; further rows are padding."""
    fences: LayerFences = NOTHING_TO_WAIT_FOR
    """The fences that its layers wait for."""
    outputs: list[RowOutput] = attrs.field(factory=list)
    error: Exception | None = None
    _finished: bool = False
    _running: threading.Lock = attrs.field(factory=threading.Lock)

    def run(self) -> None:
        """Compute, unless `finish` came first. Whatever the model raises is kept in `error`."""
        with self._running:
            if self._finished:
                return
            try:
                self.outputs = self._compute()
            except Exception as error:  # noqa: BLE001 - a model may raise anything, and only this step's requests pay
                self.error = error

    def finish(self) -> None:
        """Ensure that no thread computes after this call. Blocks only if the wait for the thread was cut short.

        Awaiting the thread is shielded, but a native `asyncio.Task.cancel()` breaks every shield, and a step must not
        release its blocks while a forward still writes into them. The forward's fences are given up first: a load that
        it waits for may need this thread in order to end.
        """
        if not self._running.acquire(blocking=False):
            self.fences.give_up("nobody waits for the forward any more")
            self._running.acquire()
        self._finished = True
        self._running.release()

    def _compute(self) -> list[RowOutput]:
        batch = PagedBatch.of(self.slices, self.block_size, self.kv_cache.device, self.fences)
        logits = self.model.forward(batch, self.kv_cache)[: self.num_rows].cpu().contiguous()
        token_ids = logits.argmax(dim=-1).tolist()
        return [RowOutput(token, _digest(row)) for token, row in zip(token_ids, logits, strict=True)]


def _digest(row: torch.Tensor) -> bytes:
    return hashlib.sha256(row.numpy().data).digest()
