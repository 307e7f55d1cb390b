"""Cells as objects in a store, and the proof that an object is the cell that was requested.

name     HMAC-SHA256(secret or layout, layout, digest, component, rank)
object   header, blocks in prefix order, seal

nonce    the writer (7 random bytes for each runtime) and the number of its put (5 bytes)
seal     with a secret    AES-256-GCM over header and blocks, with a key for each cell
         without          xxh3-128 over both: detects accidental damage, but any program that writes to the store can
                          forge it
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Callable
from typing import Any, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from ..._common.extras import needed
from ..._config.tiers import cell_units
from ..._kernel.layout import Layout
from .plans import CellLabel

FORMAT = 1
HEADER = struct.Struct("<8sHHIIIQ32s32s12s")
"""Magic, format, sealing, component, rank, number of blocks, their bytes, layout, name, nonce. Little-endian."""
MAGIC = b"aoffcell"
WRITER_BYTES, NUMBER_BYTES = 7, 5
NONCE_BYTES = WRITER_BYTES + NUMBER_BYTES
SEAL_BYTES = 16
OVERHEAD_BYTES = HEADER.size + SEAL_BYTES
"""Size of an object minus the size of its blocks."""


@attrs.frozen
class CellShape:
    """The common facts of all cells of one rank. `layout` is a digest of everything that decides their bytes. `rank`:
    the part of each block that this process has."""

    layout: bytes
    units: int
    width: int
    """Blocks per unit."""
    block_bytes: int
    rank: int = 0

    @classmethod
    def of(
        cls, layout: Layout, identity: str, block_bytes: int, max_bytes: int, rank: int = 0, num_ranks: int = 1
    ) -> CellShape:
        """`identity`: see `identity_of`. `max_bytes`: maximum bytes of the cell of one rank."""
        width = layout.full.width
        units = cell_units(max(1, width * block_bytes), max_bytes)
        described = repr((FORMAT, identity, layout.unit_tokens, width, block_bytes, units, num_ranks))
        return cls(hashlib.sha256(described.encode()).digest(), units, width, block_bytes, rank)

    @property
    def num_blocks(self) -> int:
        return self.units * self.width

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


class Sealing(Protocol):
    """A way to seal objects. `number` identifies it in the header. Every object of one key has a nonce of its own."""

    number: int

    def close(self, label: CellLabel, made: memoryview) -> None:
        """Seal `made` in place. Its header and its blocks are complete."""
        ...

    def opened(self, label: CellLabel, found: memoryview, room: Callable[[], memoryview]) -> memoryview | None:
        """The bytes of the blocks, in `found` or written to `room()`; None if header or blocks have changed since
        `close`."""
        ...


class Summed:
    """Seals with a sum. Needs xxhash."""

    number = 0

    def __init__(self) -> None:
        with needed("remote", "a remote tier"):
            import xxhash
        self._sum: Callable[..., bytes] = xxhash.xxh3_128_digest

    def close(self, label: CellLabel, made: memoryview) -> None:
        made[-SEAL_BYTES:] = self._sum(made[:-SEAL_BYTES])

    def opened(self, label: CellLabel, found: memoryview, room: Callable[[], memoryview]) -> memoryview | None:
        body = found[:-SEAL_BYTES]
        return body[HEADER.size :] if self._sum(body) == found[-SEAL_BYTES:] else None


class Encrypted:
    """Seals with a key that is derived from the secret, the layout and the whole prefix. Needs cryptography."""

    number = 1

    def __init__(self, root_key: bytes, layout: bytes) -> None:
        with needed("remote", "a remote tier with a secret"):
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        self._cipher: Callable[[bytes], Any] = AESGCM
        self._invalid: type[Exception] = InvalidTag
        self._root_key = root_key
        self._layout = layout

    def close(self, label: CellLabel, made: memoryview) -> None:
        header = bytes(made[: HEADER.size])
        blocks, sealed = made[HEADER.size : -SEAL_BYTES], made[HEADER.size :]
        self._of(label).encrypt_into(header[-NONCE_BYTES:], blocks, header, sealed)

    def opened(self, label: CellLabel, found: memoryview, room: Callable[[], memoryview]) -> memoryview | None:
        header, blocks = bytes(found[: HEADER.size]), room()
        try:
            self._of(label).decrypt_into(header[-NONCE_BYTES:], found[HEADER.size :], header, blocks)
        except self._invalid:
            return None
        return blocks

    def _of(self, label: CellLabel) -> Any:
        """The cipher of one cell. HKDF-Expand to one block of SHA-256 gives each cell a key, so no key is used
        often."""
        info = b"seal" + self._layout + label.digest + struct.pack("<I", label.component)
        return self._cipher(hmac.digest(self._root_key, info + b"\x01", "sha256"))


@attrs.frozen
class Cells:
    """Makes and reads the objects of cells of one shape. Called by several threads. `writer` identifies the objects of
    this runtime."""

    shape: CellShape
    sealing: Sealing
    _name_key: bytes
    writer: bytes = attrs.field(factory=lambda: os.urandom(WRITER_BYTES))

    @property
    def object_bytes(self) -> int:
        return self.shape.num_bytes + OVERHEAD_BYTES

    def is_cell(self, label: CellLabel) -> bool:
        """Whether `label` names a cell of this shape."""
        num_units = label.stop - label.start
        return label.component == 0 and num_units == self.shape.units and not label.start % num_units

    def name(self, label: CellLabel) -> bytes:
        """The key of its object: 32 bytes."""
        said = self.shape.layout + label.digest + struct.pack("<II", label.component, self.shape.rank)
        return hmac.digest(self._name_key, said, "sha256")

    def blocks_in(self, made: memoryview) -> NDArray[np.uint8]:
        """A view of the blocks of an object: `uint8 [num_blocks, block_bytes]`."""
        return self._rows(made[HEADER.size : -SEAL_BYTES])

    def seal(self, label: CellLabel, made: memoryview, number: int) -> None:
        """Turn `made`, which holds the blocks, into the object of this cell. `number` must be unique."""
        nonce = self.writer + number.to_bytes(NUMBER_BYTES, "little")
        made[: HEADER.size] = self._header(label, self.name(label), nonce)
        self.sealing.close(label, made)

    def number_of(self, found: bytes) -> int | None:
        """The number of an object that this process has sealed; None for an object of another process. Call `open`
        first."""
        nonce = found[HEADER.size - NONCE_BYTES : HEADER.size]
        is_own = nonce[:WRITER_BYTES] == self.writer
        return int.from_bytes(nonce[WRITER_BYTES:], "little") if is_own else None

    def open(self, label: CellLabel, found: bytes, room: Callable[[], memoryview]) -> NDArray[np.uint8] | None:
        """The blocks of an object, as a view of `found` or of `room()`, which has the length of all blocks. None if any
        bit differs from the object of this cell. `found` is read more than once, so no other code may write to it."""
        view = memoryview(found)
        if len(view) != self.object_bytes:
            return None
        header = bytes(view[: HEADER.size])
        if header != self._header(label, self.name(label), header[-NONCE_BYTES:]):
            return None
        blocks = self.sealing.opened(label, view, room)
        return None if blocks is None else self._rows(blocks)

    def _rows(self, blocks: memoryview) -> NDArray[np.uint8]:
        return np.frombuffer(blocks, np.uint8).reshape(self.shape.num_blocks, self.shape.block_bytes)

    def _header(self, label: CellLabel, name: bytes, nonce: bytes) -> bytes:
        shape = self.shape
        numbers = FORMAT, self.sealing.number, label.component, shape.rank, shape.num_blocks, shape.num_bytes
        return HEADER.pack(MAGIC, *numbers, shape.layout, name, nonce)


def cells_of_tier(shape: CellShape, secret: bytes | None) -> Cells:
    """The cells of a tier with `secret`. `MissingExtra` if packages for it are not installed."""
    if secret is None:
        return Cells(shape, Summed(), hmac.digest(shape.layout, b"name", "sha256"))
    root_key = hmac.digest(b"aoffload remote tier", secret, "sha256")  # HKDF-Extract
    return Cells(shape, Encrypted(root_key, shape.layout), hmac.digest(root_key, b"name", "sha256"))
