"""The forecast: for each size of host memory and disk, the hits, copies, computed tokens and cost of a trace."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from types import MappingProxyType

import attrs
import numpy as np
from numpy.typing import NDArray

from .._config.quotas import Quota, Quotas
from .._runtime.costs import WORTH
from ..errors import ConfigError
from .distances import Counts, StackDistances, knee
from .replay import predictions, replay
from .trace import Trace

# -- timing ----------------------------------------------------------------------------------------------------------
#
# Time to the first token, from hits: one queue for computing, and one for each link.
#
# A request's copies begin after those before it on their link. Its prompt is computed after the request before, and
# after its own copies have landed. So it waits for the longer of the two queues, then computes the tokens that missed.
# Its answer delays the next prompt by its share of the service's time. The speeds are those of the whole service.

Seconds = NDArray[np.float64]


@attrs.frozen(kw_only=True)
class Speeds:
    prefill_tokens_per_s: float
    host_gbs: float
    """GB/s from host memory to the device."""
    disk_gbs: float
    decode_tokens_per_s: float = math.inf
    """Speed of all answers together. Infinity: they take no time from prompts."""


@attrs.frozen
class FirstToken:
    times_s: Seconds
    """Time to the first token of each request."""
    busy: float
    """Compute time of all requests, divided by the duration of the trace. From 1 on, times grow with the length of the
    trace."""

    @property
    def p50_s(self) -> float:
        return float(np.median(self.times_s))

    @property
    def p90_s(self) -> float:
        return float(np.percentile(self.times_s, 90))


def first_token(trace: Trace, host_s: Seconds, disk_s: Seconds, computed: Counts, speeds: Speeds) -> FirstToken:
    """`host_s`, `disk_s`: seconds that each request's copies take. `computed`: tokens that each request computes."""
    compute_s = computed / speeds.prefill_tokens_per_s
    answer_s = np.array([each.num_output_tokens for each in trace.requests]) / speeds.decode_tokens_per_s
    host_free = disk_free = compute_free = -np.inf
    times = list[float]()
    columns = (each.tolist() for each in (host_s, disk_s, compute_s, answer_s))
    for request, of_host, of_disk, of_prompt, of_answer in zip(trace.requests, *columns, strict=True):
        begun = now = request.at_s
        if of_host:
            host_free = max(host_free, now) + of_host
            begun = max(begun, host_free)
        if of_disk:
            disk_free = max(disk_free, now) + of_disk
            begun = max(begun, disk_free)
        first_s = max(begun, compute_free) + of_prompt
        times.append(first_s - now)
        compute_free = first_s + of_answer
    busy = float(compute_s.sum() + answer_s.sum()) / trace.duration_s if trace.duration_s > 0 else 0.0
    return FirstToken(np.array(times), busy)


# -- forecast --------------------------------------------------------------------------------------------------------

STORES = ("eager", "lazy")
EVICTIONS = ("lru", "learned")
MAX_OWN_SIZES = 8
GIB = 2**30
DAY_S = 86_400


def binary_size(num_bytes: float) -> str:
    """A size such as `64 GiB`."""
    size, unit = num_bytes / 2**10, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if size >= 1024:
            size, unit = size / 1024, larger
    return f"{size:,.4g} {unit}"


@attrs.frozen
class Sizes:
    """Bytes of KV. Without host sizes: the device's, doubled until everything fits."""

    kv_bytes_per_token: int
    device: int
    host: tuple[int, ...] = ()
    disk: tuple[int, ...] = ()


@attrs.frozen
class Prices:
    """Price of a GiB per month, in any currency."""

    host: float
    disk: float


@attrs.frozen
class Kind:
    """What a row assumes besides sizes."""

    store: str = "eager"
    eviction: str = "lru"
    hints: str = "none"
    """Where hints come from: one of `HINTS`."""
    has_quotas: bool = False

    def __str__(self) -> str:
        hints = "" if self.hints == "none" else f", hints: {self.hints}"
        return f"{self.store}, {self.eviction}{hints}{', quotas' if self.has_quotas else ''}"


BY_DISTANCE = Kind()
"""The kind that needs no replay."""
NO_STORE = Kind("off")


