"""The kernel for small pieces: its bytes, in Triton's interpreter; and that it can be built for devices of today."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aoffload.transfer.backends.cuda import Pieces
from aoffload.transfer.backends.cuda.kernel import common_alignment, triton_kernel

HERE = Path(__file__).parent
has_triton = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not has_triton, reason="Triton is not installed: it comes with torch for CUDA")

numbers = st.lists(st.integers(1, 2**48), min_size=1, max_size=8)


@given(numbers, numbers, numbers)
def test_the_alignment_divides_everything(sources: list[int], destinations: list[int], sizes: list[int]) -> None:
    """The largest power of two up to 16 that does: what the kernel may assume, and what makes it fast."""
    arrays = [np.array(column, dtype=np.uint64) for column in (sources, destinations, sizes)]
    found = common_alignment(Pieces(*arrays))
    everything = [*sources, *destinations, *sizes]
    assert all(number % found == 0 for number in everything)
    assert found == 16 or not all(number % (2 * found) == 0 for number in everything)


@pytest.mark.skipif(has_triton, reason="Triton is installed")
def test_without_triton_there_is_no_kernel() -> None:
    """Then the copy engine takes all pieces."""
    assert triton_kernel(torch.device("cpu")) is None


def run(scenario: str, **environment: str) -> None:
    paths = os.pathsep.join([str(HERE), str(HERE.parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    command = [sys.executable, "-W", "ignore", str(HERE / "on_triton.py"), scenario]
    environment = {**os.environ, "PYTHONPATH": paths, **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@needs_triton
def test_the_kernel_copies_the_bytes_and_nothing_beside() -> None:
    """Every alignment, sizes around a tile, more pieces than programs."""
    run("interpret", TRITON_INTERPRET="1")


@needs_triton
def test_the_kernel_is_built_for_devices_of_today(tmp_path: Path) -> None:
    """For three architectures and every alignment, without a device; sixteen bytes at once where they are aligned."""
    run("compile", TRITON_CACHE_DIR=str(tmp_path))
