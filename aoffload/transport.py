"""Public names of transports, which move the bytes for a runtime: the protocol, the transport of one process, fences
and their errors, and `Env`, which provides the clock, the randomness and the threads.

`aoffload.ranks` has the transport of several devices, `aoffload.cuda` the options for a GPU, and `aoffload.ledger` the
plans that a transport executes.
"""

from ._common.env import Env
from ._transfer.fences import ORDERED, Fence, LoadedRegion, OnlyAfter, PassedFence, StepFences
from ._transfer.lane import BlockChecksums
from ._transfer.local import LocalTransport
from ._transfer.transport import TransferStatistics, Transport, TransportTier
from .errors import DeviceGone, RegionError, RegionNotLoaded, TransferRefused

__all__ = [
    "ORDERED",
    "BlockChecksums",
    "OnlyAfter",
    "DeviceGone",
    "Env",
    "Fence",
    "LoadedRegion",
    "LocalTransport",
    "PassedFence",
    "RegionError",
    "RegionNotLoaded",
    "StepFences",
    "TransferRefused",
    "TransferStatistics",
    "Transport",
    "TransportTier",
]
