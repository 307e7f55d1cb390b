"""What a program asks for beside its requests: a prompt kept, fetched ahead, or sent away.

Each is a scope. A pin lasts as long as its `with` block, or its time to live; a transfer that was started can be waited
for, given up, or left to itself.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Generic, Self, TypedDict, TypeVar

import anyio

from .arguments import number_of, shown
from .config import MAX_SECONDS
from .core.answer import NO_MATCH, PrefixMatch
from .core.kept import Demotion, Errand, Pin, Prefetch
from .core.lifecycle import PinState
from .errors import InvalidArgument, WrongState
from .prefix import KeySpan, Prefix
from .session import Session

__all__ = ["PendingDemotion", "PendingPrefetch", "PinScope"]

AnyErrand = TypeVar("AnyErrand", bound=Errand)


class Identity(TypedDict, total=False):
    """What identifies KV besides the token ids, as in `OffloadRuntime.request`."""

    cache_salt: str | bytes | None
    adapter_key: str | bytes | None
    key_spans: Iterable[KeySpan]


def time_to_live(value: object) -> float:
    """Seconds that a pin may last."""
    seconds = number_of(value)
    if seconds is None or not 0 < seconds <= MAX_SECONDS:
        raise InvalidArgument("ttl_s", f"must be a positive number of seconds up to 1e9, got {shown(value)}")
    return seconds


class PinScope:
    """Made by `OffloadRuntime.pin`, entered once with `with`.

    Inside, what was cached on entering stays cached. `has_lapsed` tells that its time was over before; `state`, that it
    had to yield to a request that could not have been served otherwise, or was dropped by a reset or a close.
    """

    def __init__(self, session: Session, prefix: Prefix, ttl_s: float) -> None:
        self._session = session
        self._prefix = prefix
        self._ttl_s = ttl_s
        self._pin: Pin | None = None

    def __repr__(self) -> str:
        return f"<PinScope {self.state.name} {self.match.num_tokens} tokens>"

    def __enter__(self) -> Self:
        self._session.check_usable()
        if self._pin is not None:
            raise WrongState(f"{self!r} was entered before: make another one")
        expires_at = anyio.current_time() + self._ttl_s
        self._pin = self._session.ledger.pin(self._prefix, expires_at=expires_at)
        self._session.worker.watch(expires_at)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pin is not None:
            self._session.ledger.unpin(self._pin)

    def __del__(self) -> None:
        pin = self._pin
        if pin is not None and pin.state is PinState.HELD:
            self._session.call_later(lambda: self._session.ledger.unpin(pin))  # first: a warning may be an error
            warnings.warn(f"{self!r} was abandoned: leave its with block", ResourceWarning, stacklevel=2, source=self)

    @property
    def state(self) -> PinState:
        return PinState.NEW if self._pin is None else self._pin.state

    @property
    def match(self) -> PrefixMatch:
        """What it keeps: on the device, and in host memory behind that."""
        return NO_MATCH if self._pin is None else self._pin.match

    @property
    def has_lapsed(self) -> bool:
        """Whether `ttl_s` was over before the block was left."""
        return self._pin is not None and self._pin.has_lapsed


class _Pending(ABC, Generic[AnyErrand]):
    """A transfer on its way. As a `with` block, it is given up where the block is left; without, it goes on by itself.

    `wait` may be cancelled and called again.
    """

    def __init__(self, session: Session, prefix: Prefix) -> None:
        self._session = session
        self._waiting: set[anyio.Event] = set()
        self._errand = self._start(prefix, self._wake)
        session.worker.submit(self._errand.plans)

    @abstractmethod
    def _start(self, prefix: Prefix, wake: Callable[[], None]) -> AnyErrand: ...

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._errand!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.ledger.cancel(self._errand)

    @property
    def is_over(self) -> bool:
        return self._errand.is_over

    def cancel(self) -> None:
        """Give up what was not launched yet, unless somebody else wants it."""
        self._session.check_usable()
        self._session.ledger.cancel(self._errand)

    def _wake(self) -> None:
        for event in self._waiting:
            event.set()

    async def _wait(self) -> None:
        self._session.check_usable()
        while not self._errand.is_over:
            event = anyio.Event()
            self._waiting.add(event)
            try:
                await event.wait()
            finally:
                self._waiting.discard(event)
            self._session.check_usable()


class PendingPrefetch(_Pending[Prefetch]):
    """What `OffloadRuntime.prefetch_nowait` returns."""

    def _start(self, prefix: Prefix, wake: Callable[[], None]) -> Prefetch:
        return self._session.ledger.prefetch(prefix, wake)

    async def wait(self) -> int:
        """Wait until it is over, however it ends; how many tokens of the prompt are on the device then."""
        await self._wait()
        return self._errand.num_tokens


class PendingDemotion(_Pending[Demotion]):
    """What `OffloadRuntime.demote_nowait` returns."""

    def _start(self, prefix: Prefix, wake: Callable[[], None]) -> Demotion:
        return self._session.ledger.demote(prefix, wake)

    async def wait(self) -> int:
        """Wait until it is over, however it ends; how many device blocks it has given back."""
        await self._wait()
        return self._errand.num_blocks
