"""The memory in which a soak keeps its KV. In host memory, a forward is over when its call returns. On a device, a
forward is launched on a stream, and the host continues before it is over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from aoffload._transfer.backends.base import CopyBackend
from aoffload._transfer.backends.cuda.backend import CudaBackend, CudaOptions
from aoffload._transfer.region import KVRegion

__all__ = ["Compute", "DeviceMemory", "HostMemory", "KVMemory", "MakeMemory", "cuda_compute"]

GARBAGE = -1
"""A value that is in no right block."""
SLEEP_CYCLES = 200_000
"""A tenth of a millisecond on a real device, in the middle of each write: copies that do not wait find the garbage."""


class KVMemory(Protocol):
    """`tensors`: int64 `[num_blocks, values]` each. Contents are int64 `[num_tensors, number of ids, values]`."""

    name: str
    tensors: list[torch.Tensor]
    backend: Callable[[tuple[KVRegion, ...]], CopyBackend] | None
    """Makes the copy backend; None: the default for such tensors."""

    def write(self, ids: Sequence[int], blocks: NDArray[np.int64]) -> None:
        """Write `blocks`, as a forward does."""
        ...

    def spoil(self, ids: Sequence[int]) -> None:
        """Fill the blocks with garbage, as a forward does that fails."""
        ...

    def spoil_freed(self, ids: Sequence[int]) -> None:
        """Fill blocks that change hands with garbage, if that can be done before anything else touches them."""
        ...

    def compare(self, about: str, ids: Sequence[int], blocks: NDArray[np.int64]) -> str:
        """Check that the blocks hold `blocks`. Returns what is known at once to be wrong, or an empty string; `settle`
        returns the rest."""
        ...

    def settle(self) -> list[str]:
        """Wait for everything that was launched. Returns what was found to be wrong since the last call."""
        ...


MakeMemory: TypeAlias = Callable[[tuple[int, int], int], KVMemory]
"""Makes a memory from the shape of a tensor and the number of tensors."""


class HostMemory:
    """Tensors that the thread of a forward reads and writes itself."""

    name = "cpu"
    backend = None

    def __init__(self, shape: tuple[int, int], num_tensors: int) -> None:
        self.tensors = [torch.zeros(shape, dtype=torch.int64) for _ in range(num_tensors)]
        self._rows = [tensor.numpy() for tensor in self.tensors]

    def write(self, ids: Sequence[int], blocks: NDArray[np.int64]) -> None:
        for rows, wanted in zip(self._rows, blocks, strict=True):
            rows[ids] = wanted

    def spoil(self, ids: Sequence[int]) -> None:
        for rows in self._rows:
            rows[ids] = GARBAGE

    def spoil_freed(self, ids: Sequence[int]) -> None:
        self.spoil(ids)

    def compare(self, about: str, ids: Sequence[int], blocks: NDArray[np.int64]) -> str:
        for rows, wanted in zip(self._rows, blocks, strict=True):
            # One by one: a copy of all of them, in threads that come and go, would take most of the memory.
            for index, block_id in enumerate(ids):
                if not np.array_equal(rows[block_id], wanted[index]):
                    return f"{about}, block {index} of {len(ids)} (id {block_id})"
        return ""

    def settle(self) -> list[str]:
        return []


@attrs.frozen
class Compute:
    """The stream of the forwards, and the copy backend that knows it."""

    device: torch.device
    backend: Callable[[tuple[KVRegion, ...]], CopyBackend]
    give: Callable[[Callable[[], object]], object]
    """Launch this on the stream, after everything launched before. From any thread."""
    pause: Callable[[], object]
    """Launch something that takes a while."""
    finish: Callable[[], object]
    """Wait until everything on the stream is done."""


def cuda_compute(backend: type[CudaBackend] = CudaBackend, options: CudaOptions | None = None) -> Compute:
    """A compute stream of the current CUDA device. The event loop's thread has another current stream."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def give(work: Callable[[], object]) -> None:
        with torch.cuda.stream(stream):
            work()

    def pause() -> None:
        give(lambda: torch.cuda._sleep(SLEEP_CYCLES))  # type: ignore[no-untyped-call]

    made = partial(backend, compute_stream=stream, options=options)
    return Compute(torch.device("cuda"), made, give, pause, stream.synchronize)


@attrs.frozen
class Look:
    """The result on the device of what a forward has read: which of `ids` held other bytes."""

    about: str
    ids: Sequence[int]
    is_wrong: torch.Tensor

    def verdict(self) -> str:
        wrong = self.is_wrong.nonzero().flatten().tolist()
        return f"{self.about}, block {wrong[0]} of {len(self.ids)} (id {self.ids[wrong[0]]})" if wrong else ""


class DeviceMemory:
    """Launches forwards on the compute stream, and checks them when they are done: the host runs ahead of the device.

    Each write leaves garbage first and takes some time, so that a copy that does not wait for its end reads garbage.
    """

    def __init__(self, shape: tuple[int, int], num_tensors: int, compute: Compute) -> None:
        self.name = str(compute.device)
        self.backend = compute.backend
        # Copied there, which is over when the call returns: the streams of forwards would not wait for a fill kernel.
        self.tensors = [torch.zeros(shape, dtype=torch.int64).to(compute.device) for _ in range(num_tensors)]
        self._compute = compute
        self._looks: list[Look] = []
        self._order = threading.Lock()  # what one forward launches stays together

    def write(self, ids: Sequence[int], blocks: NDArray[np.int64]) -> None:
        index, wanted = self._on_device(np.array(ids, dtype=np.int64)), self._on_device(np.ascontiguousarray(blocks))
        with self._order:
            self._fill(index)
            self._compute.pause()
            for which, tensor in enumerate(self.tensors):
                self._compute.give(partial(tensor.index_copy_, 0, index, wanted[which]))

    def spoil(self, ids: Sequence[int]) -> None:
        index = self._on_device(np.array(ids, dtype=np.int64))
        with self._order:
            self._fill(index)

    def spoil_freed(self, ids: Sequence[int]) -> None:
        """Does nothing: the stream runs it late, outside of every step, and a load into the block does not wait for it.
        What an earlier owner has left there is wrong for every other prompt, too."""

    def compare(self, about: str, ids: Sequence[int], blocks: NDArray[np.int64]) -> str:
        index, wanted = self._on_device(np.array(ids, dtype=np.int64)), self._on_device(np.ascontiguousarray(blocks))

        def look() -> None:
            wrong = [(tensor[index] != wanted[which]).any(1) for which, tensor in enumerate(self.tensors)]
            self._looks.append(Look(about, list(ids), torch.stack(wrong).any(0)))

        self._compute.give(look)
        return ""

    def settle(self) -> list[str]:
        self._compute.finish()
        looks, self._looks = self._looks, []
        return [verdict for look in looks if (verdict := look.verdict())]

    def _fill(self, index: torch.Tensor) -> None:
        for tensor in self.tensors:
            self._compute.give(partial(tensor.index_fill_, 0, index, GARBAGE))

    def _on_device(self, array: NDArray[np.int64]) -> torch.Tensor:
        """Copy to the device without waiting for it: from page-locked memory, on the stream that will read the copy."""
        given = torch.from_numpy(array)
        if self._compute.device.type == "cpu":
            return given
        arrived: list[torch.Tensor] = []
        self._compute.give(lambda: arrived.append(given.pin_memory().to(self._compute.device, non_blocking=True)))
        return arrived[0]
