"""The benchmarks for a device: they report that there is no device, and copy the right bytes on a simulated one."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from simulated_cuda import SimulatedCuda, SimulatedKernel, on

from aoffload._transfer.backends.cuda.plain import TorchDriver
from aoffload._transfer.backends.cuda.trials import BreakEven
from aoffload.errors import TransferRefused
from aoffload.ledger import Direction
from benchmarks import (
    cuda_busy,
    cuda_choice,
    cuda_copy,
    cuda_copying,
    cuda_fitting,
    cuda_latency,
    cuda_loads,
    cuda_overlap,
    cuda_pinning,
    cuda_regions,
    cuda_stress,
    cuda_sweep,
    cuda_ttft,
)
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
    """The break-even that was found for loads, and a size below and above it, beside the better of engine and kernel.
    The engine may be slower by the margin that the kernel has to win by."""
    cuda = SimulatedCuda()
    options = on(cuda, kernel=lambda device: SimulatedKernel(cuda), break_even=BreakEven(32 * 1024, 16 * 1024))
    rows = list(cuda_choice.choice_rows(CPU, options, seconds=0.0))
    assert [row.name for row in rows] == [
        "load, break-even",
        "load, half the break-even, by what is chosen",
        "load, twice the break-even, by what is chosen",
    ]
    assert rows[0].value == 32
    assert [row.wanted for row in rows[1:]] == [0.95, pytest.approx(0.95 / 1.5)]
    chosen = [row.against.partition(", better")[0] for row in rows if row.wanted is not None]
    assert chosen == ["16 KiB, chosen: kernel", "64 KiB, chosen: engine"]


def test_a_kernel_that_never_wins_is_looked_at_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the engine is left with everything, that is looked at around the published size; without a kernel there is
    nothing to choose, and a line says so."""
    cuda = SimulatedCuda()
    options = on(cuda, kernel=lambda device: SimulatedKernel(cuda), break_even=BreakEven(0, 0))
    rows = list(cuda_choice.choice_rows(CPU, options, seconds=0.0))
    assert [row.against.partition(",")[0] for row in rows] == ["as published", "14 KiB", "56 KiB"]
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
    return list(cuda_overlap.overlap_rows(CPU, on(SimulatedCuda()), num_moved=1, seconds=0.0))


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


