"""The Triton kernel. Imported only if Triton is installed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ELEMENTS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64, 16: tl.int64}
"""Element types by alignment, eight bytes at most. With alignment 16, a thread moves two elements at once."""


# No specialized kernels for some values of `num_pieces`.
@triton.jit(do_not_specialize=["num_pieces"])  # type: ignore[untyped-decorator]
def copy_pieces(table, num_pieces, ELEMENT: tl.constexpr, ALIGNMENT: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: E501, N803 # fmt: skip
    """Each program copies every n-th piece, `TILE` elements of `WIDTH` bytes at a time."""
    for piece in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        source = tl.load(table + 3 * piece).to(tl.pointer_type(ELEMENT))
        destination = tl.load(table + 3 * piece + 1).to(tl.pointer_type(ELEMENT))
        # The compiler cannot know the alignment of addresses from a table, and needs it to move sixteen bytes at once.
        source, destination = tl.multiple_of(source, ALIGNMENT), tl.multiple_of(destination, ALIGNMENT)
        num_elements = tl.multiple_of(tl.load(table + 3 * piece + 2) // WIDTH, ALIGNMENT // WIDTH)
        for start in range(0, num_elements, TILE):
            offsets = tl.multiple_of(start, TILE) + tl.arange(0, TILE)
            inside = offsets < num_elements
            tl.store(destination + offsets, tl.load(source + offsets, mask=inside), mask=inside)


def launch(grid: tuple[int], table: torch.Tensor, num_pieces: int, alignment: int, tile_bytes: int) -> None:
    """Launch the kernel on the current stream. `table`: `int64 [num_pieces, 3]` of sources, destinations and bytes."""
    width = min(8, alignment)
    copy_pieces[grid](
        table, num_pieces, ELEMENT=ELEMENTS[alignment], ALIGNMENT=alignment, WIDTH=width, TILE=tile_bytes // width
    )
