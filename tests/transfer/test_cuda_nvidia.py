"""NVIDIA's bindings as installed, over a stub of the driver library: the arguments of the driver calls.

`stub_libcuda.c` is compiled for it. Skipped where there are no bindings (`pip install aoffload[cuda]`) or no compiler.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aoffload._transfer.backends.cuda.driver import LOST_CODES

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
def on_stub_driver(library: Path) -> Iterator[subprocess.Popen[str]]:
    """The scenarios of that name, each in a fork."""
    paths = os.pathsep.join([str(HERE), str(HERE.parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "PYTHONPATH": paths}
    command = [sys.executable, "-W", "error", str(HERE / "on_stub_driver.py")]
    pipes: dict[str, int] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        yield process


@pytest.fixture(scope="module")
def run(on_stub_driver: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a scenario of `on_stub_driver`; the calls that arrived at the driver, and after them what it printed."""

    def one(scenario: str, **settings: object) -> list[str]:
        log, printed = (tmp_path_factory.mktemp("log") / name for name in ("calls", "printed"))
        environment = {"STUB_LOG": str(log), **{f"STUB_{name.upper()}": str(settings[name]) for name in settings}}
        assert on_stub_driver.stdin is not None and on_stub_driver.stdout is not None
        on_stub_driver.stdin.write(json.dumps([scenario, environment, str(printed)]) + "\n")
        on_stub_driver.stdin.flush()
        assert on_stub_driver.stdout.readline() == "0\n", printed.read_text()
        return [*log.read_text().splitlines(), *printed.read_text().splitlines()]

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
    assert len(calls(log, "destroy stream")) == 3, "one for each direction, and one for single blocks"
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
    """Thousands of pieces in a call, of arrays that are not contiguous, too; no call for no pieces."""
    log = run("batches")
    assert [line.split()[1] for line in calls(log, "batch")] == [*["4096"] * 2, "1366"]
    assert log[-1] == "<NvidiaDriver device=0 batches>"
    assert calls(log, "asked for batches of 12080")


def test_few_batches_are_under_way_and_none_is_large(run: Run) -> None:
    """At most 4,096 pieces a call. Of five batches each way with `max_batches=2`, the third waits for the event of the
    first, the fourth for that of the second, and so on."""
    log = [line for line in run("bounded") if re.match("batch|record|synchronize", line)]
    assert [line.split()[1] for line in calls(log, "batch")] == [*["4096"] * 4, "1000"] * 2
    numbers = [index for index, line in enumerate(log) if line.startswith("batch")]
    events = [log[index + 1].split()[1] for index in numbers]
    for start in (0, 5):
        for later in range(start + 2, start + 5):
            waits = log[numbers[later - 1] : numbers[later]]
            assert f"synchronize {events[later - 2]}" in waits


def test_batches_can_be_left_out(run: Run) -> None:
    """For drivers whose batches hang or crash: `batched=False` copies each piece in a call of its own."""
    log = run("one_by_one")
    assert not calls(log, "batch")
    assert len(calls(log, "copy")) == 2 * (4 * 4096 + 1000)


def test_a_piece_that_no_batch_may_hold_is_copied_alone(run: Run) -> None:
    """A tensor over several physical allocations, as torch's expandable segments have them: if the driver refuses a
    batch for it, pieces are copied one by one from then on, with one warning."""
    log = run("crossing", segment=8192)
    assert not calls(log, "batch")
    assert [line.split()[1] for line in calls(log, "copy")] == ["16384", "8192"] * 2


def test_waiting_lets_other_threads_run(run: Run) -> None:
    """The bindings release the interpreter's lock: the event loop goes on while a copy thread waits."""
    run("waits", wait_ms=300)


def test_bindings_that_hold_the_lock_are_not_used(run: Run) -> None:
    """A copy thread that waits in the driver would stop the event loop: then torch alone copies."""
    assert run("old_bindings")[-1].startswith("cuda-bindings: 12.9.0 holds the GIL in every call")


LOST = {
    46: "DEVICE_UNAVAILABLE",
    201: "INVALID_CONTEXT",
    214: "ECC_UNCORRECTABLE",
    220: "NVLINK_UNCORRECTABLE",
    226: "CONTAINED",
    700: "ILLEGAL_ADDRESS",
    702: "LAUNCH_TIMEOUT",
    709: "CONTEXT_IS_DESTROYED",
    710: "ASSERT",
    714: "HARDWARE_STACK_ERROR",
    715: "ILLEGAL_INSTRUCTION",
    716: "MISALIGNED_ADDRESS",
    717: "INVALID_ADDRESS_SPACE",
    718: "INVALID_PC",
    719: "LAUNCH_FAILED",
    806: "MPS_RPC_FAILURE",
    810: "MPS_CLIENT_TERMINATED",
    911: "EXTERNAL_DEVICE",
    999: "UNKNOWN",
}


