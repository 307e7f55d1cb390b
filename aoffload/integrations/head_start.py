"""Head starts: the first slice of a prompt, computed while what lies before it is still being loaded.

A layer waits for its own region only, so the first layers are computed while later ones are on their way. Nothing of it
is committed or told before the load is over: should it fall short, the prompt is computed from where it ends, as if
nobody had been in a hurry.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import anyio
import attrs

from ..core.lifecycle import RequestState
from ..errors import RegionNotLoaded
from .layer_fences import NOTHING_TO_WAIT_FOR, LayerFences
from .paged import SequenceSlice
from .sequence import PromptTable, RowOutput, SliceResult

if TYPE_CHECKING:
    from ..loading import PendingLoad
    from ..request import Request

__all__ = ["HeadStart", "HeadStartState"]


class HeadStartState(enum.Enum):
    WAITING = "waiting"
    COMPUTING = "computing"
    OVER = "over"


@attrs.define(eq=False)
class HeadStart:
    """One load and the slice behind it. Touched by the event loop's thread only.

    Its client waits for the load; meanwhile the engine loop may compute.
    """

    request: Request
    pending: PendingLoad
    prompt: Sequence[int]
    table_of: Callable[[Sequence[Sequence[int]], int], PromptTable]
    """The table of a prompt, from block ids and how many tokens are ready."""
    num_slots: int
    state: HeadStartState = HeadStartState.WAITING
    result: SliceResult | None = None
    error: Exception | None = None
    """What the model raised, if that was not for want of a region."""
    fences: LayerFences = NOTHING_TO_WAIT_FOR
    """What its layers wait for."""
    _is_over: anyio.Event = attrs.field(factory=anyio.Event)

    @property
    def can_begin(self) -> bool:
        """Whether a step may begin on it. Not where the load is over: its client goes on in the ordinary way."""
        is_loading = self.state is HeadStartState.WAITING and self.request.state is RequestState.LOADING
        return is_loading and self.pending.can_start

    @property
    def is_arriving(self) -> bool:
        """Whether the first region has come: who begins now waits for the rest of this copy, and for no other one."""
        return self.pending.region(0).is_given

    def begin(self) -> SequenceSlice | None:
        """The slice to compute, inside of a step of `pending`. None: it would begin off the grid or lacks room."""
        table = self.table_of(self.pending.block_ids, self.pending.num_expected_tokens)
        stop = table.stop_of(table.start, len(self.prompt))
        if table.start != table.num_ready or stop > table.num_tokens:
            self._end()
            return None
        self.state = HeadStartState.COMPUTING
        self.fences = LayerFences.of(self.pending.regions, self.num_slots)
        return SequenceSlice(self.prompt[table.start : stop], table.start, table.for_slice(table.start))

    def computed(self, part: SequenceSlice, outputs: Sequence[RowOutput], error: Exception | None) -> None:
        """What came of the slice."""
        if outputs:
            self.result = SliceResult(part, outputs[0])
        if not isinstance(error, RegionNotLoaded):
            self.error = error
        self._end()

    def give_up(self, why: str) -> None:
        """Nobody wants it any more: if it is being computed, it ends where it waits next."""
        if self.state is HeadStartState.COMPUTING:
            self.fences.give_up(why)
        else:
            self._end()

    async def wait_until_over(self) -> None:
        """Wait for the forward that computes it, if one does. Nobody begins it any more."""
        if self.state is HeadStartState.COMPUTING:
            await self._is_over.wait()
        self._end()

    def _end(self) -> None:
        self.state = HeadStartState.OVER
        self._is_over.set()
