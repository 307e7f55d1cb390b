"""A sequence in the engine: its progress, its next slice, its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import anyio
import attrs

from ..._kernel.states import RequestState
from .paged import SequenceSlice

if TYPE_CHECKING:
    from ..._runtime.request import Request

NULL_BLOCK = 0


def _ignore() -> None:
    return None


@attrs.frozen
class RowOutput:
    """The result of one row of a forward: the greedy token, and SHA-256 of the float32 logits that it was chosen
    from."""

    token_id: int
    logits_digest: bytes


@attrs.frozen
class SliceResult:
    """The result of a slice that was computed before its sequence was in the `LineUp`."""

    part: SequenceSlice
    output: RowOutput


@attrs.frozen(kw_only=True)
class Generation:
    """The result of one finished request. Times are seconds of the engine's clock. All times but `arrived_s` are those
    of the last try.

    `num_device_tokens + num_host_tokens + num_computed_tokens == num_prompt_tokens`: the sources of the prompt's KV.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logits_digests: tuple[bytes, ...]
    """SHA-256 of the logits from which each token was chosen. The first logits follow the prompt's last token."""
    num_prompt_tokens: int
    num_device_tokens: int
    num_host_tokens: int
    num_computed_tokens: int
    arrived_s: float
    admitted_s: float
    """The time at which the blocks of the request were granted."""
    first_token_s: float
    finished_s: float


@attrs.frozen
class PromptTable:
    """Block tables for a sequence whose first `num_ready` tokens are on the device, in slices on a fixed grid.

    Blocks before `num_ready` are shared and never written. If `num_ready` is not on the grid (a load that failed
    half-way), the first slice still starts at the grid point before it. Otherwise its bits would differ from those of
    other requests. KV that it computes again below `num_ready` goes to the engine's scratch blocks. That is for models
    with one group; with several a sequence begins on the grid.

        grid            |               |               |
        num_ready                 ^
        first slice     [ s   s   s   p ]                       s: scratch, p: the request's own, private blocks
        later slices     the request's own table
    """

    block_ids: Sequence[Sequence[int]]
    """A table for each group."""
    num_ready: int
    grid: int
    block_size: int
    scratch_ids: Sequence[int]

    @property
    def start(self) -> int:
        """The first position to compute."""
        return self.num_ready - self.num_ready % self.grid

    @property
    def num_tokens(self) -> int:
        """Number of positions that have blocks."""
        return len(self.block_ids[0]) * self.block_size

    @property
    def num_positions(self) -> int:
        """Entries of the block tables, over all groups."""
        return sum(len(table) for table in self.block_ids)

    @property
    def num_nulls(self) -> int:
        """Null entries of the block tables, for blocks before the window of their group."""
        return sum(table.count(NULL_BLOCK) for table in self.block_ids)

    def for_slice(self, start: int) -> Sequence[Sequence[int]]:
        """The tables of the slice that starts at `start`."""
        if start != self.start or start == self.num_ready:
            return self.block_ids
        (table,) = self.block_ids
        first, stop = start // self.block_size, self.num_ready // self.block_size
        return [[*table[:first], *self.scratch_ids[: stop - first], *table[stop:]]]

    def stop_of(self, start: int, num_tokens: int) -> int:
        """The end of the slice that starts at `start`, in a prompt of `num_tokens`."""
        return min(start + self.grid, num_tokens)


