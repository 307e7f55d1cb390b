"""Tables of a TOML file or a variable that stand for a tier: `disk` and `remote`.

A secret is neither in a file that has other settings nor in a variable, which others may read: `secret_file` names a
file that has nothing else in it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .arguments import shown
from .disk_tier import DiskTier
from .errors import ConfigError
from .object_stores.redis_cluster import RedisClusterStore
from .object_stores.redis_store import RedisStore
from .remote_tier import ObjectStore, RemoteTier

__all__ = ["NONE", "disk_from_table", "remote_from_table", "secret_in", "store_of"]

NONE = "none"
"""In a file or a variable, where a setting may be None: neither can say that otherwise."""
DISK_KEYS = ("path", "size", "daily_writes", "close_flush_s", "open_timeout_s")
REMOTE_KEYS = (
    "url", "secret_file", "ask_timeout_s", "load_timeout_s", "store_timeout_s", "max_write_rate", "cell_bytes",
)  # fmt: skip
CLUSTER = "+cluster"
"""Behind the scheme of a URL: a cluster of such servers."""
STORES: dict[str, Callable[[str], ObjectStore]] = {
    "redis": RedisStore.from_url,
    "rediss": RedisStore.from_url,
    "unix": RedisStore.from_url,
    "redis+cluster": RedisClusterStore.from_url,
    "rediss+cluster": RedisClusterStore.from_url,
}
"""By the scheme of a URL."""

Tier = TypeVar("Tier")


def disk_from_table(value: object, origin: str) -> DiskTier:
    """The disk that a table says. `origin`: where it was read."""
    table = _table("disk", value, DISK_KEYS, DISK_KEYS[:2], origin)
    if table.get("daily_writes") == NONE:
        table["daily_writes"] = None
    return _made("disk", origin, lambda: DiskTier(**table))


def remote_from_table(value: object, origin: str) -> RemoteTier:
    """The remote tier that a table says."""
    table = _table("remote", value, REMOTE_KEYS, REMOTE_KEYS[:1], origin)
    url, secret_file = table.pop("url"), table.pop("secret_file", None)
    return _made("remote", origin, lambda: RemoteTier(store_of(url), secret_in(secret_file), **table))


def store_of(url: object) -> ObjectStore:
    """The store at `url`, which is not asked for anything yet. A URL may have a password: no error shows it."""
    scheme = url.partition("://")[0] if isinstance(url, str) else ""
    if not isinstance(url, str) or scheme not in STORES:
        raise ConfigError("url", f"must begin with one of {', '.join(f'{name}://' for name in STORES)}")
    return STORES[scheme](url.replace(CLUSTER, "", 1))


def secret_in(path: object) -> bytes | None:
    """What the file `path` has, without a line's end behind it. None: there is no secret."""
    if path is None:
        return None
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError("secret_file", f"must be the path of a file, got {shown(path)}")
    try:
        with open(path, "rb") as file:
            return file.read().rstrip(b"\r\n")
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError("secret_file", f"cannot read {shown(path)}: {reason}") from error


def _table(name: str, value: object, keys: Sequence[str], required: Sequence[str], origin: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(name, f"must be a table with {' and '.join(required)}, got {shown(value)} ({origin})")
    for key in value:
        if key not in keys:
            raise ConfigError(f"{name}.{key}", f"is not one of {', '.join(keys)} ({origin})")
    for key in required:
        if key not in value:
            raise ConfigError(f"{name}.{key}", f"is missing ({origin})")
    return dict(value)


def _made(name: str, origin: str, make: Callable[[], Tier]) -> Tier:
    try:
        return make()
    except ConfigError as error:
        raise ConfigError(f"{name}.{error.argument}", f"{error.problem} ({origin})") from error
