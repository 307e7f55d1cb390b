"""The slot table as bytes: a superblock, then one record of a fixed size for each slot.

    superblock   magic, version, fingerprint, generation, number of slots, sum          4096 bytes
    record       sum | generation, write number, component, place, position,
                 root digest, prefix digest through this unit, prefix digest before it,
                 xxh3-128 of the data, tokens of the unit

The sum of a record covers all bytes after it and the number of its slot. A record of zeros stands for an empty slot.
"""

from __future__ import annotations

import struct
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from ..._common.arguments import as_tuple, check_int
from ..._config.tiers import SUPERBLOCK_BYTES, record_bytes
from ..._kernel.prefix import TOKEN_BYTES
from ...errors import ConfigError, InvalidArgument
from .plans import BlockLabel
from .sums import DATA_SUM_BYTES, record_sum

FORMAT_VERSION = 1
MAGIC = b"aoffloadslots\0\0\0"
DIGEST_BYTES = 32
_SUPERBLOCK = struct.Struct("<16sQ32sQQ")
_SUM = struct.Struct("<Q")
_HEAD = struct.Struct(f"<QQHHI{DIGEST_BYTES}s{DIGEST_BYTES}s{DIGEST_BYTES}s{DATA_SUM_BYTES}s")
MAX_WIDTH = 2**16 - 1
MAX_COMPONENTS = 62
"""Components are bits of an int64 of numpy."""


@attrs.frozen
class SlotLayout:
    """The contents of the slots. A unit of `unit_tokens` tokens has `widths[component]` blocks in each component, and
    each block has a slot. Where `leading[component]` is true (full attention), a unit counts only if all units before
    it are there; in a window it always counts."""

    unit_tokens: int
    block_bytes: int
    widths: tuple[int, ...]
    leading: tuple[bool, ...]

    def __attrs_post_init__(self) -> None:
        check_int("unit_tokens", self.unit_tokens, 1, error=ConfigError)
        check_int("block_bytes", self.block_bytes, 1, error=ConfigError)
        for width in as_tuple("widths", self.widths, "integers", ConfigError):
            check_int("widths", width, 0, MAX_WIDTH, ConfigError)
        if not 0 < len(self.widths) <= MAX_COMPONENTS or len(self.leading) != len(self.widths):
            raise ConfigError("leading", f"must have an item for each of the components, {len(self.widths)}")

    def encoded(self) -> bytes:
        """Everything here as bytes, for a fingerprint."""
        components = zip(self.widths, self.leading, strict=True)
        text = ",".join(f"{width}{'l' if leading else 'w'}" for width, leading in components)
        return f"{FORMAT_VERSION} {self.unit_tokens} {self.block_bytes} {text}".encode()


class RecordFormat:
    """Encodes and decodes the records of slots with units of `unit_tokens` tokens."""

    def __init__(self, unit_tokens: int) -> None:
        self.token_bytes = unit_tokens * TOKEN_BYTES
        self.num_bytes = record_bytes(unit_tokens)
        self._padding = bytes(self.num_bytes - _SUM.size - _HEAD.size - self.token_bytes)
        self.dtype = np.dtype(
            [
                ("sum", "<u8"), ("generation", "<u8"), ("number", "<u8"), ("component", "<u2"), ("place", "<u2"),
                ("position", "<u4"), ("root", "<u8", DIGEST_BYTES // 8), ("digest", "<u8", DIGEST_BYTES // 8),
                ("before", "<u8", DIGEST_BYTES // 8), ("data_sum", "u1", DATA_SUM_BYTES),
                ("tokens", "u1", self.token_bytes), ("padding", "u1", len(self._padding)),
            ]
        )  # fmt: skip

    def encoded(self, label: BlockLabel, slot: int, generation: int, number: int, data_sum: bytes) -> bytes:
        """The record of `slot`, for a label that `check` accepts."""
        place = (generation, number, label.component, label.place, label.position)
        head = _HEAD.pack(*place, label.root, label.digest, label.before or bytes(DIGEST_BYTES), data_sum)
        body = head + label.tokens + self._padding
        return _SUM.pack(record_sum(body, slot)) + body

    def check(self, label: BlockLabel) -> None:
        """`InvalidArgument` for a label that no record can have."""
        _check_digest("root", label.root)
        _check_digest("digest", label.digest)
        if label.position:
            _check_digest("before", label.before)
        if len(label.tokens) != self.token_bytes or (label.before and not label.position):
            raise InvalidArgument("labels", f"is no label of a unit of {self.token_bytes // TOKEN_BYTES} tokens")
        check_int("labels", label.position, 0, 2**32 - 1)

    def zeros(self, num_records: int) -> bytes:
        """Records of empty slots."""
        return bytes(num_records * self.num_bytes)

    def decoded(self, raw: Any) -> NDArray[Any]:
        """The records in `raw` as a structured array, unchecked."""
        return np.frombuffer(raw, dtype=self.dtype)

    def sound(self, raw: Any, first_slot: int, generation: int) -> NDArray[np.int64]:
        """Indices of the records in `raw` that are of `generation` and have the right sum. `first_slot`: the slot of
        the first record."""
        records = self.decoded(raw)
        candidates = np.flatnonzero((records["generation"] == generation) & (records["sum"] != 0))
        sums, view, size = records["sum"].tolist(), memoryview(raw).cast("B"), self.num_bytes
        found = [
            index
            for index in candidates.tolist()
            if sums[index] == record_sum(view[index * size + _SUM.size : (index + 1) * size], first_slot + index)
        ]
        return np.array(found, dtype=np.int64)


def _check_digest(name: str, found: bytes) -> None:
    if len(found) != DIGEST_BYTES:
        raise InvalidArgument("labels", f"{name} must have {DIGEST_BYTES} bytes, has {len(found)}")


@attrs.frozen
class Superblock:
    """Identity of a table. Records of another generation do not count."""

    fingerprint: bytes
    generation: int
    num_slots: int

    def encoded(self) -> bytes:
        body = _SUPERBLOCK.pack(MAGIC, FORMAT_VERSION, self.fingerprint, self.generation, self.num_slots)
        return (body + _SUM.pack(record_sum(body, 0))).ljust(SUPERBLOCK_BYTES, b"\0")

    @classmethod
    def decoded(cls, raw: bytes) -> Superblock | None:
        """The superblock in `raw`; None for other bytes, such as a superblock that was written in part."""
        if len(raw) < SUPERBLOCK_BYTES:
            return None
        body = raw[: _SUPERBLOCK.size]
        magic, version, fingerprint, generation, num_slots = _SUPERBLOCK.unpack(body)
        (found,) = _SUM.unpack_from(raw, _SUPERBLOCK.size)
        if (magic, version, found) != (MAGIC, FORMAT_VERSION, record_sum(body, 0)):
            return None
        return cls(fingerprint, generation, num_slots)