@attrs.frozen(kw_only=True)
class Row:
    """One configuration. Hits are blocks, then the tokens of these that need not be computed."""

    name: str
    host_bytes: int
    disk_bytes: int = 0
    kind: Kind = BY_DISTANCE
    blocks: tuple[int, int, int] = (0, 0, 0)
    """Hits on the device, in host memory, on disk."""
    tokens: tuple[int, int, int] = (0, 0, 0)
    num_computed_tokens: int
    loaded_bytes: int = 0
    stored_bytes: int = 0
    age_s: float | None = None
    """Age of blocks at eviction from the lowest tier (median). Blocks that are not requested again within this time are
    lost. None: nothing was evicted, or a replay does not know it."""
    has_evicted: bool = False
    is_disk_idle: bool = False
    """Whether a runtime would not use the disk, because computing is faster. Then no block hits there."""
    first_token: FirstToken | None = None
    price: float | None = None
    """Price per month."""
    tenants: Mapping[str, int] = MappingProxyType({})
    """Blocks hit by the requests of each tenant of the trace."""

    @property
    def num_hit_blocks(self) -> int:
        return sum(self.blocks)


@attrs.define(eq=False)
class _Hits:
    """Blocks that each request hits, tier by tier, blocks stored, and ages at eviction, if they are known."""

    device: Counts
    host: Counts
    disk: Counts
    num_stored: int = 0
    ages: list[float] | None = None


