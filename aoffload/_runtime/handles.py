"""The handles of a runtime, such as `runtime.pins`: each has the verbs of one feature.

Handle | verbs | present
--- | --- | ---
`pins` | `hold` | always
`transfers` | `prefetch`, `demote` | always; not in a `HostCacheRuntime`
`fetches` | `fetch` | if there is a tier below the host
`hints` | `pin`, `prefetch`, `demote`, `returns`, `done`, `apply` | always
`disk` | `wait_restored` | if `disk` is configured
`weights` | `set` | always
`reports` | `requests`, `holders` | always

Reading the handle of a feature that is off raises the `ConfigError` of the ledger's handle. A handle is made when it is
read. It refers to its runtime, which stays open as long as the handle exists.

A pin lasts until its `with` block ends or its time to live is over. Prefetches, demotions and fetches are transfers:
the verb begins the transfer and returns immediately. The transfer can be awaited, cancelled, or left to finish on its
own, because the ledger owns its jobs. Requests have priority: a transfer takes only free blocks that no request waits
for, and a pin ends early if a request could not be served otherwise.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack

import anyio
import attrs

from .._common.arguments import number_of, shown
from .._common.hints import (
    DemoteHint,
    DoneHint,
    GivenHint,
    Hint,
    HintVerb,
    PinHint,
    PrefetchHint,
    ReturnsHint,
    is_hint,
    read_hints,
)
from .._common.prefix import Identity, Prefix, TokenIds
from .._config.config import MAX_SECONDS
from .._extensions.hints import HintAnswer, HintOutcome, Hints
from .._extensions.pins import Pin, PinState
from .._extensions.prefetch import Demotion, DeviceTransfers, Prefetch
from .._extensions.status import Holder, RequestStatus
from .._extensions.transfers import CacheTransfer, Fetch
from .._kernel.plans import NO_MATCH, PrefixMatch
from .._tiers.fetch.rules import Fetches
from .._tiers.remote.loop import Question
from ..errors import InvalidArgument, WrongState
from .session import Session

AnyTransfer = TypeVar("AnyTransfer", bound=CacheTransfer)


def _time_to_live(name: str, value: object) -> float:
    """`value` as the time to live of a pin, in seconds."""
    seconds = number_of(value)
    if seconds is None or not 0 < seconds <= MAX_SECONDS:
        raise InvalidArgument(name, f"must be a positive number of seconds up to 1e9, got {shown(value)}")
    return seconds


class PinScope:
    """Returned by `runtime.pins.hold`; enter it once, with `with`.

    Blocks that were cached on entering stay cached inside, unless the pin ends early. `has_lapsed`: its time to live
    was over. `state` YIELDED: a request needed its blocks. DROPPED: a reset, closing or the end of the copy worker
    ended it.
    """

    def __init__(self, session: Session[Any], runtime: object, prefix: Prefix, ttl_s: float) -> None:
        self._session = session
        self._runtime = runtime
        """The runtime that opened the session. A reference keeps it open as long as this pin exists."""
        self._prefix = prefix
        self._ttl_s = ttl_s
        self._pin: Pin | None = None
        self._was_entered = False
        self._was_left = False

    def __repr__(self) -> str:
        return f"<PinScope {self.state.name} {self.match.num_tokens} tokens>"

    def __enter__(self) -> Self:
        self._was_entered = True
        self._session.check_usable()
        if self._pin is not None:
            raise WrongState(f"{self!r} was entered before: make another one")
        expires_at = self._session.now() + self._ttl_s
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
        """Whether `ttl_s` was over before the `with` block was left."""
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
        """Whether the transfer has ended or was cancelled."""
        return self._transfer.is_over

    def cancel(self) -> None:
        """Give the transfer up, and end every `wait` for it. Loads that are not launched yet are discarded, unless a
        request needs them; other copies continue. Does nothing if the transfer is over."""
        self._session.check_usable()
        self._cancel()

    def _cancel(self) -> None:
        self._session.ledger.transfers.cancel(self._transfer)

    def _wake(self) -> None:
        for event in self._waiting:
            event.set()

    async def _wait(self) -> None:
        await anyio.lowlevel.checkpoint_if_cancelled()
        self._session.check_usable()
        self._session.check_loop()
        while not self.is_over:
            event = anyio.Event()
            self._waiting.add(event)
            try:
                await event.wait()
            finally:
                self._waiting.discard(event)
            self._session.check_usable()


class PendingPrefetch(_Pending[Prefetch]):
    """A prefetch under way, as `runtime.transfers.prefetch` returns it."""

    def _start(self, prefix: Prefix, wake: Callable[[], None]) -> Prefetch:
        transfers: DeviceTransfers = self._session.ledger.transfers
        return transfers.prefetch(prefix, wake)

    async def wait(self) -> int:
        """Wait until the prefetch is over, however it ends. Returns how many tokens of the prompt are on the device
        then."""
        await self._wait()
        return self._transfer.num_tokens


class PendingFetch(_Pending[Fetch]):
    """A fetch under way, as `runtime.fetches.fetch` returns it. The remote store is queried while the disk is
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
        """Wait until the fetch is over, however it ends. Returns how many tokens of the prompt a request would hit
        then."""
        await self._wait()
        return (self._remote or self._transfer).num_tokens


