"""Store policies: which published blocks are stored in the host, and when.

`EagerStore` stores all blocks at their commit. `LazyStore` stores blocks that are about to be evicted. `SelectiveStore`
stores, at their commit, blocks that were requested before. `NoStore` stores none. The `StoreScope` and the limit of a
request restrict the stores further.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol, Self

import attrs

from .._common.arguments import check_has, check_int
from .._config.config import MAX_BLOCKS
from .._eviction.counts import HitCounts, RecentPrompts
from .._kernel.base import CacheBase
from .._kernel.extension import LedgerExtension
from .._kernel.layout import Layout
from .._kernel.records import LedgerRequest
from .._kernel.tokens import TokenSequence
from ..errors import ConfigError

MAX_SEEN = 1_000_000
MAX_COUNTED_TOKENS = 2**34
NUM_RECENT = 32
"""The default watermark of `LazyStore` follows the lengths of the last requests, about this many."""
COUNTED_TOKENS = 2**24
"""Default of `SelectiveStore.max_counted_tokens`."""


class StorePolicy(Protocol):
    """Chooses the published blocks that are stored in the host. All positions are units of the layout. `EagerStore` is
    a base for your own policies.

    If a method raises, the ledger raises the same error. `admit`, `commit` and `offer` have then changed nothing;
    `release` has ended the request and stores nothing.
    """

    @property
    def num_watermark_blocks(self) -> int:
        """0: wanted blocks are stored immediately. Otherwise this is the watermark: a wanted block is stored once it is
        among the first `num_watermark_blocks` device blocks that the next allocations would take. The ledger reads the
        value before each write-back, so it may change. If it is 0 when the ledger is made, the ledger never reads it
        again."""
        ...

    def for_ledger(self, layout: Layout, num_device_blocks: int) -> StorePolicy:
        """Returns the policy for one ledger. Return a new object if the policy counts requests or depends on the size
        of the pool."""
        ...

    def seen(self, request: LedgerRequest, first: int, stop: int) -> None:
        """Units `[first, stop)` of the tokens of `request` were requested. The ledger calls this at admission for the
        units of the prompt, and when the request is done for the generated units. It makes no call for requests that
        store nothing."""
        ...

    def wanted_stop(self, request: LedgerRequest) -> int:
        """The unit up to which the published blocks of `request` should be in the host. Called at every commit, and
        once more when the request is done."""
        ...


class EagerStore:
    """Stores every published block immediately. A base for your own policies."""

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
    """Stores blocks just before their eviction: once the allocation of `watermark_blocks` more device blocks would
    evict them.

    `watermark_blocks=None`: the blocks of the longest request seen lately, at least an eighth and at most half of the
    device pool. If one allocation takes more blocks than the watermark, blocks may be evicted before they are stored.
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
        return _AdaptiveLazyStore(layout, num_device_blocks)


class _AdaptiveLazyStore(EagerStore):
    """`LazyStore()` of one ledger: the watermark follows the length of requests."""

    def __init__(self, layout: Layout, num_device_blocks: int) -> None:
        self._width = layout.width
        self._least, self._most = max(layout.width, num_device_blocks // 8, 1), num_device_blocks // 2
        self._recent: deque[int] = deque([self._least], maxlen=2 * NUM_RECENT)
        """Two lengths of a request: of its prompt when it is admitted, and of all its tokens when it is done."""

    def __repr__(self) -> str:
        return "LazyStore()"

    @property
    def num_watermark_blocks(self) -> int:
        return max(self._least, min(max(self._recent), self._most))

    def seen(self, request: LedgerRequest, first: int, stop: int) -> None:
        self._recent.append(stop * self._width)


@attrs.define(eq=False)
class SelectiveStore(EagerStore):
    """Stores, at their commit, the blocks of prefixes that were requested at least `min_seen` times.

    The counts include prefixes that no tier holds any more. They cover up to `max_counted_tokens` tokens, at 4 bytes
    each.
    """

    min_seen: int = attrs.field(default=2, validator=_int_in(1, MAX_SEEN))
    max_counted_tokens: int = attrs.field(default=COUNTED_TOKENS, validator=_int_in(1, MAX_COUNTED_TOKENS))
    counts: HitCounts | None = attrs.field(default=None, init=False)
    """The counts in the policy of a ledger; None in a configuration."""

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


class StorePolicies(LedgerExtension):
    """Calls a store policy. `EagerStore` does not need this extension, because the kernel itself stores all blocks."""

    def __init__(self, policy: StorePolicy) -> None:
        self._policy = policy
        self._is_known = type(policy) in (NoStore, LazyStore, _AdaptiveLazyStore, SelectiveStore)

    def ask_admit(self, request: LedgerRequest) -> None:
        """Calls the policy before the request is admitted, because the program's own policy may raise."""
        if request.store_limit:
            self._policy.seen(request, 0, request.sequence.num_prompt_units)

    def on_finishing(self, request: LedgerRequest) -> None:
        self._policy.seen(request, request.sequence.num_prompt_units, request.published)

    def ask_store_stop(self, request: LedgerRequest) -> int:
        stop = self._policy.wanted_stop(request)
        return stop if self._is_known else check_int("store_policy.wanted_stop", stop, 0)


class RequestCounts(LedgerExtension):
    """Counts how often prefixes were requested. The tiers below the host use the counts."""

    counts: HitCounts

    def __init__(self, *, has_remote: bool) -> None:
        self.recent = RecentPrompts()
        self._has_remote = has_remote
        """Whether `recent` is kept."""

    def on_attach(self, ledger: CacheBase) -> None:
        self.counts = HitCounts(ledger.layout, COUNTED_TOKENS)

    def on_admitted(self, request: LedgerRequest, parent: LedgerRequest | None) -> None:
        if request.store_limit and parent is None:
            self._see(request, 0, request.sequence.num_prompt_units)

    def on_finishing(self, request: LedgerRequest) -> None:
        self._see(request, request.sequence.num_prompt_units, request.published)

    def _see(self, request: LedgerRequest, first: int, stop: int) -> None:
        self.counts.see(request.sequence, first, stop)
        if self._has_remote:
            self.recent.add(request.sequence)

    def requested_stop(self, sequence: TokenSequence, limit: int) -> int:
        """The unit, at most `limit`, up to which `sequence` was requested twice."""
        return self.counts.stop_of(sequence, limit, 2)


def store_policy_for(value: Any, layout: Layout, num_device_blocks: int) -> StorePolicy:
    """The policy of one ledger, for `OffloadConfig.store_policy`, which is a name or an object."""
    named: dict[str, Any] = {"eager": EagerStore, "lazy": LazyStore, "selective": SelectiveStore, "off": NoStore}
    given = named[value]() if isinstance(value, str) else value
    policy: StorePolicy = given.for_ledger(layout, num_device_blocks)
    name = "store_policy.for_ledger"
    check_has(name, policy, "store policy", "seen wanted_stop num_watermark_blocks", ConfigError)
    check_int("store_policy.num_watermark_blocks", policy.num_watermark_blocks, 0, MAX_BLOCKS, ConfigError)
    return policy
