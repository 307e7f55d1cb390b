"""A `CudaDriver` over NVIDIA's Python bindings (`pip install 'aoffload[cuda]'`)."""

from __future__ import annotations

import ctypes
import importlib
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...._common.extras import needed
from ...fences import Fence
from .driver import CudaError, Handle, Pieces, SourceOrder, StreamCaptured, refusal
from .events import CudaFence

HOLD_THE_LOCK = ("12.8.", "12.9.0")
"""Versions of the bindings in which a thread that waits for the device stops all others."""
INVALID_VALUE = 1
BATCH_VERSION = 12080
"""The driver version that introduced `cuMemcpyBatchAsync`. Asking for it by this number fixes its signature."""
LEGACY_STREAM = 1
"""Torch's default stream, which torch calls 0. For bindings with a default stream per thread
(`CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM`), 0 is another stream, on which no compute runs."""

PCI_BUS_ID_BYTES = 64
_NUMBER = re.compile(r"\d+")

_BATCH = ctypes.CFUNCTYPE(  # releases the GIL, and takes arrays as they are
    ctypes.c_int,
    ctypes.c_void_p,  # destinations
    ctypes.c_void_p,  # sources
    ctypes.c_void_p,  # sizes
    ctypes.c_size_t,
    ctypes.c_void_p,  # attributes
    ctypes.POINTER(ctypes.c_size_t),  # the first piece that each attribute applies to
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_size_t),  # the piece that was refused
    ctypes.c_void_p,  # stream
)


