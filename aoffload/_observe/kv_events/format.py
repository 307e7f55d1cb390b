"""The wire format: batches of events in msgpack, as vLLM publishes them and cache-aware routers read them.

A batch is an array: time, events, rank. An event is a map with its kind under `type`, as in vLLM since 0.23, or an
array that begins with its kind, as in earlier versions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

import attrs
import msgspec
import numpy as np

from ... import ChunkedLocal, ConfigError, FullAttention, KVCacheGroup, SlidingWindow, Tier
from ..._common.prefix import TOKEN_BYTES, Hasher
from ..._common.tiers import CACHE_TIERS
from ..._kernel.layout import Layout
from .changes import Change, Cleared, Kind, Told

# -- digests ---------------------------------------------------------------------------------------------------------
#
# A digest for each block, which routers use as its identity. The index makes no digest per block.

MAX_KEPT_RUNS = 8


@attrs.frozen
class BlockDigests:
    parent: bytes | None
    """Digest of all tokens before the first unit. None at the beginning of a prompt, and for removed units."""
    digests: list[bytes]


class Digests:
    """Makes one digest for each unit, of all tokens up to its end, as in the index. If all groups have one block size,
    a unit is a block. Otherwise it is the smallest hit, and all hits are its multiples.

    Runs lose their last unit again and again. To avoid hashing a run from its start each time, the digests of the last
    few runs that lost units are cached.
    """

    def __init__(self, unit_tokens: int) -> None:
        self._unit_bytes = unit_tokens * TOKEN_BYTES
        self._kept: OrderedDict[tuple[int, int], tuple[Change, list[bytes]]] = OrderedDict()

    def of(self, change: Change) -> BlockDigests:
        """The digests of units `[change.start, change.stop)`."""
        if change.kind is Kind.STORED:
            return self._hash(change, change.start)
        first, last = change.start - change.run_start, change.stop - change.run_start
        return BlockDigests(None, self._whole(change)[first:last])  # removed units need no parent

    def _whole(self, change: Change) -> list[bytes]:
        """The digests of the run's units from its start, at least up to `change.stop`."""
        key = (id(change.tokens), id(change.hash_before))  # the cached change keeps both objects alive
        found = self._kept.pop(key, None)
        if found is None or found[0].stop < change.stop:
            found = (change, self._hash(change, change.run_start).digests)
        self._kept[key] = found
        while len(self._kept) > MAX_KEPT_RUNS:
            self._kept.popitem(last=False)
        return found[1]

    def _hash(self, change: Change, start: int) -> BlockDigests:
        record = b"".join(span.record() for span in change.spans)
        hasher = self._hasher_at(change, start, record)
        parent = hasher.digest() if start else None
        digests: list[bytes] = []
        for unit in range(start, change.stop):
            hasher.update(self._tokens(change, unit, unit + 1) + record)
            digests.append(hasher.digest())
        return BlockDigests(parent, digests)

    def _hasher_at(self, change: Change, start: int, record: bytes) -> Hasher:
        hasher: Hasher = change.hash_before.copy()
        if not record:
            hasher.update(self._tokens(change, change.run_start, start))
            return hasher
        for unit in range(change.run_start, start):
            hasher.update(self._tokens(change, unit, unit + 1) + record)
        return hasher

    def _tokens(self, change: Change, start: int, stop: int) -> bytes:
        at = change.run_start
        return bytes(change.tokens[(start - at) * self._unit_bytes : (stop - at) * self._unit_bytes])


# -- format ----------------------------------------------------------------------------------------------------------

