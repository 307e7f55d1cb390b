"""Signals that arrive while the core computes."""

from __future__ import annotations

import subprocess
import sys

INTERRUPTED = """
import signal
from _thread import interrupt_main
from array import array
from functools import partial
from operator import call

from aoffload.core.table import BlockTable

signal.signal(signal.SIGINT, signal.default_int_handler)
table = BlockTable(65_536, array("i", [1, 2]))
try:  # nothing interpreted runs between the signal and the call
    list(map(call, [interrupt_main, partial(table.private, 0)]))
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_signal_in_the_middle_of_a_call_does_not_end_the_process() -> None:
    """Its handler raises, as ever: compiled code keeps to numbers in whose arithmetic no handler runs."""
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "interrupted\n"), ended.stderr
