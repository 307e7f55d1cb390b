"""Store policies: which of the blocks that a request has published are offered to the host, and when."""

from __future__ import annotations

from typing import Any, Protocol

from ..errors import ConfigError
from .holding import Holding

__all__ = ["EagerStore", "NoStore", "StorePolicy", "store_policy_of"]


class StorePolicy(Protocol):
    def wants(self, holding: Holding) -> bool:
        """Whether what `holding` has published, and the host lacks, should be stored now. Asked at every commit, and
        once more when the request is done."""
        ...


class EagerStore:
    """At once, whatever is confirmed computed."""

    def wants(self, holding: Holding) -> bool:
        return True


class NoStore:
    """Never: a cache on the device alone."""

    def wants(self, holding: Holding) -> bool:
        return False


def store_policy_of(value: Any) -> StorePolicy:
    """The policy that `OffloadConfig.store_policy` names or is."""
    if isinstance(value, str):
        named: dict[str, type[StorePolicy]] = {"eager": EagerStore, "off": NoStore}
        return named[value]()
    if not callable(getattr(value, "wants", None)):
        raise ConfigError("store_policy", f"must be a name or have a method wants(holding), got {value!r}")
    return value  # type: ignore[no-any-return]