@attrs.define(eq=False)
class RunningSequence:
    """A request between its load and its last token. Used in the event loop's thread only.

    Positions [0, num_computed) have their KV on the device. While `num_computed` is inside the prompt, the sequence
    prefills. Then each decode step computes the last token and appends the next.
    """

    request: Request
    prompt: Sequence[int]
    max_new_tokens: int
    table: PromptTable
    tell: Callable[[int], bool]
    """Passes a token to the client. Returns whether that was the last one."""
    num_computed: int
    on_prompt_done: Callable[[], None] = _ignore
    head_start: SliceResult | None = None
    """The result of its first slice, if that was computed during its load."""
    token_ids: list[int] = attrs.field(factory=list)
    logits_digests: list[bytes] = attrs.field(factory=list)
    first_token_s: float = 0.0
    error: Exception | None = None
    is_over: bool = False
    attention: anyio.Event = attrs.field(factory=anyio.Event)
    """Wakes the client: the sequence has ended, or has to wait for blocks."""

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < len(self.prompt)

    @property
    def is_live(self) -> bool:
        """Whether neither the engine nor the runtime has ended it. A request may be cancelled before its client's task
        runs."""
        return not self.is_over and self.request.state is RequestState.RUNNING

    @property
    def is_ready(self) -> bool:
        """Whether its next slice can be computed now."""
        return self.is_live and not self.needs_room

    @property
    def needs_room(self) -> bool:
        """Whether the next slice needs more blocks than its table has."""
        stop = self.num_computed + 1
        if self.is_prefilling:
            stop = self.table.stop_of(self.num_computed, len(self.prompt))
        return not self.is_complete and stop > self.table.num_tokens

    @property
    def wanted_room(self) -> int:
        """Number of tokens that need blocks: up to the next grid point, or the whole sequence."""
        next_point = self.num_computed - self.num_computed % self.table.grid + self.table.grid
        return min(next_point, len(self.prompt) + self.max_new_tokens)

    @property
    def is_complete(self) -> bool:
        return len(self.token_ids) == self.max_new_tokens

    @property
    def num_reusable(self) -> int:
        """Prompt tokens that may be committed: whole slices.

        The last slice is shorter, so its bits differ from those of the same tokens in a whole slice of a longer prompt.
        If it were committed, that prompt would use the cached blocks in place of its own, and the bits of later hits
        would depend on the order of the requests.
        """
        return max(self.table.num_ready, self.num_computed - self.num_computed % self.table.grid)

    def next_slice(self) -> SequenceSlice:
        """The next part of this sequence to compute: a slice of the prompt, or the last token."""
        start = self.num_computed
        if self.is_prefilling:
            stop = self.table.stop_of(start, len(self.prompt))
            return SequenceSlice(self.prompt[start:stop], start, self.table.for_slice(start))
        return SequenceSlice([self.token_ids[-1]], start, self.table.block_ids)

    def advance(self, num_tokens: int, output: RowOutput, now: float) -> bool:
        """Record a step's result. True if it brought a token: the last slice of a prompt, or a decode step."""
        self.num_computed += num_tokens
        if self.is_prefilling:
            return False
        if not self.token_ids:
            self.first_token_s = now
        self.token_ids.append(output.token_id)
        self.logits_digests.append(output.logits_digest)
        return True

    def commit(self, num_tokens: int, token_ids: Sequence[int] = ()) -> None:
        """Commit the first `num_tokens` tokens to the cache. `token_ids` are new ones after those that the request
        has."""
        self.request.commit(num_tokens, token_ids)

    def take_tables(self) -> None:
        """Read the request's block tables again: they have grown, or entries have become null."""
        self.table = attrs.evolve(self.table, block_ids=self.request.block_ids)

    def record(self, arrived_s: float, admitted_s: float, finished_s: float) -> Generation:
        """The result for its client."""
        num_hit = self.table.start
        num_device = min(self.request.match.num_device_tokens, num_hit)
        return Generation(
            request_id=self.request.request_id,
            token_ids=tuple(self.token_ids),
            logits_digests=tuple(self.logits_digests),
            num_prompt_tokens=len(self.prompt),
            num_device_tokens=num_device,
            num_host_tokens=num_hit - num_device,
            num_computed_tokens=len(self.prompt) - num_hit,
            arrived_s=arrived_s,
            admitted_s=admitted_s,
            first_token_s=self.first_token_s,
            finished_s=finished_s,
        )

    def end(self, error: Exception | None = None) -> None:
        """End it, complete or with an error, and wake its client. Only the first call has an effect."""
        if not self.is_over:
            self.error = error
            self.is_over = True
            self.attention.set()

    async def wait_for_attention(self) -> None:
        """Wait until it has ended or needs blocks. Code that changes either sets `attention`."""
        if not self.is_over and not self.needs_room:
            self.attention = anyio.Event()
            await self.attention.wait()
