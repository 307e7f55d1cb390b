"""Public names around the synchronous `Ledger`, which `aoffload` itself has, and of what is plugged into it.

What it takes and hands out, the states of that, the protocols of observers, policies and pools, and the errors of its
bookkeeping. Nothing here needs torch.
"""

from ._config.groups import AttentionKind
from ._config.tiers import LearnedEviction
from ._extensions.forks import Fork
from ._extensions.load_choice import CostChoice, Loadable, LoadChoice, LoadOffer
from ._extensions.store_policies import StorePolicy, StoreScope
from ._kernel.eviction import EvictionOrder
from ._kernel.ledger import LedgerStatistics, RemoteCounts
from ._kernel.plans import Answer, BlockLabel, CellLabel, Completion, RestoredRun, TransferPlan
from ._kernel.prefix import Prefix, Root
from ._kernel.protocols import BlockWatcher, DevicePool, EngineBlocks, Observer
from ._kernel.requests import CacheTransfer, Demotion, Fetch, LedgerRequest, LoadOverlap, Pin, Prefetch, Step, Waiter
from ._kernel.states import CacheTransferState, Direction, JobState, Outcome, OverlapState, PinState, is_compiled
from ._kernel.status import (
    EvictionRule,
    EvictionStatistics,
    HintEnd,
    Holder,
    RequestStatus,
    TierEviction,
    TierStatistics,
    WaitsFor,
)
from ._observe.log import LedgerLog
from ._observe.observers import Observers
from ._runtime.costs import LoadCosts
from ._tiers.remote.rules import cells_of
from ._transfer.copy_queue import CopyObserver, CopyQueue, Launches
from .errors import IllegalTransition, LeaseError

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
    "LedgerRequest",
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
