"""Head starts (layer-wise overlap): compute the first slice of a prompt while its cached prefix is still loading.

Each layer waits for its own region only, so the first layers compute while the KV of later layers is being copied.
Nothing is committed or sent to the client before the load is over. If the load brings fewer tokens than expected, the
result is dropped and the prompt is computed from where the load ended.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import anyio
import attrs

from ..._kernel.states import RequestState
from ...errors import RegionNotLoaded
from .layer_fences import NOTHING_TO_WAIT_FOR, LayerFences
from .paged import SequenceSlice
from .sequence import PromptTable, RowOutput, SliceResult

if TYPE_CHECKING:
    from ..._runtime.loading import PendingLoad
    from ..._runtime.request import Request

__all__ = ["HeadStart", "HeadStartState"]


class HeadStartState(enum.Enum):
    WAITING = "waiting"
    COMPUTING = "computing"
    OVER = "over"


@attrs.define(eq=False)
class HeadStart:
    """One load and the prompt slice that follows it. Used in the event loop's thread only.

    The client's task waits for the load; meanwhile the engine loop may compute the slice.
    """

    request: Request
    pending: PendingLoad
    prompt: Sequence[int]
    table_of: Callable[[Sequence[Sequence[int]], int], PromptTable]
    """Makes the prompt's table from block ids and the number of ready tokens."""
    num_slots: int
    state: HeadStartState = HeadStartState.WAITING
    result: SliceResult | None = None
    error: Exception | None = None
    """What the model raised, unless that was `RegionNotLoaded`."""
    fences: LayerFences = NOTHING_TO_WAIT_FOR
    """The fences that its layers wait for."""
    _is_over: anyio.Event = attrs.field(factory=anyio.Event)

    @property
    def can_begin(self) -> bool:
        """Whether a step may compute the slice now. False once the load is over: no head start is needed then."""
        is_loading = self.state is HeadStartState.WAITING and self.request.state is RequestState.LOADING
        return is_loading and self.pending.can_start

    @property
    def is_arriving(self) -> bool:
        """Whether the first region is there, or queued on a GPU: a forward that begins now waits only for this copy."""
        return self.pending.region(0).is_given

    def begin(self) -> SequenceSlice | None:
        """The slice to compute; call inside a step of `pending`. None: it would begin off the grid or lacks room."""
        table = self.table_of(self.pending.block_ids, self.pending.num_expected_tokens)
        stop = table.stop_of(table.start, len(self.prompt))
        if table.start != table.num_ready or stop > table.num_tokens:
            self._end()
            return None
        self.state = HeadStartState.COMPUTING
        self.fences = LayerFences.of(self.pending.regions, self.num_slots)
        return SequenceSlice(self.prompt[table.start : stop], table.start, table.for_slice(table.start))

    def computed(self, part: SequenceSlice, outputs: Sequence[RowOutput], error: Exception | None) -> None:
        """Record the outcome of the slice."""
        if outputs:
            self.result = SliceResult(part, outputs[0])
        if not isinstance(error, RegionNotLoaded):
            self.error = error
        self._end()

    def give_up(self, why: str) -> None:
        """Abandon the slice. A forward that computes it raises `RegionNotLoaded` at its next wait for a copy."""
        if self.state is HeadStartState.COMPUTING:
            self.fences.give_up(why)
        else:
            self._end()

    async def wait_until_over(self) -> None:
        """Wait for the forward that computes it, if there is one. No step begins it afterwards."""
        if self.state is HeadStartState.COMPUTING:
            await self._is_over.wait()
        self._end()

    def _end(self) -> None:
        self.state = HeadStartState.OVER
        self._is_over.set()