@pytest.mark.parametrize("code", [46, 201, 214, 700, 719, 810, 999])
def test_a_lost_device_has_a_type(run: Run, code: int) -> None:
    """A context that answers nothing any more, whatever it says of itself and whoever asks."""
    assert run("lost", lost=code)[-1] == f"CUDA_ERROR_{LOST[code]}"


def test_codes_are_those_of_the_driver() -> None:
    """The numbers that stand for a loss have the names that NVIDIA's documentation gives them."""
    from cuda.bindings.driver import CUresult

    assert {code: CUresult(code).name for code in LOST} == {code: f"CUDA_ERROR_{name}" for code, name in LOST.items()}
    assert set(LOST) <= LOST_CODES


@pytest.mark.parametrize(
    ("code", "said"), [(2, "CUDA_ERROR_OUT_OF_MEMORY"), (400, "CUDA_ERROR_INVALID_HANDLE"), (12345, "error 12345")]
)
def test_an_error_that_is_no_loss_has_a_type(run: Run, code: int, said: str) -> None:
    """Also one that a newer driver has and the bindings do not know."""
    refused = ("cuEventQuery", "cuStreamWaitEvent", "cuMemcpyBatchAsync")
    assert run("refuses", lost=code)[-3:] == [f"{call}: {said}" for call in refused]


@pytest.mark.parametrize("code", [700, 719])
def test_a_device_that_is_lost_midway_is_gone_for_good(run: Run, code: int) -> None:
    """The copy under way is in doubt; a later one is refused, although the driver would take it."""
    doubt, refused = run("fails_midway", lost_later=code)[-2:]
    assert doubt.startswith("UNPROVEN ") and LOST[code] in doubt
    assert refused.startswith("device lost: ") and LOST[code] in refused


def test_a_handle_that_is_refused_midway_is_no_loss(run: Run) -> None:
    """What was copied is in doubt, since no event tells when it is over; the next copy is made all the same."""
    doubt, later = run("fails_midway", lost_later=400)[-2:]
    assert doubt.startswith("UNPROVEN ") and "CUDA_ERROR_INVALID_HANDLE" in doubt
    assert later == "LANDED"


def test_not_ready_is_an_answer(run: Run) -> None:
    """An event that has not passed is no error of the driver."""
    run("busy", busy=1)


def test_a_graph_captured_in_another_thread_is_left_alone(run: Run) -> None:
    """Torch captures so that pinning, or asking after an event, in any thread would end it: not in ours."""
    log = run("beside_a_capture", capture_elsewhere=1)
    assert calls(log, "batch") and calls(log, "register")


def test_a_stream_that_is_being_captured_takes_no_fence(run: Run) -> None:
    """It says what to do instead; nothing is recorded on it, nor made to wait."""
    log = run("captured", captured=48)
    assert not [line for line in log if re.search(r"on 30$|stream 30 ", line)]


def test_a_capture_on_a_stream_that_waits_for_the_default_one_is_named(run: Run) -> None:
    """The driver's answer for the default stream is 906: the same error, and the same advice, as for a captured one."""
    run("captured_beside_the_default_stream", captured_blocking=1)


def test_torch_alone_copies_on_streams_that_nobody_else_has(run: Run) -> None:
    """Torch hands out 32 streams in turn, so the engine might capture a graph on one of ours. Ours come from the
    driver, wait for no other stream, have the lowest priority, and are destroyed."""
    log = run("streams_of_torch_alone")
    made = [line.split()[1] for line in calls(log, "stream") if line.endswith("flags 1 priority 0")]
    assert len(made) == 3
    assert [line.split()[2] for line in calls(log, "destroy stream")] == made


def test_the_driver_tells_where_the_device_is(run: Run) -> None:
    """As Linux names it, which knows what memory is near."""
    assert run("place")[-1] == "0000:1B:01.0"


def test_the_default_stream_is_torchs(run: Run) -> None:
    """Whatever the bindings make of a stream that is called 0."""
    run("default_stream")


def test_the_device_is_asked_whether_a_kernel_may_use_host_addresses(run: Run) -> None:
    """One that guesses wrong would take the device with it."""
    run("maps")
    run("maps_not", unmapped=1)


def test_fences_of_another_device_are_waited_for_on_the_device(run: Run) -> None:
    """Events are known to the whole driver."""
    run("others_events")
