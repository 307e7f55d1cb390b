"""Public names of copies on a GPU. A machine without one can import them. See docs/cuda.md."""

from ._transfer.backends.cuda import AdaptivePolling, BlockingWait, BreakEven, CudaBackend, CudaOptions, StreamCaptured

__all__ = ["AdaptivePolling", "BlockingWait", "BreakEven", "CudaBackend", "CudaOptions", "StreamCaptured"]
