"""What `test_cuda_kernel` runs in a process of its own: the kernel in Triton's interpreter, and compiled for devices
that are not there."""

from __future__ import annotations

import random
import sys

import numpy as np
import torch
from triton.runtime.errors import InterpreterError

from aoffload._transfer.backends.cuda.driver import Pieces
from aoffload._transfer.backends.cuda.kernel import TILE_BYTES, TritonKernel
from aoffload._transfer.backends.cuda.triton_copy import ELEMENTS, copy_pieces
from aoffload._transfer.fences import PASSED

ARCHITECTURES = (80, 90, 100)
CANNOT_INTERPRET = 77
"""Exit status where Triton's interpreter fails by itself: that of 3.6 makes numbers of arrays as numpy 2.4 forbids."""


def interpret() -> None:
    """Pieces of every alignment and of sizes around a tile, in an order of chance: the bytes, and nothing beside."""
    rng = random.Random(0)
    try:
        one_batch(rng, 16)
    except InterpreterError as error:
        if "0-dimensional arrays" in str(error):
            sys.exit(CANNOT_INTERPRET)
        raise
    for alignment in ELEMENTS:
        for _ in range(4):
            copied, wanted = one_batch(rng, alignment)
            assert (copied == wanted).all(), alignment


def one_batch(rng: random.Random, alignment: int) -> tuple[np.ndarray, np.ndarray]:
    source = np.frombuffer(rng.randbytes(200_016), dtype=np.uint8)
    destination = np.zeros_like(source)
    wanted = destination.copy()
    bases = [-(array.ctypes.data % -16) for array in (source, destination)]
    found, at = [], 0
    while at < 150_000:
        size = alignment * rng.choice((1, 3, 512, TILE_BYTES // alignment, TILE_BYTES // alignment + 1))
        found.append((bases[0] + at, bases[1] + at, size))
        wanted[bases[1] + at : bases[1] + at + size] = source[bases[0] + at : bases[0] + at + size]
        at += size + alignment * rng.randrange(4)
    rng.shuffle(found)
    columns = np.array(found, dtype=np.uint64).T
    starts = [np.uint64(array.ctypes.data) for array in (source, destination)]
    pieces = Pieces(columns[0] + starts[0], columns[1] + starts[1], columns[2])
    TritonKernel(torch.device("cpu")).copy(pieces, alignment, lambda: PASSED)
    return destination, wanted


def compile_all() -> None:
    """Sixteen bytes at once where everything is aligned."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = ("ELEMENT", "ALIGNMENT", "WIDTH", "TILE")
    signature = {"table": "*i64", "num_pieces": "i32", **dict.fromkeys(constants, "constexpr")}
    for architecture in ARCHITECTURES:
        for alignment, element in ELEMENTS.items():
            width = min(8, alignment)
            values = (element, alignment, width, TILE_BYTES // width)
            source = ASTSource(copy_pieces, signature, dict(zip(constants, values, strict=True)))
            made = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
            assert made.asm["cubin"]
            if alignment == 16:
                assert "st.global.v2.b64" in made.asm["ptx"] and "ld.global.v2.b64" in made.asm["ptx"]


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_all}[sys.argv[1]]()
