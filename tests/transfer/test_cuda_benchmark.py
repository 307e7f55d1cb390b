"""The benchmarks for a device say that they were not run where there is none; what they copy, on a simulated one."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable

import pytest
import torch
from simulated_cuda import SimulatedCuda, SimulatedKernel, on

from aoffload.errors import TransferRefused
from aoffload.ledger import Direction
from aoffload.transfer.backends.cuda import BreakEven
from aoffload.transfer.backends.cuda.plain import TorchDriver
from benchmarks import cuda_choice, cuda_copy, cuda_copying, cuda_fitting, cuda_latency, cuda_overlap
from benchmarks.__main__ import BENCHMARKS
from benchmarks.harness import Row, Sample, timed
from proof.gpu.parts import PARTS, Part

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a CUDA device")
@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name.startswith("cuda_")])
def test_without_a_device_there_are_no_rows_and_a_line_that_says_so(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Never a figure that was not measured."""
    assert list(importlib.import_module(f"benchmarks.{name}").run()) == []
    assert capsys.readouterr().err == f"{name}: not run, since torch sees no CUDA device\n"


def test_each_way_and_both_stand_beside_one_large_copy() -> None:
    """The same bytes on both sides of a ratio, in pieces and in one."""
    cuda = SimulatedCuda()
    rows = cuda_copy.copy_rows(CPU, on(cuda), piece_bytes=64 * 1024, wanted=0.9, num_moved=2, seconds=0.0)
    assert [row.name.partition(",")[0] for row in rows] == ["store", "load", "both ways"]
    assert [row.wanted for row in rows] == [0.9, 0.9, 0.85]
    moved = [entry for entry in cuda.log if entry[1] == "copies"]
    assert {entry[4] for entry in moved} == {2 * cuda_copying.BLOCK_BYTES}
    assert {entry[3] for entry in moved} == {2 * 32, 1}


def test_small_pieces_stand_beside_their_bytes_in_one_copy() -> None:
    """What one of them takes, each way: as many bytes either way, in 4 KiB each and at once."""
    cuda = SimulatedCuda()
    rows = list(cuda_copy.piece_rows(CPU, on(cuda), num_moved=1, seconds=0.0))
    assert [(row.name.partition(",")[0], row.unit) for row in rows] == [("load", "us"), ("store", "us")]
    moved = [entry for entry in cuda.log if entry[1] == "copies"]
    assert {(entry[3], entry[4]) for entry in moved} == {(512, 2**21), (1, 2**21)}


@pytest.mark.parametrize("direction", Direction)
def test_torch_alone_reaches_all_that_is_copied(direction: Direction) -> None:
    """Also the large copy that blocks stand beside: without NVIDIA's bindings, copies are between tensors it knows."""
    copying = cuda_copying.Copying(CPU, on(SimulatedCuda()), piece_bytes=64 * 1024, num_moved=1)
    driver, piece = TorchDriver(copying.backend.regions), copying._one_piece(direction)
    driver.learn(copying.backend.host.rows)
    for address in (int(piece.sources[0]), int(piece.destinations[0])):
        found = driver._at(address, int(piece.sizes[0]))
        assert (found.data_ptr(), found.nbytes) == (address, cuda_copying.BLOCK_BYTES)
    copying.close()


def test_the_choice_is_looked_at_on_both_sides() -> None:
    """Each way the break-even that was found, and a size below and above it, beside the better of engine and kernel."""
    cuda = SimulatedCuda()
    options = on(cuda, kernel=lambda device: SimulatedKernel(cuda), break_even=BreakEven(32 * 1024, 16 * 1024))
    rows = list(cuda_choice.choice_rows(CPU, options, seconds=0.0))
    assert [row.name for row in rows] == [
        f"{way}, {what}"
        for way in ("load", "store")
        for what in (
            "break-even", "half the break-even, by what is chosen", "twice the break-even, by what is chosen"
        )
    ]  # fmt: skip
    assert [row.value for row in rows[::3]] == [32, 16]
    chosen = [row.against.partition(", better")[0] for row in rows if row.wanted is not None]
    assert chosen == [
        "16 KiB, chosen: kernel", "64 KiB, chosen: engine", "8 KiB, chosen: kernel", "32 KiB, chosen: engine"
    ]  # fmt: skip