MEDIA = {tier: tier.name for tier in CACHE_TIERS} | {Tier.DEVICE: "GPU", Tier.HOST: "CPU"}
"""The values of `medium` for the tiers. The disk is `DISK`, whatever the device is."""
OPTIONAL = ("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
"""Fields that a map leaves out when they are None."""

Event: TypeAlias = dict[str, Any]


@attrs.frozen
class EventFormat:
    """The options of the wire format, for different consumers."""

    shape: Literal["map", "array"] = attrs.field(default="map")
    """Shape of an event: `map` as in vLLM 0.23 and later, `array` for consumers of earlier versions."""
    hash_bits: Literal[64, 256] = attrs.field(default=64)
    """64: the last 64 bits of a digest as an integer, as vLLM does by default. 256: the whole digest, as bytes."""

    @shape.validator
    def _check_shape(self, _: object, value: object) -> None:
        if value not in ("map", "array"):
            raise ConfigError("shape", f"must be 'map' or 'array', got {value!r:.80}")

    @hash_bits.validator
    def _check_hash_bits(self, _: object, value: object) -> None:
        if value not in (64, 256):
            raise ConfigError("hash_bits", f"must be 64 or 256, got {value!r:.80}")


class EventEncoder:
    """Turns changes into events, and events into bytes. Not thread-safe."""

    def __init__(self, layout: Layout, form: EventFormat, rank: int) -> None:
        self._layout = layout
        self._form = form
        self._rank = rank
        self._digests = Digests(layout.unit_tokens)
        self._encode = msgspec.msgpack.Encoder().encode

    def batch(self, told: Iterable[Told], at: float) -> bytes:
        """One batch; `at` is in seconds since 1970."""
        events = [event for one in told for event in self._events(one)]
        shaped = events if self._form.shape == "map" else [list(event.values()) for event in events]
        return self._encode([at, shaped, self._rank])

    def _events(self, told: Told) -> list[Event]:
        if isinstance(told, Cleared):
            return [{"type": "AllBlocksCleared"}]
        groups = zip(self._layout.groups, self._layout.places, strict=True)
        make = self._stored if told.kind is Kind.STORED else self._removed
        return [
            make(told, number, group)
            for number, (group, (component, _)) in enumerate(groups)
            if component == told.component
        ]

    def _stored(self, change: Change, number: int, group: KVCacheGroup) -> Event:
        found, root, unit_tokens = self._digests.of(change), change.root, self._layout.unit_tokens
        extra_keys = _extra_keys(change, unit_tokens)
        event: Event = {
            "type": "BlockStored",
            "block_hashes": self._hashes(found.digests),
            "parent_block_hash": None if found.parent is None else self._hashes([found.parent])[0],
            "token_ids": _token_ids(change, unit_tokens),
            "block_size": unit_tokens,
            "lora_id": None,
            "medium": MEDIA[change.tier],
            "lora_name": _text(root.adapter_key),
            "extra_keys": extra_keys if any(extra_keys) else None,
            "group_idx": number,
            "kv_cache_spec_kind": _kind_of(group),
            "kv_cache_spec_sliding_window": getattr(group.attention, "window", None),
        }
        return self._trimmed(event)

    def _removed(self, change: Change, number: int, group: KVCacheGroup) -> Event:
        hashes = self._hashes(self._digests.of(change).digests)
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIA[change.tier], "group_idx": number}

    def _trimmed(self, event: Event) -> Event:
        if self._form.shape == "array":
            return event
        return {name: value for name, value in event.items() if value is not None or name not in OPTIONAL}

    def _hashes(self, digests: Sequence[bytes]) -> list[int] | list[bytes]:
        if self._form.hash_bits == 256:
            return list(digests)
        return [int.from_bytes(digest[-8:], "big") for digest in digests]


def _token_ids(change: Change, unit_tokens: int) -> list[int]:
    first, last = ((at - change.run_start) * unit_tokens for at in (change.start, change.stop))
    found: list[int] = np.frombuffer(change.tokens, np.int32, last - first, first * TOKEN_BYTES).tolist()
    return found


def _extra_keys(change: Change, unit_tokens: int) -> list[list[Any] | None]:
    """The keys that identify each block besides its tokens, in vLLM's order: the adapter, the key spans that touch the
    block (digest, and start relative to the block), and for the first block the salt."""
    root, found = change.root, list[list[Any] | None]()
    for start in range(change.start * unit_tokens, change.stop * unit_tokens, unit_tokens):
        keys: list[Any] = [] if root.adapter_key is None else [_text(root.adapter_key)]
        touching = [span for span in change.spans if span.start < start + unit_tokens and span.stop > start]
        keys += [[span.digest.hex(), span.start - start] for span in touching]
        keys += [_text(root.cache_salt)] if root.cache_salt is not None and not start else []
        found.append(keys or None)
    return found


def _text(key: str | bytes | None) -> str | None:
    return key.hex() if isinstance(key, bytes) else key


def _kind_of(group: KVCacheGroup) -> str:
    names = {FullAttention: "full_attention", SlidingWindow: "sliding_window", ChunkedLocal: "chunked_local_attention"}
    return names.get(type(group.attention), "unknown")
