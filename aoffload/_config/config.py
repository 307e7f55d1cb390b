"""The configuration: checked as a whole before anything is allocated."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, Self

import attrs

from .._common.arguments import as_tuple, check_has, check_int, number_of, shown
from .._common.prefix import check_epoch
from ..errors import ConfigError, InvalidArgument
from .groups import KVCacheGroup, shortest_hit
from .quotas import Quotas
from .sources import read_environment, read_file
from .tiers import DiskTier, RemoteTier, check_eviction, parse_bytes

MAX_BLOCKS = 2**31 - 1
MAX_SECONDS = 1e9
LONG_HIT_TOKENS = 1024
"""A least common multiple of block sizes above this causes a warning, because many prompts are shorter."""


class GroupLike(Protocol):
    """The part of a group that the configuration reads; `KVCacheGroup` implements it."""

    @property
    def name(self) -> str: ...
    @property
    def block_size(self) -> int: ...


def _count(minimum: int, maximum: int = MAX_BLOCKS) -> Any:
    def check(_: object, attribute: Any, value: object) -> None:
        check_int(attribute.name, value, minimum, maximum, ConfigError)

    return check


def _seconds(_: object, attribute: Any, value: object) -> None:
    seconds = number_of(value)
    if seconds is None or not 0 < seconds <= MAX_SECONDS:
        raise ConfigError(attribute.name, f"must be a positive number of seconds up to 1e9, got {shown(value)}")


MAX_STORE_S = 10.0
"""Default maximum of `store_timeout_s`, because a store holds device blocks until it ends."""
BYTES_IN_FLIGHT = 128 * 2**20
_SECONDS_OR_NONE: Any = attrs.validators.optional(_seconds)


def _speed(_: object, attribute: Any, value: object) -> None:
    found = number_of(value)
    if found is None or not 0 < found < math.inf:
        raise ConfigError(attribute.name, f"must be a positive number of tokens a second, got {shown(value)}")


_SPEED_OR_NONE: Any = attrs.validators.optional(_speed)


def _share(_: object, attribute: Any, value: object) -> None:
    share = number_of(value)
    if share is None or not 0 <= share <= 1:
        raise ConfigError(attribute.name, f"must be a share in [0, 1], got {shown(value)}")


def _bool(_: object, attribute: Any, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(attribute.name, f"must be True or False, got {shown(value)}")


def _text(_: object, attribute: Any, value: object) -> None:
    if not isinstance(value, str):
        raise ConfigError(attribute.name, f"must be a string, got {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(attribute.name, "is not valid text (a lone surrogate)") from error


def _weights_epoch(_: object, attribute: Any, value: object) -> None:
    try:
        check_epoch(attribute.name, value)
    except InvalidArgument as error:
        raise ConfigError(error.argument, error.problem) from None


def _name_or_object(*names: str) -> Any:
    def check(_: object, attribute: Any, value: object) -> None:
        if isinstance(value, str) and value not in names:
            raise ConfigError(attribute.name, f"must be one of {', '.join(names)}, got {shown(value)}")

    return check


def _store_policy(_: object, attribute: Any, value: object) -> None:
    _name_or_object("eager", "lazy", "selective", "off")(_, attribute, value)
    if not isinstance(value, str):
        kind, methods = "name, or a policy such as LazyStore()", "for_ledger seen wanted_stop num_watermark_blocks"
        check_has("store_policy", value, kind, methods, ConfigError)


def _eviction(_: object, __: Any, value: object) -> None:
    check_eviction(value)


def _load_choice(_: object, attribute: Any, value: object) -> None:
    _name_or_object("always", "cost")(_, attribute, value)
    if not isinstance(value, str):
        check_has("load_choice", value, "name, or a LoadChoice", "stop", ConfigError)


def _kind_or_none(kind: type[DiskTier] | type[RemoteTier]) -> Any:
    def check(_: object, attribute: Any, value: object) -> None:
        if value is not None and not isinstance(value, kind):
            raise ConfigError(attribute.name, f"must be a {kind.__name__} or None, got {shown(value)}")

    return check


def _quotas_or_none(_: object, attribute: Any, value: object) -> None:
    if value is not None and not isinstance(value, Quotas):
        raise ConfigError(attribute.name, f"must be Quotas or None, got a {type(value).__name__}")  # it may have salts


def _as_tuple(groups: Iterable[GroupLike]) -> tuple[GroupLike, ...]:
    found = as_tuple("groups", groups, "KVCacheGroup", ConfigError)
    for group in found:
        check_has("groups", group, "KVCacheGroup", "name block_size attention", ConfigError)
    return found


def _rows(group: GroupLike) -> str:
    """The blocks of a checkpoint, for a group of recurrent layers."""
    return f":{group.num_rows}" if isinstance(group, KVCacheGroup) and group.is_recurrent else ""


@attrs.frozen(kw_only=True)
class OffloadConfig:
    """The configuration of a runtime. Times are in seconds, sizes in bytes.

    The host pool is given in blocks (`num_host_blocks`) or in bytes (`host_bytes`), not both.
    """

    groups: tuple[GroupLike, ...] = attrs.field(converter=_as_tuple)
    """The groups of layers, each a `KVCacheGroup` with a name of its own. Required."""
    num_host_blocks: int | None = attrs.field(default=None, validator=attrs.validators.optional(_count(0)))
    """Size of the host pool in blocks. 0: nothing is kept in host memory. Required unless you give `host_bytes`."""
    host_bytes: int | str | None = None
    """Size of the host pool in bytes, or a string such as "64GiB". Required unless you give `num_host_blocks`."""
    namespace: str = attrs.field(default="", validator=_text)
    """Identifies model, revision and dtype: a prompt never hits blocks of another namespace."""
    weights_epoch: str = attrs.field(default="", validator=_weights_epoch)
    """The first weights' epoch: the name of the weights that the engine computes with, such as a checkpoint or a step.
    `weights.set` sets another one. A prompt hits only KV of the current epoch. Empty: no epoch."""
    store_policy: Any = attrs.field(default="eager", validator=_store_policy)
    """Which computed blocks are copied to host memory, and when: "eager", "lazy", "selective", "off", or a
    `StorePolicy` (docs/policies.md)."""
    window_interval_tokens: int = attrs.field(default=0, validator=_count(0))
    """0: window blocks are stored at the end of a prompt and where prompts part. More: they are also stored at each
    multiple of this number of tokens, rounded up to whole blocks, so that the second prompt with a prefix hits there.
    1: all are stored."""
    eviction: Any = attrs.field(default="lru", validator=_eviction)
    """Which cached blocks are evicted first: "lru", "learned", a `LearnedEviction`, or a function that returns an
    `EvictionOrder`. The configuration calls the function once to check its result (docs/eviction.md)."""
    load_choice: Any = attrs.field(default="always", validator=_load_choice)
    """The part of a host hit to load: "always" (all of it), "cost" (the part whose load costs less than computing it),
    or a `LoadChoice` object, which decides."""
    verify: bool = attrs.field(default=False, validator=_bool)
    """Compute a checksum per block at store and compare it at load. A mismatch is a miss."""
    max_jobs_in_flight: int | None = attrs.field(default=None, validator=attrs.validators.optional(_count(1, 1024)))
    """Maximum jobs in flight on each link. Loads and stores use different links, so no load waits for stores. None: 4,
    or on one GPU as many of the largest jobs as fit in the byte bound, if that is more."""
    max_bytes_in_flight: int | str | None = None
    """Maximum bytes in flight on each link. A larger job goes alone. None: 128 MiB, or on one GPU the bytes that the
    link copies in 20 ms, if that is more."""
    max_job_bytes: int | str = "32MiB"
    """Larger transfers are split into several jobs."""
    load_timeout_s: float = attrs.field(default=30.0, validator=_seconds)
    """Seconds after which a request stops waiting for a load and computes instead."""
    fetch_timeout_s: float | None = attrs.field(default=None, validator=_SECONDS_OR_NONE)
    """Seconds after which a request stops waiting for a fetch from a tier below the host and computes the rest. None:
    `load_timeout_s`."""
    prefill_tokens_per_s: float | None = attrs.field(default=None, validator=_SPEED_OR_NONE)
    """Prompt tokens that the engine computes per second. Blocks that would arrive after the engine could have computed
    them are not fetched. None: measured from the steps."""
    transfer_timeout_s: float = attrs.field(default=120.0, validator=_seconds)
    """Seconds after which a launched job without a completion is given up: its destination is quarantined, and its link
    launches nothing more until the job reports."""
    store_timeout_s: float | None = attrs.field(default=None, validator=_SECONDS_OR_NONE)
    """Seconds after which a store is given up, as with `transfer_timeout_s`. None: `transfer_timeout_s`, but at most
    10. A store that hangs keeps its source blocks for this long, and requests may wait for these blocks."""
    close_timeout_s: float = attrs.field(default=10.0, validator=_seconds)
    """Seconds that closing waits for copies in flight before it quarantines their destinations."""
    slow_wait_s: float | None = attrs.field(default=30.0, validator=_SECONDS_OR_NONE)
    """Seconds after which a request that waits for blocks causes one warning (`slow_wait`). None: no warning."""
    slow_step_s: float | None = attrs.field(default=30.0, validator=_SECONDS_OR_NONE)
    """Seconds after which an open step causes one warning (`slow_step`). None: no warning."""
    pending_timeout_s: float = attrs.field(default=2.0, validator=_seconds)
    """With a `HostCache`: seconds that a match stays PENDING because another request loads the same block. After that,
    the request loads the block itself."""
    max_pinned_share: float = attrs.field(default=0.5, validator=_share)
    """Maximum share of each tier's blocks that pins may hold. Blocks held by requests and transfers do not count."""
    max_hint_pinned_share: float = attrs.field(default=0.25, validator=_share)
    """Maximum share of each tier's blocks that pins of hints may hold. Keep it below `max_pinned_share`, because that
    limit counts the pins of hints and the pins of the program together."""
    max_hint_pin_s: float = attrs.field(default=3600.0, validator=_seconds)
    """Maximum time to live of a pin of a hint."""
    max_prefetch_share: float = attrs.field(default=0.25, validator=_share)
    """Maximum share of the device's blocks that prefetches under way may take."""
    disk: DiskTier | None = attrs.field(default=None, validator=_kind_or_none(DiskTier))
    """The disk tier. It keeps the blocks that the host evicts, also over a restart. None: no disk. Needs a
    `namespace`."""
    max_fetch_share: float = attrs.field(default=0.25, validator=_share)
    """Maximum share of the host's blocks that fetches from the disk or the remote store under way may take."""
    remote: RemoteTier | None = attrs.field(default=None, validator=_kind_or_none(RemoteTier))
    """The remote tier: a store that other processes use, too. Blocks that were requested twice are stored there. None:
    no remote store. Needs a `namespace`, and groups with full attention."""
    max_quarantined_share: float = attrs.field(default=0.25, validator=_share)
    """With a `HostCache`: maximum share of the engine's blocks in quarantine. Above it, nothing is loaded."""
    quotas: Quotas | None = attrs.field(default=None, validator=_quotas_or_none)
    """Floors and ceilings of tenants in the host and on the disk, by `cache_salt`. None: all tenants share all
    blocks."""

    def __attrs_post_init__(self) -> None:
        if not self.groups:
            raise ConfigError("groups", "is empty")
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise ConfigError("groups", f"has two groups with the same name: {names}")
        self._warn_of_long_hits()
        if (self.num_host_blocks is None) == (self.host_bytes is None):
            given = "neither is" if self.host_bytes is None else "both are"
            raise ConfigError("num_host_blocks", f"give either num_host_blocks or host_bytes: {given} given")
        if self.disk is not None and not self.namespace:
            raise ConfigError("namespace", "is empty: with a disk, it has to name weights, revision and dtype")
        if self.remote is not None and not self.namespace:
            raise ConfigError("namespace", "is empty: with a remote store, it has to name weights, revision and dtype")
        if self.num_host_blocks == 0 and (self.disk is not None or self.remote is not None):
            raise ConfigError("num_host_blocks", "is 0: blocks of a disk or a remote store pass through host memory")
        if self.quotas is not None and callable(self.eviction):
            raise ConfigError("quotas", "need the eviction 'lru' or 'learned', not a custom eviction order")
        is_recurrent = any(isinstance(group, KVCacheGroup) and group.is_recurrent for group in self.groups)
        if is_recurrent and not callable(self.eviction) and self.eviction != "lru":
            raise ConfigError(
                "eviction", "must be 'lru' with a recurrent state: learned eviction does not support checkpoints"
            )
        for name in ("host_bytes", "max_bytes_in_flight", "max_job_bytes"):
            if getattr(self, name) is not None or name == "max_job_bytes":
                parse_bytes(name, getattr(self, name))

    def _warn_of_long_hits(self) -> None:
        """Warn if block sizes that do not divide each other make all hits long."""
        sizes = sorted({group.block_size for group in self.groups})
        shortest = shortest_hit(sizes)
        if shortest > max(LONG_HIT_TOKENS, sizes[-1]):
            problem = (
                f"groups: no hit is shorter than {shortest:,} tokens, the least common multiple of the block sizes"
            )
            advice = "choose block sizes of which each divides the next larger one"
            sizes_are = ", ".join(map(str, sizes))
            warnings.warn(f"{problem} {sizes_are}, so shorter prompts never hit: {advice}", UserWarning, stacklevel=4)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], **arguments: Any) -> Self:
        """Read the configuration from a TOML file whose keys are the fields. `arguments` replace settings of the file.

        A group is a table with `name` and `block_size`, and with `window` or `chunk` unless it has full attention. A
        group with a recurrent state has `rows`, the number of blocks of a checkpoint. `ConfigError` names the key and
        the file, also if a key is unknown or the file cannot be read.
        """
        return read_file(path, cls).build(cls, arguments)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **arguments: Any) -> Self:
        """Read the configuration from environment variables. Their names are `AOFFLOAD_` and the field's name in
        capitals.

        `arguments` replace variables, and variables replace settings of the file that `AOFFLOAD_CONFIG_FILE` names. A
        list of groups is written as in such a file. `environ` replaces `os.environ`. `ConfigError` names the variable.
        """
        return read_environment(os.environ if environ is None else environ, cls).build(cls, arguments)

    def resolve_host_blocks(self, block_bytes: int) -> int:
        """The size of the host pool in blocks of `block_bytes`."""
        if self.num_host_blocks is not None:
            return self.num_host_blocks
        assert self.host_bytes is not None
        num_bytes = parse_bytes("host_bytes", self.host_bytes)
        num_blocks = num_bytes // block_bytes
        if not num_blocks:
            problem = f"is {num_bytes:,} bytes, less than one block of {block_bytes:,} bytes"
            raise ConfigError("host_bytes", problem)
        if num_blocks > MAX_BLOCKS:
            most = f"the limit is {MAX_BLOCKS:,} blocks, {MAX_BLOCKS * block_bytes:,} bytes"
            problem = f"is {num_bytes:,} bytes, {num_blocks:,} blocks of {block_bytes:,} bytes: {most}"
            raise ConfigError("host_bytes", problem)
        return num_blocks

    def blocks_per_job(self, block_bytes: int) -> int:
        """Maximum blocks per job."""
        bound = min(parse_bytes("max_job_bytes", self.max_job_bytes), self.bytes_in_flight)
        return max(1, bound // max(1, block_bytes))

    @property
    def root_namespace(self) -> str:
        """The namespace of root keys. It includes the layout of the groups, so that different layouts never share
        KV."""
        groups = ",".join(f"{group.name}:{group.block_size}{_rows(group)}" for group in self.groups)
        return f"{self.namespace}\n{groups}"

    @property
    def store_bound_s(self) -> float:
        """Seconds after which a store is given up."""
        return min(self.transfer_timeout_s, MAX_STORE_S) if self.store_timeout_s is None else self.store_timeout_s

    @property
    def fetch_bound_s(self) -> float:
        """Seconds after which a request no longer waits for a fetch."""
        return self.load_timeout_s if self.fetch_timeout_s is None else self.fetch_timeout_s

    @property
    def bytes_in_flight(self) -> int:
        """Maximum bytes in flight on a link. `link_of` raises it for a fast link if `max_bytes_in_flight` is None."""
        given = self.max_bytes_in_flight
        return BYTES_IN_FLIGHT if given is None else parse_bytes("max_bytes_in_flight", given)
