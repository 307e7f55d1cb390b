"""NVIDIA's bindings as they are installed, above a driver library without a device: what is really handed over.

`stub_libcuda.c` is compiled for it. Skipped where there are no bindings (`pip install aoffload[cuda]`) or no compiler.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMPILER = shutil.which("cc") or shutil.which("gcc")
Run = Callable[..., list[str]]


def has_bindings() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings.driver") is not None
    except ModuleNotFoundError:
        return False


pytestmark = [
    pytest.mark.skipif(not has_bindings(), reason="cuda-bindings is not installed: pip install 'aoffload[cuda]'"),
    pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="no C compiler for the stub of libcuda"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("libcuda")
    made = folder / "libcuda.so.1"
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([str(COMPILER), *options, "-o", str(made), str(HERE / "stub_libcuda.c"), "-ldl"], check=True)
    return folder


@pytest.fixture(scope="module")
def log(run: Run) -> list[str]:
    """What a round trip asked of the driver."""
    return run("round_trip")


@pytest.fixture(scope="module")
def run(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a scenario of `on_stub_driver`; the calls that arrived at the driver, and after them what it printed."""

    def one(scenario: str, **settings: object) -> list[str]:
        log = tmp_path_factory.mktemp("log") / "calls"
        paths = os.pathsep.join([str(HERE), str(HERE.parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
        environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "STUB_LOG": str(log), "PYTHONPATH": paths}
        environment.update({f"STUB_{name.upper()}": str(value) for name, value in settings.items()})
        command = [sys.executable, "-W", "error", str(HERE / "on_stub_driver.py"), scenario]
        if scenario == "pageable":
            command[1:3] = ["-W", "ignore"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return [*log.read_text().splitlines(), *done.stdout.splitlines()]

    return one


def calls(log: list[str], word: str) -> list[str]:
    return [line for line in log if line.startswith(word)]


def test_a_round_trip_hands_over_what_the_rules_ask_for(log: list[str]) -> None:
    """Stores read in stream order (1), loads at any time (3); one attribute for all pieces, from the first one on;
    copies prefer to overlap with compute; each is given in a thread where the device is current. Seven pieces: what
    blocks 3 and 4 have next to each other is one."""
    store, load = calls(log, "batch")
    assert store.startswith("batch 7 pieces 32768 bytes order 1 flags 1 location 0 0 attributes 1 from 0 on ")
    assert load.startswith("batch 7 pieces 32768 bytes order 3 flags 1 location 0 0 attributes 1 from 0 on ")
    assert all(int(line.rpartition(" ")[2]) >= 1 for line in (store, load))


def test_streams_and_events_are_made_as_the_design_says(log: list[str]) -> None:
    """Streams that wait for no other one, of the lowest priority; events that sleep (1) and measure no time (2)."""
    assert len(calls(log, "destroy stream")) == 2
    assert all("flags 1 priority 0" in line for line in calls(log, "stream") if "priority" in line)
    assert {line.rpartition(" ")[2] for line in calls(log, "event")} == {"3"}
    assert len(calls(log, "event")) == len(calls(log, "destroy event"))


def test_a_copy_waits_and_is_recorded_on_its_own_stream(log: list[str]) -> None:
    """What stream waits for the compute's event, copies, and records: for each of the two copies, in this order."""
    for batch in calls(log, "batch"):
        (stream,) = re.findall(r"on (\w+) depth", batch)
        mine = [line for line in log if re.search(rf"(stream {stream} waits|on {stream}\b)", line)]
        kinds = [line.split()[0] for line in mine]
        assert kinds[:3] == ["stream", "batch", "record"]


def test_host_memory_is_registered_for_every_device_and_let_go_of(log: list[str]) -> None:
    """Portable (1) and mapped (2), where the pool begins; every piece of it is unregistered."""
    (registered,) = calls(log, "register")
    assert "flags 3" in registered and f" {20 * 2 * 4096} " in registered
    assert [line.split()[1] for line in calls(log, "unregister")] == [registered.split()[1]]


def test_memory_that_cannot_be_pinned_is_copied_piece_by_piece(run: Run) -> None:
    """No batch, no kernel: plain copies in stream order."""
    log = run("pageable", pinnable=10)
    assert not calls(log, "batch") and not calls(log, "unregister")
    assert len(calls(log, "copy")) == 2 * 7


@pytest.mark.parametrize("version", [12070, 12040])
def test_a_driver_without_batches_copies_one_by_one(run: Run, version: int) -> None:
    """Before 12.8 there was no such call; pinned memory is used all the same."""
    log = run("round_trip", version=version)
    assert not calls(log, "batch")
    assert len(calls(log, "copy")) == 2 * 7
    assert calls(log, "register") and calls(log, "unregister")


def test_arrays_are_handed_over_as_they_are(run: Run) -> None:
    """A thousand pieces in one call, of arrays that are not contiguous, too; none for no pieces."""
    log = run("batches")
    assert [line.split()[1] for line in calls(log, "batch")] == ["1000", "1000", "334"]
    assert log[-1] == "<NvidiaDriver device=0 batches>"
    assert calls(log, "asked for batches of 12080")


def test_waiting_lets_other_threads_run(run: Run) -> None:
    """The bindings let go of the interpreter's lock: the event loop goes on while a copy thread waits."""
    run("waits", wait_ms=300)


def test_errors_have_types(run: Run) -> None:
    """A context that answers nothing any more is a lost device; not ready is an answer."""
    run("lost", lost=1)
    run("busy", busy=1)


def test_the_device_is_asked_whether_a_kernel_may_use_host_addresses(run: Run) -> None:
    """One that guesses wrong would take the device with it."""
    run("maps")
    run("maps_not", unmapped=1)


def test_fences_of_another_device_are_waited_for_on_the_device(run: Run) -> None:
    """Events are known to the whole driver."""
    run("others_events")
