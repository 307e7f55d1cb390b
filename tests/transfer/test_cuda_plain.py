"""The driver layer with torch alone: the classification of torch's error texts, and the calls of torch that it uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aoffload._transfer.backends.cuda import plain
from aoffload._transfer.backends.cuda.driver import CudaError, DeviceLost, StreamCaptured
from aoffload._transfer.backends.cuda.plain import TorchDriver
from aoffload._transfer.region import regions_of


@pytest.fixture
def driver() -> TorchDriver:
    return TorchDriver(regions_of(torch.zeros(3, 2)))


class Failing:
    """Stands for torch's `device`, or for an event: every call fails."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def fail(self, *_: object) -> Any:
        raise self._error

    __enter__ = query = synchronize = record = fail


def numbered(code: int, words: str = "") -> RuntimeError:
    """As `torch.AcceleratorError`, since torch 2.8."""
    error = RuntimeError(words)
    error.error_code = code  # type: ignore[attr-defined]
    return error


LOSSES = [
    *(numbered(code) for code in (46, 214, 700, 702, 710, 719, 999)),
    # What `cudaGetErrorString` says of them, before torch told the code.
    *(
        RuntimeError(f"CUDA error: {words}\nCUDA kernel errors might be asynchronously reported")
        for words in (
            "CUDA-capable device(s) is/are busy or unavailable",
            "uncorrectable ECC error encountered",
            "uncorrectable NVLink error detected during the execution",
            "an illegal memory access was encountered",
            "the launch timed out and was terminated",
            "context is destroyed",
            "device-side assert triggered",
            "hardware stack error",
            "an illegal instruction was encountered",
            "misaligned address",
            "operation not supported on global/shared address space",
            "invalid program counter",
            "unspecified launch failure",
            "unknown error",
        )
    ),
]
REFUSALS = [
    numbered(1, "an illegal value"),
    RuntimeError("CUDA error: invalid argument"),
    RuntimeError("out of memory"),
]


@pytest.mark.parametrize("error", LOSSES, ids=repr)
def test_a_lost_device_has_a_type(driver: TorchDriver, error: Exception) -> None:
    """By its code where torch tells it, by its words where it does not."""
    event = Failing(error)
    for ask in (driver.query_event, driver.synchronize_event, lambda event: driver.record_event(event, None)):
        with pytest.raises(DeviceLost):
            ask(event)


@pytest.mark.parametrize("error", REFUSALS, ids=repr)
def test_an_error_that_is_no_loss_is_none(driver: TorchDriver, error: Exception) -> None:
    """A refusal must not turn the cache off: only what says that the device is gone is `DeviceLost`."""
    with pytest.raises(CudaError) as raised:
        driver.query_event(Failing(error))
    assert type(raised.value) is CudaError


@pytest.mark.parametrize(
    "error",
    [numbered(906), RuntimeError("operation would make the legacy stream depend on a capturing blocking stream")],
)
def test_a_capture_that_the_default_stream_would_join_is_named(driver: TorchDriver, error: Exception) -> None:
    """An engine that captures on a stream which waits for the default one gets the same advice as any other."""
    with pytest.raises(StreamCaptured, match="outside of the capture"):
        driver.record_event(Failing(error), None)


def test_what_the_runtime_refuses_leaves_no_error_to_torch(
    driver: TorchDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch would report it for the next kernel that the thread launches, which has nothing to do with it."""
    asked: list[str] = []

    class Runtime:
        def __init__(self, name: str) -> None:
            asked.append(name)

        def cudaGetLastError(self) -> int:  # noqa: N802 - as the library has it
            asked.append("taken")
            return 1

    refusing = SimpleNamespace(cudaHostRegister=lambda *_: 1, cudaHostUnregister=lambda *_: 713)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refusing)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(plain.ctypes, "CDLL", Runtime)
    with pytest.raises(CudaError, match="cudaHostUnregister: error 713"):
        driver.unregister(4096)
    with pytest.raises(CudaError, match="cudaHostRegister: error 1"):
        driver.register(4096, 8)
    assert asked == ["libcudart.so.12", "taken"] * 2
    monkeypatch.undo()
    plain._forget_last_error()


def test_without_the_drivers_library_streams_are_torchs(driver: TorchDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on ROCm: copies still have streams of the lowest priority, which torch keeps."""
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda device, priority: SimpleNamespace(cuda_stream=7, priority=priority)
    )
    monkeypatch.setattr(plain.ctypes, "CDLL", Failing(OSError("no library")).fail)
    stream = driver.create_stream()
    assert stream.priority == 0
    driver.destroy_stream(stream)


def test_the_place_of_a_device_is_told_where_torch_knows_it(
    driver: TorchDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Linux names it; older versions of torch do not tell."""
    found = SimpleNamespace(pci_domain_id=0, pci_bus_id=27, pci_device_id=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert driver.pci_bus_id == "0000:1b:01.0"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    assert driver.pci_bus_id == ""


def test_a_device_that_cannot_be_made_current_is_an_error_with_a_type(
    driver: TorchDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or closing a backend whose device is lost would raise what nobody expects."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: Failing(numbered(700)))
    with pytest.raises(DeviceLost, match="cudaSetDevice"), driver.bound():
        pytest.fail("it is bound")


def test_what_is_raised_inside_is_left_as_it_is(driver: TorchDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the caller's is no answer of a driver."""

    class Device:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "device", lambda device: Device())
    with pytest.raises(RuntimeError, match="mine") as raised, driver.bound():
        raise RuntimeError("mine")
    assert type(raised.value) is RuntimeError


def test_a_captured_stream_takes_no_fence(driver: TorchDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of the stream that is meant, whichever is current."""
    current: list[Any] = ["default"]

    @contextmanager
    def stream(given: Any) -> Iterator[None]:
        current.append(given)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] == "captured")
    assert driver.current_stream() == "default"
    assert driver.stream_of("other") == "other"  # type: ignore[arg-type]
    with pytest.raises(StreamCaptured, match="outside of the capture"):
        driver.stream_of("captured")  # type: ignore[arg-type]
