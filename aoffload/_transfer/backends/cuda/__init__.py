"""Copies between GPU tensors and page-locked host memory."""

from ...transport import PinProgress
from .backend import CudaBackend, CudaOptions
from .driver import CudaDriver, CudaError, DeviceLost, Pieces, SourceOrder, StreamCaptured
from .events import CudaFence
from .method import BreakEven
from .page_locked import HostMemoryError
from .waiting import AdaptivePolling, BlockingWait, WaitPolicy

__all__ = [
    "AdaptivePolling",
    "BlockingWait",
    "BreakEven",
    "CudaBackend",
    "CudaDriver",
    "CudaError",
    "CudaFence",
    "CudaOptions",
    "DeviceLost",
    "HostMemoryError",
    "PinProgress",
    "Pieces",
    "SourceOrder",
    "StreamCaptured",
    "WaitPolicy",
]
