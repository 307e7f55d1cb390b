"""Store policies: which published blocks are stored in the host, and when.

`EagerStore` stores all blocks at their commit. `LazyStore` stores blocks that are about to be evicted. `SelectiveStore`
stores, at their commit, blocks that were requested before. `NoStore` stores none. The `StoreScope` and the limit of a
request narrow that further.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self

import attrs

from .._arguments import check_int, shown
from .._config.config import MAX_BLOCKS
from .._eviction.counts import HitCounts, RecentPrompts
from .._kernel.layout import Layout
from .._kernel.plans import StoreScope
from .._kernel.prefix import Prefix
from .._kernel.records import NO_LIMIT
from .._kernel.requests import LedgerRequest
from .._kernel.tokens import TokenSequence
from ..errors import ConfigError, InvalidArgument

MAX_SEEN = 1_000_000
MAX_COUNTED_TOKENS = 2**34
COUNTED_TOKENS = 2**24
"""Default of `SelectiveStore.max_counted_tokens`."""


class StorePolicy(Protocol):
    """A store policy, as the ledger calls it. All positions are units of the layout. `EagerStore` is a base for your
    own policies.

    If a method raises, the ledger raises the same error. `admit`, `commit` and `offer` have changed nothing then;
    `release` has ended the request, and stores nothing."""

    @property
    def num_watermark_blocks(self) -> int:
        """0: store wanted blocks at once. Otherwise the watermark: store wanted blocks once they are among this number
        of device blocks that the next allocations would take."""
        ...

    def for_ledger(self, layout: Layout, num_device_blocks: int) -> StorePolicy:
        """The policy for one ledger: a new object if it counts, or depends on the size of the pool."""
        ...

    def seen(self, request: LedgerRequest, first: int, stop: int) -> None:
        """Units `[first, stop)` of the tokens of `request` were requested. Called for the units of the prompt at
        admission, and for generated units when the request is done. Not called for requests that store nothing."""
        ...

    def wanted_stop(self, request: LedgerRequest) -> int:
        """The unit up to which the published blocks of `request` should be in the host. Asked at every commit, and once
        more when the request is done."""
        ...


class EagerStore:
    """Stores every published block, at once. A base for your own policies."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @property
    def num_watermark_blocks(self) -> int:
        return 0

    def for_ledger(self, layout: Layout, num_device_blocks: int) -> StorePolicy:
        return self

    def seen(self, request: LedgerRequest, first: int, stop: int) -> None:
        """Counts nothing."""

    def wanted_stop(self, request: LedgerRequest) -> int:
        return request.published


class NoStore(EagerStore):
    """Stores nothing: a cache on the device alone."""

    def wanted_stop(self, request: LedgerRequest) -> int:
        return 0


def _int_in(minimum: int, maximum: int) -> Any:
    def check(_: object, attribute: Any, value: object) -> None:
        check_int(f"store_policy.{attribute.name}", value, minimum, maximum, ConfigError)

    return check


