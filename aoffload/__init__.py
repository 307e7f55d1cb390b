"""aoffload: a KV cache offload runtime for async LLM serving.

Each request is a task; what it pins lives as long as its `async with` block. See docs/architecture.md.
"""

from importlib.metadata import version as _version

from .config import OffloadConfig
from .core.blocks import DevicePool
from .core.eviction import EvictionOrder
from .core.groups import AttentionKind, FullAttention, KVCacheGroup
from .core.holding import Extension, Holding
from .core.ledger import Ledger, LedgerStatistics
from .core.lifecycle import JobState, Observer, RequestState
from .core.matching import Answer, PrefixMatch
from .core.plan import Completion, Direction, Outcome, Tier, TransferPlan
from .core.policy import StorePolicy
from .core.tiers import TierStatistics
from .core.waiting import Waiter
from .env import Env
from .errors import (
    AoffloadError,
    CommitError,
    ConfigError,
    DuplicateRequest,
    IllegalTransition,
    IntegrityError,
    InvalidArgument,
    LeaseError,
    OutOfBlocks,
    RegionError,
    RequestAborted,
    RuntimeClosed,
    TransferRefused,
    WrongProcess,
    WrongState,
    WrongThread,
)
from .prefix import KeySpan, Prefix, Root
from .request import PendingLoad, Request
from .runtime import Computed, OffloadRuntime, RuntimeStatistics
from .transfer.fence import Fence, PassedFence
from .transfer.local import LocalTransport
from .transfer.region import KVRegion
from .transfer.transport import TransferStatistics, Transport

__version__ = _version("aoffload")

__all__ = [
    "Answer",
    "AoffloadError",
    "AttentionKind",
    "CommitError",
    "Completion",
    "Computed",
    "ConfigError",
    "DevicePool",
    "Direction",
    "DuplicateRequest",
    "Env",
    "EvictionOrder",
    "Extension",
    "Fence",
    "FullAttention",
    "Holding",
    "IllegalTransition",
    "IntegrityError",
    "InvalidArgument",
    "JobState",
    "KVCacheGroup",
    "KVRegion",
    "KeySpan",
    "LeaseError",
    "Ledger",
    "LedgerStatistics",
    "LocalTransport",
    "Observer",
    "OffloadConfig",
    "OffloadRuntime",
    "OutOfBlocks",
    "Outcome",
    "PassedFence",
    "PendingLoad",
    "Prefix",
    "PrefixMatch",
    "RegionError",
    "Request",
    "RequestAborted",
    "RequestState",
    "Root",
    "RuntimeClosed",
    "RuntimeStatistics",
    "StorePolicy",
    "Tier",
    "TierStatistics",
    "TransferPlan",
    "TransferRefused",
    "TransferStatistics",
    "Transport",
    "Waiter",
    "WrongProcess",
    "WrongState",
    "WrongThread",
]
