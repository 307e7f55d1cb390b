from __future__ import annotations

import subprocess
import sys


def test_the_ledger_needs_no_torch() -> None:
    """A program around the synchronous face never imports torch, which takes seconds."""
    program = (
        "import sys, aoffload; ledger = aoffload.Ledger; assert 'torch' not in sys.modules;"
        "from aoffload import OffloadRuntime; assert 'torch' in sys.modules; assert 'KVRegion' in dir(aoffload)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
