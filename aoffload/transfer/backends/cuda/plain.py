"""A `CudaDriver` over torch alone: correct everywhere, with one call per piece."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from ...fence import Fence
from ...region import KVRegion
from .driver import LOST_CODES, CudaError, DeviceLost, Handle, Pieces, SourceOrder, StreamCaptured
from .events import CudaFence

__all__ = ["TorchDriver"]

LOST_WORDS = (
    *("illegal", "unspecified launch failure", "uncorrectable", "assert", "misaligned", "hardware stack", "timed out"),
    *("invalid program counter", "address space", "context is destroyed", "invalid device context", "unknown error"),
    *("busy or unavailable", "MPS", "driver shutting down"),
)
"""Parts of error messages for a lost device in torch before 2.8, which does not tell the error code."""


class TorchDriver:
    """Implements `CudaDriver` with torch only.

    Torch copies between tensors, so the driver keeps tensors of all memory: of the regions, and of what `learn` adds.
    """

    def __init__(self, regions: tuple[KVRegion, ...]) -> None:
        self._device = regions[0].device
        self._memory: dict[int, torch.Tensor] = {}
        for region in regions:
            self._know(_bytes_of(region.tensor.untyped_storage(), region.device))

    def __repr__(self) -> str:
        return f"<TorchDriver device={self._device}>"

    @property
    def maps_host_memory(self) -> bool:
        return False  # torch does not tell, and a kernel with wrong addresses loses the device

    @contextmanager
    def bound(self) -> Iterator[None]:
        device = torch.cuda.device(self._device)
        with _asking("cudaSetDevice"):  # may be the first call to find the device lost
            device.__enter__()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            with _asking("cudaSetDevice"):
                device.__exit__(None, None, None)

    # -- memory ---------------------------------------------------------------------------------------------------

    def register(self, address: int, num_bytes: int) -> None:
        with _asking("cudaHostRegister"):
            status = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 3))  # type: ignore[no-untyped-call] # portable and mapped
        if status:
            raise CudaError("cudaHostRegister", f"error {status}")

    def unregister(self, address: int) -> None:
        with _asking("cudaHostUnregister"):
            status = int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]
        if status:
            raise CudaError("cudaHostUnregister", f"error {status}")

    def learn(self, memory: NDArray[np.uint8]) -> None:
        self._know(torch.from_numpy(memory).reshape(-1))

    # -- streams and events ---------------------------------------------------------------------------------------

    def create_stream(self) -> Handle:
        with _asking("cudaStreamCreateWithPriority"):
            # 0 is the lowest priority, for torch and for the device.
            return torch.cuda.Stream(self._device, priority=0)  # type: ignore[no-untyped-call]

    def destroy_stream(self, stream: Handle) -> None:
        """Nothing to do: torch keeps its streams."""

    def current_stream(self) -> Handle:
        return self.stream_of(torch.cuda.current_stream(self._device))

    def stream_of(self, stream: torch.cuda.Stream) -> Handle:
        with torch.cuda.stream(stream), _asking("cudaStreamIsCapturing"):
            is_captured = torch.cuda.is_current_stream_capturing()
        if is_captured:
            raise StreamCaptured("cudaStreamIsCapturing")
        return stream

    def on_stream(self, stream: Handle) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def create_event(self) -> Handle:
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def record_event(self, event: Handle, stream: Handle) -> None:
        with _asking("cudaEventRecord"):
            event.record(stream)

    def query_event(self, event: Handle) -> bool:
        with _asking("cudaEventQuery"):
            return bool(event.query())

    def synchronize_event(self, event: Handle) -> None:
        with _asking("cudaEventSynchronize"):
            event.synchronize()

    def wait_event(self, stream: Handle, event: Handle) -> None:
        with _asking("cudaStreamWaitEvent"):
            stream.wait_event(event)

    def destroy_event(self, event: Handle) -> None:
        """Nothing to do: torch destroys an event that is no longer referenced."""

    def event_of(self, fence: Fence) -> Handle | None:
        if isinstance(fence, CudaFence) and isinstance(fence.driver, TorchDriver):
            return fence.event
        return fence if isinstance(fence, torch.cuda.Event) else None

    # -- copies ---------------------------------------------------------------------------------------------------

    def copy_batch(self, pieces: Pieces, order: SourceOrder, stream: Handle) -> None:
        self.copy_each(pieces, stream)  # in stream order, which either order allows

    def copy_each(self, pieces: Pieces, stream: Handle) -> None:
        columns = (pieces.destinations.tolist(), pieces.sources.tolist(), pieces.sizes.tolist())
        with _asking("cudaMemcpyAsync"), self.on_stream(stream):
            for destination, source, num_bytes in zip(*columns, strict=True):
                # Contiguous on both sides; otherwise torch would copy through a temporary tensor and wait for it.
                self._at(destination, num_bytes).copy_(self._at(source, num_bytes), non_blocking=True)

    def _know(self, memory: torch.Tensor) -> None:
        self._memory[memory.data_ptr()] = memory
        self._starts = sorted(self._memory)

    def _at(self, address: int, num_bytes: int) -> torch.Tensor:
        start = self._starts[bisect.bisect_right(self._starts, address) - 1]
        return self._memory[start][address - start : address - start + num_bytes]


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))


@contextmanager
def _asking(call: str) -> Iterator[None]:
    """Turn a `RuntimeError`, as which torch reports driver errors, into a `CudaError` or a `DeviceLost`."""
    try:
        yield
    except RuntimeError as error:
        problem = str(error).partition("\n")[0]
        raise (DeviceLost if _is_lost(error, problem) else CudaError)(call, problem) from error


def _is_lost(error: RuntimeError, problem: str) -> bool:
    code = getattr(error, "error_code", None)
    return code in LOST_CODES if code is not None else any(word in problem for word in LOST_WORDS)
