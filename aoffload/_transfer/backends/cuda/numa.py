"""Host memory on the GPU's NUMA node, so that copies do not cross the link between two processors."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

PCI_DEVICES = Path("/sys/bus/pci/devices")
NODES = Path("/sys/devices/system/node")
MBIND = {"x86_64": 237, "aarch64": 235}
"""The number of the system call `mbind`, which the C library does not wrap."""
PREFERRED = 1
"""`MPOL_PREFERRED`: memory of another node where this one has none left, rather than an error."""
MAX_NODES = 1024


def node_of(pci_bus_id: str, devices: Path = PCI_DEVICES) -> int | None:
    """The NUMA node of a PCI device; None if Linux does not say, or has one node only."""
    try:
        node = int((devices / pci_bus_id.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if 0 <= node < MAX_NODES else None


def run_near(node: int | None, nodes: Path = NODES) -> None:
    """Run the calling thread on the processors of `node`, so that the pages that it is the first to touch come from
    there. Containers often forbid `mbind`, and allow this."""
    with suppress(OSError, ValueError, AttributeError):  # AttributeError: another system than Linux
        ranges = (nodes / f"node{node}" / "cpulist").read_text().split(",")
        ends = [[int(number) for number in part.split("-")] for part in ranges]
        os.sched_setaffinity(0, [number for first, *last in ends for number in range(first, (last or [first])[0] + 1)])


def prefer_node(rows: NDArray[np.uint8], node: int) -> None:
    """Take the pages of `rows`, which nobody has touched yet, from `node`. Does nothing where that cannot be asked for:
    copies work from any memory."""
    if sys.platform != "linux" or not rows.nbytes:
        return
    nodes = (ctypes.c_uint8 * (MAX_NODES // 8))()
    nodes[node // 8] = 1 << node % 8
    with suppress(OSError, AttributeError, KeyError):
        call = ctypes.CDLL(None).syscall
        address, size = ctypes.c_void_p(rows.ctypes.data), ctypes.c_size_t(rows.nbytes)
        call(MBIND[platform.machine()], address, size, PREFERRED, nodes, ctypes.c_size_t(MAX_NODES), ctypes.c_size_t(0))
