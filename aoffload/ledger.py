"""Public names around the synchronous `Ledger`, which `aoffload` itself has, and of what is plugged into it.

What it takes and hands out, the states of that, the protocols of observers, policies and pools, and the errors of its
bookkeeping. Nothing here needs torch.
"""

from ._config.groups import AttentionKind
from ._config.tiers import LearnedEviction
from ._extensions.forks import Fork
from ._extensions.load_choice import CostChoice, Loadable, LoadChoice, LoadOffer
from ._extensions.store_policies import StorePolicy
from ._kernel.events import (
    CacheTransferMoved,
    CacheTurnedOff,
    CompletionDelivered,
    Event,
    EvictionSwitched,
    ExtensionRefused,
    HintEnded,
    HintGiven,
    JobMoved,
    LoadsPaused,
    LoadsResumed,
    Observer,
    OverlapMoved,
    PinMoved,
    RequestCancelled,
    RequestMoved,
    SlowStep,
    SlowWait,
    StepBegun,
    StepEnded,
    StoreSkipped,
    TransportRecovered,
    TransportStalled,
    WaitedForBlocks,
    WorkerFailed,
)
from ._kernel.ledger import LedgerStatistics, RemoteCounts
from ._kernel.plans import (
    Answer,
    Completion,
    RequestOptions,
    StoreScope,
    TierStatistics,
    TransferPlan,
)
from ._kernel.prefix import Prefix, Root
from ._kernel.protocols import BlockWatcher, DevicePool, EngineBlocks, EvictionOrder
from ._kernel.requests import CacheTransfer, Demotion, Fetch, LedgerRequest, LoadOverlap, Pin, Prefetch, Step, Waiter
from ._kernel.states import CacheTransferState, Direction, JobState, Outcome, OverlapState, PinState, is_compiled
from ._kernel.status import (
    EvictionRule,
    EvictionStatistics,
    HintEnd,
    Holder,
    RequestStatus,
    TierEviction,
    WaitsFor,
)
from ._observe.log import LedgerLog
from ._observe.observers import Observers
from ._runtime.costs import LoadCosts
from ._tiers.disk.plans import BlockLabel, DiskPayload, RestoredRun
from ._tiers.remote.plans import CellLabel
from ._tiers.remote.rules import cells_of
from ._transfer.copy_queue import CopyQueue, Launches
from .errors import IllegalTransition, LeaseError

__all__ = [
    "Answer",
    "AttentionKind",
    "BlockLabel",
    "BlockWatcher",
    "CacheTransfer",
    "CacheTransferMoved",
    "CacheTransferState",
    "CacheTurnedOff",
    "CellLabel",
    "Completion",
    "CompletionDelivered",
    "CopyQueue",
    "CostChoice",
    "Demotion",
    "DevicePool",
    "Direction",
    "DiskPayload",
    "EngineBlocks",
    "Event",
    "EvictionOrder",
    "EvictionRule",
    "EvictionStatistics",
    "EvictionSwitched",
    "ExtensionRefused",
    "Fetch",
    "Fork",
    "HintEnd",
    "HintEnded",
    "HintGiven",
    "Holder",
    "IllegalTransition",
    "JobMoved",
    "JobState",
    "Launches",
    "LearnedEviction",
    "LeaseError",
    "LedgerLog",
    "LedgerRequest",
    "LedgerStatistics",
    "LoadChoice",
    "LoadCosts",
    "LoadOffer",
    "LoadOverlap",
    "Loadable",
    "LoadsPaused",
    "LoadsResumed",
    "Observer",
    "Observers",
    "Outcome",
    "OverlapMoved",
    "OverlapState",
    "Pin",
    "PinMoved",
    "PinState",
    "Prefetch",
    "Prefix",
    "RemoteCounts",
    "RequestCancelled",
    "RequestMoved",
    "RequestOptions",
    "RequestStatus",
    "RestoredRun",
    "Root",
    "SlowStep",
    "SlowWait",
    "Step",
    "StepBegun",
    "StepEnded",
    "StorePolicy",
    "StoreScope",
    "StoreSkipped",
    "TierEviction",
    "TierStatistics",
    "TransferPlan",
    "TransportRecovered",
    "TransportStalled",
    "WaitedForBlocks",
    "Waiter",
    "WaitsFor",
    "WorkerFailed",
    "cells_of",
    "is_compiled",
]
