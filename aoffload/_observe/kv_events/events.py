"""The contents of events: the identity of blocks, the names of tiers, and the fields of each kind of event.

Two users make events of these fields: `EventEncoder`, with aoffload's own digests, and the connector for vLLM, with
vLLM's hashes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np

from ... import ConfigError, KeySpan, Tier
from ..._common.prefix import TOKEN_BYTES, Hasher
from ..._common.tiers import CACHE_TIERS
from .changes import Change, Kind

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


# -- media -----------------------------------------------------------------------------------------------------------

_OWN_MEDIA = {tier: tier.name for tier in CACHE_TIERS} | {Tier.DEVICE: "GPU", Tier.HOST: "CPU"}
MEDIA: Mapping[str, Mapping[Tier, str]] = {"aoffload": _OWN_MEDIA, "vllm": _OWN_MEDIA | {Tier.DISK: "STORAGE"}}
"""The values of `medium` for the tiers, by the name of a set of values. Any device is `GPU`."""


def media_of(name: object, argument: str = "media") -> Mapping[Tier, str]:
    """The values of `medium` in the set `name`. If there is no such set, `ConfigError` names `argument`."""
    found = MEDIA.get(name) if isinstance(name, str) else None
    if found is None:
        raise ConfigError(argument, f"must be 'aoffload' or 'vllm', got {name!r:.80}")
    return found


# -- events ----------------------------------------------------------------------------------------------------------

Event: TypeAlias = dict[str, Any]


@attrs.frozen
class EventGroup:
    """The description of a group in events."""

    number: int
    block_size: int
    """Tokens of one block in events."""
    kind: str
    window: int | None


@attrs.frozen
class Owner:
    """The adapter and the salt of a prompt, as events name them. They are part of the identity of its blocks."""

    lora_id: int | None = None
    lora_name: str | None = None
    salt: str | None = None


def stored_event(
    group: EventGroup, medium: str, hashes: Sequence[Any], parent: Any, token_ids: list[int], owner: Owner,
    extra_keys: Sequence[Any],
) -> Event:  # fmt: skip
    """`BlockStored`, with its fields in the order of the array shape."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": token_ids,
        "block_size": group.block_size,
        "lora_id": owner.lora_id,
        "medium": medium,
        "lora_name": owner.lora_name,
        "extra_keys": extra_keys if any(extra_keys) else None,
        "group_idx": group.number,
        "kv_cache_spec_kind": group.kind,
        "kv_cache_spec_sliding_window": group.window,
    }


def removed_event(group: EventGroup, medium: str, hashes: Sequence[Any]) -> Event:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, "group_idx": group.number}


def token_ids_of(change: Change, unit_tokens: int, start: int, stop: int) -> list[int]:
    """The token ids of units `[start, stop)` of the run of `change`."""
    first, last = ((at - change.run_start) * unit_tokens for at in (start, stop))
    found: list[int] = np.frombuffer(change.tokens, np.int32, last - first, first * TOKEN_BYTES).tolist()
    return found


def extra_keys_of(
    spans: Sequence[KeySpan], tokens: range, owner: Owner, name_of: Callable[[KeySpan], str]
) -> list[list[Any] | None]:
    """The keys that identify each block besides its tokens, in vLLM's order: the adapter, the key spans that touch the
    block, and for the first block the salt. A key span has a name, made by `name_of`, and a start relative to the
    block. `tokens`: the position of the first token of each block."""
    if not spans and owner.lora_name is None and owner.salt is None:
        return [None] * len(tokens)
    found = list[list[Any] | None]()
    for start in tokens:
        keys: list[Any] = [] if owner.lora_name is None else [owner.lora_name]
        touching = [span for span in spans if span.start < start + tokens.step and span.stop > start]
        keys += [[name_of(span), span.start - start] for span in touching]
        keys += [owner.salt] if owner.salt is not None and not start else []
        found.append(keys or None)
    return found
