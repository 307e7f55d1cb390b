"""Access control: an API key, and for a server on loopback the host names that it answers to."""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import anyio
import attrs

from ...errors import InvalidArgument
from .errors import ApiError
from .wire import FAREWELL_S, Reply

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


# -- keys ------------------------------------------------------------------------------------------------------------
#
# The source of the API key. The key is in no message and in no `repr`.

VARIABLE = "AOFFLOAD_API_KEY"
MAX_KEY_BYTES = 4096


def find_key(option: str | None, file: Path | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The key of an option, a file (its first line) or the environment, in this order. None if there is none.

    Raises `InvalidArgument` naming `api_key` or `api_key_file` for a key that no header can carry.
    """
    if option is not None and file is not None:
        raise InvalidArgument("api_key_file", "give either a key or a file, not both")
    if file is not None:
        return _checked("api_key_file", _read(file))
    if option is not None:
        return _checked("api_key", option)
    found = environment.get(VARIABLE)
    return _checked("api_key", found) if found is not None else None


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return opened.read(MAX_KEY_BYTES).decode("latin-1").partition("\n")[0].rstrip("\r")
    except OSError as error:
        raise InvalidArgument("api_key_file", f"cannot be read: {error}") from error


def _checked(argument: str, key: str) -> str:
    if not key or not all("!" <= character <= "~" for character in key):
        raise InvalidArgument(argument, "must be one or more visible ASCII characters without spaces")
    return key


# -- gate ------------------------------------------------------------------------------------------------------------

OPEN_PATHS = frozenset({"/health"})
"""Paths that need no key, because health probes have none."""


@attrs.frozen(kw_only=True)
class Rules:
    """The rules for every request."""

    api_key: str | None = attrs.field(default=None, repr=False)
    """None: no key is needed."""
    hosts: frozenset[str] | None = None
    """Names besides those of loopback that `Host` and `Origin` may have. None: any.

    A firewall does not protect a server on loopback: a web page in a browser on this machine can reach it, under its
    own name (`Host`, after DNS rebinding) or across origins (`Origin`).
    """

    @classmethod
    def of(cls, host: str, allowed_hosts: Iterable[str], api_key: str | None) -> Rules:
        """The rules of a server that listens at `host`."""
        names = frozenset(name.lower() for name in allowed_hosts)
        return cls(api_key=api_key, hosts=names if names or is_loopback(host) else None)

    def check(self, scope: Scope) -> None:
        """Raise `ApiError` with 401 or 403 for a request that is not allowed."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if self.hosts is not None:
            for name in (b"host", b"origin"):
                for value in (value for found, value in headers if found == name):
                    self._check_name(name.decode(), value.decode("latin-1"))
        if self.api_key is not None and scope["path"] not in OPEN_PATHS:
            self._check_key([value for found, value in headers if found == b"authorization"])

    def _check_name(self, header: str, value: str) -> None:
        assert self.hosts is not None
        name = _name_of(value if header == "origin" else f"//{value}")
        if name is None or not (is_loopback(name) or name in self.hosts):
            message = f"{header}: {value!r:.100} is not a host name that this server accepts (option --allow-host)"
            raise ApiError(403, message, code="forbidden")

    def _check_key(self, values: list[bytes]) -> None:
        assert self.api_key is not None
        scheme, _, given = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
        is_same = hmac.compare_digest(given.strip(), self.api_key.encode())  # same time for any key of that length
        if scheme.lower() != b"bearer" or not is_same:
            raise ApiError(401, "authorization: the API key is missing or wrong", code="invalid_api_key")


class Gate:
    """ASGI middleware that passes a request on, or answers it with an error."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._rules.check(scope)
            except ApiError as error:
                with anyio.move_on_after(FAREWELL_S):
                    await Reply(send).fail(error)
                return
        await self._app(scope, receive, send)


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, can only be reached from this machine."""
    if host in ("localhost", "localhost."):  # with a dot, the resolver appends nothing to it
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _name_of(url: str) -> str | None:
    """The host that `url` names, in lower case; None if it names none."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
