"""A CUDA device that is not there. Its tensors lie in host memory, its streams do their work at once, and copies of the
backend go through NVIDIA's bindings to the stub of libcuda in `tests/transfer`.

Everything that a program says to a device is said for real, so a wrong name, argument or type is found. Nothing is ever
late, so a missing fence is not found, and no figure means anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

__all__ = [
    "copy_small_pieces_on_the_host",
    "give_torch_a_device",
    "name_the_first_device",
    "take_all_memory_for_the_devices",
]

NAME = "no device"
MEMORY_BYTES = 80 << 30
FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "from_numpy", "full", "full_like", "linspace",
    "ones", "ones_like", "rand", "randint", "randn", "randperm", "tensor", "zeros", "zeros_like",
)  # fmt: skip
"""Functions of torch that take a device."""
DOES_NOTHING = ("_sleep", "empty_cache", "reset_peak_memory_stats", "set_device", "synchronize")
OF_TENSORS = ("to", "new_empty", "new_full", "new_ones", "new_zeros")
handles = itertools.count(0x9000, 16)


# -- torch -----------------------------------------------------------------------------------------------------------


def give_torch_a_device(torch: Any) -> None:
    """Tensors on `cuda` are made in host memory, and `torch.cuda` has the streams, events and graphs of this module."""
    placed = functools.partial(_placed, torch.device)
    for name in FACTORIES:
        setattr(torch, name, placed(getattr(torch, name)))
    for name in OF_TENSORS:
        setattr(torch.Tensor, name, placed(getattr(torch.Tensor, name)))
    torch.nn.Module.to = placed(torch.nn.Module.to)
    torch.Generator = _on_host(torch.Generator)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.Tensor.is_pinned = lambda self, *args, **kwargs: True
    torch.version.cuda = torch.version.cuda or "13.0"
    for name, value in _names(torch.device("cuda", 0)).items():
        setattr(torch.cuda, name, value)


def _placed(device: type, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with the host's memory for a device that is not there."""

    def place(given: object) -> object:
        is_named = isinstance(given, str) and given.partition(":")[0] == "cuda"
        return "cpu" if is_named or (isinstance(given, device) and given.type == "cuda") else given  # type: ignore[attr-defined]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(place, args), **{name: place(value) for name, value in kwargs.items()})

    return call


def _on_host(generator: Any) -> Any:
    """A class, because annotations name it."""

    class Generator(generator):  # type: ignore[misc]
        def __new__(cls, device: object = "cpu") -> Any:
            return super().__new__(cls, "cpu")

    return Generator


def _names(device: Any) -> dict[str, Any]:
    """What `torch.cuda` has instead of its own."""
    properties = SimpleNamespace(
        name=NAME, total_memory=MEMORY_BYTES, major=9, minor=0, multi_processor_count=132, uuid="none"
    )  # fmt: skip
    runtime = SimpleNamespace(cudaHostRegister=lambda *args: 0, cudaHostUnregister=lambda *args: 0)
    default = Stream(0)
    current = threading.local()

    def current_stream(device: object = None) -> Stream:
        found: Stream = getattr(current, "stream", default)
        return found

    @contextlib.contextmanager
    def stream(given: Stream | None) -> Iterator[None]:
        before = current_stream()
        current.stream = given or before
        try:
            yield
        finally:
            current.stream = before

    @contextlib.contextmanager
    def graph(given: Graph, **options: object) -> Iterator[None]:
        captured = Stream()
        os.environ["STUB_CAPTURED"] = str(captured.cuda_stream)  # the stub's name for a stream that is captured
        try:
            with stream(captured):
                yield
        finally:
            del os.environ["STUB_CAPTURED"]

    def is_current_stream_capturing() -> bool:
        return os.environ.get("STUB_CAPTURED") == str(current_stream().cuda_stream)

    Stream.context = staticmethod(stream)
    Event.device = Stream.device = device
    # A function for each name, because torch's compiler keeps a table by function.
    nothing = {name: (lambda *args, **kwargs: None) for name in DOES_NOTHING}
    return {
        "CUDAGraph": Graph, "Event": Event, "ExternalStream": External, "Stream": Stream,
        "current_stream": current_stream, "default_stream": lambda device=None: default,
        "graph": graph, "stream": stream, "is_current_stream_capturing": is_current_stream_capturing, "device": Device,
        "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 1,
        "current_device": lambda: 0, "get_device_name": lambda device=None: NAME,
        "get_device_properties": lambda device=None: properties, "get_device_capability": lambda device=None: (9, 0),
        "mem_get_info": lambda device=None: (MEMORY_BYTES, MEMORY_BYTES), "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0, "memory_reserved": lambda device=None: 0,
        "cudart": lambda: runtime, **nothing,
    }  # fmt: skip


class Device(contextlib.AbstractContextManager[None]):
    """There is one device, so nothing changes."""

    def __init__(self, device: object = None) -> None: ...

    def __exit__(self, *error: object) -> None: ...


class Stream:
    """A stream whose work is over when its call returns."""

    context: Callable[[Stream | None], Any]
    device: Any

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.cuda_stream = 0 if device == 0 else next(handles)
        self.priority = priority

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def wait_stream(self, other: Stream) -> None: ...

    def wait_event(self, event: Any) -> None:
        event.wait(self)  # a fence of the backend asks the driver

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> None:
        self._entered = self.context(self)
        self._entered.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


class External(Stream):
    def __init__(self, stream_ptr: int, device: object = None) -> None:
        super().__init__()
        self.cuda_stream = stream_ptr


class Event:
    """An event that has passed when it was recorded."""

    device: Any

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.cuda_event = next(handles)
        self._recorded_s = time.perf_counter()

    def record(self, stream: Stream | None = None) -> None:
        self._recorded_s = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return max(1e-3, (end._recorded_s - self._recorded_s) * 1e3)


class Graph:
    """What was captured was also done at once, and a replay does nothing."""

    def replay(self) -> None: ...


# -- aoffload ----------------------------------------------------------------------------------------------------------


class HostKernel:
    """A `CopyKernel` whose pieces are copied when it is called."""

    def copy(self, pieces: Any, *settings: object) -> None:
        columns = (pieces.destinations.tolist(), pieces.sources.tolist(), pieces.sizes.tolist())
        for destination, source, num_bytes in zip(*columns, strict=True):
            ctypes.memmove(destination, source, num_bytes)


def copy_small_pieces_on_the_host(kernel: Any) -> None:
    """In the place of Triton, which compiles for devices that are there."""
    kernel.triton_kernel = lambda device: HostKernel()


def name_the_first_device(nvidia: Any) -> None:
    """Tensors in host memory have a device without a number."""
    make = nvidia.NvidiaDriver.__init__
    nvidia.NvidiaDriver.__init__ = lambda self, ordinal: make(self, ordinal or 0)


def take_all_memory_for_the_devices(local: Any) -> None:
    """A transport chooses its backend by the device of its tensors."""
    local._backend_for = lambda device_type: local.CudaBackend
