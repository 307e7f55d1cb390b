"""vLLM's KV cache groups as groups of the ledger."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs

from aoffload import ChunkedLocal, FullAttention, KVCacheGroup, RecurrentState, SlidingWindow

from ..errors import ConfigError
from .states import Checkpoints

NO_DRAFTS_WITH_STATES = "is not supported with recurrent layers: their states could include rejected draft tokens"


@attrs.frozen
class CachedGroups:
    """The groups whose blocks are found by the hash of their tokens. The others are rebuilt by vLLM itself."""

    ids: tuple[int, ...]
    """vLLM's number of each group."""
    groups: tuple[KVCacheGroup, ...]
    """The block size of a group of recurrent layers is the unit."""
    _sizes: tuple[int, ...]
    """Tokens per block in vLLM's tables."""

    @classmethod
    def of(cls, kv_cache_config: Any, num_context_ranks: int) -> CachedGroups:
        """`num_context_ranks`: the ranks that share the tokens of a block. `ConfigError` for other kinds of caches."""
        ids = tuple(kv_cache_config.prefix_cacheable_group_ids)
        if not ids:
            raise ConfigError("kv_connector", "this model has no KV cache that supports prefix caching")
        found = [
            _group(number, kv_cache_config.kv_cache_groups[number].kv_cache_spec, num_context_ranks) for number in ids
        ]
        unit = math.lcm(*[group.block_size for group in found])
        sizes = tuple([group.block_size for group in found])
        # A hit ends at a whole unit, so a state inside a unit would never be read.
        of_units = [attrs.evolve(group, block_size=unit) if group.is_recurrent else group for group in found]
        return cls(ids, tuple(of_units), sizes)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        return tuple(group.block_size for group in self.groups)

    @property
    def has_states(self) -> bool:
        """Whether some of these layers are recurrent."""
        return any(group.is_recurrent for group in self.groups)

    def tables(self, block_tables: Sequence[Any]) -> list[Any]:
        """From a list with one table per group of vLLM, select the tables of these groups. Those of recurrent layers
        are left empty."""
        return [
            () if group.is_recurrent else block_tables[number]
            for number, group in zip(self.ids, self.groups, strict=True)
        ]

    def checkpoint_at(self, block_tables: Sequence[Any], num_tokens: int) -> list[int] | None:
        """The blocks of recurrent layers in which a load of `num_tokens` tokens has to put its checkpoint. None: there
        are no such layers."""
        found = [
            block_tables[number][num_tokens // size - 1]
            for number, group, size in zip(self.ids, self.groups, self._sizes, strict=True)
            if group.is_recurrent
        ]
        return found or None

    def checkpoints(self, handed: Checkpoints, most: int) -> dict[int, list[int]]:
        """The checkpoints of `handed` up to token `most`, for an offer. One that not all groups have, or that lies
        inside a unit, is left out, because no hit ends there."""
        states = [
            (number, group.block_size)
            for number, group in zip(self.ids, self.groups, strict=True)
            if group.is_recurrent
        ]
        if not states or not handed:
            return {}
        (first, unit), *_ = states
        of_groups = [handed.get(number, {}) for number, _ in states]
        whole = [
            at for at in handed.get(first, {}) if not at % unit and at <= most and all(at in of for of in of_groups)
        ]
        return {at: [of[at] for of in of_groups] for at in whole}


def _group(number: int, spec: Any, num_context_ranks: int) -> KVCacheGroup:
    from .internals import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

    kind = get_kv_cache_spec_kind(spec).value
    # Layers with unequal pages have a spec each. vLLM gives workers all of them, and the scheduler the first one.
    layer = next(iter(spec.kv_cache_specs.values())) if hasattr(spec, "kv_cache_specs") else spec
    attention: FullAttention | SlidingWindow | ChunkedLocal | RecurrentState
    if kind in ("full_attention", "mla_attention", "sink_full_attention"):
        attention = FullAttention()
    elif kind in ("sliding_window", "sliding_window_mla"):
        # Modules of MTP compute their last tokens again after a hit. They read that much more than the window.
        attention = SlidingWindow(get_kv_cache_spec_sliding_window(spec) + layer.extra_retained_tokens)
    elif kind == "chunked_local_attention":
        attention = ChunkedLocal(layer.attention_chunk_size)
    elif kind == "mamba":
        _check_states(layer)
        attention = RecurrentState()
    else:
        raise ConfigError(
            "kv_connector", f"KV cache group {number} has the kind {kind}, which aoffload does not support"
        )
    block_size = spec.block_size * (num_context_ranks if spec.dcp_sharded else 1)
    return KVCacheGroup(f"group-{number}", attention, block_size)


def check_mode(mode: object) -> None:
    """Refuse modes of vLLM in which it keeps no states for hits."""
    if mode != "align":
        problem = f'must be "align" for a model with recurrent layers, because a hit needs their states (got {mode!r})'
        raise ConfigError("mamba_cache_mode", f"{problem}. Start with --mamba-cache-mode align")


def _check_states(layer: Any) -> None:
    """Refuse states that vLLM does not cache as checkpoints. `refusals` finds both before the weights are loaded,
    unless a model chooses for itself."""
    check_mode(layer.mamba_cache_mode)
    if layer.num_speculative_blocks:
        raise ConfigError("speculative_config", f"{NO_DRAFTS_WITH_STATES}. Start without --speculative-config")
