"""Recurrent layers: which blocks hold checkpoints, where the next one is made, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_vllm_groups import FULL, groups_of, spec
from test_vllm_plugin import VllmConfig
from vllm_configs import vllm_config
from vllm_doubles import interface

from aoffload import ConfigError, FullAttention
from aoffload._config.groups import RecurrentState
from aoffload._vllm.blocks import Placement, regions_at
from aoffload._vllm.states import handed_over, move_junction
from aoffload._vllm.worker import strides_of
from aoffload.errors import RegionError

BLOCK = FULL.block_size


def state(block_size: int = BLOCK, mode: str = "align", **fields: Any) -> Any:
    return interface.MambaSpec(
        block_size=block_size, shapes=((3, 4), (2, 4, 4)), dtypes=(torch.bfloat16, torch.float32),
        mamba_cache_mode=mode, **fields,
    )  # fmt: skip


# -- groups and tables --------------------------------------------------------------------------------------------


def test_recurrent_layers_are_a_group_of_states() -> None:
    """With one block for each checkpoint, beside groups of attention."""
    found = groups_of(state(), FULL)
    assert [group.attention for group in found.groups] == [RecurrentState(), FullAttention()]
    assert [group.num_rows for group in found.groups] == [1, 1]
    assert found.has_states and not groups_of(FULL).has_states


def test_a_state_is_that_of_a_whole_unit() -> None:
    """Ranks may share a block of attention, so that it has more tokens than a block of states. A hit ends where both
    end, and a load needs the state that ends there."""
    found = groups_of(state(), FULL, num_context_ranks=2)
    assert found.block_sizes == (2 * BLOCK, 2 * BLOCK)
    tables = [[0, 0, 0, 7], [4, 5]]
    assert found.tables(tables) == [(), [4, 5]]
    assert found.checkpoint_at(tables, 4 * BLOCK) == [7]
    assert groups_of(FULL).checkpoint_at(tables, 4 * BLOCK) is None


def test_a_store_reads_only_blocks_that_hold_checkpoints() -> None:
    """The table of a request names its running state, too, and states that vLLM has freed. So only blocks that vLLM
    hands over are offered, of all groups together."""
    found = groups_of(FULL, state(), state())
    assert found.tables([[1, 2, 3], [0, 8, 9], [0, 5, 6]]) == [[1, 2, 3], (), ()]
    handed = {1: {2 * BLOCK: 8, 3 * BLOCK: 4}, 2: {2 * BLOCK: 5}}
    assert found.checkpoints(handed, 9 * BLOCK) == {2 * BLOCK: [8, 5]}
    assert found.checkpoints(handed, BLOCK) == found.checkpoints({}, BLOCK) == groups_of(FULL).checkpoints({}, 0) == {}


def test_a_checkpoint_inside_a_block_is_left_out() -> None:
    """vLLM's own cache may hit inside a block; no hit of the connector ends there."""
    found = groups_of(FULL, state())
    assert found.checkpoints({1: {3 * BLOCK: 7, 5 * BLOCK + 1: 8}}, 9 * BLOCK) == {3 * BLOCK: [7]}


# -- steps --------------------------------------------------------------------------------------------------------


def step(offloads: Any) -> Any:
    return SimpleNamespace(kv_connector_block_state=SimpleNamespace(boundary_state_offloads=offloads))


def test_checkpoints_that_vllm_hands_over() -> None:
    """By request, group and position."""
    handed = {"a": [(0, 5, 64), (2, 6, 64), (0, 7, 128)], "b": [(0, 9, 64)]}
    assert handed_over(step(handed)) == {"a": {0: {64: 5, 128: 7}, 2: {64: 6}}, "b": {0: {64: 9}}}
    assert handed_over(step({})) == handed_over(SimpleNamespace(kv_connector_block_state=None)) == {}


@pytest.mark.parametrize(
    ("known", "planned", "wanted"), [(0, (128, 320), 128), (192, (128, 320), 192), (64, (320,), 64), (64, (), 64)]
)
def test_the_deepest_junction_is_where_the_next_checkpoint_is_made(
    known: int, planned: tuple[int, ...], wanted: int
) -> None:
    """vLLM knows one from its own cache, and host memory may know another. The end of the prompt is none."""
    request = SimpleNamespace(shared_prefix_boundary=known)
    move_junction(request, planned)
    assert request.shared_prefix_boundary == wanted


# -- memory -------------------------------------------------------------------------------------------------------


def test_the_parts_of_a_state_are_one_region() -> None:
    """vLLM registers a list of tensors for a recurrent layer, which lie in the memory of all layers."""
    memory = torch.zeros(4 * 64, dtype=torch.uint8)
    parts = [memory.view(4, 64)[:, :16], memory.view(4, 64)[:, 16:48].view(torch.float32)]
    (region,) = regions_at([Placement(0, 64)], {"states": parts, "full": memory}, 4)
    assert region.tensor.data_ptr() == memory.data_ptr() and region.tensor.shape == (4, 64)
    with pytest.raises(RegionError, match="2 allocations"):
        regions_at([Placement(0, 64)], {"states": [*parts, torch.zeros(4, 4)]}, 4)


def test_the_identity_of_a_disk_has_all_parts_of_a_state() -> None:
    """Other shapes of any part are other KV."""
    one, other = torch.zeros(4, 2), torch.zeros(4, 3)
    found = [strides_of({"states": [one, part]}, 4) for part in (one, other)]
    assert found[0] != found[1]


# -- refusals -----------------------------------------------------------------------------------------------------


def recurrent(mode: str = "align", drafts: Any = None, **extra: Any) -> Any:
    config = vllm_config(drafts=drafts, **extra)
    config.model_config.is_hybrid, config.cache_config.mamba_cache_mode = True, mode
    return config


DRAFTS = SimpleNamespace(num_ahead=0, use_eagle=lambda: False, draft_model_config=None)


@pytest.mark.parametrize(
    ("config", "argument"),
    [
        (recurrent("all"), "mamba_cache_mode"),
        (recurrent(drafts=DRAFTS), "speculative_config"),
        (recurrent(remote={"url": "redis://127.0.0.1:1"}), "remote"),
    ],
)
def test_what_cannot_work_with_states_is_refused_before_the_weights(config: Any, argument: str) -> None:
    """By the name of the option, with a way out."""
    VllmConfig(recurrent())
    with pytest.raises(ConfigError, match=r"Start with|Use `") as caught:
        VllmConfig(config)
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("fields", "argument"),
    [({"mode": "all"}, "mamba_cache_mode"), ({"num_speculative_blocks": 2}, "speculative_config")],
)
def test_layers_that_choose_for_themselves_are_refused(fields: dict[str, Any], argument: str) -> None:
    """Their descriptions come with the weights."""
    with pytest.raises(ConfigError, match="Start with") as caught:
        groups_of(state(**fields), FULL)
    assert caught.value.argument == argument


def test_the_kind_of_a_group_that_is_not_known_is_named() -> None:
    with pytest.raises(ConfigError, match="cross_attention"):
        groups_of(state(), spec("CrossAttention"))
