"""Several KV cache groups: cached groups, the blocks of a window, and local hits of vLLM."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_doubles import BLOCK, TEXT, Manager, Pool, Request
from small_engine import SmallEngine, counted, held
from vllm_configs import HEADS
from vllm_doubles import interface, vllm_importable

from aoffload import ChunkedLocal, ConfigError, FullAttention, KVCacheGroup, SlidingWindow
from aoffload._vllm.blocks import BlockTable, EnginePool
from aoffload._vllm.groups import CachedGroups


def described(*specs: Any, ids: tuple[int, ...] | None = None) -> Any:
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs],
        prefix_cacheable_group_ids=tuple(range(len(specs))) if ids is None else ids,
    )


def spec(kind: str, **fields: Any) -> Any:
    return getattr(interface, f"{kind}Spec")(**HEADS | {"dtype": torch.uint8} | fields)


def groups_of(*specs: Any, num_context_ranks: int = 1, **options: Any) -> CachedGroups:
    with vllm_importable():
        return CachedGroups.of(described(*specs, **options), num_context_ranks)


FULL, WINDOW = spec("FullAttention"), spec("SlidingWindow", sliding_window=12)


def test_kinds_of_attention() -> None:
    """What a hit needs of a group hangs on its kind."""
    chunked = spec("ChunkedLocalAttention", attention_chunk_size=8)
    found = groups_of(FULL, WINDOW, chunked, spec("MLAAttention")).groups
    assert [group.attention for group in found] == [
        FullAttention(), SlidingWindow(12), ChunkedLocal(8), FullAttention()
    ]  # fmt: skip


def test_a_window_has_what_is_computed_again() -> None:
    """Modules of multi-token prediction compute the last tokens before a hit again, so they read before the window."""
    (found,) = groups_of(spec("SlidingWindow", sliding_window=12, extra_retained_tokens=2)).groups
    assert found.attention == SlidingWindow(14)


@pytest.mark.parametrize(
    ("kind", "fields", "attention"),
    [
        ("SlidingWindow", {"sliding_window": 12, "extra_retained_tokens": 2}, SlidingWindow(14)),
        ("ChunkedLocalAttention", {"attention_chunk_size": 8}, ChunkedLocal(8)),
        ("FullAttention", {}, FullAttention()),
    ],
)
def test_layers_with_unequal_pages_are_one_group(kind: str, fields: dict[str, int], attention: Any) -> None:
    """vLLM gives workers the descriptions of all layers of a group, and the scheduler that of one layer. Both make the
    same group of them."""
    layer = spec(kind, **fields)
    uniform = interface.UniformTypeKVCacheSpecs(block_size=layer.block_size, kv_cache_specs={"a": layer, "b": layer})
    (of_worker,), (of_scheduler,) = groups_of(uniform).groups, groups_of(layer).groups
    assert of_worker == of_scheduler and of_worker.attention == attention


def test_only_groups_whose_blocks_can_be_found_are_cached() -> None:
    """The others are rebuilt by vLLM; their tables are not read."""
    found = groups_of(FULL, spec("CrossAttention"), WINDOW, ids=(0, 2))
    assert found.ids == (0, 2)
    assert [group.name for group in found.groups] == ["group-0", "group-2"]
    assert found.tables(["full", "cross", "window"]) == ["full", "window"]


def test_ranks_that_share_a_block() -> None:
    """With decode context parallelism a block has the tokens of all ranks, except in groups that are not split."""
    found = groups_of(FULL, spec("SlidingWindow", sliding_window=12, dcp_sharded=False), num_context_ranks=2)
    assert found.block_sizes == (2 * BLOCK, BLOCK)


@pytest.mark.parametrize(
    ("specs", "options", "reason"),
    [
        ((FULL,), {"ids": ()}, "no KV cache that supports prefix caching"),
        ((FULL, spec("CrossAttention")), {}, "group 1 has the kind cross_attention"),
    ],
)
def test_what_cannot_be_cached_is_refused(specs: Any, options: dict[str, Any], reason: str) -> None:
    """At the start, with the reason."""
    with pytest.raises(ConfigError, match=reason):
        groups_of(*specs, **options)


def test_a_hit_needs_the_window_before_its_end_only(warm: Callable[..., SmallEngine]) -> None:
    """Seven blocks of one group, three of the other; vLLM has null blocks in place of the others."""
    engine = warm(windows=(0, 12), num_blocks=40)
    seen: list[int] = []
    engine.alter = lambda commands: (seen.extend(plan.num_blocks for plan in commands.loads), commands)[1]
    engine.run(Request("again", TEXT, num_new=12))
    assert sorted(seen) == [3, 7]
    assert held(engine) == 0


@pytest.mark.parametrize("most_tokens", [5, 8, 1_000])
def test_what_is_stored_of_a_window_is_found(engines: Callable[..., SmallEngine], most_tokens: int) -> None:
    """However long the prompts, and wherever the next one begins: at an end of a request that came before."""
    engine = engines(windows=(0, 12), num_blocks=60, num_host_blocks=200, most_tokens=most_tokens)
    request = Request("first", TEXT, num_new=20)
    engine.run(request)
    engine.manager.evict_all()
    second = Request("second", [*request.all_token_ids, *range(150, 160)], num_new=9)
    engine.run(second)
    assert counted(engine, "copied_blocks|load|host") == 12 + 3
    engine.manager.evict_all()
    engine.run(Request("third", [*second.all_token_ids, 1]))
    assert counted(engine, "lost_tokens") == 0


@pytest.mark.parametrize(("interval", "hits"), [(0, [0, 0, 28, 28]), (16, [0, 16, 28, 28]), (1, [0, 28, 28, 28])])
@pytest.mark.parametrize("most_tokens", [5, 16, 1_000])
def test_users_of_a_system_prompt_hit_it(
    engines: Callable[..., SmallEngine], interval: int, hits: list[int], most_tokens: int
) -> None:
    """Their questions are longer than the window. All of it hits from the third user on, and from the second one on up
    to a multiple of the interval at which windows are stored."""
    options = {"num_host_blocks": 200, "window_interval_tokens": interval, "most_tokens": most_tokens}
    engine = engines(windows=(0, 12), num_blocks=60, **options)
    found = []
    for user in range(4):
        request = Request(f"user {user}", [*TEXT[:28], *range(40 + 50 * user, 70 + 50 * user)], num_new=2)
        before = counted(engine, "copied_blocks|load|host")
        engine.run(request)
        found.append((counted(engine, "copied_blocks|load|host") - before - 3) * BLOCK)
        engine.manager.evict_all()
    assert [max(0, hit) for hit in found] == hits


# -- vLLM's pool ------------------------------------------------------------------------------------------------------


def pool_of(manager: Manager, request: Request, block_sizes: tuple[int, ...] = (BLOCK, BLOCK)) -> EnginePool:
    return EnginePool(manager.block_pool, (0, 1), block_sizes, lambda name: request.block_hashes)


def test_blocks_that_left_a_window_are_found_in_vllms_cache() -> None:
    """By group and place; what was reused since, and what has no hash yet, is not there."""
    manager, request = Manager(40, (0, 12)), Request("r", TEXT)
    manager.adopt(request, 0)
    manager.grow(request, 0, len(TEXT))
    manager.cache(request, len(TEXT))
    full, window = manager.block_ids("r")
    pool = pool_of(manager, request)
    manager.grow(request, 28, 30)
    assert manager.block_ids("r")[1][:4] == [0, 0, 0, 0]
    assert pool.find("r", 0, 0, 3) == full[:3]
    assert pool.find("r", 1, 1, 4) == window[1:4]
    del manager.block_pool.cached[1, request.block_hashes[2]]
    assert pool.find("r", 1, 1, 4) == [window[1], 0, window[3]]
    assert pool.find("r", 1, 6, 9) == [window[6], 0, 0]


def test_a_block_is_found_by_the_hash_of_its_last_tokens() -> None:
    """Groups may have blocks of different sizes; vLLM hashes the smallest of them."""
    manager, request = Manager(40), Request("r", TEXT)
    block = manager.block_pool.blocks[9]
    manager.block_pool.cached[1, request.block_hashes[3]] = block
    assert pool_of(manager, request, (BLOCK, 2 * BLOCK)).find("r", 1, 0, 3) == [0, 9, 0]


def test_a_copy_holds_what_it_touches() -> None:
    """Each block as often as it is held; the end of a prefix is evicted before its beginning."""
    pool = Pool(9)
    held_by = EnginePool(pool, (0,), (BLOCK,), lambda name: ())
    taken = [block.block_id for block in pool.take(3)]
    held_by.hold(array("i", taken))
    assert [pool.blocks[block_id].ref_cnt for block_id in taken] == [2, 2, 2]
    pool.free_blocks([pool.blocks[block_id] for block_id in taken])
    assert not set(taken) & set(pool.free)
    held_by.give(array("i", taken))
    assert list(pool.free)[-3:] == taken[::-1]


def test_a_block_is_private_while_only_its_request_has_it() -> None:
    """A copy that may still write holds it, too."""
    pool = Pool(9)
    held_by = EnginePool(pool, (0,), (BLOCK,), lambda name: ())
    (block,) = pool.take(1)
    assert held_by.is_private(block.block_id)
    held_by.hold(array("i", [block.block_id]))
    assert not held_by.is_private(block.block_id)


def test_a_table_reads_the_ids_that_it_is_asked_for() -> None:
    """Tables have thousands of blocks, of which a step needs a few."""

    class Block:
        def __init__(self, number: int) -> None:
            self.number, self.num_reads = number, 0

        @property
        def block_id(self) -> int:
            self.num_reads += 1
            return self.number

    blocks = [Block(number) for number in range(9)]
    table = BlockTable(blocks)
    assert (len(table), table[2], table[5:7]) == (9, 2, [5, 6])
    assert [block.num_reads for block in blocks] == [0, 0, 1, 0, 0, 1, 1, 0, 0]


def test_groups_share_one_number_for_a_block() -> None:
    """The ledger numbers groups from 0; vLLM's numbers may have gaps."""
    manager, request = Manager(9), Request("r", TEXT)
    manager.block_pool.cached[4, request.block_hashes[0]] = manager.block_pool.blocks[3]
    pool = EnginePool(manager.block_pool, (0, 4), (BLOCK, BLOCK), lambda name: request.block_hashes)
    assert (pool.find("r", 1, 0, 1), pool.find("r", 0, 0, 1)) == ([3], [0])
    assert isinstance(groups_of(FULL).groups[0], KVCacheGroup)
