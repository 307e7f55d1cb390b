"""Public names for copies on a GPU. They can be imported on a machine without a GPU. See docs/cuda.md."""

from ._transfer.backends.cuda.backend import CudaBackend, CudaOptions
from ._transfer.backends.cuda.driver import StreamCaptured
from ._transfer.backends.cuda.events import AdaptivePolling, BlockingWait
from ._transfer.backends.cuda.trials import BreakEven

__all__ = ["AdaptivePolling", "BlockingWait", "BreakEven", "CudaBackend", "CudaOptions", "StreamCaptured"]
