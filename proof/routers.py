"""What two cache-aware routers believe after a stream of KV events, written from their published formats.

    Dynamo    github.com/ai-dynamo/dynamo, lib/kv-router: `zmq_wire`, the radix tree of GPU blocks, the index of the
              tiers below, and the publisher's filter of repeated events
    llm-d     github.com/llm-d/llm-d-kv-cache, pkg/kvevents and pkg/kvcache: adapter of vLLM, pool, index, scorer

A parser takes the frames of a message. `blocks` is its view: the blocks that it counts as cached, by medium, group and
64-bit hash. What it does not believe, it drops, as the router does, and counts in `dropped`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

__all__ = ["DynamoRouter", "LlmdIndexer", "Block", "events_of"]

Block: TypeAlias = tuple[str, int, int]
"""Medium, group, hash."""
Key: TypeAlias = tuple[Any, ...]

_STORED = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
)  # fmt: skip
_FIELDS = {"BlockStored": _STORED, "BlockRemoved": ("block_hashes", "medium", "group_idx"), "AllBlocksCleared": ()}
_REQUIRED = {"BlockStored": ("block_hashes", "token_ids", "block_size"), "BlockRemoved": ("block_hashes",)}
_decode = msgspec.msgpack.Decoder().decode


def events_of(payload: bytes, *, takes_maps: bool = True) -> tuple[int, list[dict[str, Any]]]:
    """The rank of a batch, and its events as maps with `type`. Both routers take arrays by position, ignore what
    follows the fields that they know, and refuse an event of another kind or without the fields that they need."""
    _, raw, *rest = _decode(payload)
    events = []
    for one in raw:
        if isinstance(one, list):
            kind, *values = one
            event = {"type": kind, **dict(zip(_FIELDS[kind], values, strict=False))}
        elif takes_maps:
            event = dict(one)
            kind = event["type"]
        else:
            raise ValueError("the event is a map, and this router takes arrays alone")
        if missing := [name for name in _REQUIRED.get(kind, ()) if name not in event]:
            raise ValueError(f"{kind} has no {', '.join(missing)}")
        events.append(event)
    return (rest[0] if rest else None) or 0, events


# -- Dynamo ----------------------------------------------------------------------------------------------------------

_TIERS = {
    "GPU": "GPU", "DEVICE": "GPU", "CPU": "CPU", "CPU_PINNED": "CPU", "CPU_TIER1": "CPU", "DISK": "DISK",
    "CPU_TIER2": "DISK", "NVME": "DISK", "STORAGE": "DISK", "EXTERNAL": "EXTERNAL", "REMOTE": "EXTERNAL",
}  # fmt: skip
_MAIN = ("full_attention", "mla_attention", "sink_full_attention")
SALT = "dynamo-cache-salt:"
"""Dynamo's frontend puts this before the salts that it gives to vLLM, and reads no others."""