def test_a_kernel_that_never_wins_is_looked_at_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the engine is left with everything, that is looked at around the published size; without a kernel there is
    nothing to choose, and a line says so."""
    cuda = SimulatedCuda()
    options = on(cuda, kernel=lambda device: SimulatedKernel(cuda), break_even=BreakEven(0, 0))
    rows = list(cuda_choice.choice_rows(CPU, options, seconds=0.0))
    assert [row.against.partition(",")[0] for row in rows] == 2 * ["as published", "14 KiB", "56 KiB"]
    assert all("chosen: engine" in row.against for row in rows if row.wanted is not None)
    assert list(cuda_choice.choice_rows(CPU, on(SimulatedCuda()), seconds=0.0)) == []
    assert "not run, since no kernel copies here" in capsys.readouterr().err


def test_copies_beside_compute_are_measured_themselves() -> None:
    """They have begun before the compute does, and what they took is there to be compared with what they take alone."""
    copying = cuda_copying.Copying(CPU, on(SimulatedCuda()), piece_bytes=64 * 1024, num_moved=1)
    moved: list[Sample] = []
    with cuda_overlap.traffic(copying, moved):
        assert moved
    copying.close()
    assert all(sample.wall_s > 0 for sample in moved)


def test_copies_that_fail_beside_compute_are_no_figure() -> None:
    """What ended them is raised: the compute ran alone."""
    copying = cuda_copying.Copying(CPU, on(SimulatedCuda()), piece_bytes=64 * 1024, num_moved=1)
    copying.close()
    with pytest.raises(TransferRefused), cuda_overlap.traffic(copying, []):
        pass


def test_serving_what_fits_stores_all_of_it_or_nothing() -> None:
    """What is compared is a runtime that has stored every block within the time, and one that has stored none; what
    stores some other part is refused."""
    serving = cuda_fitting.Serving(CPU, num_requests=3, num_products=1, product_side=8)
    assert serving.num_blocks == 24
    for policy in ("eager", "off"):
        assert serving.once(policy).wall_s > 0
    with pytest.raises(RuntimeError, match="lazy: 8 blocks were stored"):
        serving.once("lazy")


# -- every row is a figure of the report, and every figure a row ------------------------------------------------------


def overlap_rows(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    monkeypatch.setattr(cuda_overlap, "PRODUCT_SIDE", 8)
    monkeypatch.setattr(cuda_overlap, "_timed_by_device", timed)
    return cuda_overlap.overlap_rows(CPU, on(SimulatedCuda()), num_moved=1, seconds=0.0)


def latency_rows(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    async def found(device: torch.device, policies: Iterable[str], turn_s: float) -> dict[str, list[float]]:
        return {name: [1e-3, 2e-3] for name in policies}

    monkeypatch.setattr(cuda_latency, "_latencies", found)
    return list(cuda_latency.latency_rows(CPU))


def copy_rows(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    sizes = (64 * 1024, 16 * 1024)
    rows = [cuda_copy.copy_rows(CPU, on(SimulatedCuda()), size, 0.9, num_moved=1, seconds=0.0) for size in sizes]
    return [*itertools.chain(*rows), *cuda_copy.piece_rows(CPU, on(SimulatedCuda()), num_moved=1, seconds=0.0)]


def choice_rows(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    cuda = SimulatedCuda()
    options = on(cuda, kernel=lambda device: SimulatedKernel(cuda), break_even=BreakEven(0, 0))
    return list(cuda_choice.choice_rows(CPU, options, seconds=0.0))


def fitting_rows(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    return [cuda_fitting.fitting_row(cuda_fitting.Serving(CPU, 1, 1, 8), seconds=0.0)]


ROWS = {
    "cuda_copy": copy_rows, "cuda_choice": choice_rows, "cuda_overlap": overlap_rows, "cuda_fitting": fitting_rows,
    "cuda_latency": latency_rows,
}  # fmt: skip


@pytest.mark.parametrize("part", [part for part in PARTS if "benchmarks" in part.words], ids=lambda part: part.name)
def test_each_row_is_a_figure_of_the_report(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name that the report looks for, so that neither is lost."""
    rows = ROWS[part.name](monkeypatch)
    assert sorted(row.name for row in rows) == sorted(figure.source for figure in part.figures)
