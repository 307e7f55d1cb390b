"""The wire format: batches of events in msgpack, as vLLM publishes them and cache-aware routers read them.

A batch is an array: time, events, rank. An event is a map with its kind under `type`, as in vLLM since 0.23, or an
array that begins with its kind, as in earlier versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import attrs
import msgspec

from ... import ChunkedLocal, ConfigError, FullAttention, KeySpan, KVCacheGroup, RecurrentState, SlidingWindow
from ..._kernel.layout import Layout
from .changes import Cleared, Kind, Told
from .events import (
    MEDIA,
    Digests,
    Event,
    EventGroup,
    Owner,
    extra_keys_of,
    media_of,
    removed_event,
    stored_event,
    token_ids_of,
)

OPTIONAL = ("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
"""Fields that a map leaves out when they are None."""


@attrs.frozen
class EventFormat:
    """The options of the wire format, for different consumers."""

    shape: Literal["map", "array"] = attrs.field(default="map")
    """Shape of an event: `map` as in vLLM 0.23 and later, `array` for consumers of earlier versions."""
    hash_bits: Literal[64, 256] = attrs.field(default=64)
    """64: the last 64 bits of a digest as an integer, as vLLM does by default. 256: the whole digest, as bytes."""
    media: Literal["aoffload", "vllm"] = attrs.field(default="aoffload")
    """The set of names for the tiers. `aoffload` calls the disk `DISK`, and `vllm` calls it `STORAGE`."""

    @shape.validator
    def _check_shape(self, _: object, value: object) -> None:
        if value not in ("map", "array"):
            raise ConfigError("shape", f"must be 'map' or 'array', got {value!r:.80}")

    @hash_bits.validator
    def _check_hash_bits(self, _: object, value: object) -> None:
        if value not in (64, 256):
            raise ConfigError("hash_bits", f"must be 64 or 256, got {value!r:.80}")

    @media.validator
    def _check_media(self, _: object, value: object) -> None:
        media_of(value)


# -- bytes -----------------------------------------------------------------------------------------------------------


class EventEncoder:
    """Turns changes into events, and events into bytes. Not thread-safe."""

    def __init__(self, layout: Layout, form: EventFormat, rank: int) -> None:
        self._layout = layout
        self._form = form
        self._media = MEDIA[form.media]
        self._rank = rank
        self._digests = Digests(layout.unit_tokens)
        self._encode = msgspec.msgpack.Encoder().encode
        self._groups: list[list[EventGroup]] = [[] for _ in layout.components]
        for number, (group, (component, _)) in enumerate(zip(layout.groups, layout.places, strict=True)):
            window = getattr(group.attention, "window", None)
            self._groups[component].append(EventGroup(number, layout.unit_tokens, _kind_of(group), window))

    def batch(self, told: Iterable[Told], at: float) -> bytes:
        """One batch; `at` is in seconds since 1970."""
        events = [event for one in told for event in self._events(one)]
        shaped = [self._trimmed(event) if self._form.shape == "map" else list(event.values()) for event in events]
        return self._encode([at, shaped, self._rank])

    def _events(self, told: Told) -> list[Event]:
        if isinstance(told, Cleared):
            return [{"type": "AllBlocksCleared"}]
        found, medium, groups = self._digests.of(told), self._media[told.tier], self._groups[told.component]
        hashes = self._hashes(found.digests)
        if told.kind is Kind.REMOVED:
            return [removed_event(group, medium, hashes) for group in groups]
        unit = self._layout.unit_tokens
        owner = Owner(None, _text(told.root.adapter_key), _text(told.root.cache_salt))
        parent = None if found.parent is None else self._hashes([found.parent])[0]
        token_ids = token_ids_of(told, unit, told.start, told.stop)
        extra_keys = extra_keys_of(told.spans, range(told.start * unit, told.stop * unit, unit), owner, _digest_of)
        return [stored_event(group, medium, hashes, parent, token_ids, owner, extra_keys) for group in groups]

    @staticmethod
    def _trimmed(event: Event) -> Event:
        return {name: value for name, value in event.items() if value is not None or name not in OPTIONAL}

    def _hashes(self, digests: Sequence[bytes]) -> list[int] | list[bytes]:
        if self._form.hash_bits == 256:
            return list(digests)
        return [int.from_bytes(digest[-8:], "big") for digest in digests]


def _digest_of(span: KeySpan) -> str:
    return span.digest.hex()


def _text(key: str | bytes | None) -> str | None:
    return key.hex() if isinstance(key, bytes) else key


def _kind_of(group: KVCacheGroup) -> str:
    names: dict[type, str] = {
        FullAttention: "full_attention", SlidingWindow: "sliding_window", ChunkedLocal: "chunked_local_attention",
        RecurrentState: "mamba",
    }  # fmt: skip
    return names.get(type(group.attention), "unknown")
