"""`CacheBase`: what `Ledger` and `HostCache` have in common.

Both keep a prefix cache, the copies that fill the cache, and the requests that read it. A `Ledger` allocates the device
blocks. A `HostCache` serves an engine that allocates them itself. `CacheBase` has the verbs that are the same in both:

Verb | what it does
--- | ---
`launch`, `settle`, `discard` | report that a copy begins or is over, or give it up
`lookup` | returns how much of a prompt is cached
`lapse` | passes the time, and ends what expires, such as pins
`reset` | forgets all cached blocks
`watch`, `unwatch` | reports each change of the set of cached blocks

Each verb checks its arguments and the state first, so a refused call changes nothing. No verb waits, and no verb leaves
a change half done. A verb that may change the free blocks or the wait queue ends with `end_call`, which grants blocks
to waiters, reports the events to the observer, and calls the callbacks of loads and waiters that are over.

A feature outside of the kernel is an extension (`extension.py`). The constructor adds the extensions in the given
order; `add_once` adds one later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from .._common.arguments import (
    as_tuple,
    check_bool,
    check_has,
    check_int,
    check_names,
    check_text,
    check_type,
    number_of,
    shown,
)
from .._common.prefix import Prefix
from .._common.tiers import BELOW, CACHE_TIERS, DEVICE, HIT_TIERS, HOST, Tier, check_tier
from .._config.config import MAX_BLOCKS, OffloadConfig
from .._config.groups import KVCacheGroup
from .._config.tiers import new_order
from ..errors import ConfigError, DuplicateRequest, ExtensionError, InvalidArgument
from .cache import PrefixCache
from .events import Observer, WorkerFailed
from .extension import Build, LedgerExtension, check_extension, make_tier
from .hooks import GuardedOrder, Hooks
from .jobs import JobBook, Stores
from .layout import Layout
from .leases import RequestLeases
from .moves import Moves
from .plans import Completion, PrefixMatch, RequestOptions, StoreScope, TransferPlan, check_completion
from .pools import ExtentPool, LastUses, LeastRecentlyUsed, TierBlocks, absent_tier
from .protocols import BlockWatcher, EvictionOrder
from .records import NO_LIMIT, Job, LedgerRequest
from .states import JOB_QUEUED, NoEpoch
from .tokens import TokenSequence

Added = TypeVar("Added", bound=LedgerExtension)


def configured_groups(config: OffloadConfig) -> list[KVCacheGroup]:
    groups = [group for group in config.groups if isinstance(group, KVCacheGroup)]
    if len(groups) != len(config.groups):
        raise ConfigError("groups", "must hold KVCacheGroup objects")
    return groups


class EndsCall(Protocol):
    """Ends a call of a ledger, and calls `wakes`, the callbacks of loads and waiters that are over."""

    def __call__(self, wakes: Iterable[Callable[[], object]] = ()) -> None: ...


class CacheBase:
    """Base of `Ledger` and `HostCache`."""

    def __init__(
        self,
        config: OffloadConfig,
        num_device_blocks: int,
        make_device: Callable[[EvictionOrder, Moves], TierBlocks],
        *,
        num_tracked_blocks: int,
        block_bytes: int,
        clock: Callable[[], float] | None,
        observer: Observer | None,
        built_in: Iterable[LedgerExtension],
        extensions: Iterable[LedgerExtension],
    ) -> None:
        """`built_in`: the extensions that the configuration needs; their exceptions are not caught. `extensions`: the
        program's own extensions. `num_tracked_blocks`: the number of device blocks for which the ledger records the
        last step that used them."""
        check_type("config", config, OffloadConfig)
        check_int("num_device_blocks", num_device_blocks, 2, MAX_BLOCKS)
        check_int("block_bytes", block_bytes, 1)
        if observer is not None:
            check_has("observer", observer, "Observer", "observe")
        own = as_tuple("extensions", extensions, "LedgerExtension")
        for number, extension in enumerate(own):
            check_extension(extension)
            if any(extension is other for other in own[:number]):
                raise InvalidArgument("extensions", f"has one {type(extension).__name__} twice")
        self.config, self.layout, self.block_bytes = config, Layout.of(configured_groups(config)), block_bytes
        self.hooks = Hooks(self._fail)
        self.live_requests: dict[str, LedgerRequest] = {}
        self.closing: set[LedgerRequest] = set()
        """Requests that are over while a step still holds their blocks."""
        self.num_admitted = 0
        self.new_sequence: Callable[[Prefix, int], TokenSequence] = TokenSequence
        """Makes the token sequence of each prefix that a caller passes. An extension may replace it, to put KV under
        other roots."""
        self.moves = moves = Moves(observer, clock, self.hooks)
        added = (*built_in, *own)
        sizes: dict[Tier, int] = {
            DEVICE: num_device_blocks - 1,
            HOST: config.resolve_host_blocks(block_bytes),
        }
        build = Build(config, self.layout, block_bytes, sizes)
        for number, extension in enumerate(added):
            build.is_trusted = number < len(added) - len(own)
            extension.on_build(build)
        for function, is_trusted in build.sized:
            build.is_trusted = is_trusted
            function()
        orders = build.orders
        if orders and callable(config.eviction):
            raise ConfigError("extensions", "set an eviction order, and so does `eviction`")

        for tier in orders:
            if tier not in sizes:
                raise ConfigError(
                    "extensions", f"set the eviction order of {tier.name}, a tier that this ledger does not have"
                )
        latest: dict[Tier, EvictionOrder] = {}

        def order_of(tier: Tier) -> EvictionOrder:
            key, factory = ("extensions", orders[tier]) if tier in orders else ("eviction", config.eviction)
            order: EvictionOrder = new_order(factory, key) if callable(factory) else LeastRecentlyUsed()
            if any(order is other for other in latest.values()):
                raise ConfigError(key, "returned the same order twice: return a new order from each call")
            latest[tier] = order
            is_own = type(order) is not LeastRecentlyUsed and tier not in build.trusted_orders
            return GuardedOrder(self.hooks, order) if is_own else order

        device = make_device(order_of(DEVICE), moves)
        host = TierBlocks(HOST, ExtentPool(sizes[HOST]), order_of(HOST))
        # A tier's number is its index in the cache, so a tier that no extension has added is there without blocks.
        lower = [
            make_tier(build, tier, order_of(tier)) if tier in build.tiers else absent_tier(tier)
            for tier in CACHE_TIERS
            if HOST < tier <= max(build.tiers, default=HOST)
        ]
        self.cache = PrefixCache(self.layout, (device, host, *lower), order_of, LastUses(num_tracked_blocks))
        self.request_leases = RequestLeases(self.cache, self.hooks)
        self.jobs = JobBook(self.cache, moves, self.hooks, self._units_per_job(config.blocks_per_job(block_bytes)))
        interval = -(-config.window_interval_tokens // self.layout.unit_tokens)
        self.stores = Stores(self.cache, self.jobs, moves, DEVICE, BELOW, interval)
        self._extensions: list[LedgerExtension] = []
        self._trusted = len(added) - len(own)
        self._waiting = added

    def _attach(self) -> None:
        """Add the extensions. Called at the end of the constructor."""
        for number, extension in enumerate(self._waiting):
            self._add(extension, is_trusted=number < self._trusted)
        self._waiting = ()

    def _add(self, extension: LedgerExtension, *, is_trusted: bool) -> None:
        before = self.hooks.calling
        self.hooks.calling = "" if is_trusted else f"{type(extension).__name__}.on_attach"
        try:
            extension.on_attach(self)
        finally:
            self.hooks.calling = before
        object.__setattr__(extension, "is_attached", True)  # it may be frozen
        self._extensions.append(extension)
        self.hooks.add(extension, is_trusted=is_trusted)

    def find(self, kind: type[Added]) -> Added | None:
        """The extension of class `kind`, if there is one."""
        for extension in self._extensions:
            if isinstance(extension, kind):
                return extension
        return None

    def add_once(self, kind: type[Added], make: Callable[[], Added]) -> Added:
        """The extension of class `kind`. If there is none yet, adds the one that `make` returns."""
        if (found := self.find(kind)) is not None:
            return found
        made = make()
        self._add(made, is_trusted=True)
        return made

    def __repr__(self) -> str:
        present = [tier for tier in self.cache.tiers if not tier.is_absent]
        tiers = [f"{t.tier.name.lower()} {t.pool.num_free}/{t.pool.num_blocks} free" for t in present]
        return f"<{type(self).__name__} {', '.join(tiers)}, {len(self.live_requests)} requests>"

    # -- how a call begins and ends -------------------------------------------------------------------------------

    def own(self, request: object) -> LedgerRequest:
        """Raise if `request` belongs to another ledger, or if the call comes from inside a hook."""
        raise NotImplementedError

    def _foreign(self, request: object) -> InvalidArgument:
        advice = "" if isinstance(request, LedgerRequest) else ", which is not a LedgerRequest"
        return InvalidArgument("request", f"was not admitted by this ledger: {shown(request)}{advice}")

    end_call: EndsCall
    """End a call whose change is complete: grant blocks to waiters, report the events, and call `wakes`. Every verb
    that may change the free blocks or the wait queue ends with it, including those of extensions."""

    def report_errors(self) -> None:
        """From now on, report the errors of the program's extensions to the observer (`WorkerFailed`), and raise none
        of them. A runtime uses this, because after a verb it has work of its own, such as ending a scope or resetting
        the disk, which must be done even if an extension fails. `KeyboardInterrupt` and `SystemExit` in a hook are the
        exception: the verb raises `ExtensionError` for them."""
        moves = self.moves
        self.hooks.report_error = lambda error: moves.note(WorkerFailed(error))

    def _fail(self) -> None:
        """Raise the error of a hook. The call returns no plans, and no caller would launch its jobs. So discard all
        queued jobs, also those of earlier calls."""
        error = self.hooks.take_error()
        assert error is not None
        wakes: list[Callable[[], object]] = []
        for job in tuple(self.jobs.unsettled.values()):
            if job.job_id in self.jobs.unsettled and job.state is JOB_QUEUED:
                wakes += self.jobs.end_claims(self.jobs.discard(job))
        with suppress(ExtensionError):  # the first one is raised
            self.end_call(wakes)
        raise error

    def waits_for(self, request: LedgerRequest) -> LedgerRequest | None:
        """The other request whose load `request` waits for before it is matched. None if there is no such request."""
        return None

    def rematch(self, request: LedgerRequest) -> None:
        """Match `request`, which is PINNED, again."""
        raise NotImplementedError

    def match_all_again(self) -> None:
        """Match again the live requests whose match has lost blocks."""
        raise NotImplementedError

    def _units_per_job(self, num_blocks: int) -> Sequence[int]:
        return [max(1, num_blocks // max(1, component.width)) for component in self.layout.components]

    def possible_publishers(self) -> Iterable[LedgerRequest]:
        """The requests that may still publish or store KV. Some of them may be over."""
        raise NotImplementedError

    def has_begun(self, request: LedgerRequest) -> bool:
        """Whether `request` may have computed KV, or may have tokens that were sampled from KV that it has read. If
        False, the request begins with its next match, which is still to come or may be repeated."""
        raise NotImplementedError

    def pending_wakes(self) -> list[Callable[[], object]]:
        """The callbacks of requests whose last answer was `PENDING`. Only a `HostCache` gives that answer."""
        return []

    def sequence_of(self, prefix: Prefix) -> TokenSequence:
        """The tokens of `prefix`, in units of the layout. Refuses a call from inside a hook."""
        if self.hooks.calling:
            self.hooks.refuse_verb()
        sequence = self.new_sequence(check_type("prefix", prefix, Prefix), self.layout.unit_tokens)
        for hook in self.hooks.on_sequence:
            hook(sequence)
        return sequence

    # -- admission ------------------------------------------------------------------------------------------------

    def _checked(self, prefix: Prefix, request_id: str | None, options: RequestOptions) -> LedgerRequest:
        """Check the arguments of `admit`, and return the record of the new request. Changes nothing."""
        if options:
            check_names(f"{type(self).__name__}.admit", options, RequestOptions)
        if self.hooks.calling:
            self.hooks.refuse_verb()
        unit = self.layout.unit_tokens
        sequence = self.new_sequence(check_type("prefix", prefix, Prefix), unit)
        limit, alignment, may_store = sequence.num_prompt_units, 1, NO_LIMIT
        if options:
            limit, alignment, may_store = _limits(prefix, sequence, unit, options)
        return self._request_class(
            self.new_name(request_id), sequence, self.cache.epoch, self.num_admitted, limit, alignment,
            store_limit=may_store, ledger=self, evictions_before=self.cache.tiers[BELOW].num_evicted,
        )  # fmt: skip

    _request_class: type[LedgerRequest] = LedgerRequest

    def new_name(self, request_id: str | None) -> str:
        """`request_id`, or a name that no live request has."""
        if request_id is not None:
            name = check_text("request_id", request_id)
            if name in self.live_requests:
                raise DuplicateRequest("request_id", f"another live request has the id {name!r}")
            return name
        name = f"request-{self.num_admitted}"
        while name in self.live_requests:
            name += "'"
        return name

    def enrol(self, request: LedgerRequest, parent: LedgerRequest | None = None) -> None:
        """Make `request` live. `parent`: the request that it was forked from, if any."""
        self.num_admitted += 1
        self.live_requests[request.request_id] = request
        for hook in self.hooks.on_admitted:
            hook(request, parent)

    # -- verbs that differ ----------------------------------------------------------------------------------------

    def lookup(self, prefix: Prefix) -> PrefixMatch:
        """The hit of a request for `prefix`. Changes nothing, not even the eviction order."""
        raise NotImplementedError

    def lost_to_reset(self, request: Any) -> bool:
        """Whether a reset came after the load was over and before the request began to compute."""
        raise NotImplementedError

    def abandon_load(self, request: Any) -> None:
        """Stop waiting for a load."""
        raise NotImplementedError

    def release(self, request: Any, reason: str = "closed_early") -> tuple[TransferPlan, ...]:
        """End the request, and release its blocks and leases."""
        raise NotImplementedError

    def invalidated(self, sequence: TokenSequence, first: int, stop: int) -> list[Callable[[], object]]:
        """Report to the extensions (`on_invalidated`) that the KV of `sequence` from unit `first` on is wrong, and
        discard the jobs that they return. Returns the callbacks to call."""
        wakes: list[Callable[[], object]] = []
        for hook in self.hooks.on_invalidated:
            for job in hook(sequence, first, stop):
                if self.jobs.unsettled.get(job.job_id) is job and job.state is JOB_QUEUED:
                    wakes += self.jobs.end_claims(self.jobs.discard(job))
        return wakes

    def end_invalidation(
        self, readers: tuple[LedgerRequest, ...], wakes: Iterable[Callable[[], object]]
    ) -> tuple[LedgerRequest, ...]:
        """End a call that returns `readers`. If the call raises an `ExtensionError` instead, the error carries the
        readers, because the caller must abort them."""
        try:
            self.end_call(wakes)
        except ExtensionError as error:
            error.readers = readers
            raise
        return readers

    # -- jobs -----------------------------------------------------------------------------------------------------

    def launch(self, job_id: int) -> bool:
        """Mark a queued job as launched. Call it before the copy begins, because a copy cannot be recalled. If it
        returns False, the job was discarded, so do not copy."""
        if self.hooks.calling:
            self.hooks.refuse_verb()
        job = self.jobs.unsettled.get(check_int("job_id", job_id, 0))
        is_wanted = job is not None and self.jobs.launch(job)
        self.moves.report()
        return is_wanted

    def settle(self, completion: Completion) -> None:
        """Settle a launched job: publish its blocks, release its leases, end the loads that waited for it, grant blocks
        to waiters, and call the wakes, in this order."""
        check_completion(completion)
        if self.hooks.calling:
            self.hooks.refuse_verb()
        self.end_call(self.jobs.end_claims(self.jobs.settle(completion)))

    def discard(self, job_id: int) -> None:
        """Give up a job that was never launched. The requests that wait for it compute instead."""
        if self.hooks.calling:
            self.hooks.refuse_verb()
        job = self.jobs.unsettled.get(check_int("job_id", job_id, 0))
        if job is not None:
            self.end_call(self.jobs.end_claims(self.jobs.discard(job)))

    def plans_of(self, jobs: Iterable[Job]) -> tuple[TransferPlan, ...]:
        """End a call that has planned `jobs`. Returns the plans to launch."""
        self.end_call()
        return tuple([job.plan for job in jobs])

    # -- the whole ------------------------------------------------------------------------------------------------

    @property
    def next_lapse(self) -> float:
        """The time at which to call `lapse` next; infinity if nothing expires."""
        asks = self.hooks.ask_next_lapse
        if not asks:
            return math.inf
        due = min([ask() for ask in asks])
        if (error := self.hooks.take_error()) is not None:  # nothing has changed, so there is nothing to complete
            raise error
        return due

    def lapse(self, now: float) -> None:
        """End the pins and hints that expire by the time `now`."""
        if self.hooks.calling:
            self.hooks.refuse_verb()
        seconds = check_time("now", now)
        for hook in self.hooks.on_lapse:
            hook(seconds)
        self.end_call()

    def reset(self, tier: Tier | None = None) -> None:
        """Forget all cached blocks, or those of `tier`. Every pin ends, unless only a tier below the host is reset.

        After a reset of all tiers or of the device, no request begins to compute with KV from before it. The reset
        drops the match of a request without blocks. If the load of a request is not over, the request loses its device
        hit, its load ends with no tokens, and the request computes from its first token (with a `HostCache`: from the
        end of the engine's own hit). After a reset of a lower tier alone, such a load continues: its KV is not wrong. A
        request whose load is over, or that computes without a load, keeps its blocks and goes on, unless its caller has
        not learned yet that the load is over: see `lost_to_reset`. Requests from before the reset publish and store
        nothing any more, unless only a tier below the device is reset."""
        if self.hooks.calling:
            self.hooks.refuse_verb()
        if tier is not None:
            tiers = [each.tier.name for each in self.cache.tiers if not each.is_outside]
            if check_tier("tier", tier).name not in tiers:
                raise InvalidArgument("tier", f"must be a tier that this cache can forget: {', '.join(tiers)}")
        orders = self.cache.new_orders() if tier is None else []  # before any change: a program's factory may raise
        for hook in self.hooks.on_resetting:
            hook(tier)
        if tier is None:
            self.cache.reset(orders)
        else:
            self.cache.reset_tier(tier, self.jobs.unsettled.values())
        for hook in self.hooks.on_reset:
            hook(tier)
        if tier is None or tier in HIT_TIERS:  # matches have no leases in other tiers
            self.match_all_again()
        if tier is DEVICE:
            for request in (*self.live_requests.values(), *self.closing):
                if request.num_units and request.epoch == self.cache.epoch:
                    request.epoch = NoEpoch.ORPHANED
        self.end_call()

    def watch(self, watcher: BlockWatcher) -> None:
        """Report to `watcher` every block that becomes cached or is no longer cached, except blocks that an engine
        owns. Watchers that were added before stay."""
        check_has("watcher", watcher, "BlockWatcher", "part_changed all_cleared")
        self.cache.watch(watcher)

    def unwatch(self, watcher: BlockWatcher) -> None:
        """Stop reporting to `watcher`."""
        check_has("watcher", watcher, "BlockWatcher", "part_changed all_cleared")
        self.cache.unwatch(watcher)


def _limits(prefix: Prefix, sequence: TokenSequence, unit_tokens: int, options: RequestOptions) -> tuple[int, int, int]:
    """What `options` set, in units: the limit of the hit, the alignment of the hit, and the limit of the stores."""
    reads_cache, max_hit_tokens = options.get("reads_cache", True), options.get("max_hit_tokens")
    store, max_store_tokens = options.get("store", StoreScope.ALL), options.get("max_store_tokens")
    hit_alignment = options.get("hit_alignment", 1)
    if reads_cache is not True:
        check_bool("reads_cache", reads_cache)
    limit = sequence.num_prompt_units if reads_cache else 0
    if max_hit_tokens is not None:
        limit = min(limit, check_int("max_hit_tokens", max_hit_tokens, 0) // unit_tokens)
    alignment = 1
    if type(hit_alignment) is not int or hit_alignment != 1:
        alignment = math.lcm(unit_tokens, check_int("hit_alignment", hit_alignment, 1)) // unit_tokens
    may_store = NO_LIMIT
    if store is not StoreScope.ALL or max_store_tokens is not None:
        may_store = store_limit(prefix, unit_tokens, store, max_store_tokens)
    return limit, alignment, may_store


def check_time(name: str, value: object) -> float:
    seconds = number_of(value)
    if seconds is None:
        raise InvalidArgument(name, f"must be a number of seconds, got {shown(value)}")
    return seconds


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