@dataclass
class DynamoRouter:
    """One worker of Dynamo's router. GPU blocks are a tree, in which a block needs its parent. In each tier below, a
    block is an edge: from the hash of its parent, which need not be there, and its own tokens, to its hash."""

    block_size: int
    dropped: Counter[str] = field(default_factory=Counter)
    edges: dict[str, dict[Key, int]] = field(default_factory=dict)
    """By tier: from the hash of the parent and the tokens of a block to its hash."""
    places: dict[str, dict[int, Key]] = field(default_factory=dict)
    """By tier and hash: the edge."""
    _references: Counter[tuple[str, int]] = field(default_factory=Counter)
    _kinds: dict[int, str] = field(default_factory=dict)
    _salts: dict[int, str] = field(default_factory=dict)

    def receive(self, frames: Sequence[bytes]) -> None:
        for event in events_of(frames[-1])[1]:
            self.apply(event)

    def apply(self, event: Mapping[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":  # it names no tier: all of them are meant
            for each in (self.edges, self.places, self._references, self._salts):
                each.clear()
            return
        group, kind = event.get("group_idx"), event.get("kv_cache_spec_kind")
        if kind is not None and group is not None:
            self._kinds[group] = kind
        kind = kind or self._kinds.get(group or 0, "full_attention" if not group else "unlearned")
        if kind not in _MAIN:
            self.dropped[kind] += 1
            return
        tier = _TIERS[event.get("medium") or "GPU"]
        hashes = [self._hash(one) for one in event["block_hashes"]]
        if event["type"] == "BlockRemoved":
            self._remove(tier, hashes)
        else:
            self._store(tier, hashes, event)

    @staticmethod
    def _hash(value: object) -> int:
        if not isinstance(value, int):
            raise TypeError(f"a hash has to be an integer of 64 bits, not {value!r:.40}")
        return value % 2**64

    def _store(self, tier: str, hashes: list[int], event: Mapping[str, Any]) -> None:
        parent = event.get("parent_block_hash")
        before = None if parent is None else self._hash(parent)
        if len({before, *hashes}) <= len(hashes):
            self.dropped["repeated hash"] += 1
            return
        if event["block_size"] != self.block_size:
            self.dropped["block size"] += 1
            return
        owner = (event.get("lora_name"), self._salt(hashes, before, event))
        extra, size = event.get("extra_keys") or [None] * len(hashes), self.block_size
        edges, places = self.edges.setdefault(tier, {}), self.places.setdefault(tier, {})
        if tier == "GPU" and before is not None and before not in places:
            self.dropped["no parent"] += 1
            return
        self._references.update((tier, one) for one in hashes)
        for at, one in enumerate(hashes):
            tokens = tuple(event["token_ids"][at * size : (at + 1) * size])
            edge = (before, tokens, *owner, *self._inputs(extra[at]))
            if len(tokens) < size or places.get(one, edge) != edge or edges.get(edge, one) != one:
                self.dropped["conflict"] += 1
                return
            edges[edge], places[one], before = one, edge, one

    def _salt(self, hashes: list[int], before: int | None, event: Mapping[str, Any]) -> str | None:
        """A salt comes with the first block, and goes on with the blocks after it."""
        first = (event.get("extra_keys") or [None])[0] or []
        found = next((one[len(SALT) :] for one in first if isinstance(one, str) and one.startswith(SALT)), None)
        if found is None and before is not None:
            found = self._salts.get(before)
        if found is not None:
            self._salts.update(dict.fromkeys(hashes, found))
        return found

    @staticmethod
    def _inputs(keys: Sequence[Any] | None) -> list[str]:
        return [one[0] for one in keys or () if isinstance(one, (list, tuple))]

    def _remove(self, tier: str, hashes: Iterable[int]) -> None:
        edges, places = self.edges.setdefault(tier, {}), self.places.setdefault(tier, {})
        for one in hashes:
            if self._references[tier, one] > 1:  # named twice: the publisher waits for as many removals
                self._references[tier, one] -= 1
                continue
            del self._references[tier, one]
            if (edge := places.pop(one, None)) is not None:
                del edges[edge]

    def blocks(self, names: Mapping[str, str]) -> set[Block]:
        """The view. `names`: the medium of each of its tiers. Groups without full attention are not in it."""
        return {(names[tier], 0, one) for tier, places in self.places.items() if tier in names for one in places}

    def hits(self, token_ids: Sequence[int], lora_name: str | None = None, salt: str | None = None) -> dict[str, int]:
        """Blocks of a prompt by tier, each tier going on after the one above."""
        found, before, at, size = {}, None, 0, self.block_size
        for tier in ("GPU", "CPU", "DISK", "EXTERNAL"):
            start = at
            while (at + 1) * size <= len(token_ids):
                edge = (before, tuple(token_ids[at * size : (at + 1) * size]), lora_name, salt)
                after = self.edges.get(tier, {}).get(edge)
                if after is None:
                    break
                before, at = after, at + 1
            found[tier] = at - start
        return found


# -- llm-d -----------------------------------------------------------------------------------------------------------

WEIGHTS = {"gpu": 1.0, "cpu": 0.8}
"""The default of its scorer. A tier without a weight has 1.0, as the GPU."""


@dataclass
class LlmdIndexer:
    """llm-d's index. A block is found by a key of llm-d's own, over model, tokens and multi-modal inputs, that follows
    the key of its parent. The engine's hashes lead to these keys."""

    block_size: int
    takes_maps: bool = True
    """False: as before maps were understood."""
    weights: Mapping[str, float] = field(default_factory=lambda: dict(WEIGHTS))
    dropped: Counter[str] = field(default_factory=Counter)
    keys: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Its keys by the hash of the engine."""
    entries: dict[str, set[tuple[str, str, int | None]]] = field(default_factory=dict)
    """Pod, tier and group by key."""
    _references: Counter[Key] = field(default_factory=Counter)

    @staticmethod
    def pod_and_model(topic: bytes) -> tuple[str, str]:
        parts = topic.decode().split("@")
        return (parts[1], parts[2]) if len(parts) == 3 else (topic.decode(), "")

    def receive(self, frames: Sequence[bytes]) -> None:
        pod, model = self.pod_and_model(frames[0])
        for event in events_of(frames[-1], takes_maps=self.takes_maps)[1]:
            self.apply(pod, model, event)

    def apply(self, pod: str, model: str, event: Mapping[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            for key, found in list(self.entries.items()):
                self._keep(key, {entry for entry in found if entry[0] != pod})
            self._references = Counter({key: n for key, n in self._references.items() if key[0] != pod})
            return
        entry = (pod, (event.get("medium") or "gpu").lower(), event.get("group_idx"))
        hashes = [self._hash(one) for one in event["block_hashes"]]
        if event["type"] == "BlockRemoved":
            self._remove(entry, hashes)
        else:
            self._store(entry, hashes, event, event.get("lora_name") or model)

    @staticmethod
    def _hash(value: Any) -> int:
        found: int = int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value % 2**64
        return found

    def _store(self, entry: Any, hashes: list[int], event: Mapping[str, Any], model: str) -> None:
        self._references.update((*entry, one) for one in hashes)
        parent, before = event.get("parent_block_hash"), f"root {model}"
        if parent:
            above = self.keys.get(self._hash(parent))
            if above is None:
                self.dropped["no parent"] += 1
                return
            before = above[-1]
        made = self.chain(before, event["token_ids"], event.get("extra_keys"))
        if not made or not hashes:
            return
        number = max(len(hashes), len(made))
        found: dict[int, list[str]] = {}
        for at in range(number):
            found.setdefault(hashes[at * len(hashes) // number], []).append(made[at * len(made) // number])
        self.keys.update({one: tuple(keys) for one, keys in found.items()})
        for key in made:
            self.entries.setdefault(key, set()).add(entry)

    def chain(self, before: str, token_ids: Sequence[int], extra_keys: Sequence[Any] | None = None) -> list[str]:
        """The keys of whole blocks. Of the extra keys, those of multi-modal inputs count, and salts and adapters do
        not."""
        made, size = list[str](), self.block_size
        number = len(token_ids) // size
        for at in range(number):
            extra = extra_keys[at * len(extra_keys) // number] if extra_keys else None
            inputs = [list(one) for one in extra or () if isinstance(one, (list, tuple))]
            text = repr((before, list(token_ids[at * size : (at + 1) * size]), inputs))
            before = hashlib.sha256(text.encode()).hexdigest()[:16]
            made.append(before)
        return made

    def _remove(self, entry: Any, hashes: Iterable[int]) -> None:
        for one in hashes:
            if self._references[*entry, one] > 1:
                self._references[*entry, one] -= 1
                continue
            del self._references[*entry, one]
            keys = self.keys.get(one, ())
            for key in keys:
                self._keep(key, self.entries.get(key, set()) - {entry})
            if keys and not any(key in self.entries for key in keys):
                del self.keys[one]

    def _keep(self, key: str, left: set[Any]) -> None:
        if left:
            self.entries[key] = left
        else:
            self.entries.pop(key, None)

    def blocks(self, pod: str, names: Mapping[str, str]) -> set[Block]:
        """The view of a pod. `names`: the medium of each of its tiers."""
        return {
            (names[tier], group or 0, one)
            for one, keys in self.keys.items()
            for its_pod, tier, group in set.intersection(*(self.entries.get(key, set()) for key in keys))
            if its_pod == pod and tier in names
        }

    def score(self, pod: str, model: str, token_ids: Sequence[int]) -> float:
        """The score of a prompt: the sum of the weights of its leading blocks, each of the best tier that has it."""
        total = 0.0
        for key in self.chain(f"root {model}", token_ids):
            weights = [self.weights.get(tier, 1.0) for its, tier, _ in self.entries.get(key, ()) if its == pod]
            if not weights:
                break
            total += max(weights)
        return total
