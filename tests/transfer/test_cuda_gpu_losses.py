"""Tests that need a device: kernels that end the context, each in its own process, and the handling of the loss.

Skipped, with the reason, where torch sees none.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from copies import GUARD_S

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

PROGRAM = """
import sys
import torch
from cuda.bindings import driver
from copies import Copies
from aoffload._kernel.states import Outcome
from aoffload.errors import DeviceGone

# The driver compiles this text itself: there is no compiler on a machine that serves.
KERNELS = b'''
.version 7.0
.target sm_80
.address_size 64
.visible .entry illegal() { .reg .b64 %at; mov.u64 %at, 64; st.global.u64 [%at], %at; ret; }
.visible .entry trapped() { trap; ret; }
'''

def asked(found):
    status, *results = found
    assert status == driver.CUresult.CUDA_SUCCESS, status
    return results[0] if results else None

pool = torch.zeros(8, 1 << 16, device="cuda")
copies = Copies(pool, 4)
assert copies.store([1], [0]).outcome is Outcome.LANDED
after = copies.transport.record_fence()
module = asked(driver.cuModuleLoadData(KERNELS + b"\\0"))
kernel = asked(driver.cuModuleGetFunction(module, sys.argv[1].encode()))
torch.cuda._sleep(200_000_000)
stream = torch.cuda.current_stream().cuda_stream
asked(driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0))
copies.launch_store([1], [1])  # it waits for the kernel
found = copies.next()
assert found.outcome is Outcome.UNPROVEN, found
for direction, fence in (("load", None), ("store", None), ("store", after)):
    try:
        copies.launch_load([1], [1]) if direction == "load" else copies.launch_store([1], [1], after=fence)
    except DeviceGone as error:
        print(direction, "refused for good:", error)
copies.transport.close(5)
print("went on", flush=True)  # before torch ends, which may end badly now
"""
KERNELS = {700: ("illegal", "ILLEGAL_ADDRESS"), 719: ("trapped", "LAUNCH_FAILED")}


@pytest.mark.parametrize("code", KERNELS)
def test_gpu_a_kernel_that_ends_the_context_is_an_outcome(code: int, record_property: Any) -> None:
    """Only the copy that was under way is in doubt, everything else is refused for good and says which error it was,
    and the program goes on."""
    pytest.importorskip("cuda.bindings.driver")
    kernel, name = KERNELS[code]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{PROGRAM}", kernel]
    done = subprocess.run(command, capture_output=True, text=True, timeout=6 * GUARD_S, check=False)
    record_property("found", done.stdout.partition("refused for good: ")[2].partition("\n")[0])
    assert "went on" in done.stdout, done.stderr
    assert done.stdout.count("refused for good: device lost") == 3, done.stdout
    assert done.stdout.count(f"CUDA_ERROR_{name}") == 3, done.stdout
    assert "Exception in thread" not in done.stderr
