"""Public names around the synchronous `Ledger`, which `aoffload` itself has, and of what is plugged into it.

What it takes and hands out, the states of that, the protocols of observers, policies and pools, and the errors of its
bookkeeping. Nothing here needs torch.
"""

from .core.answer import Answer
from .core.blocks import DevicePool
from .core.engine_blocks import EngineBlocks
from .core.eviction import EvictionOrder
from .core.forks import Fork
from .core.kept import CacheTransfer, Demotion, Pin, Prefetch, Step
from .core.ledger import LedgerStatistics
from .core.lifecycle import CacheTransferState, JobState, OverlapState, PinState
from .core.observer import Observer
from .core.owners import Holding, LoadOverlap, Waiter
from .core.plan import Completion, Direction, Outcome, TransferPlan
from .core.policy import StorePolicy, StoreScope
from .core.status import Holder, RequestStatus, WaitsFor
from .core.tiers import BlockWatcher, TierStatistics
from .errors import IllegalTransition, LeaseError
from .kinds import AttentionKind
from .observers import Observers
from .prefix import Prefix, Root
from .telemetry import LedgerLog
from .transfer.copy_observer import CopyObserver
from .transfer.copy_queue import CopyQueue, Launches

__all__ = [
    "Answer",
    "AttentionKind",
    "BlockWatcher",
    "CacheTransfer",
    "CacheTransferState",
    "Completion",
    "CopyObserver",
    "CopyQueue",
    "Demotion",
    "DevicePool",
    "Direction",
    "EngineBlocks",
    "EvictionOrder",
    "Fork",
    "Holder",
    "Holding",
    "IllegalTransition",
    "JobState",
    "Launches",
    "LeaseError",
    "LedgerLog",
    "LedgerStatistics",
    "LoadOverlap",
    "Observer",
    "Observers",
    "Outcome",
    "OverlapState",
    "Pin",
    "PinState",
    "Prefetch",
    "Prefix",
    "RequestStatus",
    "Root",
    "Step",
    "StorePolicy",
    "StoreScope",
    "TierStatistics",
    "TransferPlan",
    "Waiter",
    "WaitsFor",
]
