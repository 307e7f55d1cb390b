"""aoffload: a KV cache offload runtime for async LLM serving.

Each request is a task. It holds blocks until its `async with` block ends. See docs/architecture.md.
"""

from importlib import import_module as _import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

from .config import OffloadConfig
from .core.answer import Answer, PrefixMatch
from .core.blocks import DevicePool
from .core.engine_blocks import EngineBlocks
from .core.eviction import EvictionOrder
from .core.forks import Fork
from .core.groups import ChunkedLocal, FullAttention, KVCacheGroup, SlidingWindow
from .core.kept import Demotion, Errand, Pin, Prefetch
from .core.kinds import AttentionKind
from .core.ledger import Ledger, LedgerStatistics
from .core.lifecycle import EarlyState, ErrandState, JobState, PinState, RequestState
from .core.observer import Observer
from .core.owners import EarlyStart, Extension, Holding, Waiter
from .core.plan import Completion, Direction, Outcome, Tier, TransferPlan
from .core.policy import EagerStore, LazyStore, NoStore, SelectiveStore, StorePolicy, StoreScope
from .core.preemption import Preemption
from .core.tiers import BlockWatcher, TierStatistics
from .env import Env
from .errors import (
    AoffloadError,
    CommitError,
    ConfigError,
    DeviceGone,
    DuplicateRequest,
    IllegalTransition,
    IntegrityError,
    InvalidArgument,
    LeaseError,
    OutOfBlocks,
    RegionError,
    RegionNotLoaded,
    RequestAborted,
    RuntimeClosed,
    TransferRefused,
    WireError,
    WrongProcess,
    WrongState,
    WrongThread,
)
from .keeping import PendingDemotion, PendingPrefetch, PinScope
from .loading import PendingLoad
from .observers import RuntimeObserver
from .prefix import KeySpan, Prefix, Root
from .request import Request
from .transfer.fence import Fence, PassedFence
from .transfer.ranks.rank import LocalRank, Rank
from .transfer.region_fences import LoadedRegion
from .transfer.transport import TransferStatistics, Transport

if TYPE_CHECKING:
    from .runtime import OffloadRuntime, RuntimeStatistics
    from .steps import Computed
    from .transfer.backends.cuda import (
        AdaptivePolling,
        BlockingWait,
        BreakEven,
        CudaBackend,
        CudaOptions,
        StreamCaptured,
    )
    from .transfer.local import LocalTransport
    from .transfer.ranks.process import ProcessRank
    from .transfer.ranks.transport import RankFence, RankTransport
    from .transfer.region import KVRegion

__version__ = _version("aoffload")

# Imported on first access (PEP 562): torch takes seconds to import, and a program around the `Ledger` needs none.
_NEEDS_TORCH = {
    "Computed": ".steps",
    "OffloadRuntime": ".runtime",
    "RuntimeStatistics": ".runtime",
    "AdaptivePolling": ".transfer.backends.cuda",
    "BlockingWait": ".transfer.backends.cuda",
    "BreakEven": ".transfer.backends.cuda",
    "CudaBackend": ".transfer.backends.cuda",
    "CudaOptions": ".transfer.backends.cuda",
    "StreamCaptured": ".transfer.backends.cuda",
    "LocalTransport": ".transfer.local",
    "ProcessRank": ".transfer.ranks.process",
    "RankFence": ".transfer.ranks.transport",
    "RankTransport": ".transfer.ranks.transport",
    "KVRegion": ".transfer.region",
}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(_NEEDS_TORCH[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "AdaptivePolling",
    "Answer",
    "AoffloadError",
    "AttentionKind",
    "BlockWatcher",
    "BlockingWait",
    "BreakEven",
    "ChunkedLocal",
    "CommitError",
    "Completion",
    "Computed",
    "ConfigError",
    "CudaBackend",
    "CudaOptions",
    "Demotion",
    "DeviceGone",
    "DevicePool",
    "Direction",
    "DuplicateRequest",
    "EagerStore",
    "EarlyStart",
    "EarlyState",
    "Env",
    "Errand",
    "ErrandState",
    "EvictionOrder",
    "Extension",
    "Fence",
    "Fork",
    "FullAttention",
    "Holding",
    "IllegalTransition",
    "IntegrityError",
    "InvalidArgument",
    "JobState",
    "KVCacheGroup",
    "KVRegion",
    "KeySpan",
    "LazyStore",
    "LeaseError",
    "Ledger",
    "LedgerStatistics",
    "EngineBlocks",
    "LoadedRegion",
    "LocalRank",
    "LocalTransport",
    "NoStore",
    "Observer",
    "OffloadConfig",
    "OffloadRuntime",
    "OutOfBlocks",
    "Outcome",
    "PassedFence",
    "PendingDemotion",
    "PendingLoad",
    "PendingPrefetch",
    "Pin",
    "PinScope",
    "PinState",
    "Prefetch",
    "Prefix",
    "Preemption",
    "PrefixMatch",
    "ProcessRank",
    "Rank",
    "RankFence",
    "RankTransport",
    "RegionError",
    "RegionNotLoaded",
    "Request",
    "RequestAborted",
    "RequestState",
    "Root",
    "RuntimeClosed",
    "RuntimeObserver",
    "RuntimeStatistics",
    "SelectiveStore",
    "SlidingWindow",
    "StorePolicy",
    "StoreScope",
    "StreamCaptured",
    "Tier",
    "TierStatistics",
    "TransferPlan",
    "TransferRefused",
    "TransferStatistics",
    "Transport",
    "Waiter",
    "WireError",
    "WrongProcess",
    "WrongState",
    "WrongThread",
]
