"""A subscriber that knows only the published format, and keeps a set of blocks for each medium and group.

The structs say what is published: kinds, fields and their order, defaults. Whoever decodes strictly decodes like this.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from aoffload import Ledger, Tier
from aoffload._common.prefix import TOKEN_BYTES
from aoffload._kernel.records import Run

Hash = int | bytes
Block = tuple[str, int, Hash]
"""Medium, group, hash."""


class MapEvent(msgspec.Struct, omit_defaults=True, tag_field="type", forbid_unknown_fields=True):
    pass


class BlockStored(MapEvent, tag="BlockStored"):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(MapEvent, tag="BlockRemoved"):
    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(MapEvent, tag="AllBlocksCleared"):
    pass


class ArrayEvent(msgspec.Struct, omit_defaults=True, array_like=True):
    pass


class OldBlockStored(ArrayEvent, tag="BlockStored"):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class OldBlockRemoved(ArrayEvent, tag="BlockRemoved"):
    block_hashes: list[Hash]
    medium: str | None


class OldAllBlocksCleared(ArrayEvent, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, omit_defaults=True, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class OldBatch(msgspec.Struct, omit_defaults=True, array_like=True):
    ts: float
    events: list[OldBlockStored | OldBlockRemoved | OldAllBlocksCleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(Batch).decode
decode_old = msgspec.msgpack.Decoder(OldBatch).decode


class EventSubscriber:
    """Rebuilds what is cached from batches. What it can't believe, it asserts."""

    def __init__(self) -> None:
        self.cached: dict[Block, tuple[int, ...]] = {}
        """With the token ids of each."""
        self.known: dict[tuple[int, Hash], Hash | None] = {}
        """The parent of every block that was ever told of: a hash says the same for ever."""
        self.num_events = 0

    def apply(self, payload: bytes) -> None:
        for event in decode(payload).events:
            self.num_events += 1
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    del self.cached[event.medium or "", event.group_idx or 0, block_hash]  # was told of before
            else:
                self.cached.clear()

    def _store(self, event: BlockStored) -> None:
        group, size = event.group_idx or 0, event.block_size
        assert len(event.token_ids) == len(event.block_hashes) * size
        assert event.extra_keys is None or len(event.extra_keys) == len(event.block_hashes)
        parent = event.parent_block_hash
        for at, block_hash in enumerate(event.block_hashes):
            block = (event.medium or "", group, block_hash)
            assert block not in self.cached, "told of twice"
            assert self.known.setdefault((group, block_hash), parent) == parent, "two pasts of one block"
            self.cached[block] = tuple(event.token_ids[at * size : (at + 1) * size])
            parent = block_hash


def cached_blocks(ledger: Ledger) -> dict[Block, tuple[int, ...]]:
    """The same, read from the index and hashed from the first token on, block by block."""
    layout, found = ledger.layout, dict[Block, tuple[int, ...]]()
    for run in ledger.cache.index.runs.values():
        for part in run.parts:
            tier, component = part.tier, part.component
            if ledger.cache.tiers[tier].is_outside:
                continue
            groups = [group for group, (its_component, _) in enumerate(layout.places) if its_component == component]
            for unit in range(part.first, part.stop) if part.blocks else ():
                digest, tokens = naive_digest(run, unit, layout.unit_tokens)
                medium = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "DISK"}[tier]
                found |= {(medium, group, int.from_bytes(digest[-8:], "big")): tokens for group in groups}
    return found


def naive_digest(run: Run, unit: int, unit_tokens: int) -> tuple[bytes, tuple[int, ...]]:
    """SHA-256 of the root's digest and every unit up to the end of this one, each with what touches it; its tokens."""
    path = run.whole_path()
    tokens = b"".join(one.tokens for one in path)
    spans = {span for one in path for span in one.spans}
    encoded = run.root.digest
    for start in range(0, (unit + 1) * unit_tokens, unit_tokens):
        encoded += tokens[start * TOKEN_BYTES : (start + unit_tokens) * TOKEN_BYTES]
        touching = [span for span in spans if span.start < start + unit_tokens and span.stop > start]
        encoded += b"".join(span.record() for span in sorted(touching))
    ids = memoryview(tokens[unit * unit_tokens * TOKEN_BYTES : (unit + 1) * unit_tokens * TOKEN_BYTES]).cast("i")
    return hashlib.sha256(encoded).digest(), tuple(ids)
