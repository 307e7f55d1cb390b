"""Sources of settings other than arguments: a TOML file, and environment variables.

A setting has the name of its field in all of them; a variable has it in capitals after `AOFFLOAD_`. A later source
replaces the settings of an earlier one: first the file, then variables, then arguments. An error names the setting and
the source that it was read from.

`disk`, `remote` and `quotas` are tables. A secret must not be in a file with other settings or in a variable, because
others may read these. `secret_file` names a file that contains only the secret. `file` of `quotas` names a file that
contains only the quotas, because the salts of tenants are secrets.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs

from .._common.arguments import shown
from .._tiers.remote.clients.redis import RedisClusterStore, RedisStore
from ..errors import ConfigError
from .groups import AttentionKind, ChunkedLocal, FullAttention, KVCacheGroup, RecurrentState, SlidingWindow
from .quotas import SIZES, Quota, Quotas
from .tiers import DiskTier, ObjectStore, RemoteTier

NONE = "none"
"""Stands for None in a file or a variable, which have no other way to write it."""
DISK_KEYS = ("path", "size", "daily_writes", "close_flush_s", "open_timeout_s")
REMOTE_KEYS = (
    "url", "secret_file", "ask_timeout_s", "load_timeout_s", "store_timeout_s", "max_write_rate", "cell_bytes",
)  # fmt: skip
QUOTAS_KEYS = ("salts", "default", "file")
QUOTA_KEYS = ("name", *SIZES)
CLUSTER = "+cluster"
"""Suffix of the scheme of a URL: a cluster of such servers."""
STORES: dict[str, Callable[[str], ObjectStore]] = {
    "redis": RedisStore.from_url,
    "rediss": RedisStore.from_url,
    "unix": RedisStore.from_url,
    "redis+cluster": RedisClusterStore.from_url,
    "rediss+cluster": RedisClusterStore.from_url,
}
"""Stores by the scheme of their URL."""

Tier = TypeVar("Tier")


def disk_from_table(value: object, origin: str) -> DiskTier:
    """The disk tier of a table. `origin`: the source of the table."""
    table = _table("disk", value, DISK_KEYS, DISK_KEYS[:2], origin)
    if table.get("daily_writes") == NONE:
        table["daily_writes"] = None
    return _made("disk", origin, lambda: DiskTier(**table))


def remote_from_table(value: object, origin: str) -> RemoteTier:
    """The remote tier of a table."""
    table = _table("remote", value, REMOTE_KEYS, REMOTE_KEYS[:1], origin)
    url, secret_file = table.pop("url"), table.pop("secret_file", None)
    return _made("remote", origin, lambda: RemoteTier(store_of(url), secret_in(secret_file), **table))


def store_of(url: object) -> ObjectStore:
    """The store at `url`. It is not contacted yet. No error shows the URL, because it may have a password."""
    scheme = url.partition("://")[0] if isinstance(url, str) else ""
    if not isinstance(url, str) or scheme not in STORES:
        raise ConfigError("url", f"must begin with one of {', '.join(f'{name}://' for name in STORES)}")
    return STORES[scheme](url.replace(CLUSTER, "", 1))


def secret_in(path: object) -> bytes | None:
    """The content of the file `path`, without a trailing newline. None: there is no secret."""
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


def quotas_from_table(value: object, origin: str) -> Quotas:
    """The quotas of a table: `salts`, a table of quotas by salt, and `default`; or `file`, the path of a TOML file that
    has these two, because others may read the table and must not see the salts. No error shows a salt."""
    table, keys = value, set(QUOTAS_KEYS)
    if isinstance(table, dict) and list(table) == ["file"]:
        origin, keys = str(table["file"]), set(QUOTAS_KEYS[:2])
        table = _toml(table["file"], "quotas.file")
    if not isinstance(table, dict) or not table.keys() <= keys or "file" in table:
        raise ConfigError("quotas", f"must be a table with {' and '.join(QUOTAS_KEYS[:2])}, or with file ({origin})")
    salts = table.get("salts", {})
    if not isinstance(salts, dict):
        raise ConfigError("quotas.salts", f"must be a table with a quota for each salt ({origin})")
    default = _quota("default", table.get("default", {}), origin)
    quotas = {salt: _quota(f"salts[{number}]", of, origin) for number, (salt, of) in enumerate(salts.items(), 1)}
    return _made("quotas", origin, lambda: Quotas(quotas, default))


def _quota(name: str, value: object, origin: str) -> Quota:
    if not isinstance(value, dict):
        raise ConfigError(f"quotas.{name}", f"must be a table with some of {', '.join(QUOTA_KEYS)} ({origin})")
    table = _table(f"quotas.{name}", value, QUOTA_KEYS, (), origin)
    sizes: dict[str, Any] = {key: None if size == NONE else size for key, size in table.items()}
    return _made(f"quotas.{name}", origin, lambda: Quota(**sizes))


def _toml(path: object, argument: str) -> dict[str, Any]:
    """The content of the TOML file `path`."""
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(argument, f"must be the path of a TOML file, got {shown(path)}")
    name = os.fsdecode(path)
    try:
        return tomllib.loads(Path(name).read_bytes().decode())
    except OSError as error:
        raise ConfigError(argument, f"cannot read {name}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, or a path with a null byte
        raise ConfigError(argument, f"{name!r} is not a TOML file: {error}") from error


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


PREFIX = "AOFFLOAD_"
FILE_VARIABLE = "AOFFLOAD_CONFIG_FILE"
"""Names a file. The other variables replace its settings."""
KEY_VARIABLE = "AOFFLOAD_API_KEY"
"""Belongs to the HTTP server; it is not a setting."""
HOST_POOL = {"num_host_blocks", "host_bytes"}
"""Two names for the size of the host pool: a later source that has one of them replaces the other, too."""
KINDS: dict[str, Callable[[Any], AttentionKind]] = {
    "window": SlidingWindow, "chunk": ChunkedLocal, "rows": lambda _: RecurrentState(),
}  # fmt: skip
"""Kinds of layers by the key of a group that they need; without one of these keys, a group has full attention."""
GROUP_KEYS = ("name", "block_size", *KINDS)
TABLES: dict[str, Callable[[object, str], object]] = {
    "disk": disk_from_table, "remote": remote_from_table, "quotas": quotas_from_table,
}  # fmt: skip
"""Settings that are tables."""
NAMES = ("store_policy", "eviction", "load_choice")
"""Settings that also take objects, which only a program can give."""

Config = TypeVar("Config")


@attrs.frozen
class Settings:
    """The settings of one or more sources: values by field, and the source of each."""

    values: dict[str, Any] = attrs.field(factory=dict)
    origins: dict[str, str] = attrs.field(factory=dict)
    sources: tuple[str, ...] = ()

    def over(self, earlier: Settings) -> Settings:
        """These settings, and those of `earlier` that these do not replace."""
        replaced = self.values.keys() | (HOST_POOL if HOST_POOL & self.values.keys() else set())
        kept = {name: value for name, value in earlier.values.items() if name not in replaced}
        return Settings(kept | self.values, earlier.origins | self.origins, earlier.sources + self.sources)

    def build(self, kind: Callable[..., Config], arguments: dict[str, Any]) -> Config:
        """A configuration from these settings and from `arguments`, which replace them."""
        settings = Settings(arguments).over(self)
        where = " and ".join(self.sources)
        if "groups" not in settings.values:
            raise ConfigError("groups", f"is missing ({where})")
        try:
            return kind(**settings.values)
        except ConfigError as error:
            name = error.argument.partition(".")[0]
            if name in arguments:
                raise
            raise ConfigError(error.argument, f"{error.problem} ({self.origins.get(name, where)})") from error


def read_file(path: object, kind: type[Any], argument: str = "path") -> Settings:
    """The settings in a TOML file, whose keys are the fields of `kind`."""
    found, name = _toml(path, argument), os.fsdecode(path)  # type: ignore[arg-type]
    for key in found:
        if key not in attrs.fields_dict(kind):
            raise ConfigError(key, f"is not a setting ({name})")
    fields = attrs.fields_dict(kind)
    values = {key: _from_toml(key, value, name, _may_be_none(fields[key])) for key, value in found.items()}
    return Settings(values, dict.fromkeys(values, name), (name,))


def read_environment(environ: Mapping[str, str], kind: type[Any]) -> Settings:
    """The settings in variables `AOFFLOAD_…`, over those of the file that `AOFFLOAD_CONFIG_FILE` names."""
    fields = {PREFIX + name.upper(): field for name, field in attrs.fields_dict(kind).items()}
    values, origins, earlier = {}, {}, Settings()
    for variable in sorted(environ):
        if variable == FILE_VARIABLE and environ[variable]:
            earlier = read_file(environ[variable], kind, FILE_VARIABLE)
        elif variable in fields:
            field = fields[variable]
            values[field.name] = _from_text(field, environ[variable], variable)
            origins[field.name] = variable
        elif variable.startswith(PREFIX) and variable not in (FILE_VARIABLE, KEY_VARIABLE):
            raise ConfigError(variable, "does not name a setting")
    return Settings(values, origins, (f"variables {PREFIX}…",)).over(earlier)


def _may_be_none(field: attrs.Attribute[Any]) -> bool:
    return str(field.type).endswith("| None")


def _from_toml(key: str, value: object, origin: str, may_be_none: bool) -> object:
    if value == NONE and may_be_none:
        return None
    if key == "groups":
        return _groups(value, origin)
    if key in TABLES:
        return TABLES[key](value, origin)
    if key in NAMES and not isinstance(value, str):
        raise ConfigError(key, f"must be a name, got {shown(value)} ({origin})")
    return value


def _groups(value: object, origin: str) -> list[KVCacheGroup]:
    if not isinstance(value, list):
        raise ConfigError("groups", f"must be a list of tables, got {shown(value)} ({origin})")
    return [_group(table, origin) for table in value]


def _group(table: object, origin: str) -> KVCacheGroup:
    if not isinstance(table, dict):
        raise ConfigError("groups", f"must be a list of tables, got {shown(table)} in it ({origin})")
    for key in table:
        if key not in GROUP_KEYS:
            raise ConfigError(f"groups.{key}", f"is not one of {', '.join(GROUP_KEYS)} ({origin})")
    given = [key for key in KINDS if key in table]
    if len(given) > 1:
        raise ConfigError(
            f"groups.{given[0]}", f"excludes groups.{given[1]}, which is for another kind of layers ({origin})"
        )
    try:
        kind = KINDS[given[0]](table[given[0]]) if given else FullAttention()
        named = {key: table[key] for key in ("name", "block_size") if key in table}
        rows = {"num_rows": table["rows"]} if "rows" in table else {}
        return KVCacheGroup(**{"name": "", **named}, attention=kind, **rows)
    except ConfigError as error:
        argument = error.argument if error.argument.startswith("groups.") else f"groups.{error.argument}"
        argument = argument.replace("num_rows", "rows")
        raise ConfigError(argument, f"{error.problem} ({origin})") from error


def _from_text(field: attrs.Attribute[Any], text: str, variable: str) -> object:
    """The value of `text` for `field`, read according to the annotation of the field."""
    if field.name == "groups":
        return _groups(_value("groups", "be a list of tables", text, variable), variable)
    if text == NONE and _may_be_none(field):
        return None
    if field.name in TABLES:
        return TABLES[field.name](_value(field.name, "be a table", text, variable), variable)
    annotation = str(field.type)
    if annotation.startswith("bool"):
        if text.lower() not in ("true", "false"):
            raise ConfigError(field.name, f"must be true or false, got {shown(text)} ({variable})")
        return text.lower() == "true"
    if annotation.startswith("float"):
        return _number(field.name, text, variable, float)
    if annotation in ("int", "int | None"):
        return _number(field.name, text, variable, int)
    return text  # a name, a namespace, or a size, which may be a number


def _number(name: str, text: str, variable: str, kind: type[int] | type[float]) -> float:
    try:
        return kind(text)
    except ValueError as error:
        noun = "an integer" if kind is int else "a number"
        raise ConfigError(name, f"must be {noun}, got {shown(text)} ({variable})") from error


def _value(name: str, wanted: str, text: str, variable: str) -> object:
    """The value of `text`, read as it would be after `name =` in a file."""
    try:
        found = tomllib.loads(f"{name} = {text}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(name, f"is not valid TOML: {error} ({variable})") from error
    if found.keys() != {name}:
        raise ConfigError(name, f"must {wanted}, got {shown(text)} ({variable})")
    return found[name]
