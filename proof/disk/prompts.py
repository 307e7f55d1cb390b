"""The data of a story: a few prompts with common prefixes, and the bytes of each of their blocks."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections import Counter
from functools import cache

import attrs
import numpy as np
from numpy.typing import NDArray

from aoffload._config.tiers import ROUNDING_BYTES, SUPERBLOCK_BYTES
from aoffload._tiers.disk.plans import BlockLabel
from aoffload._tiers.disk.table import RecordFormat, SlotLayout

__all__ = ["Key", "World"]

BANDS = (
    ((1,), (True,)), ((2,), (True,)), ((1, 1), (True, False)), ((0, 1), (True, False)), ((1, 2), (True, False)),
)  # fmt: skip
"""Widths, and whether a unit needs all before it."""
NUM_ROOTS = 2
Path = tuple[tuple[int, ...], ...]


@attrs.frozen
class Key:
    """One block: its prompt up to and including its unit, its component, and its place in there."""

    root: int
    path: Path
    component: int
    place: int


class World:
    """Layout, sizes and prompts, drawn once for a story. `epoch` counts resets: the same prompt has other bytes."""

    def __init__(self, rng: random.Random) -> None:
        widths, leading = rng.choice(BANDS)
        self.layout = SlotLayout(rng.choice((2, 3, 4)), rng.choice((48, 64, 96)), widths, leading)
        self.form = RecordFormat(self.layout.unit_tokens)
        self.num_slots = rng.randrange(6, 20)
        self.size_bytes = SUPERBLOCK_BYTES + ROUNDING_BYTES + self.num_slots * self.slot_bytes
        self.num_host = 16
        self.epoch = 0
        self.accepted = {0}
        """Epochs whose bytes may be found: more than one after a reset that did not return."""
        self.fingerprint = 0
        self.version: Counter[Key] = Counter()
        """How often a block was invalidated. Its right bytes change each time."""
        self.wrong: set[tuple[Key, int]] = set()
        """Versions that no load may find any more, not even after a loss of power."""
        self.prompts = [(rng.randrange(NUM_ROOTS), self._prompt(rng)) for _ in range(4)]
        self.digest = cache(self._digest)

    @property
    def slot_bytes(self) -> int:
        return self.layout.block_bytes + self.form.num_bytes

    def memory(self) -> NDArray[np.uint8]:
        """Host memory of a process."""
        return np.zeros((self.num_host, self.layout.block_bytes), dtype=np.uint8)

    def _prompt(self, rng: random.Random) -> Path:
        """Units of few kinds, so that prompts have beginnings in common."""
        size = self.layout.unit_tokens
        return tuple((rng.randrange(2),) * size for _ in range(rng.randrange(1, 6)))

    def perhaps_next_epoch(self) -> None:
        """A reset begins: what was stored until now is of no use any more, if the disk hears of it."""
        self.epoch += 1
        self.accepted = self.accepted | {self.epoch}

    @staticmethod
    def root_digest(root: int) -> bytes:
        return hashlib.sha256(b"root %d" % root).digest()

    @staticmethod
    def tokens(path: Path) -> bytes:
        return array("i", [token for unit in path for token in unit]).tobytes()

    def _digest(self, root: int, path: Path) -> bytes:
        return hashlib.sha256(self.root_digest(root) + self.tokens(path)).digest() if path else b""

    def content(self, epoch: int, key: Key, version: int | None = None) -> bytes:
        """`version`: by default, the one that is right now."""
        about = (self.fingerprint, epoch, key, self.version[key] if version is None else version)
        return hashlib.shake_128(repr(about).encode()).digest(self.layout.block_bytes)

    def right(self, key: Key) -> list[bytes]:
        """The contents of a block that may be found. Several, after a reset or an invalidation that was not over."""
        versions = [version for version in range(self.version[key] + 1) if (key, version) not in self.wrong]
        return [self.content(epoch, key, version) for epoch in self.accepted for version in versions]

    def is_right(self, key: Key, data: bytes) -> bool:
        return data in self.right(key)

    def take_back(self, rng: random.Random) -> set[tuple[Key, int]]:
        """A forward has failed: all blocks of a prompt from some unit on are wrong, and so are the blocks that other
        requests have computed after them. Returns every version of these blocks so far."""
        root, prompt = rng.choice(self.prompts)
        first = rng.randrange(1, len(prompt) + 1)
        paths = {p[:n] for r, p in self.prompts if r == root for n in range(first, len(p) + 1)}
        components = range(len(self.layout.widths))
        wrong = set[tuple[Key, int]]()
        for path in sorted(path for path in paths if path[:first] == prompt[:first]):
            for key in [key for component in components for key in self.keys(root, path, component)]:
                wrong |= {(key, version) for version in range(self.version[key] + 1)}
                self.version[key] += 1
        return wrong

    def label(self, key: Key) -> BlockLabel:
        path = key.path
        digest, before = self.digest(key.root, path), self.digest(key.root, path[:-1])
        place = (key.component, key.place, len(path) - 1)
        return BlockLabel(*place, self.root_digest(key.root), digest, before, self.tokens(path[-1:]))

    def keys(self, root: int, path: Path, component: int) -> list[Key]:
        """The blocks of one unit in one component."""
        return [Key(root, path, component, place) for place in range(self.layout.widths[component])]
