"""The configuration is checked as a whole before anything is allocated, and says which setting is wrong."""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

import pytest

from aoffload import DiskTier, RemoteTier
from aoffload._config.config import OffloadConfig
from aoffload._config.groups import FullAttention, KVCacheGroup, RecurrentState
from aoffload._config.tiers import parse_bytes
from aoffload._extensions.assembly import Ledger
from aoffload._extensions.store_policies import LazyStore
from aoffload._kernel.layout import Layout
from aoffload._kernel.pools import LeastRecentlyUsed
from aoffload.errors import ConfigError, InvalidArgument
from aoffload.ledger import LearnedEviction
from aoffload.testing import SimulatedStore

GROUP = KVCacheGroup("full", block_size=16)


def config(**changes: Any) -> OffloadConfig:
    return OffloadConfig(**{"groups": [GROUP], "num_host_blocks": 4, **changes})


class Text(enum.StrEnum):
    """Text of another class, which may compare as it likes."""

    LEARNED = "learned"


class MadeOnce:
    """A factory that makes an order when it is checked, and none afterwards."""

    def __init__(self) -> None:
        self.orders = [LeastRecentlyUsed()]

    def __call__(self) -> Any:
        return self.orders.pop() if self.orders else None


NUMBERS = [0, -1, 2**31, 10**30, 1.5, "4", True, float("nan"), float("inf"), [4]]
SIZES = [0, -1, "", "0", "-1GiB", "8 gigs", "1e30GiB", "9" * 400 + "GiB", 2**70, 1.5, True, b"8GiB"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_host_blocks", value) for value in NUMBERS if value != 0 or value is False),
        *(("max_jobs_in_flight", value) for value in NUMBERS),
        *(("max_bytes_in_flight", value) for value in SIZES),
        *(("max_job_bytes", value) for value in [*SIZES, None]),
        *(("load_timeout_s", value) for value in [0, -1, float("nan"), float("inf"), "3", None, True, 1e300]),
        *(("transfer_timeout_s", value) for value in [0, float("inf")]),
        *(("close_timeout_s", value) for value in [-0.5, None]),
        *(("verify", value) for value in [None, 1, "yes"]),
        *(("namespace", value) for value in [None, 7, b"m", "\ud800"]),
        *(("store_policy", value) for value in ["lazily", "", "LAZY"]),
        *(("load_choice", value) for value in ["costs", "", "COST", None, 7, object()]),
        *(("eviction", value) for value in ["mru", "", Text.LEARNED, None, 7, object(), LeastRecentlyUsed()]),
        *(("eviction", value) for value in [dict, len, LearnedEviction, lambda: 7]),
        *(("groups", value) for value in [[], GROUP, "full", None, 7, [7], {"full": 16}, [GROUP, GROUP]]),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_bad_setting_is_named(name: str, value: Any) -> None:
    """Zero, negative, absurd, of another type: one typed error with the name of the setting."""
    with pytest.raises(ConfigError) as refusal:
        config(**{name: value})
    assert refusal.value.argument == name
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize("value", SIZES, ids=lambda value: repr(value)[:20])
def test_a_bad_size_is_named(value: Any) -> None:
    """The host pool in bytes, too."""
    with pytest.raises(ConfigError) as refusal:
        OffloadConfig(groups=[GROUP], host_bytes=value)
    assert refusal.value.argument == "host_bytes"


def test_the_host_pool_is_given_once() -> None:
    """In blocks or in bytes; both or neither is refused."""
    for both in ({"num_host_blocks": 4, "host_bytes": "1GiB"}, {"num_host_blocks": None, "host_bytes": None}):
        with pytest.raises(ConfigError, match="num_host_blocks"):
            config(**both)


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 8 * 2**30), ("512 MB", 512 * 10**6), ("1.5KiB", 1536), (" 7 ", 7), ("7b", 7), (9, 9)],
)
def test_sizes_are_read_as_people_write_them(text: int | str, size: int) -> None:
    """Powers of two with an i, powers of ten without."""
    assert parse_bytes("host_bytes", text) == size


@pytest.mark.parametrize("tier", [{"disk": DiskTier("x", "1MiB")}, {"remote": RemoteTier(SimulatedStore())}])
def test_tiers_below_no_host_are_refused(tier: dict[str, Any]) -> None:
    """All that goes down or comes up passes host memory: without it they would silently do nothing."""
    with pytest.raises(ConfigError) as refusal:
        config(num_host_blocks=0, namespace="m", **tier)
    assert refusal.value.argument == "num_host_blocks"


def test_bytes_become_blocks() -> None:
    """Rounded down; less than one block is refused, since it would silently be no cache."""
    sized = OffloadConfig(groups=[GROUP], host_bytes="10KiB")
    assert sized.resolve_host_blocks(4096) == 2
    with pytest.raises(ConfigError, match="host_bytes"):
        sized.resolve_host_blocks(2**20)


def test_a_job_never_carries_more_than_may_be_in_flight() -> None:
    """A bound on what is in flight bounds each job; one block always fits."""
    assert config(max_job_bytes=100, max_bytes_in_flight=30).blocks_per_job(10) == 3
    assert config(max_job_bytes=100, max_bytes_in_flight=30).blocks_per_job(1000) == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"name": ""}, "groups.name"),
        ({"name": 7}, "groups.name"),
        ({"attention": "full"}, "groups.attention"),
        *(({"block_size": value}, "groups.block_size") for value in (0, -16, 65_537, 1.5, "16", True, None)),
    ],
)
def test_a_bad_group_is_named(arguments: dict[str, Any], named: str) -> None:
    """A group that no tensor could follow is refused where it is made."""
    with pytest.raises(ConfigError) as refusal:
        KVCacheGroup(**{"name": "full", "block_size": 16, **arguments})
    assert refusal.value.argument == named


