"""Properties of a machine that affect its figures: driver, link, clocks, NUMA node, and limits of memory.

It imports nothing but the standard library. Each line is read on its own, so that a file or a command that is missing
costs only that line.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["CONNECTIONS", "QUERY", "environment"]

QUERY = (
    "driver_version", "pci.bus_id", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current",
    "pcie.link.width.max", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem", "temperature.gpu",
    "power.draw", "power.limit", "mig.mode.current", "persistence_mode", "compute_mode",
)  # fmt: skip
"""Fields of `nvidia-smi --query-gpu`."""
SMI_S = 20.0
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""With 1, all streams share one hardware queue: copies and compute wait for each other."""
VARIABLES = (
    CONNECTIONS, "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)  # fmt: skip
FILES = {
    "kernel module of the driver": ("/proc/driver/nvidia/version",),
    "cgroup memory.max": ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"),
    "transparent huge pages": ("/sys/kernel/mm/transparent_hugepage/enabled",),
    "clock source": ("/sys/devices/system/clocksource/clocksource0/current_clocksource",),
    "NUMA nodes": ("/sys/devices/system/node/online",),
}
"""By name: the files that may have it; the first one that can be read counts."""
MEMORY = ("MemTotal", "MemAvailable", "Hugepagesize")
DEVICES = Path("/sys/bus/pci/devices")


def environment(query: Callable[[], str] | None = None, devices: Path = DEVICES) -> dict[str, str]:
    """What is known, by name. `query` returns the line that `nvidia-smi` prints for `QUERY`."""
    return dict([*_of_device(_asked if query is None else query, devices), *_of_host()])


def _asked() -> str:
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader", "--id=0"]
    return subprocess.run(command, capture_output=True, text=True, timeout=SMI_S, check=True).stdout


def _of_device(query: Callable[[], str], devices: Path) -> Iterator[tuple[str, str]]:
    try:
        values = [value.strip() for value in query().strip().split(",")]
    except subprocess.CalledProcessError as error:  # it does not know a field
        yield "nvidia-smi", f"refused: {error.stdout}"
        return
    except (OSError, subprocess.SubprocessError) as error:
        yield "nvidia-smi", f"not asked: {error!r}"
        return
    if len(values) != len(QUERY):
        yield "nvidia-smi", f"not understood: {', '.join(values)}"
        return
    found = dict(zip(QUERY, values, strict=True))
    yield from found.items()
    # `nvidia-smi` has eight digits for the domain of an address, and the kernel's folder has four.
    yield "NUMA node of the GPU", _first_line(devices / found["pci.bus_id"].lower()[-12:] / "numa_node")


def _of_host() -> Iterator[tuple[str, str]]:
    yield "CPU", _processor()
    yield "cores of this process", str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else "unknown")
    yield "kernel", platform.release()
    for name, files in FILES.items():
        yield name, next((line for line in map(_first_line, map(Path, files)) if line != UNREADABLE), UNREADABLE)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield "ulimit -l", "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
    for line in _lines(Path("/proc/meminfo")):
        name, _, value = line.partition(":")
        if name in MEMORY:
            yield name, value.strip()
    yield "compilers", ", ".join(filter(shutil.which, ("cc", "gcc", "nvcc"))) or "none"
    for name in VARIABLES:
        yield name, os.environ.get(name, "not set")


def _processor() -> str:
    models = [line.partition(":")[2].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")]
    return f"{models[0]}, {len(models)} cores" if models else platform.machine()


UNREADABLE = "unknown"


def _first_line(file: Path) -> str:
    return next(iter(_lines(file)), UNREADABLE)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
