"""Layers in groups of one size: which layer keeps its keys where."""

from __future__ import annotations

import math
from typing import Any

import pytest

from aoffload import FullAttention, KVCacheGroup
from aoffload._config.groups import AttentionKind, SlidingWindow
from aoffload._reference.engine.layers import (
    LayerGroup,
    LayerPlace,
    check_groups,
    group_layers,
    kv_cache_groups,
    places_of,
)
from aoffload.errors import ConfigError

FULL, SLIDING = FullAttention(), SlidingWindow(128)


def test_two_full_and_ten_sliding_layers() -> None:
    """One group of the two full layers, five of two sliding ones each, all of one size."""
    groups = group_layers([*[SLIDING] * 5, FULL, *[SLIDING] * 5, FULL])
    assert [(group.name, group.layers, group.window) for group in groups] == [
        ("sliding-0", (0, 1), 128),
        ("sliding-1", (2, 3), 128),
        ("sliding-2", (4, 6), 128),
        ("sliding-3", (7, 8), 128),
        ("sliding-4", (9, 10), 128),
        ("full", (5, 11), None),
    ]


@pytest.mark.parametrize(
    "kinds",
    [
        [FULL] * 6,
        [SLIDING] * 4,
        [SLIDING, FULL] * 3,
        [*[SLIDING] * 5, FULL] * 4 + [SLIDING] * 2,
        [FULL, SLIDING, SlidingWindow(64), SLIDING, SlidingWindow(64), FULL],
    ],
)
def test_every_layer_has_a_place_of_its_own(kinds: list[AttentionKind]) -> None:
    """Groups are as large as they can be and equally large, hold one kind, and no two layers share a place."""
    groups = group_layers(kinds)
    sizes = {len(group.layers) for group in groups}
    assert sizes == {math.gcd(*(kinds.count(kind) for kind in kinds))}
    assert all(kinds[layer] == group.attention for group in groups for layer in group.layers)
    places = places_of(groups)
    assert sorted(places) == list(range(len(kinds)))
    assert len(set(places.values())) == len(kinds)
    assert len({group.name for group in groups}) == len(groups)
    assert all(groups[place.group].layers[place.slot] == layer for layer, place in places.items())


def test_a_model_of_one_kind_is_one_group() -> None:
    """Models without windows keep the one table they had, called full."""
    (group,) = group_layers([FULL] * 3)
    assert group == LayerGroup("full", (0, 1, 2))
    assert kv_cache_groups([group], 32) == [KVCacheGroup("full", block_size=32)]
    assert places_of([group])[2] == LayerPlace(0, 2, None)


@pytest.mark.parametrize(
    ("configured", "problem"),
    [
        ([KVCacheGroup("a", block_size=4)], "are 1 in the runtime, but 2 in the model"),
        ([KVCacheGroup("a", block_size=4), KVCacheGroup("b", block_size=8)], "'b' has blocks of 8 tokens, not 4"),
    ],
)
def test_a_runtime_that_does_not_fit_is_refused(configured: list[KVCacheGroup], problem: str) -> None:
    """Another number of groups, or blocks of another size, than the model needs."""
    groups = group_layers([FULL, SLIDING])
    with pytest.raises(ConfigError, match=f"^groups: {problem}"):
        check_groups(groups, configured, 4)


def test_a_runtime_may_keep_more_than_the_model_reads_but_not_less() -> None:
    """Full groups are enough for every layer; a window in place of full attention would lose keys."""

    class Configured:
        block_size, attention, name = 4, SLIDING, "b"

    full, configured = KVCacheGroup("a", block_size=4), Configured()
    check_groups(group_layers([FULL, SLIDING]), [full, full], 4)
    check_groups(group_layers([FULL, SLIDING]), [full, configured], 4)
    for kinds in ([FULL], [SlidingWindow(64)]):
        with pytest.raises(ConfigError, match="'b' keeps"):
            check_groups(group_layers(kinds), [configured], 4)


def test_layers_of_a_config_are_sorted_by_what_they_read() -> None:
    """`layer_types` and `sliding_window` decide; without types all layers slide or none does."""
    from transformers import AutoConfig

    from aoffload._reference.engine.transformers import _attention_kinds

    def kinds(name: str, **options: Any) -> list[AttentionKind]:
        return _attention_kinds(AutoConfig.for_model(name, **options))

    assert kinds("gemma3_text", num_hidden_layers=7, sliding_window=128) == [*[SLIDING] * 5, FULL, SLIDING]
    assert kinds("gpt_oss", num_hidden_layers=4, sliding_window=128) == [SLIDING, FULL] * 2
    assert kinds("mistral", num_hidden_layers=2, sliding_window=128) == [SLIDING] * 2
    assert kinds("mistral", num_hidden_layers=2, sliding_window=None) == [FULL] * 2
    assert kinds("llama", num_hidden_layers=2) == [FULL] * 2
    options = {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 1}
    assert kinds("qwen3", num_hidden_layers=2, **options) == [FULL, SLIDING]
