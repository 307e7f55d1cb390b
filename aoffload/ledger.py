"""Public names around the synchronous `Ledger`, which `aoffload` itself has, and of what is plugged into it.

What it takes and hands out, the states of that, the protocols of observers, policies and pools, and the errors of its
bookkeeping. Nothing here needs torch.
"""

from .core.answer import Answer
from .core.build import is_compiled
from .core.cells import cells_of
from .core.choice import CostChoice, Loadable, LoadChoice, LoadOffer
from .core.eviction import EvictionOrder
from .core.forked import Fork
from .core.hops import Direction, Outcome
from .core.kept import CacheTransfer, Demotion, Fetch, Pin, Prefetch, Step
from .core.ledger import LedgerStatistics, RemoteCounts
from .core.lifecycle import CacheTransferState, JobState, OverlapState, PinState
from .core.observing import Observer
from .core.owners import Holding, LoadOverlap, Waiter
from .core.plan import BlockLabel, CellLabel, Completion, TransferPlan
from .core.policy import StorePolicy, StoreScope
from .core.pools import DevicePool, EngineBlocks
from .core.restored import RestoredRun
from .core.status import (
    EvictionRule,
    EvictionStatistics,
    HintEnd,
    Holder,
    RequestStatus,
    TierEviction,
    TierStatistics,
    WaitsFor,
)
from .core.watching import BlockWatcher
from .errors import IllegalTransition, LeaseError
from .evictions import LearnedEviction
from .kinds import AttentionKind
from .ledger_log import LedgerLog
from .load_costs import LoadCosts
from .observers import Observers
from .prefix import Prefix, Root
from .transfer.copy_observer import CopyObserver
from .transfer.copy_queue import CopyQueue, Launches

__all__ = [
    "Answer",
    "AttentionKind",
    "BlockLabel",
    "BlockWatcher",
    "CacheTransfer",
    "CacheTransferState",
    "CellLabel",
    "Completion",
    "CopyObserver",
    "CopyQueue",
    "CostChoice",
    "Demotion",
    "DevicePool",
    "Direction",
    "EngineBlocks",
    "EvictionOrder",
    "EvictionRule",
    "EvictionStatistics",
    "Fetch",
    "Fork",
    "HintEnd",
    "Holder",
    "Holding",
    "IllegalTransition",
    "JobState",
    "Launches",
    "LearnedEviction",
    "LeaseError",
    "LedgerLog",
    "LedgerStatistics",
    "LoadChoice",
    "LoadCosts",
    "LoadOffer",
    "LoadOverlap",
    "Loadable",
    "Observer",
    "Observers",
    "Outcome",
    "OverlapState",
    "Pin",
    "PinState",
    "Prefetch",
    "Prefix",
    "RemoteCounts",
    "RequestStatus",
    "RestoredRun",
    "Root",
    "Step",
    "StorePolicy",
    "StoreScope",
    "TierEviction",
    "TierStatistics",
    "TransferPlan",
    "Waiter",
    "WaitsFor",
    "cells_of",
    "is_compiled",
]
