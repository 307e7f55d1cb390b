"""Public names around the synchronous `Ledger`, which is in `aoffload` itself.

The values that a `Ledger` takes and returns, with their states; the protocols of observers, policies and pools; its
errors; and the results of pins, prefetches, fetches and demotions. Importing this module does not import torch.
"""

from ._common.hints import (
    DemoteHint,
    DoneHint,
    GivenHint,
    HintReason,
    HintVerb,
    PinHint,
    PrefetchHint,
    ReturnsHint,
    read_hints,
)
from ._common.prefix import Prefix, Root
from ._config.groups import AttentionKind
from ._config.quotas import Quota, Quotas
from ._config.tiers import LearnedEviction
from ._eviction.status import (
    BucketStatistics,
    EvictionRule,
    EvictionStatistics,
    EvictionSwitched,
    TierEviction,
)
from ._extensions.assembly import AnyLedger, LedgerStatistics
from ._extensions.forks import Fork
from ._extensions.hints import HintAnswer, HintAnswered, HintOutcome, HintStatistics
from ._extensions.load_choice import CostChoice, Loadable, LoadChoice, LoadOffer
from ._extensions.overlap import LoadOverlap, OverlapMoved, OverlapState
from ._extensions.pins import Pin, PinMoved, PinState
from ._extensions.prefetch import Demotion, Prefetch
from ._extensions.quotas import AccountStatistics, AccountTier, QuotaAccounts, QuotaCleared, QuotaReached
from ._extensions.status import Holder, RequestStatus, SlowStep, SlowWait, WaitsFor
from ._extensions.store_policies import StorePolicy
from ._extensions.transfers import CacheTransfer, CacheTransferMoved, CacheTransferState, Fetch
from ._extensions.weights import WeightsChanged
from ._kernel.events import (
    CacheTurnedOff,
    CompletionDelivered,
    Event,
    ExtensionRefused,
    JobMoved,
    Observer,
    RequestCancelled,
    RequestMoved,
    StepBegun,
    StepEnded,
    StoreSkipped,
    TransportRecovered,
    TransportStalled,
    WaitedForBlocks,
    WorkerFailed,
)
from ._kernel.extension import Build, LedgerExtension
from ._kernel.layout import Layout
from ._kernel.ledger import CoreLedger
from ._kernel.plans import (
    Answer,
    Completion,
    RequestOptions,
    StoreScope,
    TierStatistics,
    TransferPlan,
)
from ._kernel.pools import LeastRecentlyUsed
from ._kernel.protocols import BlockWatcher, DevicePool, EvictionOrder
from ._kernel.records import LedgerRequest, Part, Step, Waiter
from ._kernel.states import Direction, JobState, Outcome, is_compiled
from ._observe.log import LedgerLog
from ._observe.observers import Observers
from ._runtime.costs import LoadCosts
from ._runtime.handles import PendingDemotion, PendingFetch, PendingPrefetch, PinScope
from ._tiers.disk.plans import BlockLabel, DiskPayload, RestoredRun
from ._tiers.lower.extension import LowerTier
from ._tiers.remote.extension import RemoteCounts
from ._tiers.remote.plans import CellLabel
from ._tiers.remote.rules import cells_of
from ._transfer.copy_queue import CopyQueue, Launches
from .errors import ExtensionError, IllegalTransition, LeaseError

__all__ = [
    "AccountStatistics",
    "AccountTier",
    "AnyLedger",
    "Answer",
    "AttentionKind",
    "BlockLabel",
    "BlockWatcher",
    "Build",
    "CacheTransfer",
    "CacheTransferMoved",
    "BucketStatistics",
    "CacheTransferState",
    "CacheTurnedOff",
    "CellLabel",
    "Completion",
    "CompletionDelivered",
    "CopyQueue",
    "CoreLedger",
    "CostChoice",
    "DemoteHint",
    "Demotion",
    "DevicePool",
    "Direction",
    "DiskPayload",
    "DoneHint",
    "Event",
    "EvictionOrder",
    "EvictionRule",
    "EvictionStatistics",
    "EvictionSwitched",
    "ExtensionError",
    "ExtensionRefused",
    "Fetch",
    "Fork",
    "GivenHint",
    "HintAnswer",
    "HintAnswered",
    "HintOutcome",
    "HintReason",
    "HintStatistics",
    "HintVerb",
    "Holder",
    "IllegalTransition",
    "JobMoved",
    "JobState",
    "Launches",
    "Layout",
    "LearnedEviction",
    "LeaseError",
    "LeastRecentlyUsed",
    "LedgerExtension",
    "LedgerLog",
    "LedgerRequest",
    "LedgerStatistics",
    "LoadChoice",
    "LoadCosts",
    "LoadOffer",
    "LoadOverlap",
    "Loadable",
    "LowerTier",
    "Observer",
    "Observers",
    "Outcome",
    "OverlapMoved",
    "OverlapState",
    "Part",
    "PendingDemotion",
    "PendingFetch",
    "PendingPrefetch",
    "Pin",
    "PinHint",
    "PinMoved",
    "PinScope",
    "PinState",
    "Prefetch",
    "PrefetchHint",
    "Prefix",
    "Quota",
    "QuotaAccounts",
    "QuotaCleared",
    "QuotaReached",
    "Quotas",
    "RemoteCounts",
    "RequestCancelled",
    "RequestMoved",
    "RequestOptions",
    "RequestStatus",
    "RestoredRun",
    "ReturnsHint",
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
    "WeightsChanged",
    "WorkerFailed",
    "cells_of",
    "is_compiled",
    "read_hints",
]
