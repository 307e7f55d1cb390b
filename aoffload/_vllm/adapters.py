"""LoRA adapters in the scheduler: the weights that each adapter has, as the workers report them.

The cache key of a request with an adapter contains a digest of the adapter's weights. Until every rank has reported
that digest, nothing is loaded for such a request. vLLM may read an adapter again at any time. So every copy, and the
first forward over loaded KV, carries the `AdapterUse` that it was planned under, and the workers compare it with the
weights that they have.

vLLM's own prefix cache keys an adapter by name and path. If several weights have been used under one name and path, a
hit of vLLM may be KV of any of them. A request that begins with such a hit is not cached.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import attrs

from .messages import AdapterSeen, AdapterUse, Said


@attrs.define(eq=False)
class Adapters:
    """One per engine. An adapter is identified by vLLM's `lora_int_id`."""

    num_ranks: int
    max_loaded: int | None = None
    """Adapters that each worker keeps before it evicts one; None: unknown."""
    _by_rank: dict[int, dict[int, AdapterSeen]] = attrs.field(factory=dict, init=False)
    _uses: dict[int, AdapterUse] = attrs.field(factory=dict, init=False)
    _places: dict[int, set[tuple[str, str]]] = attrs.field(factory=dict, init=False)
    """Names and paths under which an adapter was requested."""
    _in_place: dict[tuple[str, str], set[str | int]] = attrs.field(factory=dict, init=False)
    """By name and path, the weights whose KV vLLM's own cache may have: keys of weights, and ids of adapters whose
    weights no worker has reported yet."""
    _asked: set[int] = attrs.field(factory=set, init=False)

    def use_of(self, adapter: int) -> AdapterUse | None:
        """The weights that the workers have loaded last. None: not reported yet."""
        return self._uses.get(adapter)

    def is_news(self, adapter: int) -> bool:
        """Whether this is the first call for the adapter. Then the workers may have loaded it already, and report it
        with the next step."""
        is_first = adapter not in self._asked
        self._asked.add(adapter)
        return is_first

    def see(self, lora: Any) -> None:
        """A request with `lora` asks for blocks: vLLM is about to compute with that adapter."""
        adapter, place = lora.lora_int_id, (lora.lora_name, lora.lora_path)
        use = self._uses.get(adapter)
        self._places.setdefault(adapter, set()).add(place)
        self._in_place.setdefault(place, set()).add(adapter if use is None else use.key)

    def is_mixed(self, lora: Any) -> bool:
        """Whether vLLM's own cache may have KV of several weights under the name and path of `lora`."""
        return len(self._in_place.get((lora.lora_name, lora.lora_path), ())) > 1

    @property
    def may_evict(self) -> bool:
        """Whether the workers may evict an adapter, and so read it again later."""
        return self.max_loaded is None or len(self._places.keys() | self._by_rank.keys()) > self.max_loaded

    def hear(self, said: Iterable[Said]) -> list[AdapterUse]:
        """Take reports of the workers. Returns the adapters that every rank has reported, with their new weights."""
        touched = dict[int, None]()
        for report in said:
            if isinstance(report, AdapterSeen):
                self._by_rank.setdefault(report.adapter, {})[report.rank] = report
                touched[report.adapter] = None
        changed = []
        for adapter in touched:
            by_rank = self._by_rank[adapter]
            if len(by_rank) == self.num_ranks:
                seen = [by_rank[rank] for rank in sorted(by_rank)]
                serials = {one.rank: one.serial for one in seen}
                use = AdapterUse(adapter, serials, _key([one.digest for one in seen]))
                self._uses[adapter] = use
                changed.append(use)
                for place in self._places.get(adapter, ()):
                    if place in self._in_place:  # some request has computed there since vLLM's cache was empty
                        self._in_place[place].discard(adapter)
                        self._in_place[place].add(use.key)
        return changed

    def forget_places(self) -> None:
        """vLLM's own cache is empty."""
        self._in_place.clear()


def _key(digests: list[str]) -> str:
    """A key for the weights of all ranks together. Ranks may have loaded different weights."""
    return digests[0] if len(set(digests)) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()