@attrs.frozen
class LazyStore(EagerStore):
    """Stores blocks just before their eviction: once allocating `watermark_blocks` more device blocks would evict them.

    None is an eighth of the device pool. Best effort: blocks evicted before they are stored are lost.
    """

    watermark_blocks: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(_int_in(1, MAX_BLOCKS))
    )

    @property
    def num_watermark_blocks(self) -> int:
        return self.watermark_blocks or 0

    def for_ledger(self, layout: Layout, num_device_blocks: int) -> StorePolicy:
        if self.watermark_blocks is not None:
            return self
        return attrs.evolve(self, watermark_blocks=max(layout.width, num_device_blocks // 8, 1))


@attrs.define(eq=False)
class SelectiveStore(EagerStore):
    """Stores, at their commit, the blocks of prefixes that were requested at least `min_seen` times.

    The counts include prefixes that no tier holds any more. They keep up to `max_counted_tokens` tokens, of 4 bytes.
    """

    min_seen: int = attrs.field(default=2, validator=_int_in(1, MAX_SEEN))
    max_counted_tokens: int = attrs.field(default=COUNTED_TOKENS, validator=_int_in(1, MAX_COUNTED_TOKENS))
    counts: HitCounts | None = attrs.field(default=None, init=False)
    """Set in the policy of a ledger; None in a configuration."""

    def for_ledger(self, layout: Layout, num_device_blocks: int) -> Self:
        found = type(self)(self.min_seen, self.max_counted_tokens)
        found.counts = HitCounts(layout, self.max_counted_tokens)
        return found

    def seen(self, request: LedgerRequest, first: int, stop: int) -> None:
        assert self.counts is not None, "counts belong to a ledger"
        self.counts.see(request.sequence, first, stop)

    def wanted_stop(self, request: LedgerRequest) -> int:
        assert self.counts is not None, "counts belong to a ledger"
        return self.counts.stop_of(request.sequence, request.published, self.min_seen)


@attrs.frozen
class PolicyWrapper(EagerStore):
    """A base for policies that wrap another one and pass its answers on."""

    policy: StorePolicy

    @property
    def num_watermark_blocks(self) -> int:
        return self.policy.num_watermark_blocks

    def seen(self, request: LedgerRequest, first: int, stop: int) -> None:
        self.policy.seen(request, first, stop)

    def wanted_stop(self, request: LedgerRequest) -> int:
        return self.policy.wanted_stop(request)


@attrs.frozen
class CheckedPolicy(PolicyWrapper):
    """A policy of the program's own, whose answers are checked. Those of this file need no check."""

    def wanted_stop(self, request: LedgerRequest) -> int:
        return check_int("store_policy.wanted_stop", self.policy.wanted_stop(request), 0)


def checked(policy: StorePolicy) -> StorePolicy:
    return policy if type(policy) in (EagerStore, NoStore, LazyStore, SelectiveStore) else CheckedPolicy(policy)


@attrs.frozen
class LearningPolicy(PolicyWrapper):
    """The policy of a ledger whose eviction learns."""

    learn: Callable[[LedgerRequest, int, int], object]
    """`Hints.seen`."""

    def seen(self, request: LedgerRequest, first: int, stop: int) -> None:
        self.policy.seen(request, first, stop)
        self.learn(request, first, stop)


@attrs.frozen
class CountingPolicy(PolicyWrapper):
    """The policy of a ledger with a disk or a remote store, which also counts how often prefixes are requested."""

    counts: HitCounts
    recent: RecentPrompts = attrs.field(factory=RecentPrompts)
    has_remote: bool = False
    """Whether `recent` is kept."""

    @classmethod
    def of(cls, policy: StorePolicy, layout: Layout, *, has_remote: bool) -> Self:
        return cls(policy, HitCounts(layout, COUNTED_TOKENS), has_remote=has_remote)

    def seen(self, request: LedgerRequest, first: int, stop: int) -> None:
        self.policy.seen(request, first, stop)
        self.counts.see(request.sequence, first, stop)
        if self.has_remote:
            self.recent.add(request.sequence)

    def requested_stop(self, sequence: TokenSequence, limit: int) -> int:
        """The unit, at most `limit`, up to which `sequence` was asked for twice."""
        return self.counts.stop_of(sequence, limit, 2)


def store_policy_of(value: Any) -> StorePolicy:
    """The policy that `OffloadConfig.store_policy` names or is."""
    if isinstance(value, str):
        named: dict[str, Any] = {"eager": EagerStore, "lazy": LazyStore, "selective": SelectiveStore, "off": NoStore}
        policy: StorePolicy = named[value]()
        return policy
    return value  # type: ignore[no-any-return]


def store_limit(prefix: Prefix, unit_tokens: int, store: StoreScope | str, max_store_tokens: int | None) -> int:
    """The unit up to which a request for `prefix` may be stored."""
    try:
        scope = StoreScope(store)
    except Exception:  # noqa: BLE001 - it is compared and hashed
        names = ", ".join(repr(scope.value) for scope in StoreScope)
        raise InvalidArgument("store", f"must be a StoreScope or one of {names}, got {shown(store)}") from None
    by_scope = {StoreScope.ALL: NO_LIMIT, StoreScope.PROMPT: prefix.num_tokens // unit_tokens, StoreScope.NONE: 0}
    if max_store_tokens is None:
        return by_scope[scope]
    return min(by_scope[scope], check_int("max_store_tokens", max_store_tokens, 0) // unit_tokens)
