"""The seam between the kernel and its extensions: the hooks by which the kernel reports changes and asks questions.

A feature outside of the kernel is a `LedgerExtension`. Its docstring has the rules of hooks. The kernel calls a hook
only on the extensions that override it, in the order in which they were added, so unused hooks cost nothing. Only
`ask_admit` is called in reverse order: the program's own extensions may refuse a request before a store policy counts
it.

The ledger grants blocks that a hook gives back to waiters at the end of the call. Calls that free no blocks themselves,
such as `admit` and `accept`, do not serve the wait queue; in that case the next call that serves the wait queue grants
the blocks.

Extensions stay interpreted if the kernel is compiled, so programs may derive from `LedgerExtension`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from types import MappingProxyType
from typing import Any

from .._common.arguments import check_callable, check_int, check_type, shown
from .._common.tiers import LOWER_TIERS, TIERS, Tier, check_tier
from .._config.config import MAX_BLOCKS
from ..errors import ConfigError, InvalidArgument
from .layout import Component, Layout
from .pools import TierBlocks
from .protocols import EvictionOrder
from .records import Job, Lease, LedgerRequest, Run
from .tokens import TokenSequence


class LedgerExtension:
    """Base of the features of the package, and of your own. Pass instances as `extensions=` to a ledger or a runtime.

    Override the hooks that you need; the ledger never calls the others. It calls extensions in the order in which they
    were added: those of the configuration first, then yours. Only `ask_admit` is called in reverse order. An instance
    belongs to one ledger. The constructor of the ledger refuses an async hook, a generator as an `on_` hook, and
    another method whose name begins with `on_`, `ask_` or `report_`.

    - An `on_` hook reports a change, before or after it. The hook may lease and release, take and give blocks, and cut
      and split runs, through `ledger.cache`.
    - An `ask_` hook only answers a question. In addition, `ask_blocks` may release leases and give blocks, and
      `ask_take` may evict blocks.
    - A `report_` hook is called by `check_integrity`. Return the blocks and leases that the extension keeps. If the
      hook returns another type, `check_integrity` raises `ExtensionError`.

    Hook | How the answers of several extensions are combined
    --- | ---
    `ask_admit`, `ask_commit` | no answer: each may raise to refuse, and then nothing has changed
    `ask_store_stop` | the minimum, which includes the answer of the store policy
    `ask_load_stop`, `ask_take` | the last answer: each extension gets the answer of the extension before it
    `ask_deferred` | the first True
    `ask_blocks` | the first True; a True that has freed nothing counts as False
    `ask_first_wrong`, `ask_next_lapse` | the minimum
    `ask_former_readers`, `report_leases`, `report_requests`, `report_blocks` | all answers together

    A hook must not call a verb of the ledger. Only `on_build`, `on_attach`, `ask_admit`, `ask_commit` and the `report_`
    hooks may raise, and their exceptions reach the caller. If another hook raises, returns a value of a wrong type or
    calls a verb, the ledger ignores its answer, completes the change, discards all queued copies, and raises
    `ExtensionError` at the end of the call. A request or a pin that the call should have returned is over. A runtime
    keeps the copies, and reports the error as the event `worker_failed` instead of raising it. So does a `CopyQueue`
    for an error at the end of a copy.

    A `HostCache` has no block tables and no wait queue, so it does not call `on_allocated`, `on_load_over`,
    `on_published`, `on_step`, `ask_commit`, `ask_load_stop`, `ask_deferred`, `ask_blocks`, `ask_first_wrong` and
    `ask_former_readers`.
    """

    is_attached = False
    """Whether a ledger has this extension."""

    # -- construction ---------------------------------------------------------------------------------------------

    def on_build(self, build: Build) -> None:
        """Called before the cache is made: add tiers below the host, or set the eviction order of a tier. May raise."""

    def on_attach(self, ledger: Any) -> None:
        """Called once, when the extension is added to `ledger`. May raise."""

    # -- a request ------------------------------------------------------------------------------------------------

    def ask_admit(self, request: LedgerRequest) -> None:
        """`request` is about to be admitted, and is not matched yet. Raise to refuse it. Not called for `lookup`, pins
        and prefetches."""

    def on_admitted(self, request: LedgerRequest, parent: LedgerRequest | None) -> None:
        """`request` is live. It is not matched yet or, if it is a fork of `parent`, is RUNNING."""

    def on_matched(self, request: LedgerRequest) -> None:
        """The leases of the hit are taken. Called after each match of `request`."""

    def on_allocated(self, request: LedgerRequest) -> None:
        """`request` now has block tables."""

    def on_load_over(self, request: LedgerRequest) -> None:
        """The load of `request` is over. Its tables have null blocks for units that the load has not brought. Called
        again at the end of the step if the request is DRAINING."""

    def ask_commit(self, request: LedgerRequest, num_computed_tokens: int) -> None:
        """`request` is about to commit. Raise to refuse the commit."""

    def on_published(self, request: LedgerRequest, first: int) -> None:
        """Called at each commit of a request that may publish, because its epoch is current. The units from `first` up
        to `request.published`, if any, are cached now. Their stores are not planned yet."""

    def on_finishing(self, request: LedgerRequest) -> None:
        """`request` is done. Its last stores are not planned yet."""

    def on_leaving(self, request: LedgerRequest, is_last: bool) -> None:
        """`request` is about to give up its blocks: for good if `is_last`, else it may be resumed."""

    def on_released(self, request: LedgerRequest) -> None:
        """`request` is over and owns nothing. This is the last call about the request."""

    def on_step(self, request: LedgerRequest) -> None:
        """A step with `request` begins."""

    def on_sequence(self, sequence: TokenSequence) -> None:
        """A verb other than `admit` is about to look up `sequence` in the index."""

    # -- blocks ---------------------------------------------------------------------------------------------------

    def on_job_settled(self, job: Job) -> None:
        """`job` is settled or discarded, and its leases are released."""

    def on_withdrawn(self) -> None:
        """Cached blocks were withdrawn because their bytes are wrong. No request has been matched again yet."""

    def on_invalidated(self, sequence: TokenSequence, first: int, stop: int) -> list[Job]:
        """The KV of `sequence` from unit `first` on is wrong, and so is all KV that was computed from it. The units of
        `sequence` before `stop` were published. `stop` may equal `first`: then `sequence` may have only a part of unit
        `first`, which other requests may have completed and published. Return the queued jobs to discard."""
        return []

    def on_resetting(self, tier: Tier | None) -> None:
        """All cached blocks, or those of `tier`, are about to be forgotten."""

    def on_reset(self, tier: Tier | None) -> None:
        """The blocks of `on_resetting` are forgotten. No request has been matched again yet."""

    def on_lapse(self, now: float) -> None:
        """End all pins, hints and the like that expire by the time `now`. Called by `lapse`."""

    # -- questions ------------------------------------------------------------------------------------------------

    def ask_store_stop(self, request: LedgerRequest) -> int:
        """The unit up to which a commit, an offer or the end of `request` may store its blocks in the host.
        Preemptions, demotions and lazy stores do not ask."""
        raise NotImplementedError

    def ask_load_stop(self, request: LedgerRequest, stop: int) -> int:
        """The unit, at most `stop`, up to which the host hit of `request` is loaded."""
        raise NotImplementedError

    def ask_take(self, tier: Tier, run: Run, component: Component, num_units: int) -> int:
        """The number of units, at most `num_units`, that a copy to `tier`, a tier below the device, may bring. They are
        units of `component` on the path of `run`, which leases protect. The hook may evict unpinned parts of `tier`
        (`TierBlocks.evict`, then `PrefixCache.tidy`). If it does not, the kernel evicts the blocks that are missing.
        Units that are not granted count as skipped (`StoreSkipped`)."""
        raise NotImplementedError

    def ask_deferred(self, run: Run, stop: int) -> bool:
        """Whether the extension itself stores the units up to `stop` on the path of `run` later."""
        raise NotImplementedError

    def ask_blocks(self) -> bool:
        """Free device blocks that the extension keeps. Called if the head of the wait queue lacks blocks and no request
        can free any. Returns whether it has freed some."""
        raise NotImplementedError

    def ask_next_lapse(self) -> float:
        """The time at which `on_lapse` has to be called next; infinity if there is nothing to end."""
        raise NotImplementedError

    def ask_first_wrong(self, request: LedgerRequest, sources: Mapping[LedgerRequest, int]) -> int | None:
        """The first unit at which `request` may have copied wrong KV from one of `sources`. None if it has copied none.
        `sources` maps each source to its first wrong token."""
        raise NotImplementedError

    def ask_former_readers(self) -> Iterable[LedgerRequest]:
        """Requests that are over, but whose cached units an invalidation may still have to find."""
        raise NotImplementedError

    # -- integrity ------------------------------------------------------------------------------------------------

    def report_leases(self) -> Iterable[Lease]:
        """The leases of the extension. The check compares the references of each part with all leases."""
        raise NotImplementedError

    def report_requests(self) -> Iterable[LedgerRequest]:
        """Request records of the extension that are not live requests, and may own leases and blocks."""
        raise NotImplementedError

    def report_blocks(self, tier: Tier) -> Iterable[array[int]]:
        """Blocks of `tier` that the extension has taken from the pool and holds itself."""
        raise NotImplementedError

    def report_job(self, job: Job) -> None:
        """Raise `IntegrityError` if `job` violates an invariant of the extension."""


_PREFIXES = ("on_", "ask_", "report_")
HOOKS = tuple(name for name in vars(LedgerExtension) if name.startswith(_PREFIXES))


class Build:
    """What extensions may add before the cache is made: tiers below the host, and eviction orders."""

    def __init__(self, config: Any, layout: Layout, block_bytes: int, sizes: dict[Tier, int]) -> None:
        self.config = config
        self.layout = layout
        self.block_bytes = block_bytes
        self.sizes: Mapping[Tier, int] = MappingProxyType(sizes)
        """Number of blocks of each tier, without the null block. Complete when the functions of `when_sized` are
        called."""
        self._sizes = sizes
        self.sized: list[tuple[Callable[[], object], bool]] = []
        """Functions to call, each with `is_trusted` of its extension."""
        self.tiers: dict[Tier, Callable[[EvictionOrder], TierBlocks]] = {}
        self.orders: dict[Tier, Callable[[], EvictionOrder]] = {}
        self.trusted_orders = set[Tier]()
        """Tiers whose order is that of a built-in extension."""
        self.is_trusted = True
        """Whether the extension that is called is built in."""

    def add_tier(self, tier: Tier, num_blocks: int, make: Callable[[EvictionOrder], TierBlocks]) -> None:
        """Add a tier below the host whose blocks are in the index. `make` is called with the eviction order of the
        tier."""
        if tier not in LOWER_TIERS or not TIERS[tier].is_indexed:
            raise ConfigError("extensions", f"cannot add the tier {getattr(tier, 'name', shown(tier))}")
        if tier in self.sizes:
            raise ConfigError("extensions", f"add the tier {tier.name} twice")
        check_callable("make", make)
        self._sizes[tier] = check_int("num_blocks", num_blocks, 1, MAX_BLOCKS)
        self.tiers[tier] = make

    def when_sized(self, function: Callable[[], object]) -> None:
        """Call `function` once all extensions have added their tiers. It may set eviction orders."""
        check_callable("function", function)
        self.sized.append((function, self.is_trusted))

    def set_order(self, tier: Tier, make: Callable[[], EvictionOrder]) -> None:
        """Use the eviction order that `make` returns for `tier`. Refused if `OffloadConfig.eviction` is a factory."""
        check_callable("make", make)
        if check_tier("tier", tier) in self.orders:
            raise ConfigError("extensions", f"two of them set the eviction order of {tier.name}")
        self.orders[tier] = make
        if self.is_trusted:
            self.trusted_orders.add(tier)


def make_tier(build: Build, tier: Tier, order: EvictionOrder) -> TierBlocks:
    """The blocks of a tier that was added, with the eviction order `order`."""
    blocks = build.tiers[tier](order)
    if not isinstance(blocks, TierBlocks) or blocks.tier is not tier or blocks.pool.num_blocks != build.sizes[tier]:
        problem = f"must return TierBlocks of {build.sizes[tier]} blocks for {tier.name}: {shown(blocks)}"
        raise ConfigError("extensions", problem)
    return blocks


def check_extension(extension: object) -> LedgerExtension:
    """Refuse a program's extension with a method that looks like a hook and is none, with an async hook, and one that
    another ledger has."""
    check_type("extensions", extension, LedgerExtension)
    assert isinstance(extension, LedgerExtension)
    kind = type(extension)
    for name in dir(kind):
        if not name.startswith(_PREFIXES) or getattr(kind, name) is getattr(LedgerExtension, name, None):
            continue
        if name not in HOOKS:
            raise InvalidArgument("extensions", f"{kind.__name__}.{name} is not a hook of LedgerExtension")
        hook, is_report = getattr(kind, name), name.startswith("on_") and name != "on_invalidated"
        if iscoroutinefunction(hook) or isasyncgenfunction(hook):
            problem = f"{kind.__name__}.{name} is async, but hooks are called without await"
            raise InvalidArgument("extensions", problem)
        if is_report and isgeneratorfunction(hook):
            problem = f"{kind.__name__}.{name} is a generator, so calling it would run nothing"
            raise InvalidArgument("extensions", problem)
    if extension.is_attached:
        raise InvalidArgument("extensions", f"has a {kind.__name__} that belongs to another ledger: make a new one")
    return extension