def test_block_sizes_that_hardly_meet_are_refused() -> None:
    """With coprime sizes of 65,000 no prompt would ever hit: refused instead of a cache that does nothing."""
    for other in (65_535, 17):
        groups = [KVCacheGroup("a", block_size=65_536), KVCacheGroup("b", block_size=other)]
        with pytest.raises(ConfigError, match="groups"):
            Layout.of(groups)
        with pytest.raises(ConfigError, match="groups"):
            config(groups=groups)


@pytest.mark.parametrize(
    ("sizes", "shortest"), [((1648, 784), "80,752"), ((528, 1056, 256), "8,448"), ((400, 416), "10,400")]
)
def test_block_sizes_that_make_all_hits_long_are_warned_of(sizes: tuple[int, ...], shortest: str) -> None:
    """A hit ends where blocks of all groups end. If that is seldom, the warning names the smallest hit that there can
    be, and what to change."""
    groups = [KVCacheGroup(f"g{size}", block_size=size) for size in sizes]
    with pytest.warns(
        UserWarning,
        match=f"no hit is shorter than {shortest} tokens.*shorter prompts never hit: .* each divides the next",
    ) as told:
        OffloadConfig(groups=groups, num_host_blocks=1)
    assert [one.filename for one in told] == [__file__]


@pytest.mark.parametrize("sizes", [(16,), (16, 32), (1648, 16), (256, 64, 8, 4), (65_536,), (32, 992)])
def test_block_sizes_that_divide_each_other_are_not(sizes: tuple[int, ...]) -> None:
    """Nor are those whose common multiple is short; warnings are errors here."""
    OffloadConfig(groups=[KVCacheGroup(f"g{size}", block_size=size) for size in sizes], num_host_blocks=1)


@pytest.mark.parametrize(("sizes", "unit"), [((65_536,), 65_536), ((4, 6), 12), ((65_536, 15), 983_040)])
def test_block_sizes_that_meet_within_a_million_tokens_are_taken(sizes: tuple[int, ...], unit: int) -> None:
    """Groups share a cache if all their block sizes divide some number of tokens up to 2**20."""
    assert Layout.of([KVCacheGroup(f"g{size}", block_size=size) for size in sizes]).unit_tokens == unit


def test_a_group_of_another_make_is_refused() -> None:
    """What merely looks like a group is refused by name: it is never left out of the cache in silence."""
    lookalike: Any = SimpleNamespace(name="other", block_size=16, attention=FullAttention())
    for groups in ([lookalike], [GROUP, lookalike]):
        with pytest.raises(ConfigError) as refusal:
            Ledger(config(groups=groups), 64)
        assert refusal.value.argument == "groups"


@pytest.mark.parametrize("num_device_blocks", [1, 0, -3, 1.5, True, None, 2**31, 10**30])
def test_a_bad_device_pool_is_named(num_device_blocks: Any) -> None:
    """A pool needs the null block and one more, and ids have to fit into an int32."""
    with pytest.raises(InvalidArgument) as refusal:
        Ledger(config(), num_device_blocks)
    assert refusal.value.argument == "num_device_blocks"


@pytest.mark.parametrize("block_bytes", [0, -1, 1.5])
def test_a_bad_block_size_in_bytes_is_named(block_bytes: Any) -> None:
    """Sizes in bytes are divided by it."""
    with pytest.raises(InvalidArgument) as refusal:
        Ledger(config(), 8, block_bytes=block_bytes)
    assert refusal.value.argument == "block_bytes"


@pytest.mark.parametrize(
    ("name", "value"), [("store_policy", object()), ("store_policy", LazyStore), ("eviction", MadeOnce())]
)
def test_an_object_that_is_no_policy_is_named(name: str, value: Any) -> None:
    """A policy may be any object, if it can do what a policy does."""
    with pytest.raises(ConfigError) as refusal:
        Ledger(config(**{name: value}), 8)
    assert refusal.value.argument == name


def test_a_large_host_pool_costs_nothing_until_it_is_used() -> None:
    """The largest pool that ids can name is a few extents."""
    ledger = Ledger(config(num_host_blocks=2**31 - 1), 8)
    assert ledger.statistics().host.num_free == 2**31 - 1


def test_full_attention_needs_every_block() -> None:
    """What a kind requires is asked by position."""
    assert FullAttention().required_blocks(40, 16) == range(2)


def test_the_blocks_of_a_checkpoint_are_in_the_root() -> None:
    """Checkpoints of another number of blocks are never found: their bytes would be cut at other places. Without a
    recurrent state, roots are those of versions that knew none."""
    full = KVCacheGroup("full")
    roots = {
        OffloadConfig(
            groups=[full, KVCacheGroup("state", RecurrentState(), num_rows=rows)], num_host_blocks=1
        ).root_namespace
        for rows in (1, 2, 3)
    }
    assert len(roots) == 3
    assert OffloadConfig(groups=[full], namespace="m", num_host_blocks=1).root_namespace == "m\nfull:16"
