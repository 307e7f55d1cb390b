"""Public names of what moves bytes for a runtime: the protocol, the transport of one process, fences and their errors;
and `Env`, its clock, randomness and threads.

`aoffload.ranks` has the transport of several devices, `aoffload.cuda` what a GPU takes, `aoffload.ledger` the plans.
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
