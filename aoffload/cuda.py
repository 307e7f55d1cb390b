"""Public names of copies on a GPU. A machine without one can import them. See docs/cuda.md."""

from ._transfer.backends.cuda.backend import CudaBackend, CudaOptions
from ._transfer.backends.cuda.driver import StreamCaptured
from ._transfer.backends.cuda.events import AdaptivePolling, BlockingWait
from ._transfer.backends.cuda.trials import BreakEven

__all__ = ["AdaptivePolling", "BlockingWait", "BreakEven", "CudaBackend", "CudaOptions", "StreamCaptured"]
