"""Quotas for tenants: limits on the host and disk space that the prompts of a `cache_salt` take.

Each salt of `Quotas.salts` has an account of its own. All other salts, and prompts without a salt, share the default
account. Salts are secrets of tenants. So nothing shows a salt: not a log, a metric, an error or a `repr`. An account is
shown by its name or, without one, by its number.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any, TypeAlias

import attrs

from .._common.arguments import shown
from ..errors import ConfigError
from .tiers import parse_bytes

Salt: TypeAlias = str | bytes
DEFAULT = "default"
MAX_NAME = 64
MAX_ACCOUNTS = 1024
"""Maximum number of accounts. Each account adds time series to the metrics, and each eviction compares all accounts."""
SIZES = ("host_floor", "host_ceiling", "disk_floor", "disk_ceiling", "pinned", "daily_writes")


def _size(_: object, attribute: Any, value: Any) -> None:
    if value is not None and not (type(value) is int and value == 0):
        parse_bytes(attribute.name, value)


def _name(_: object, attribute: Any, value: object) -> None:
    if not isinstance(value, str) or len(value) > MAX_NAME or not value.isprintable():
        raise ConfigError(attribute.name, f"must be text of at most {MAX_NAME} characters, got {shown(value)}")


def _field() -> Any:
    return attrs.field(default=None, validator=_size, kw_only=True)


@attrs.frozen
class Quota:
    """The limits of one account. Sizes are bytes, or text such as "8GiB". None means no limit, or no floor.

    An account at or below its floor loses no block to other accounts while an account above its floor has an evictable
    block. A floor only orders evictions. It reserves no space: other accounts use the space that the account does not
    need. In every account, blocks that requests, pins or copies hold are never evicted.

    At its ceiling, an account evicts its own blocks first. If too few of them are evictable, the rest of the store is
    skipped.

    `pinned` limits the host memory that pins of the account hold, and their device memory to the same number of bytes.
    `daily_writes` limits the bytes written to the disk for the account within any 24 hours.
    """

    name: str = attrs.field(default="", validator=_name)
    """Shown in logs and metrics in place of the number of the account. It must not be the salt."""
    host_floor: int | str | None = _field()
    host_ceiling: int | str | None = _field()
    disk_floor: int | str | None = _field()
    disk_ceiling: int | str | None = _field()
    pinned: int | str | None = _field()
    daily_writes: int | str | None = _field()

    def __attrs_post_init__(self) -> None:
        for tier in ("host", "disk"):
            floor, ceiling = self.num_bytes(f"{tier}_floor"), self.num_bytes(f"{tier}_ceiling")
            if floor is not None and ceiling is not None and floor > ceiling:
                raise ConfigError(f"{tier}_floor", f"is {floor:,} bytes, more than the ceiling, {ceiling:,}")

    def num_bytes(self, key: str) -> int | None:
        """The size `key` in bytes; None if it is not set."""
        value = getattr(self, key)
        return value if value is None or value == 0 else parse_bytes(key, value)

    def scaled(self, share: Fraction) -> Quota:
        """The quota with its sizes in host memory multiplied by `share`."""
        sizes = {key: self.num_bytes(key) for key in ("host_floor", "host_ceiling", "pinned")}
        found: dict[str, Any] = {key: None if size is None else int(size * share) for key, size in sizes.items()}
        return attrs.evolve(self, **found)


def _salts(value: Any) -> Mapping[Salt, Quota]:
    """A copy of `value`. No error shows a salt."""
    if not isinstance(value, Mapping):
        raise ConfigError("salts", f"must map each salt to a Quota, got a {type(value).__name__}")
    found: dict[Salt, Quota] = {}
    for number, (salt, quota) in enumerate(value.items(), 1):
        if type(salt) not in (str, bytes):
            raise ConfigError("salts", f"salt {number} must be str or bytes, got a {type(salt).__name__}")
        if not isinstance(quota, Quota):
            raise ConfigError("salts", f"the value of salt {number} must be a Quota, got a {type(quota).__name__}")
        found[salt] = quota
    if len(found) >= MAX_ACCOUNTS:
        raise ConfigError("salts", f"must be fewer than {MAX_ACCOUNTS:,}, got {len(found):,}")
    return MappingProxyType(found)


def _quota(_: object, attribute: Any, value: object) -> None:
    if not isinstance(value, Quota):
        raise ConfigError(attribute.name, f"must be a Quota, got {shown(value)}")


@attrs.frozen
class Quotas:
    """The quota of each `cache_salt`, and the quota that all other prompts share."""

    salts: Mapping[Salt, Quota] = attrs.field(factory=dict, converter=_salts, repr=False)
    default: Quota = attrs.field(default=Quota(), validator=_quota)
    """The quota that prompts with other salts and prompts without a salt share."""

    def __attrs_post_init__(self) -> None:
        names = self.names
        for name in names:
            if names.count(name) > 1:
                raise ConfigError("salts", f"has two accounts with the name {shown(name)}")
        if clear := [name for name in names if name in self.salts and self._is_given(name)]:
            raise ConfigError("salts", f"account {names.index(clear[0])} has a salt as its name, but names are shown")

    def _is_given(self, name: str) -> bool:
        return any(quota.name == name for quota in self.quotas)

    @property
    def quotas(self) -> tuple[Quota, ...]:
        """The quota of each account, by number: the default account is 0."""
        return (self.default, *self.salts.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The name that is shown for each account, by number."""
        default = self.default.name or DEFAULT
        return (default, *(quota.name or str(number) for number, quota in enumerate(self.salts.values(), 1)))

    @property
    def numbers(self) -> dict[Salt, int]:
        """The number of the account of each salt."""
        return {salt: number for number, salt in enumerate(self.salts, 1)}

    def scaled(self, share: Fraction) -> Quotas:
        """The quotas with their sizes in host memory multiplied by `share`."""
        return Quotas({salt: quota.scaled(share) for salt, quota in self.salts.items()}, self.default.scaled(share))
