"""The walk of one host hit: how far a reader goes who follows it from `runtime.request` to the last store.

A prompt of 90 tokens, of which 80 are in host memory, is served by a runtime on CPU tensors. Every Python call of the
package in the event loop's thread is noted, with the file that it enters. `python tests/test_walk.py` prints the walk.
"""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from types import FrameType

import anyio
import attrs
import pytest
import torch

import aoffload
from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime, Request

ROOT = os.path.dirname(os.path.abspath(aoffload.__file__)) + os.sep
BLOCK = 16
PROMPT, OTHER = list(range(90)), list(range(1000, 1120))


@attrs.frozen
class Walk:
    files: int
    """Files that are visited."""
    moves: int
    """Calls that enter another file than the call before."""
    calls: int


MOST = Walk(files=34, moves=274, calls=377)
"""Each figure may fall freely. One that rises is given its reason here, because the walk is what a stranger reads.

260 moves and 363 calls until full attention became a component like any other: its leases have a start, its parts are
entered by the method of windows, and a load asks for the windows that it needs without asking first if there are any.

257 moves and 358 calls until a commit appended its tokens before it published them: `commit_step` does the first for
all its requests before the second for any, so that it is all or nothing if a store policy raises."""


async def serve(runtime: OffloadRuntime, request: Request, kv: torch.Tensor, num_tokens: int) -> int:
    await request.allocate()
    num_ready = await request.load()
    with runtime.step([request]):
        kv[request.block_ids[0][num_ready // BLOCK :]] = 1
    request.commit(num_tokens)
    return num_ready


async def walked() -> list[tuple[str, str]]:
    """The calls of one host hit, in order: file and function."""
    kv, found = torch.zeros(9, 2, BLOCK, 64), list[tuple[str, str]]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (name := frame.f_code.co_filename).startswith(ROOT):
            found.append((name.removeprefix(ROOT), frame.f_code.co_qualname))

    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=BLOCK)], num_host_blocks=64)
    async with OffloadRuntime(config, kv) as runtime:
        for tokens in (PROMPT, OTHER):  # the other one evicts the prompt from the device
            async with runtime.request(tokens) as request:
                await serve(runtime, request, kv, len(tokens))
            await runtime.flush()
        sys.setprofile(note)
        try:
            async with runtime.request(PROMPT) as request:
                num_ready = await serve(runtime, request, kv, len(PROMPT))
            await runtime.flush()
        finally:
            sys.setprofile(None)
    assert num_ready == 80
    return found


def counted(calls: list[tuple[str, str]]) -> Walk:
    files = [file for file, _ in calls]
    moves = 1 + sum(one != other for one, other in pairwise(files))
    return Walk(len(set(files)), moves, len(calls))


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions of Python inline other calls")
def test_a_host_hit_is_a_short_walk() -> None:
    """A stranger who follows one host hit through the code meets few files, and seldom changes from one to another."""
    found = counted(anyio.run(walked))
    assert found.files <= MOST.files and found.moves <= MOST.moves and found.calls <= MOST.calls, found


if __name__ == "__main__":
    each = anyio.run(walked)
    print("\n".join(f"{file}:{name}" for file, name in each), counted(each), sep="\n")