class PendingDemotion(_Pending[Demotion]):
    """A demotion under way, as `runtime.transfers.demote` returns it."""

    def _start(self, prefix: Prefix, wake: Callable[[], None]) -> Demotion:
        transfers: DeviceTransfers = self._session.ledger.transfers
        return transfers.demote(prefix, wake)

    async def wait(self) -> int:
        """Wait until the demotion is over, however it ends. Returns how many device blocks it has freed."""
        await self._wait()
        return self._transfer.num_blocks


class _HintedFetch(PendingFetch):
    """The fetch of a prefetch hint. Once it is over, the prompt is loaded onto the device, if the ledger has one."""

    def __init__(self, session: Session[Any], prefix: Prefix) -> None:
        self._prefix = prefix
        super().__init__(session, prefix)

    def _wake(self) -> None:
        if self.is_over:
            self._session.call_later(self._go_on)  # not inside of the call of the ledger that ended the fetch

    def _go_on(self) -> None:
        transfers = self._session.ledger.transfers
        if self._session.is_open and isinstance(transfers, DeviceTransfers):
            self._session.submit_transfers(transfers.prefetch(self._prefix).plans)


@attrs.frozen(repr=False)
class Handle:
    """Base of the handles of a runtime."""

    _session: Session[Any]
    _runtime: object
    """Keeps the runtime open as long as the handle exists."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._runtime!r}>"


class RuntimePins(Handle):
    """`runtime.pins`: keeps cached prompts from eviction."""

    def hold(self, token_ids: TokenIds, ttl_s: float, **identity: Unpack[Identity]) -> PinScope:
        """A context manager that pins the cached part of a prompt from entering on, for at most `ttl_s` seconds.

        Pass the same `cache_salt`, `adapter_key` and `key_spans` as for a request. Entering raises `OutOfBlocks` if all
        pins together would hold more than `max_pinned_share` of a tier.
        """
        prefix = self._session.prefix("pins.hold", token_ids, identity)
        return PinScope(self._session, self._runtime, prefix, _time_to_live("ttl_s", ttl_s))


class RuntimeTransfers(Handle):
    """`OffloadRuntime.transfers`: moves cached prompts between the device and the host."""

    def prefetch(self, token_ids: TokenIds, **identity: Unpack[Identity]) -> PendingPrefetch:
        """Begin to load the host hit of a prompt onto the device. `wait` of the result returns how many of the prompt's
        tokens are on the device then.

        A prefetch takes only free blocks, and only while no request waits for blocks. It never raises for a failed
        copy.
        """
        return PendingPrefetch(self._session, self._session.prefix("transfers.prefetch", token_ids, identity))

    def demote(self, token_ids: TokenIds, **identity: Unpack[Identity]) -> PendingDemotion:
        """Begin to move the blocks of a prompt from the device to host memory. `wait` of the result returns how many
        device blocks were freed.

        Pinned blocks and prefix blocks of other cached prompts stay on the device. If the host cannot hold the whole
        prompt, all blocks stay.
        """
        return PendingDemotion(self._session, self._session.prefix("transfers.demote", token_ids, identity))


class RuntimeFetches(Handle):
    """`runtime.fetches`: brings prompts from the tiers below the host into host memory."""

    def fetch(self, token_ids: TokenIds, **identity: Unpack[Identity]) -> PendingFetch:
        """Begin to copy the blocks of a prompt that only a tier below the host holds into host memory. `wait` of the
        result returns how many tokens a request for the prompt would hit then.

        All fetches together take at most `max_fetch_share` of the host. A fetch never raises for a failed copy.
        `Request.allocate` fetches for its own prompt.
        """
        return PendingFetch(self._session, self._session.prefix("fetches.fetch", token_ids, identity))


class RuntimeHints(Handle):
    """`runtime.hints`: acts on hints, in which clients predict the future of their prompts.

    Pass the same `cache_salt`, `adapter_key` and `key_spans` as for a request. The copies of a hint finish on their
    own.
    """

    def pin(self, token_ids: TokenIds, ttl_s: float, **identity: Unpack[Identity]) -> HintAnswer:
        """Keep the cached part of a prompt for `ttl_s` seconds, at most `max_hint_pin_s`. No `with` block ends the
        pin."""
        return self._give("hints.pin", token_ids, identity, PinHint(ttl_s))

    def prefetch(self, token_ids: TokenIds, **identity: Unpack[Identity]) -> HintAnswer:
        """Begin to bring a prompt up: from the tiers below the host into the host and, in an `OffloadRuntime`, then
        onto the device."""
        return self._give("hints.prefetch", token_ids, identity, PrefetchHint())

    def demote(self, token_ids: TokenIds, **identity: Unpack[Identity]) -> HintAnswer:
        """End the pins of hints for a prompt, and begin to move its blocks from the device to the host. In a
        `HostCacheRuntime`: free the host blocks that a tier below has, too."""
        return self._give("hints.demote", token_ids, identity, DemoteHint())

    def returns(
        self, token_ids: TokenIds, *, in_s: float | None = None, category: str = "", **identity: Unpack[Identity]
    ) -> HintAnswer:
        """Predict that a prompt is requested again in about `in_s` seconds. Without a time, the prediction is the usual
        time of prompts with the same `category`. Needs learned eviction."""
        return self._give("hints.returns", token_ids, identity, ReturnsHint(in_s, category))

    def done(self, token_ids: TokenIds, **identity: Unpack[Identity]) -> HintAnswer:
        """Predict that a prompt will never be requested again. Ends the pins of hints for it."""
        return self._give("hints.done", token_ids, identity, DoneHint())

    def apply(self, token_ids: TokenIds, given: object, **identity: Unpack[Identity]) -> tuple[HintAnswer, ...]:
        """Act on `given`: a hint such as `PinHint(60)`, or the payload of a client, which may be any object. An action
        of a payload that cannot be read is rejected with a reason, and raises nothing."""
        prefix = self._session.prefix("hints.apply", token_ids, identity)
        actions = [GivenHint.of(given)] if is_hint(given) else read_hints(given)
        return self._apply(prefix, actions)

    def _give(self, call: str, token_ids: TokenIds, identity: Identity, hint: Hint) -> HintAnswer:
        prefix = self._session.prefix(call, token_ids, identity)
        (answer,) = self._apply(prefix, [GivenHint.of(hint)])
        return answer

    def _apply(self, prefix: Prefix, actions: Sequence[GivenHint]) -> tuple[HintAnswer, ...]:
        session, found = self._session, list[HintAnswer]()
        hints: Hints = session.ledger.hints
        for action in actions:
            answer = self._fetch(prefix, action) if type(action.hint) is PrefetchHint and session.lower_tiers else None
            if answer is None:
                (answer,) = hints.apply_all(prefix, [action], session.now())
                session.submit_transfers(answer.plans)
            found.append(answer)
        session.worker.watch(session.ledger.next_lapse)
        return tuple(found)

    def _fetch(self, prefix: Prefix, action: GivenHint) -> HintAnswer | None:
        """Begin to fetch `prefix` from the tiers below the host. None: they have nothing more, as far as is known."""
        session = self._session
        num_tokens = session.ledger.lookup(prefix).num_lower_tokens
        if _HintedFetch(session, prefix).is_over:
            return None
        hints: Hints = session.ledger.hints
        return hints.answered(
            HintAnswer(HintVerb.PREFETCH, HintOutcome.ACCEPTED, num_tokens=num_tokens, action_id=action.action_id)
        )


class RuntimeDisk(Handle):
    """`runtime.disk`: the disk tier."""

    async def wait_restored(self) -> int:
        """Wait until the runtime has read which blocks an earlier process has left on the disk. Returns the number of
        restored blocks."""
        self._session.check_usable()
        self._session.check_loop()
        await anyio.lowlevel.checkpoint_if_cancelled()
        work = self._session.disk
        assert work is not None  # without a disk there is no handle
        await work.is_restored.wait()
        return work.num_restored


class RuntimeWeights(Handle):
    """`runtime.weights`: the weights' epoch, the name of the weights that the engine computes with."""

    @property
    def epoch(self) -> str:
        """The weights' epoch; empty if none is set."""
        self._session.check_may_read()
        found: str = self._session.ledger.weights.epoch
        return found

    def set(self, epoch: str) -> None:
        """Set the weights' epoch, a name of at most 256 characters. Does nothing if it is the current epoch.

        After this call, no request begins to compute with KV of another epoch. All pins end. A request without device
        blocks is matched again. A request whose load is not over, because `load`, `resume` or `PendingLoad.wait` has
        not returned, computes from its first token. A request that computes keeps its blocks and continues. Only a
        request that has not begun publishes and stores KV afterwards; see docs/howto/weights.md. No KV is forgotten: if
        an earlier epoch is set again, its KV is found again, also on the disk and in the remote store.

        Call it between the last forward with the old weights and the first forward with the new ones.
        """
        self._session.check_usable()
        self._session.ledger.weights.set(epoch)


class RuntimeReports(Handle):
    """`runtime.reports`: the holders of device blocks, and the cause of each request's wait."""

    def requests(self) -> tuple[RequestStatus, ...]:
        """The live requests. The request that has been in its state for the longest comes first. Each status has the
        blocks that the request holds, the blocks that it waits for, and their holders."""
        self._session.check_may_read()
        found: tuple[RequestStatus, ...] = self._session.ledger.reports.requests()
        return found

    def holders(self) -> tuple[Holder, ...]:
        """All holders of device blocks, the biggest first: requests, steps (also for requests that are over), pins,
        jobs, prefetches, demotions."""
        self._session.check_may_read()
        found: tuple[Holder, ...] = self._session.ledger.reports.holders()
        return found
