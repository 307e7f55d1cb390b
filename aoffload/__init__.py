"""aoffload: a KV cache offload runtime for async LLM serving.

Each request is a task. It holds blocks until its `async with` block ends. See docs/architecture.md.

This module has the names for programs that use `OffloadRuntime`. Further names for programs that use the `Ledger`, and
for plug-ins, are in `aoffload.ledger`, `aoffload.host_cache`, `aoffload.transport`, `aoffload.ranks`, `aoffload.cuda`
and `aoffload.stores`. docs/api.md lists every name.
"""

from importlib import import_module as _import_module
from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

from ._common.prefix import KeySpan
from ._common.tiers import Tier
from ._config.config import OffloadConfig
from ._config.groups import ChunkedLocal, FullAttention, KVCacheGroup, RecurrentState, SlidingWindow
from ._config.model_layout import ModelLayout, RegionSpec, groups_of
from ._config.models import fingerprint
from ._config.tiers import DiskTier, RemoteTier
from ._extensions.assembly import Ledger
from ._extensions.preemption import Preemption
from ._extensions.store_policies import EagerStore, LazyStore, NoStore, SelectiveStore
from ._host_cache.host_cache import HostCache
from ._kernel.plans import Extension, PrefixMatch
from ._kernel.states import RequestState
from ._runtime.loading import PendingLoad
from ._runtime.request import Request
from .errors import (
    AoffloadError,
    CommitError,
    ConfigError,
    DuplicateRequest,
    IntegrityError,
    InvalidArgument,
    MissingExtra,
    OutOfBlocks,
    RequestAborted,
    RuntimeClosed,
    UnsupportedVersion,
    WrongProcess,
    WrongState,
    WrongThread,
)

if TYPE_CHECKING:
    from ._runtime.runtime import HostCacheRuntime, OffloadRuntime, RuntimeStatistics
    from ._runtime.steps import Computed
    from ._transfer.region import KVRegion

try:
    __version__ = _version("aoffload")
except _PackageNotFoundError:  # a source tree that is on the path, but not installed
    __version__ = "0+unknown"

# Imported on first access (PEP 562): importing torch takes seconds, and a program that uses only the `Ledger` does not
# need it.
_NEEDS_TORCH = {
    "Computed": "._runtime.steps",
    "HostCacheRuntime": "._runtime.runtime",
    "KVRegion": "._transfer.region",
    "OffloadRuntime": "._runtime.runtime",
    "RuntimeStatistics": "._runtime.runtime",
}

# With this function visible, a type checker would accept any misspelled name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _NEEDS_TORCH:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(_import_module(_NEEDS_TORCH[name], __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return list(__all__)


__all__ = [
    "AoffloadError",
    "ChunkedLocal",
    "CommitError",
    "Computed",
    "ConfigError",
    "DiskTier",
    "DuplicateRequest",
    "EagerStore",
    "Extension",
    "FullAttention",
    "HostCache",
    "HostCacheRuntime",
    "IntegrityError",
    "InvalidArgument",
    "KVCacheGroup",
    "KVRegion",
    "KeySpan",
    "LazyStore",
    "Ledger",
    "MissingExtra",
    "ModelLayout",
    "NoStore",
    "OffloadConfig",
    "OffloadRuntime",
    "OutOfBlocks",
    "PendingLoad",
    "PrefixMatch",
    "Preemption",
    "RecurrentState",
    "RegionSpec",
    "RemoteTier",
    "Request",
    "RequestAborted",
    "RequestState",
    "RuntimeClosed",
    "RuntimeStatistics",
    "SelectiveStore",
    "SlidingWindow",
    "Tier",
    "UnsupportedVersion",
    "WrongProcess",
    "WrongState",
    "WrongThread",
    "fingerprint",
    "groups_of",
]
