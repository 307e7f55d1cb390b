"""Signals during calls of the core."""

from __future__ import annotations

import subprocess
import sys

import pytest

INTERRUPTED = """
import signal
from _thread import interrupt_main
from array import array
from functools import partial
from operator import call

from aoffload._kernel.layout import KVCacheGroup, Layout
from aoffload._eviction.counts import HitCounts
from aoffload._kernel.records import BlockTable
from aoffload._kernel.tokens import TokenSequence
from aoffload._common.prefix import Prefix, Root

signal.signal(signal.SIGINT, signal.default_int_handler)
table, counts = BlockTable(1, array("i", [1, 2])), HitCounts(Layout.of([KVCacheGroup("full", block_size=2)]), 1 << 20)
sequence = TokenSequence(Prefix.of(Root("interrupted"), range(8)), 2)
calls = {"private": partial(table.private, 0), "see": partial(counts.see, sequence, 0, 4)}
try:  # nothing interpreted runs between the signal and the call
    list(map(call, [interrupt_main, calls[%r]]))
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("name", ["private", "see"])
def test_a_signal_in_the_middle_of_a_call_does_not_end_the_process(name: str) -> None:
    """Its handler raises, as ever: compiled code keeps to numbers in whose arithmetic no handler runs."""
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED % name], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "interrupted\n"), ended.stderr
