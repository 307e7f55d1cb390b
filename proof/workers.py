"""Forked workers over one queue: a free worker takes the next piece, so none idles while another has many."""

from __future__ import annotations

import json
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import IO, Any, TypeAlias

__all__ = ["WorkerFailed", "share_out"]

JSON: TypeAlias = Any
NUMBER_BYTES = 2
PIPE_BYTES = 1 << 16
"""How many bytes a pipe holds before a writer has to wait for a reader."""


class WorkerFailed(Exception):  # noqa: N818 - what happened
    """A worker failed, and its piece is not done."""


def share_out(function: Callable[[int], JSON], num_pieces: int, num_workers: int) -> list[JSON]:
    """`[function(0), function(1), ...]`, computed in `num_workers` forks of this process.

    The caller must have no threads. `function` has to return JSON. An error that it raises is printed, and raises
    `WorkerFailed` here once every worker has ended.
    """
    queue = _queue_of(num_pieces)
    with tempfile.TemporaryFile() as results:
        workers = [_fork(function, queue, results) for _ in range(num_workers)]
        os.close(queue)
        if failed := [pid for pid in workers if os.waitpid(pid, 0)[1]]:  # waits for all of them
            raise WorkerFailed(f"{len(failed)} of {num_workers} workers")
        results.seek(0)
        found = dict(json.loads(line) for line in results)
    return [found[number] for number in range(num_pieces)]


def _queue_of(num_pieces: int) -> int:
    """A pipe with the numbers of the pieces: a number that one worker has read is gone for the others."""
    assert num_pieces * NUMBER_BYTES <= PIPE_BYTES, f"{num_pieces} pieces do not fit into a pipe"
    reader, writer = os.pipe()
    os.write(writer, b"".join(number.to_bytes(NUMBER_BYTES) for number in range(num_pieces)))
    os.close(writer)
    return reader


def _fork(function: Callable[[int], JSON], queue: int, results: IO[bytes]) -> int:
    pid = os.fork()
    if not pid:
        status = 1
        try:
            _work(function, queue, results)
            status = 0
        except BaseException:  # noqa: BLE001 - a forked worker must not go on as if it were the program
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def _work(function: Callable[[int], JSON], queue: int, results: IO[bytes]) -> None:
    while taken := os.read(queue, NUMBER_BYTES):
        number = int.from_bytes(taken)
        line = json.dumps([number, function(number)]) + "\n"
        os.write(results.fileno(), line.encode())  # one write each, at the offset that all share
