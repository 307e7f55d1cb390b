"""`benchmarks/cuda_copy.py` says that it was not run where there is no device; what it copies, on a simulated one."""

from __future__ import annotations

import pytest
import torch
from simulated_cuda import SimulatedCuda, SimulatedKernel, on

from aoffload.transfer.backends.cuda import BreakEven
from benchmarks import cuda_copy

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a CUDA device")
def test_without_a_device_there_are_no_rows_and_a_line_that_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Never a figure that was not measured."""
    assert cuda_copy.run() == []
    assert capsys.readouterr().err == "cuda_copy: not run, since torch sees no CUDA device\n"


def test_each_way_and_both_stand_beside_one_large_copy() -> None:
    """The same bytes on both sides of a ratio, in pieces and in one."""
    cuda = SimulatedCuda()
    rows = cuda_copy.copy_rows(CPU, on(cuda), piece_bytes=64 * 1024, wanted=0.9, num_moved=2, seconds=0.0)
    assert [row.name.partition(",")[0] for row in rows] == ["store", "load", "both ways"]
    assert [row.wanted for row in rows] == [0.9, 0.9, 0.85]
    moved = [entry for entry in cuda.log if entry[1] == "copies"]
    assert {entry[4] for entry in moved} == {2 * cuda_copy.BLOCK_BYTES}
    assert {entry[3] for entry in moved} == {2 * 32, 1}


def test_the_choice_is_looked_at_on_both_sides() -> None:
    """A size below the break-even by the kernel, one above it by the engine, each way; no kernel, no choice."""
    cuda = SimulatedCuda()
    options = on(cuda, kernel=lambda device: SimulatedKernel(cuda), break_even=BreakEven(32 * 1024, 16 * 1024))
    names = [row.name for row in cuda_copy.choice_rows(CPU, options, seconds=0.0)]
    assert names == [
        "load in pieces of 16 KiB, by the kernel",
        "load in pieces of 64 KiB, by the engine",
        "store in pieces of 8 KiB, by the kernel",
        "store in pieces of 32 KiB, by the engine",
    ]
    assert cuda_copy.choice_rows(CPU, on(SimulatedCuda()), seconds=0.0) == []


def test_copies_beside_compute_are_measured_themselves() -> None:
    """They have begun before the compute does, and what they took is there to be compared with what they take alone."""
    copying = cuda_copy.Copying(CPU, on(SimulatedCuda()), piece_bytes=64 * 1024, num_moved=1)
    moved: list[cuda_copy.Sample] = []
    with cuda_copy.traffic(copying, moved):
        assert moved
    copying.close()
    assert all(sample.wall_s > 0 for sample in moved)
