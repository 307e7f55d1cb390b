"""A `CudaDriver` over torch alone: correct everywhere, with one call per piece."""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...fences import Fence
from ...region import KVRegion
from .driver import CudaError, DeviceLost, Handle, Pieces, SourceOrder, StreamCaptured, refusal
from .events import CudaFence

LOST_WORDS = (
    *("illegal", "unspecified launch failure", "uncorrectable", "assert", "misaligned", "hardware stack", "timed out"),
    *("invalid program counter", "address space", "context is destroyed", "invalid device context", "unknown error"),
    *("busy or unavailable", "MPS", "driver shutting down"),
)
"""Parts of error messages for a lost device in torch before 2.8, which does not tell the error code."""
CAPTURE_WORDS = "depend on a capturing blocking stream"
"""The same for a capture that the default stream would become a part of."""
NON_BLOCKING = 1
LOWEST_PRIORITY = 0
"""For torch and for the driver."""


class TorchDriver:
    """Implements `CudaDriver` with torch only.

    Torch copies between tensors, so the driver keeps tensors of all memory: of the regions, and of what `learn` adds.
    """

    def __init__(self, regions: tuple[KVRegion, ...]) -> None:
        self._device = regions[0].device
        self._own_streams: set[int] = set()
        self._memory: dict[int, torch.Tensor] = {}
        for region in regions:
            self._know(_bytes_of(region.tensor.untyped_storage(), region.device))

    def __repr__(self) -> str:
        return f"<TorchDriver device={self._device}>"

    @property
    def maps_host_memory(self) -> bool:
        return False  # torch does not tell, and a kernel with wrong addresses loses the device

    @property
    def pci_bus_id(self) -> str:
        try:
            found: Any = torch.cuda.get_device_properties(self._device)
            return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        except (AttributeError, RuntimeError, AssertionError):  # an older torch does not tell; a lost device, neither
            return ""

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
            _forget_last_error()
            raise CudaError("cudaHostRegister", f"error {status}")

    def unregister(self, address: int) -> None:
        with _asking("cudaHostUnregister"):
            status = int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]
        if status:
            _forget_last_error()
            raise CudaError("cudaHostUnregister", f"error {status}")

    def learn(self, memory: NDArray[np.uint8]) -> None:
        self._know(torch.from_numpy(memory).reshape(-1))

    # -- streams and events ---------------------------------------------------------------------------------------

    def create_stream(self) -> Handle:
        """A stream of the driver's own. Torch has 32 streams and hands them out in turn, so the engine may get the same
        one, and capture a graph on it. Torch's streams are used only if the driver's library is missing, as on ROCm."""
        with _driver_library(self._device) as library:
            made = ctypes.c_void_p()
            if library is not None and not library.cuStreamCreateWithPriority(
                ctypes.byref(made), NON_BLOCKING, LOWEST_PRIORITY
            ):
                self._own_streams.add(int(made.value or 0))
                return torch.cuda.ExternalStream(int(made.value or 0), device=self._device)  # type: ignore[no-untyped-call]
        with _asking("cudaStreamCreateWithPriority"):
            return torch.cuda.Stream(self._device, priority=LOWEST_PRIORITY)  # type: ignore[no-untyped-call]

    def destroy_stream(self, stream: Handle) -> None:
        """Torch keeps its own streams."""
        if stream.cuda_stream in self._own_streams:
            self._own_streams.remove(stream.cuda_stream)
            with _driver_library(self._device) as library:
                if library is not None:
                    library.cuStreamDestroy_v2(ctypes.c_void_p(stream.cuda_stream))

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
        code = getattr(error, "error_code", None)
        if code is not None:
            raise refusal(call, code, problem) from error
        if CAPTURE_WORDS in problem:
            raise StreamCaptured(call) from error
        raise (DeviceLost if any(word in problem for word in LOST_WORDS) else CudaError)(call, problem) from error


@contextmanager
def _driver_library(device: torch.device) -> Iterator[ctypes.CDLL | None]:
    """The driver's library, which torch has loaded, with the context of `device` current; None without it."""
    context, number = ctypes.c_void_p(), ctypes.c_int()
    try:
        library = ctypes.CDLL("libcuda.so.1")
        status = library.cuDeviceGet(ctypes.byref(number), device.index or 0)
        status = status or library.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)
        status = status or library.cuCtxPushCurrent_v2(context)
    except (OSError, AttributeError):
        status = 1
    if status:
        yield None
        return
    try:
        yield library
    finally:
        library.cuCtxPopCurrent_v2(ctypes.byref(context))
        library.cuDevicePrimaryCtxRelease_v2(number)


def _forget_last_error() -> None:
    """Clear the last error of the CUDA runtime. A refused call leaves its error set, and torch would report it for the
    next kernel that this thread launches. Torch itself has no call that clears it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}").cudaGetLastError()
