"""The tries of one client, usually one. If no request can proceed, the youngest one gives up its blocks and starts
again.

Requests that get their blocks slice by slice can together hold all blocks while each waits for more. The runtime
reports this with a retryable `OutOfBlocks` from `extend`. The request that came last then releases all its blocks, so
the first one always proceeds. The next try finds the committed tokens in the cache. Greedy tokens are bit for bit the
same in every try, so a client gets only tokens that no earlier try has delivered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import attrs
import numpy as np

from ..._kernel.states import RequestState

if TYPE_CHECKING:
    from ..._runtime.request import Request

MADE_WAY = "made way for an older request"
_HOLDS_ROOM = (
    RequestState.ALLOCATED, RequestState.LOADING, RequestState.DRAINING, RequestState.REQUEUED, RequestState.STRANDED,
    RequestState.RUNNING,
)  # fmt: skip


def _never(_: int) -> bool:
    return False


@attrs.define(eq=False)
class Ask:
    """One call of `PagedEngine.generate`, over all its tries."""

    ticket: int
    """Number of the call, in order of arrival."""
    tokens: np.ndarray
    prompt: Sequence[int]
    max_new_tokens: int
    request_id: str | None
    options: Mapping[str, Any]
    """Further arguments of `OffloadRuntime.request`."""
    deadline_s: float | None
    on_token: Callable[[int], None]
    until: Callable[[int], bool] = _never
    max_hit_tokens: int | None = None
    num_alone: int = 0
    """Number of times that it lacked blocks although no other request held any."""
    _expires_at: float | None = None
    _num_told: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt) + self.max_new_tokens

    def remaining_s(self) -> float | None:
        """Seconds until its deadline, which counts from the first call. None without one."""
        if self.deadline_s is None or self._expires_at is None:
            self._expires_at = None if self.deadline_s is None else anyio.current_time() + float(self.deadline_s)
            return self.deadline_s
        return max(0.0, self._expires_at - anyio.current_time())

    def listener(self) -> Callable[[int], bool]:
        """The token callback of one try. True at the last token. It passes on only tokens that no earlier try has
        delivered."""
        count = 0

        def tell(token_id: int) -> bool:
            nonlocal count
            count += 1
            if count > self._num_told:
                self._num_told = count
                self.on_token(token_id)
                if self.until(token_id):
                    self.max_new_tokens = count  # also for another try, as this one may be cancelled before it ends
            return count == self.max_new_tokens

        return tell


@attrs.define(eq=False)
class Try:
    ask: Ask
    request: Request
    has_made_way: bool = False
    has_left: anyio.Event = attrs.field(factory=anyio.Event)
    is_served: anyio.Event = attrs.field(factory=anyio.Event)
    """Set when it has its blocks or has ended. The try that gave up its blocks waits until then, because it could take
    them back otherwise."""
    _made_way_for: Try | None = None

    @property
    def is_to_be_repeated(self) -> bool:
        """Whether it ended only because it gave up its blocks."""
        return self.has_made_way and self.request.reason == MADE_WAY

    def make_way(self, needy: Try) -> None:
        """Cancel the request in favour of `needy`. Its task then starts another try."""
        self.has_made_way = True
        self._made_way_for = needy
        self.request.cancel(MADE_WAY)

    async def wait_to_return(self) -> None:
        """Wait until the try for which it gave up its blocks has blocks or has ended."""
        if self._made_way_for is not None and self._made_way_for is not self:
            await self._made_way_for.is_served.wait()


@attrs.define(eq=False)
class Rivals:
    """The running tries of one engine."""

    num_made_way: int = 0
    _tries: list[Try] = attrs.field(factory=list)

    @contextmanager
    def entered(self, one: Try) -> Iterator[Try]:
        self._tries.append(one)
        try:
            yield one
        finally:
            self._tries.remove(one)
            one.is_served.set()
            one.has_left.set()

    def is_alone(self, needy: Try) -> bool:
        """Whether no other try holds blocks."""
        return all(one is needy for one in self._tries if one.request.state in _HOLDS_ROOM)

    async def have_one_make_way(self, needy: Try) -> None:
        """Cancel the youngest try that holds blocks, perhaps `needy` itself, and wait until it has ended.

        One at a time: while one try is ending, no other is cancelled.
        """
        leaving = next((one for one in self._tries if one.has_made_way), None)
        if leaving is None:
            holders = [one for one in self._tries if one.request.state in _HOLDS_ROOM]
            leaving = max(holders, key=lambda one: one.ask.ticket)
            self.num_made_way += 1
            if needy.is_served.is_set():
                needy.is_served = anyio.Event()
            leaving.make_way(needy)
        if leaving is needy:
            await anyio.lowlevel.checkpoint()  # raises: its scope is cancelled
        await leaving.has_left.wait()


@attrs.define(eq=False)
class PromptPlace:
    """One of the places for prompts in progress, held until the prompt is complete or the `async with` block is
    left."""

    _places: anyio.Semaphore
    _is_held: bool = False

    async def __aenter__(self) -> PromptPlace:
        await self._places.acquire()
        self._is_held = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self.give_back()

    def give_back(self) -> None:
        if self._is_held:
            self._is_held = False
            self._places.release()
