"""`make gpu-dry`: the parts of `make gpu` over a device that is not there."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from proof.gpu import dry
from proof.gpu.parts import Figure, Part
from proof.gpu.readings import ALL_TESTS, Reading
from proof.gpu.report import PartReport

ROOT = Path(__file__).parent.parent.parent


def has_bindings() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings.driver") is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """A folder with the stub of libcuda."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("no C compiler for the stub of libcuda")
    if not has_bindings():
        pytest.skip("cuda-bindings is not installed: pip install 'aoffload[cuda]'")
    dry.build_stub(compiler, tmp_path)
    return tmp_path


def test_parts_run_over_a_device_that_is_not_there(
    stub: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Their own code, small, with every figure that they are to print; the exit status says so."""
    monkeypatch.setattr(dry, "WORK", stub / "work")
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.chdir(ROOT)
    assert dry.main(["cuda_ceilings"]) == 0, capfd.readouterr()
    assert capfd.readouterr().out.splitlines()[-1].startswith("gpu-dry: 1 parts, ")


COPIES = """
import torch
from aoffload.transport import LocalTransport
from aoffload.cuda import CudaBackend

pool = torch.arange(8, device="cuda")[:, None].repeat(1, 1024)
transport = LocalTransport(pool)
assert type(transport.backend) is CudaBackend, transport.backend
print(transport.backend.driver, torch.cuda.is_available(), torch.version.cuda is not None)
with torch.cuda.stream(torch.cuda.Stream()) as _:
    fence = torch.cuda.current_stream().record_event()
    assert fence.query()
print(torch.zeros(1, device=torch.device("cuda")).new_zeros(2, device="cuda:0").to("cuda").sum().item())
"""


def test_a_program_believes_in_the_device(stub: Path) -> None:
    """Torch makes tensors on it, and a transport has the driver layer that copies on a real one."""
    environment = {**os.environ, **dry.fake_environment(stub)}
    command = [sys.executable, "-c", COPIES]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["<NvidiaDriver device=0 batches> True True", "0.0"]


def report(
    readings: Mapping[str, Reading], problem: str = "", words: tuple[str, ...] = ("-m", "benchmarks")
) -> list[str]:
    part = Part("p", words, 1.0, lambda text: {}, (Figure("f", "about", "one"),))
    return list(dry.problems(PartReport(part, 1.0, problem, readings)))


GOOD = {"one": Reading("1 GB/s", "much", False)}
TESTS = ("-m", "pytest")


def test_a_figure_that_misses_its_aim_is_no_problem() -> None:
    """Nothing is measured there."""
    assert report(GOOD) == []


def test_what_would_waste_a_run_is_a_problem() -> None:
    """A part that died, one without a figure, and an error of a program in whatever was found."""
    assert report(GOOD, "exit status 1") == ["p: exit status 1"]
    assert report({}) == ["p: f: not in its output"]
    assert report({**GOOD, "two": Reading("AttributeError: no such name")}) == ["p: two: AttributeError: no such name"]


def test_tests_may_fail_that_need_a_device_to_be_late() -> None:
    """They alone, and not of an error in the program."""
    late = f"{dry.CAN_FAIL[0]}[a]"
    failed = Reading("failed: assert 0 == 1", "passes", False)
    summary = {ALL_TESTS: Reading("1 failed", "none fails", False)}
    assert report({**GOOD, late: failed, **summary}, "exit status 1", TESTS) == ["p: one: 1 GB/s"]
    found = {"one": Reading("passed", "passes", True)}
    assert report({**found, late: failed, **summary}, "exit status 1", TESTS) == []
    assert report({**found, "test_gpu_other": failed}, "exit status 1", TESTS) == [
        "p: test_gpu_other: failed: assert 0 == 1"
    ]
    wrong = Reading("failed: NameError: name", "passes", False)
    assert report({**found, late: wrong}, "exit status 1", TESTS) == [f"p: {late}: failed: NameError: name"]
    assert report(found, "died of SIGSEGV", TESTS) == ["p: died of SIGSEGV"]


def test_tests_that_may_fail_are_there() -> None:
    """By that name: whatever else fails in the dry run is a problem."""
    source = "".join(file.read_text() for file in (ROOT / "tests/transfer").glob("test_cuda_gpu*.py"))
    assert [name for name in dry.CAN_FAIL if f"def {name}(" not in source] == []