class NvidiaDriver:
    """Implements `CudaDriver` for one device, in its primary context, which is also torch's.

    The bindings' own batch call takes a Python object per address, created and read under the GIL; this class passes
    arrays to the driver. `MissingExtra` without the bindings, `CudaError` without a driver or such a device, and with
    bindings that are too old.
    """

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        with needed("cuda", "NvidiaDriver"):
            self._cuda: ModuleType = importlib.import_module("cuda.bindings.driver")
            version = str(importlib.import_module("cuda.bindings").__version__)
        if version.startswith(HOLD_THE_LOCK):
            problem = f"{version} holds the GIL in every call, which blocks the event loop: install 12.9.1"
            raise CudaError("cuda-bindings", problem)
        try:
            self._ask("cuInit", 0)
        except RuntimeError as error:  # the bindings are there, the driver's library is not
            raise CudaError("cuInit", str(error)) from error
        self._device = self._ask("cuDeviceGet", ordinal)
        self._context = self._ask("cuDevicePrimaryCtxRetain", self._device)
        self._call_batch = self._batch_call()
        self._attributes = {order: self._attributes_of(order) for order in SourceOrder}

    @property
    def has_batches(self) -> bool:
        """Whether the driver copies many pieces in one call."""
        return self._call_batch is not None

    @property
    def maps_host_memory(self) -> bool:
        attribute = self._cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        return bool(self._ask("cuDeviceGetAttribute", attribute, self._device))

    @property
    def pci_bus_id(self) -> str:
        try:
            found: bytes = self._ask("cuDeviceGetPCIBusId", PCI_BUS_ID_BYTES, self._device)
        except CudaError:  # used only to choose where the host memory is allocated
            return ""
        return found.partition(b"\0")[0].decode()

    def __repr__(self) -> str:
        return f"<NvidiaDriver device={self._ordinal} {'batches' if self.has_batches else 'one by one'}>"

    @contextmanager
    def bound(self) -> Iterator[None]:
        self._ask("cuCtxPushCurrent", self._context)
        try:
            with self._beside_captures():
                yield
        finally:
            self._ask("cuCtxPopCurrent")

    @contextmanager
    def _beside_captures(self) -> Iterator[None]:
        """Relax the capture mode of this thread. In torch's default mode, querying an event or page-locking memory here
        would end a graph capture in another thread. No call made here can be part of a capture."""
        relaxed = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        mode = self._ask("cuThreadExchangeStreamCaptureMode", relaxed)
        try:
            yield
        finally:
            self._ask("cuThreadExchangeStreamCaptureMode", mode)

    # -- memory ---------------------------------------------------------------------------------------------------

    def register(self, address: int, num_bytes: int) -> None:
        flags = self._cuda.CU_MEMHOSTREGISTER_PORTABLE | self._cuda.CU_MEMHOSTREGISTER_DEVICEMAP
        self._ask("cuMemHostRegister", address, num_bytes, flags)

    def unregister(self, address: int) -> None:
        self._ask("cuMemHostUnregister", address)

    def learn(self, memory: NDArray[np.uint8]) -> None:
        """Nothing to do: this driver needs only addresses."""

    # -- streams and events ---------------------------------------------------------------------------------------

    def create_stream(self) -> Handle:
        lowest, _ = self._ask("cuCtxGetStreamPriorityRange")
        return self._ask("cuStreamCreateWithPriority", int(self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING), lowest)

    def destroy_stream(self, stream: Handle) -> None:
        self._ask("cuStreamDestroy", stream)

    def current_stream(self) -> Handle:
        return self.stream_of(torch.cuda.current_stream(self._ordinal))

    def stream_of(self, stream: torch.cuda.Stream) -> Handle:
        found = self._cuda.CUstream(stream.cuda_stream or LEGACY_STREAM)
        # An event recorded there would pull the copy streams into the graph, and event and copies would never end.
        if int(self._ask("cuStreamIsCapturing", found)):
            raise StreamCaptured("cuStreamIsCapturing")
        return found

    def on_stream(self, stream: Handle) -> AbstractContextManager[object]:
        known = torch.cuda.ExternalStream(int(stream), device=self._ordinal)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(known)

    def create_event(self) -> Handle:
        flags = self._cuda.CUevent_flags
        return self._ask("cuEventCreate", int(flags.CU_EVENT_BLOCKING_SYNC) | int(flags.CU_EVENT_DISABLE_TIMING))

    def record_event(self, event: Handle, stream: Handle) -> None:
        self._ask("cuEventRecord", event, stream)

    def query_event(self, event: Handle) -> bool:
        (status,) = self._call("cuEventQuery", event)
        if status == self._cuda.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._check("cuEventQuery", int(status))
        return True

    def synchronize_event(self, event: Handle) -> None:
        self._ask("cuEventSynchronize", event)

    def wait_event(self, stream: Handle, event: Handle) -> None:
        self._ask("cuStreamWaitEvent", stream, event, 0)

    def destroy_event(self, event: Handle) -> None:
        self._ask("cuEventDestroy", event)

    def event_of(self, fence: Fence) -> Handle | None:
        if isinstance(fence, CudaFence) and isinstance(fence.driver, NvidiaDriver):
            return fence.event
        # Torch creates an event at its first recording. One that was never recorded has no work before it.
        if isinstance(fence, torch.cuda.Event) and fence.cuda_event:
            return self._cuda.CUevent(fence.cuda_event)
        return None

    # -- copies ---------------------------------------------------------------------------------------------------

    def copy_batch(self, pieces: Pieces, order: SourceOrder, stream: Handle) -> None:
        call = self._call_batch  # another thread may leave batches meanwhile
        if call is None:
            self.copy_each(pieces, stream)  # in stream order, which either order allows
        elif len(pieces):
            status = self._copy_batch(call, pieces, order, stream)
            if status == INVALID_VALUE:
                self._leave_batches()
                self.copy_each(pieces, stream)
            else:
                self._check("cuMemcpyBatchAsync", status)

    def copy_each(self, pieces: Pieces, stream: Handle) -> None:
        columns = (pieces.destinations.tolist(), pieces.sources.tolist(), pieces.sizes.tolist())
        for destination, source, num_bytes in zip(*columns, strict=True):
            self._ask("cuMemcpyAsync", destination, source, num_bytes, stream)

    def _copy_batch(self, call: Callable[..., int], pieces: Pieces, order: SourceOrder, stream: Handle) -> int:
        columns = [np.ascontiguousarray(part) for part in (pieces.destinations, pieces.sources, pieces.sizes)]
        holds_from, refused = ctypes.c_size_t(0), ctypes.c_size_t(0)
        return call(
            *map(_pointer, columns), len(pieces), self._attributes[order].getPtr(), ctypes.byref(holds_from), 1,
            ctypes.byref(refused), int(stream),
        )  # fmt: skip

    def _leave_batches(self) -> None:
        """Copy one by one from now on. A driver may refuse a piece in a batch that it copies alone, such as one that
        crosses from one physical allocation of a tensor into the next."""
        self._call_batch = None
        problem = f"{self!r}: the driver refused a batch of copies as invalid, so each copy is a separate call now"
        warnings.warn(f"copies will be slow: {problem}", RuntimeWarning, stacklevel=2)

    def _batch_call(self) -> Callable[..., int] | None:
        """The function `cuMemcpyBatchAsync` of drivers since 12.8; None if there is none."""
        flags = self._cuda.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_LEGACY_STREAM
        status, address, _ = self._cuda.cuGetProcAddress(b"cuMemcpyBatchAsync", BATCH_VERSION, int(flags))
        is_there = status == self._cuda.CUresult.CUDA_SUCCESS and int(address or 0)
        return _BATCH(int(address)) if is_there else None

    def _attributes_of(self, order: SourceOrder) -> Any:
        """Copy attributes, made by the bindings, which know their layout. Only managed memory needs location hints."""
        cuda = self._cuda
        if not hasattr(cuda, "CUmemcpyAttributes"):
            self._call_batch = None  # bindings that are older than the driver
            return None
        orders = cuda.CUmemcpySrcAccessOrder
        attributes = cuda.CUmemcpyAttributes()
        attributes.srcAccessOrder = {
            SourceOrder.STREAM: orders.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            SourceOrder.ANY: orders.CU_MEMCPY_SRC_ACCESS_ORDER_ANY,
        }[order]
        attributes.flags = int(cuda.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)
        return attributes

    # -- calls and errors -----------------------------------------------------------------------------------------

    def _ask(self, call: str, *arguments: object) -> Any:
        """Make a call. Returns its result: an empty tuple, one value, or a tuple of values."""
        status, *results = self._call(call, *arguments)
        self._check(call, int(status))
        return results[0] if len(results) == 1 else tuple(results)

    def _call(self, call: str, *arguments: object) -> Any:
        try:
            return getattr(self._cuda, call)(*arguments)
        except (ValueError, KeyError) as error:
            # A status of a driver newer than the bindings: those of 13 raise a ValueError that has it, 12 a KeyError.
            if found := _NUMBER.search(str(error)):
                self._check(call, int(found[0]))
            raise CudaError(call, str(error)) from error

    def _check(self, call: str, status: int) -> None:
        if status:
            raise refusal(call, status, self._name_of(status))

    def _name_of(self, status: int) -> str:
        try:
            return str(self._cuda.CUresult(status).name)
        except ValueError:
            return f"error {status}"


def _pointer(array: NDArray[np.uint64]) -> int:
    return int(array.ctypes.data)