@attrs.define(eq=False, slots=False)
class Forecast:
    """Raises `ConfigError` for a device of less than two blocks, a host of less than one, and for hints and quotas that
    the trace has no fields for. `quotas`: by tenant, in bytes."""

    trace: Trace
    sizes: Sizes
    speeds: Speeds | None = None
    prices: Prices | None = None
    stores: tuple[str, ...] = ("eager",)
    evictions: tuple[str, ...] = ("lru",)
    hints: tuple[str, ...] = ("none",)
    quotas: Mapping[str, Quota] = MappingProxyType({})

    def __attrs_post_init__(self) -> None:
        self.block_bytes = self.sizes.kv_bytes_per_token * self.trace.block_tokens
        self.num_device = self._blocks("device", self.sizes.device, 2)
        for name in ("host", "disk"):
            for size in getattr(self.sizes, name):
                self._blocks(name, size, 1)
        self._check_hints()
        self._quotas = self._quotas_in_blocks()

    def _check_hints(self) -> None:
        if self.hints != ("none",) and "learned" not in self.evictions:
            raise ConfigError("hints", "has an effect only with --eviction learned")
        for source, field in (("stop", "stop"), ("returns", "returns_s")):
            if source in self.hints and all(getattr(each, field) is None for each in self.trace.requests):
                raise ConfigError(
                    "hints", f"{source} needs the field `{field}`, which no line of {self.trace.name} has"
                )

    def _quotas_in_blocks(self) -> Quotas | None:
        if not self.quotas:
            return None
        for tenant in self.quotas:
            if tenant not in self.num_asked_by_tenant:
                raise ConfigError("quota", f"{tenant!r:.80} is no `tenant` of any line of {self.trace.name}")
        bounds = {
            tenant: (each.num_bytes("host_floor"), each.num_bytes("host_ceiling"))
            for tenant, each in self.quotas.items()
        }
        least, total = min(self.host_sizes()), sum(floor or 0 for floor, _ in bounds.values())
        if total > least:
            raise ConfigError("quota", f"has floors of {total:,} bytes, more than a host of {least:,}")
        try:
            return Quotas(
                {
                    tenant: Quota(host_floor=self._in_blocks(floor), host_ceiling=self._in_blocks(ceiling))
                    for tenant, (floor, ceiling) in bounds.items()
                }
            )
        except ConfigError as error:  # too many
            raise ConfigError("quota", error.problem) from error

    def _in_blocks(self, num_bytes: int | None) -> int | None:
        return None if num_bytes is None else num_bytes // self.block_bytes

    def _blocks(self, name: str, size: int, least: int) -> int:
        found = size // self.block_bytes
        if found < least:
            raise ConfigError(name, f"{size:,} bytes hold {found} blocks of {self.block_bytes:,}; {least} are needed")
        return found

    # -- one pass over the trace for each tier --------------------------------------------------------------------

    @cached_property
    def on_device(self) -> Counts:
        """Hits of each request."""
        return self._device[0]

    @cached_property
    def _device(self) -> tuple[Counts, list[float]]:
        """Hits, and ages at eviction. One block is the last one of a request, which is never full."""
        stack = StackDistances.of(self.trace)
        return stack.hits(self.num_device - 1), stack.ages(self.num_device - 1)

    @cached_property
    def _wholly(self) -> frozenset[int]:
        """Requests whose blocks are all on the device. Nothing of them is loaded, so the host's order does not change,
        unless the host has lost some of their blocks and gets them again."""
        lengths = np.array([len(request.blocks) for request in self.trace.requests], np.int64)
        return frozenset(np.flatnonzero(lengths == self.on_device).tolist())

    @cached_property
    def _large(self) -> StackDistances:
        return StackDistances.of(self.trace, self._wholly)

    def below(self, size: int) -> StackDistances:
        """Stack distances of host memory, or of a disk, of `size` blocks."""
        if size >= self._large.exact_from:
            return self._large
        return StackDistances.of(self.trace, self._wholly, size)

    def num_hit_tokens(self, num_host: int) -> int:
        """Number of prompt tokens that hit with `num_host` blocks of host memory and eager stores. For a chart, because
        it is inexact for sizes near the device's."""
        return int(self._in_tokens(np.maximum(self.on_device, self._large.hits(num_host))).sum())

    @property
    def num_endless(self) -> int:
        """Number of blocks hit in a cache of unlimited size."""
        return int(np.maximum(self.on_device, self._large.hits(self.trace.num_blocks)).sum())

    @cached_property
    def _lengths(self) -> Counts:
        return np.array([request.num_tokens for request in self.trace.requests], np.int64)

    def _in_tokens(self, blocks: Counts) -> Counts:
        """Prompt tokens that need not be computed if each request hits `blocks`. The last token is always computed."""
        return np.minimum(blocks * self.trace.block_tokens, self._lengths - 1)

    @property
    def knee_bytes(self) -> int:
        sizes, hits = self._large.curve()
        return knee(sizes, hits, self.num_device) * self.block_bytes

    @property
    def load_share(self) -> float:
        """Time of a load from host memory, divided by the time of computing the same tokens. 0 if speeds are not
        given."""
        if self.speeds is None:
            return 0.0
        return self.sizes.kv_bytes_per_token / 1e9 / self.speeds.host_gbs * self.speeds.prefill_tokens_per_s

    @property
    def fetch_share(self) -> float:
        """Time of a fetch from the disk, divided by the time of computing the same tokens. 0 if speeds are not
        given."""
        if self.speeds is None:
            return 0.0
        return self.sizes.kv_bytes_per_token / 1e9 / self.speeds.disk_gbs * self.speeds.prefill_tokens_per_s

    @property
    def is_disk_idle(self) -> bool:
        """Whether the gate of fetches does not use the disk."""
        return self.fetch_share >= WORTH

    def daily_writes(self, row: Row) -> float:
        """Bytes that host memory evicts to the disk of `row` in a day, at the rate of the trace."""
        if not row.disk_bytes or row.is_disk_idle or not self.trace.duration_s:
            return 0.0
        return max(0, row.stored_bytes - row.host_bytes) / self.trace.duration_s * DAY_S

    def writes_too_much(self, row: Row) -> bool:
        """Whether these are more than `DiskTier.daily_writes` allows by default, which is the size of the disk."""
        return self.daily_writes(row) > row.disk_bytes

    def is_too_short_for(self, row: Row) -> bool:
        """Whether the trace never fills the tiers of `row`, or only late. With a longer one, more would hit."""
        if not row.host_bytes or row.name == "endless":
            return False
        return not row.has_evicted or (row.age_s is not None and row.age_s > self.trace.duration_s / 2)

    # -- tenants --------------------------------------------------------------------------------------------------

    @cached_property
    def num_asked_by_tenant(self) -> dict[str, int]:
        """Blocks of the prompts of each tenant of the trace."""
        return self._by_tenant(np.array([request.num_prompt_blocks for request in self.trace.requests], np.int64))

    @cached_property
    def _tenants(self) -> tuple[tuple[str, ...], NDArray[np.int64]]:
        """The tenants, and of each request the number of its tenant from 1 on; 0: it has none."""
        names = self.trace.tenants
        numbers = {name: number for number, name in enumerate(names, 1)}
        of_requests = [0 if each.tenant is None else numbers[each.tenant] for each in self.trace.requests]
        return names, np.array(of_requests, np.int64)

    def _by_tenant(self, blocks: Counts) -> dict[str, int]:
        """The sum over the requests of each tenant."""
        names, numbers = self._tenants
        _, *sums = np.bincount(numbers, blocks, len(names) + 1).tolist()
        return {name: int(each) for name, each in zip(names, sums, strict=True)}

    # -- rows -----------------------------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> list[Row]:
        return list(self._rows())

    def _rows(self) -> Iterator[Row]:
        nothing = np.zeros(len(self.trace.requests), np.int64)
        yield self._row("no cache", 0, 0, _Hits(nothing, nothing, nothing), NO_STORE)
        alone = _Hits(self.on_device, nothing, nothing, 0, self._device[1])
        yield self._row("device alone", 0, 0, alone, NO_STORE)
        for kind in self.kinds:
            for size in self.host_sizes():
                yield self.of_size(size, 0, kind)
                for disk in self.sizes.disk if kind == BY_DISTANCE else ():
                    yield self.of_size(size, disk, kind)
        endless = self.trace.num_blocks * self.block_bytes
        yield attrs.evolve(self.of_size(endless, 0, BY_DISTANCE), name="endless")

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of the rows with host memory, in their order. Only learned eviction is replayed with hints."""
        return tuple(
            Kind(store, eviction, hints, has_quotas)
            for eviction in self.evictions
            for hints in (self.hints if eviction == "learned" else ("none",))
            for has_quotas in ((False, True) if self.quotas else (False,))
            for store in self.stores
        )

    def host_sizes(self) -> tuple[int, ...]:
        """The requested sizes, or the device's, doubled until everything fits, at most `MAX_OWN_SIZES`."""
        if self.sizes.host:
            return tuple(sorted(set(self.sizes.host)))
        endless = self.trace.num_blocks * self.block_bytes
        doublings = max(0, math.ceil(math.log2(endless / self.sizes.device))) if endless else 0
        return tuple(self.sizes.device * 2**power for power in range(min(doublings + 1, MAX_OWN_SIZES)))

    def of_size(self, host: int, disk: int, kind: Kind) -> Row:
        """The row of any size, also of one that is not in the table."""
        num_host = host // self.block_bytes
        if kind == BY_DISTANCE:
            hits = self._by_distance(num_host, 0 if self.is_disk_idle else disk // self.block_bytes)
        else:
            found = replay(
                self.trace, self.num_device, num_host, store=kind.store, eviction=kind.eviction,
                hints=predictions(self.trace, kind.hints), quotas=self._quotas if kind.has_quotas else None,
            )  # fmt: skip
            hits = _Hits(found.device, found.host, np.zeros_like(found.host), found.num_stored)
        return self._row("host and disk" if disk else "host", host, disk, hits, kind)

    def _by_distance(self, num_host: int, num_disk: int) -> _Hits:
        host = self.below(num_host)
        lowest = self.below(num_disk) if num_disk > num_host else host
        upper = np.maximum(self.on_device, host.hits(num_host))
        disk = np.maximum(upper, lowest.hits(max(num_host, num_disk))) - upper
        ages = lowest.ages(max(num_host, num_disk))
        return _Hits(self.on_device, upper - self.on_device, disk, host.num_missing(num_host), ages)

    def _row(self, name: str, host: int, disk: int, hits: _Hits, kind: Kind) -> Row:
        lengths = self._lengths
        device, upper, all_ = (
            self._in_tokens(blocks)
            for blocks in (hits.device, hits.device + hits.host, hits.device + hits.host + hits.disk)
        )
        tokens = (device, upper - device, all_ - upper)
        return Row(
            name=name, host_bytes=host, disk_bytes=disk, kind=kind,
            blocks=(int(hits.device.sum()), int(hits.host.sum()), int(hits.disk.sum())),
            tokens=(int(tokens[0].sum()), int(tokens[1].sum()), int(tokens[2].sum())),
            num_computed_tokens=int((lengths - all_).sum()),
            loaded_bytes=int((hits.host + hits.disk).sum()) * self.block_bytes,
            stored_bytes=hits.num_stored * self.block_bytes,
            age_s=float(np.median(hits.ages)) if hits.ages else None,
            has_evicted=host // self.block_bytes < self.trace.num_blocks if hits.ages is None else bool(hits.ages),
            is_disk_idle=bool(disk) and self.is_disk_idle,
            first_token=self._times(tokens[1], tokens[2], lengths - all_),
            price=self._price(host, disk),
            tenants=self._by_tenant(hits.device + hits.host + hits.disk),
        )  # fmt: skip

    def _times(self, host: Counts, disk: Counts, computed: Counts) -> FirstToken | None:
        if self.speeds is None:
            return None
        per_token = self.sizes.kv_bytes_per_token / 1e9
        # copies from disk pass through host memory
        host_s = np.asarray((host + disk) * per_token / self.speeds.host_gbs, np.float64)
        disk_s = np.asarray(disk * per_token / self.speeds.disk_gbs, np.float64)
        return first_token(self.trace, host_s, disk_s, computed, self.speeds)

    def _price(self, host: int, disk: int) -> float | None:
        return None if self.prices is None else (host * self.prices.host + disk * self.prices.disk) / GIB
