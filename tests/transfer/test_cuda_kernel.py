"""The kernel for small pieces: its bytes, in Triton's interpreter; and that it can be built for devices of today."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from copies import Copies
from simulated_cuda import SimulatedCuda, on

from aoffload._kernel.states import Outcome
from aoffload._transfer.backends.cuda import kernel
from aoffload._transfer.backends.cuda.backend import CudaBackend
from aoffload._transfer.backends.cuda.kernel import triton_kernel
from aoffload._transfer.backends.cuda.trials import BreakEven

HERE = Path(__file__).parent
has_triton = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not has_triton, reason="Triton is not installed: it comes with torch for CUDA")


@pytest.mark.parametrize("seed", range(6))
def test_a_table_is_written_again_only_when_no_kernel_reads_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that read their table when the device gets to them, of more launches than there are tables, in a device
    that lags behind: every byte is right. No launch has more programs than the forward can spare."""
    cuda = SimulatedCuda(seed)

    def launch(grid: tuple[int], table: torch.Tensor, num_pieces: int, alignment: int, tile_bytes: int) -> None:
        assert grid == (min(16, num_pieces),) and alignment == 16

        def run() -> None:
            for source, destination, size in table.tolist():
                ctypes.memmove(destination, source, size)

        cuda.compute_on(cuda._local.stream, run)

    module = SimpleNamespace(launch=launch)
    monkeypatch.setitem(sys.modules, "aoffload._transfer.backends.cuda.triton_copy", module)
    monkeypatch.setattr(kernel, "MAX_BATCH", 17)
    options = on(cuda, kernel=kernel.TritonKernel, break_even=BreakEven(2**40, 2**40))
    pool = torch.arange(240, dtype=torch.int64)[:, None].repeat(1, 4)
    copies = Copies(pool, 120, partial(CudaBackend, options=options))
    blocks = list(range(1, 240, 2))
    assert copies.store(blocks, list(range(120))).outcome is Outcome.LANDED
    pool.zero_()
    assert copies.load(list(range(120)), blocks).outcome is Outcome.LANDED
    assert pool[1::2, 3].tolist() == blocks
    assert copies.transport.close(20)


@pytest.mark.skipif(has_triton, reason="Triton is installed")
def test_without_triton_there_is_no_kernel() -> None:
    """Then the copy engine takes all pieces."""
    assert triton_kernel(torch.device("cpu")) is None


def run(scenario: str, **environment: str) -> None:
    paths = os.pathsep.join([str(HERE), str(HERE.parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    command = [sys.executable, "-W", "ignore", str(HERE / "on_triton.py"), scenario]
    environment = {**os.environ, "PYTHONPATH": paths, **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == 77:
        pytest.skip("Triton's interpreter does not work with this numpy")
    assert done.returncode == 0, done.stderr


@needs_triton
def test_the_kernel_copies_the_bytes_and_nothing_beside() -> None:
    """Every alignment, sizes around a tile, more pieces than programs."""
    run("interpret", TRITON_INTERPRET="1")


@needs_triton
def test_the_kernel_is_built_for_devices_of_today(tmp_path: Path) -> None:
    """For three architectures and every alignment, without a device; sixteen bytes at once where they are aligned."""
    run("compile", TRITON_CACHE_DIR=str(tmp_path))
