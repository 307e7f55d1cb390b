"""The driver layer that has torch alone: what torch says in words, and which of torch's own calls are asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from aoffload.transfer.backends.cuda import CudaError, DeviceLost, StreamCaptured
from aoffload.transfer.backends.cuda.plain import TorchDriver
from aoffload.transfer.region import regions_of


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
