from __future__ import annotations

import subprocess
import sys


def test_the_ledger_needs_no_torch() -> None:
    """A program around the synchronous face never imports torch, which takes seconds."""
    program = (
        "import sys, aoffload, aoffload.env, aoffload.ledger; ledger = aoffload.Ledger;"
        "assert 'torch' not in sys.modules;"
        "from aoffload import OffloadRuntime; assert 'torch' in sys.modules; assert 'KVRegion' in dir(aoffload)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_the_cuda_backend_is_there_without_a_gpu() -> None:
    """Its names can be imported, and options made, without NVIDIA's bindings or Triton: they are asked for later."""
    program = (
        "import sys, aoffload;"
        "sys.modules |= dict.fromkeys(('cuda', 'cuda.bindings', 'triton'));"  # as if they were not installed
        "from aoffload.cuda import AdaptivePolling, BlockingWait, BreakEven, CudaBackend, CudaOptions;"
        "from aoffload.transfer.backends import cuda;"
        "assert cuda.CudaBackend is CudaBackend;"
        "CudaOptions(break_even=BreakEven(1, 2), waiting=AdaptivePolling())"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
