"""How large the demo's pools are."""

from __future__ import annotations

import pytest

from aoffload._config.groups import FullAttention, SlidingWindow
from aoffload._reference.engine.layers import LayerGroup, group_layers
from aoffload.demo.options import DemoOptions
from aoffload.demo.workload import Pools, make_workload
from aoffload.errors import InvalidArgument

WORKLOAD = make_workload(0, 32, 1000)
EVERYTHING = 2 * sum(-(-conversation.max_tokens // 16) for conversation in WORKLOAD.conversations)
FULL = (LayerGroup("full", tuple(range(6))),)
MIXED = group_layers([SlidingWindow(128)] * 5 + [FullAttention()])


def test_the_default_suits_the_groups() -> None:
    """128 blocks for a full group; for a windowed one no more than two requests' windows take."""
    assert Pools.of(DemoOptions(), WORKLOAD, FULL) == Pools(128, 2048, EVERYTHING)
    mixed = Pools.of(DemoOptions(), WORKLOAD, MIXED)
    assert mixed.num_device_blocks == 128 + 5 * 2 * (8 + 2 * 4)
    assert (mixed.num_host_blocks, mixed.num_reference_blocks) == (6 * 2048, 6 * EVERYTHING)


def test_what_was_asked_for_is_taken() -> None:
    """Numbers of blocks on the command line win; the reference keeps everything all the same."""
    options = DemoOptions(num_device_blocks=2000, num_host_blocks=7)
    assert Pools.of(options, WORKLOAD, FULL) == Pools(2000, 7, 2000)


@pytest.mark.parametrize("groups", [FULL, MIXED])
def test_too_few_are_refused(groups: tuple[LayerGroup, ...]) -> None:
    """A pool without room for the longest request is refused, and the message says what would do."""
    with pytest.raises(InvalidArgument, match=r"^device_blocks: 40 is too few.*takes \d+ blocks") as caught:
        Pools.of(DemoOptions(num_device_blocks=40), WORKLOAD, groups)
    needed = int(caught.value.problem.split()[-2])
    assert Pools.of(DemoOptions(num_device_blocks=needed), WORKLOAD, groups).num_device_blocks == needed
