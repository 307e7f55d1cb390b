"""Public names of what moves bytes for a runtime: the protocol, the transport of one process, fences and their errors.

`aoffload.ranks` has the transport of several devices, `aoffload.cuda` what a GPU takes, `aoffload.ledger` the plans.
"""

from .errors import DeviceGone, RegionError, RegionNotLoaded, TransferRefused
from .transfer.fence import ORDERED, Fence, OnlyAfter, PassedFence
from .transfer.local import LocalTransport
from .transfer.region_fences import LoadedRegion
from .transfer.step_fences import StepFences
from .transfer.transport import TransferStatistics, Transport

__all__ = [
    "ORDERED",
    "OnlyAfter",
    "DeviceGone",
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
]