def sweep_rows(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    monkeypatch.setattr(cuda_sweep, "SIZES_KIB", (4, 16, 32, 64, 1024))
    cuda = SimulatedCuda()
    options = on(cuda, kernel=lambda device: SimulatedKernel(cuda), break_even=BreakEven(0, 0))
    return list(cuda_sweep.sweep_rows(CPU, options, num_moved=1, seconds=0.0))


def load_rows(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    monkeypatch.setattr(cuda_loads, "SMALLER", 64)
    monkeypatch.setattr(cuda_loads, "BESIDE", 1)
    return list(cuda_loads.load_rows(CPU, on(SimulatedCuda()), num_rounds=2))


def region_rows(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    monkeypatch.setattr(cuda_regions, "SLOT_BYTES", 64)
    return list(cuda_regions.region_rows(CPU, on(SimulatedCuda()), sizes=(8, 64), seconds=0.0))


def busy_rows(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    return list(cuda_busy.busy_rows(CPU, on(SimulatedCuda()), num_moved=1, seconds=0.0))


def pinning_rows(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    monkeypatch.setattr(cuda_pinning, "SMALLER", 1024)
    return list(cuda_pinning.pinning_rows(CPU, on(SimulatedCuda())))


def ttft_rows(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    monkeypatch.setattr(cuda_ttft, "SHORTER", 128)
    shape = cuda_ttft.Shape(2, 32, 64, 4, 2, 8)
    return list(cuda_ttft.ttft_rows(CPU, on(SimulatedCuda()), shape, seconds=0.0))


ROWS = {
    "cuda_copy": copy_rows, "cuda_choice": choice_rows, "cuda_overlap": overlap_rows, "cuda_fitting": fitting_rows,
    "cuda_latency": latency_rows, "cuda_sweep": sweep_rows, "cuda_loads": load_rows, "cuda_regions": region_rows,
    "cuda_busy": busy_rows, "cuda_pinning": pinning_rows, "cuda_ttft": ttft_rows,
}  # fmt: skip
IN_THE_DRY_RUN = {"cuda_ceilings", "cuda_interference", "cuda_stress"}
"""They use `torch.cuda` itself, so `python -m proof.gpu.dry` looks for their rows, on a fake of it."""


def test_the_rows_of_each_part_are_looked_at() -> None:
    """Here or in the dry run."""
    assert {part.name for part in PARTS if "benchmarks" in part.words} == ROWS.keys() | IN_THE_DRY_RUN


@pytest.mark.parametrize("part", [part for part in PARTS if part.name in ROWS], ids=lambda part: part.name)
def test_each_row_is_a_figure_of_the_report(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each figure that the page names is a row, by the name that the report looks for, and no name stands for two."""
    names = [row.name for row in ROWS[part.name](monkeypatch)]
    assert {figure.source for figure in part.figures} - set(names) == set()
    assert len(set(names)) == len(names)


def test_a_load_layer_by_layer_is_over_when_all_layers_are() -> None:
    """The first layer is there before the load is, and both loads move the same bytes."""
    cuda = SimulatedCuda()
    loads = cuda_regions.LayeredLoads(CPU, on(cuda), num_blocks=2)
    for load in (loads.load, loads.load_by_layer, loads.first_layer):
        load(2)
    loads.close()
    moved = [(entry[3], entry[4]) for entry in cuda.log if entry[1] == "copies"]
    whole, layer = 2 * 32 * cuda_regions.SLOT_BYTES, 2 * cuda_regions.SLOT_BYTES
    assert moved == [(1, whole), *[(2, layer)] * 32, *[(2, layer)] * 32]


def test_a_first_token_from_host_memory_has_the_bytes_that_were_computed() -> None:
    """The load brings back the KV of every token but the last block's, so that computing goes on where it would."""
    model = cuda_ttft.Model(cuda_ttft.Shape(2, 32, 64, 4, 2, 8), CPU)
    prompt = cuda_ttft.StoredPrompt(model, on(SimulatedCuda()), 64)
    prompt.compute()
    wanted = prompt._cache.clone()
    prompt.store()
    prompt._cache[1:4] = 0
    prompt.load()
    prompt.close()
    assert torch.equal(prompt._cache, wanted)


def test_no_pool_is_opened_that_a_container_would_die_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its limit counts where it is less than what the machine has free; a size that is left out is said."""
    of_machine = cuda_pinning.free_bytes(tmp_path / "none")
    for name, value in (("max", 3 * 2**20), ("current", 2**20)):
        (tmp_path / f"memory.{name}").write_text(f"{value}\n")
    assert cuda_pinning.free_bytes(tmp_path) == 2**21
    (tmp_path / "memory.max").write_text("max\n")
    assert cuda_pinning.free_bytes(tmp_path) == pytest.approx(of_machine, rel=0.5)
    monkeypatch.setattr(cuda_pinning, "free_bytes", lambda: 2**21)
    assert list(cuda_pinning.pinning_rows(CPU, on(SimulatedCuda()), sizes_mib=(4,))) == []
    assert capsys.readouterr().err == "cuda_pinning: not 4 MiB, since 2 MiB are free\n"


def test_stress_notices_a_wrong_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that all end are not enough: their last bytes are compared."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    copying = cuda_copying.Copying(CPU, on(SimulatedCuda()), piece_bytes=64 * 1024, num_moved=8)
    batches = cuda_stress.Batches(copying)
    assert batches.copy(3) > 0
    for direction in Direction:
        copies = copying.backend.copy_by_engine

        def spoil(pieces: Any, to: Direction, wrong: Direction = direction, copies: Any = copies) -> None:
            copies(pieces.where(np.arange(len(pieces)) != 7) if to is wrong else pieces, to)

        with monkeypatch.context() as planted:
            planted.setattr(copying.backend, "copy_by_engine", spoil)
            with pytest.raises(AssertionError, match=f"wrong bytes after a {direction.value}"):
                batches.copy(3)
    copying.close()


def test_a_kernel_that_does_not_compile_costs_its_own_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """Triton may be there without a compiler: the other rows of the sweep are there, and a line says why."""

    class Broken:
        def copy(self, *given: object) -> None:
            raise RuntimeError("no compiler")

    options = on(SimulatedCuda(), kernel=lambda device: Broken(), break_even=BreakEven(0, 0))
    rows = list(itertools.islice(cuda_sweep.sweep_rows(CPU, options, num_moved=1, seconds=0.0), 6))
    assert [row.name.rpartition(", ")[2] for row in rows[:3]] == ["one batch", "one by one", "submission of a piece"]
    assert "cuda_sweep: no rows of the kernel, since the kernel cannot be used: RuntimeError" in capsys.readouterr().err
