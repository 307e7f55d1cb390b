"""Pins, fetches, prefetches and demotions of prompts, independently of requests. Each is a context manager.

A pin lasts until its `with` block ends or its time to live is over. The others are transfers: each can be awaited,
cancelled, or left to finish on its own, because the ledger owns its jobs. All of them yield to requests: a transfer
takes only free blocks that no request waits for, and a pin ends early if a request could not be served otherwise.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import anyio

from .._common.arguments import number_of, shown
from .._config.config import MAX_SECONDS
from .._extensions.pins import Pin, PinState
from .._extensions.prefetch import Demotion, DeviceTransfers, Prefetch
from .._extensions.transfers import CacheTransfer, Fetch
from .._kernel.plans import NO_MATCH, PrefixMatch
from .._kernel.prefix import Prefix
from .._tiers.fetch.rules import Fetches
from .._tiers.remote.loop import Question
from ..errors import InvalidArgument, WrongState
from .session import Session

AnyTransfer = TypeVar("AnyTransfer", bound=CacheTransfer)


def time_to_live(value: object, name: str = "ttl_s") -> float:
    """`value` as the time to live of a pin or a hint, in seconds."""
    seconds = number_of(value)
    if seconds is None or not 0 < seconds <= MAX_SECONDS:
        raise InvalidArgument(name, f"must be a positive number of seconds up to 1e9, got {shown(value)}")
    return seconds


class PinScope:
    """Returned by `OffloadRuntime.pin`; enter it once, with `with`.

    Blocks that were cached on entering stay cached inside, unless the pin ends early: its time to live was over
    (`has_lapsed`); it yielded to a request that could not be served otherwise (`state` YIELDED); or a reset, closing or
    the end of the copy worker dropped it (DROPPED).
    """

    def __init__(self, session: Session[Any], prefix: Prefix, ttl_s: float) -> None:
        self._session = session
        self._prefix = prefix
        self._ttl_s = ttl_s
        self._pin: Pin | None = None
        self._was_entered = False
        self._was_left = False
        self._runtime: object = None
        """The runtime that opened the session. A reference keeps it open as long as this pin exists."""

    def __repr__(self) -> str:
        return f"<PinScope {self.state.name} {self.match.num_tokens} tokens>"

    def __enter__(self) -> Self:
        self._was_entered = True
        self._session.check_usable()
        if self._pin is not None:
            raise WrongState(f"{self!r} was entered before: make another one")
        expires_at = anyio.current_time() + self._ttl_s
        self._pin = self._session.ledger.pins.hold(self._prefix, expires_at=expires_at)
        self._session.worker.watch(expires_at)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pin = self._pin
        if pin is not None and not self._was_left:
            self._was_left = True
            self._session.leave_in_loop(lambda: self._session.ledger.pins.release(pin))

    def __del__(self) -> None:
        pin = self._pin
        if pin is None:
            if not self._was_entered and self._session.is_open:
                warnings.warn("a pin was never entered, and pins nothing: use `with`", ResourceWarning, stacklevel=2)
        elif pin.state is PinState.HELD:
            self._session.call_later(
                lambda: self._session.ledger.pins.release(pin)
            )  # before the warning, which may raise
            warnings.warn(f"{self!r} was abandoned: leave its with block", ResourceWarning, stacklevel=2, source=self)

    @property
    def state(self) -> PinState:
        return PinState.NEW if self._pin is None else self._pin.state

    @property
    def match(self) -> PrefixMatch:
        """The pinned prefix: its device hit, followed by its host hit."""
        return NO_MATCH if self._pin is None else self._pin.match

    @property
    def has_lapsed(self) -> bool:
        """Whether `ttl_s` was over before the block was left."""
        return self._pin is not None and self._pin.has_lapsed


class _Pending(ABC, Generic[AnyTransfer]):
    """A fetch, prefetch or demotion under way. A `with` block cancels it at its end; otherwise it finishes on its own.

    `wait` may be cancelled and called again.
    """

    def __init__(self, session: Session[Any], prefix: Prefix) -> None:
        self._session = session
        self._waiting: set[anyio.Event] = set()
        self._transfer = self._start(prefix, self._wake)
        session.submit_transfers(self._transfer.plans)

    @abstractmethod
    def _start(self, prefix: Prefix, wake: Callable[[], None]) -> AnyTransfer: ...

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._transfer!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.leave_in_loop(self._cancel)

    @property
    def is_over(self) -> bool:
        return self._transfer.is_over

    def cancel(self) -> None:
        """Stop waiting. Loads not launched yet are dropped unless another request needs them; other jobs go on."""
        self._session.check_usable()
        self._cancel()

    def _cancel(self) -> None:
        self._session.ledger.transfers.cancel(self._transfer)

    def _wake(self) -> None:
        for event in self._waiting:
            event.set()

    async def _wait(self) -> None:
        self._session.check_usable()
        while not self.is_over:
            event = anyio.Event()
            self._waiting.add(event)
            try:
                await event.wait()
            finally:
                self._waiting.discard(event)
            self._session.check_usable()


class PendingPrefetch(_Pending[Prefetch]):
    """A prefetch under way, as `OffloadRuntime.prefetch_nowait` returns it."""

    def _start(self, prefix: Prefix, wake: Callable[[], None]) -> Prefetch:
        transfers: DeviceTransfers = self._session.ledger.transfers
        return transfers.prefetch(prefix, wake)

    async def wait(self) -> int:
        """Wait until it is over, however it ends. Returns how many tokens of the prompt are on the device then."""
        await self._wait()
        return self._transfer.num_tokens


class PendingFetch(_Pending[Fetch]):
    """A fetch under way, as `OffloadRuntime.fetch_nowait` returns it. The remote store is queried while the disk is
    read; a second transfer fetches the cells that the store has after the tokens of the disk."""

    def __init__(self, session: Session[Any], prefix: Prefix) -> None:
        self._question: Question | None = None
        self._remote: Fetch | None = None
        """The transfer from the remote store."""
        super().__init__(session, prefix)
        remote, ledger = session.remote, session.ledger
        if remote is None or not remote.may_fetch:
            return
        match = ledger.lookup(prefix)
        labels = remote.labels_nowait(prefix, match.num_tokens + match.num_lower_tokens)

        def answered(num_cells: int) -> None:
            if num_cells and session.is_open:
                num_tokens = labels[num_cells - 1].stop * ledger.layout.unit_tokens
                self._remote = ledger.fetches.fetch(prefix, self._wake, num_remote_tokens=num_tokens)
                session.worker.submit(self._remote.plans)
            self._wake()

        if labels:
            self._question = remote.ask(labels, answered)

    def _start(self, prefix: Prefix, wake: Callable[[], None]) -> Fetch:
        fetches: Fetches = self._session.ledger.fetches
        return fetches.fetch(prefix, wake)

    @property
    def is_over(self) -> bool:
        is_asking = self._question is not None and not self._question.is_over
        return not is_asking and super().is_over and (self._remote is None or self._remote.is_over)

    def _cancel(self) -> None:
        if self._question is not None:
            self._question.cancel()
        super()._cancel()
        if self._remote is not None:
            self._session.ledger.transfers.cancel(self._remote)

    async def wait(self) -> int:
        """Wait until it is over, however it ends. Returns how many tokens of the prompt a request would hit then."""
        await self._wait()
        return (self._remote or self._transfer).num_tokens


class PendingDemotion(_Pending[Demotion]):
    """A demotion under way, as `OffloadRuntime.demote_nowait` returns it."""

    def _start(self, prefix: Prefix, wake: Callable[[], None]) -> Demotion:
        transfers: DeviceTransfers = self._session.ledger.transfers
        return transfers.demote(prefix, wake)

    async def wait(self) -> int:
        """Wait until it is over, however it ends. Returns how many device blocks it has freed."""
        await self._wait()
        return self._transfer.num_blocks
