"""The keys of `kv_connector_extra_config`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from aoffload import ConfigError, KVCacheGroup, OffloadConfig, SlidingWindow
from aoffload._vllm.settings import KEYS, offload_config, with_a_step_in_flight, with_windows_as_retained
from aoffload.ledger import Quota, Quotas

GROUPS = [KVCacheGroup("full", block_size=32)]


def made(num_ranks: int = 1, **extra: object) -> OffloadConfig:
    return offload_config(extra, GROUPS, namespace="model", num_ranks=num_ranks)


@pytest.mark.parametrize(("key", "meant"), [("disks", "disk"), ("event_medium", "event_media")])
def test_the_error_for_a_key_with_a_typo_names_the_key_that_was_meant(key: str, meant: str) -> None:
    """The list of all keys is too long to find it there."""
    with pytest.raises(
        ConfigError, match=rf"is not a key of kv_connector_extra_config\. Did you mean {meant}\? The keys"
    ):
        made(host_bytes="1GiB", **{key: 1})


def test_an_unknown_key_is_named() -> None:
    """A typing error never means the default."""
    with pytest.raises(ConfigError, match="num_cpu_blocks: is not a key") as caught:
        made(host_bytes="1GiB", num_cpu_blocks=3)
    assert caught.value.argument == "num_cpu_blocks"
    assert all(key in str(caught.value) for key in KEYS)


@pytest.mark.parametrize("sizes", [{}, {"host_bytes": "1GiB", "num_host_blocks": 3}, {"host_bytes": None}])
def test_one_size_is_needed(sizes: dict[str, object]) -> None:
    """Neither none, nor two that might contradict each other."""
    with pytest.raises(ConfigError, match=r"give one of host_bytes, cpu_bytes_to_use, num_host_blocks"):
        made(**sizes)


@pytest.mark.parametrize("key", ["host_bytes", "cpu_bytes_to_use"])
def test_bytes_are_those_of_the_server(key: str) -> None:
    """Each rank takes its part of them."""
    assert made(4, **{key: "4GiB"}).host_bytes == 2**30
    assert made(4, **{key: "4GiB"}).resolve_host_blocks(2**20) == 1024


def test_blocks_are_counted_once() -> None:
    """A block has a part on every rank, so their number is not divided."""
    assert made(4, num_host_blocks=100).num_host_blocks == 100


def test_quotas_are_those_of_the_server() -> None:
    """By salt; each rank takes its part of the sizes in host memory."""
    table = {"default": {"host_ceiling": "4GiB"}, "salts": {"secret": {"host_floor": "2GiB", "name": "team-a"}}}
    quotas = made(4, host_bytes="16GiB", quotas=table).quotas
    assert quotas == Quotas({"secret": Quota(host_floor=2**29, name="team-a")}, Quota(host_ceiling=2**30))
    with pytest.raises(ConfigError, match="kv_connector_extra_config") as wrong:
        made(host_bytes="1GiB", quotas={"salts": {"secret": {"floor": 1}}})
    assert wrong.value.argument == "quotas.salts[1].floor" and "secret" not in str(wrong.value)


def test_other_keys_are_passed_on() -> None:
    """With their checks: an invalid value is an error that names the key."""
    config = made(num_host_blocks=9, store_policy="selective", verify=True, max_bytes_in_flight="1MiB", eviction="lru")
    assert (config.store_policy, config.verify, config.bytes_in_flight) == ("selective", True, 2**20)
    assert made(num_host_blocks=9, load_choice="cost").load_choice == "cost"
    assert made(num_host_blocks=9, transfer_timeout_s=3).transfer_timeout_s == 3
    wrong = [("verify", "yes"), ("transfer_timeout_s", 0), ("host_bytes", "much"), ("eviction", "arc")]
    wrong += [("load_choice", value) for value in ("never", "", None, 3, True, ["cost"], {"stop": 1})]
    for key, value in wrong:
        with pytest.raises(ConfigError, match=key):
            made(**({"num_host_blocks": 9} if key != "host_bytes" else {}), **{key: value})


def test_a_step_is_in_flight_at_once_whatever_is_configured() -> None:
    """Fewer bytes would not bound what a worker copies at a time, only how much of a step is stored."""
    groups = [KVCacheGroup("full", block_size=16), KVCacheGroup("window", SlidingWindow(64), 8)]

    def bound(**extra: object) -> int | str | None:
        config = offload_config({"num_host_blocks": 9, **extra}, groups, namespace="n", num_ranks=1)
        return with_a_step_in_flight(config, 100, 1000).max_bytes_in_flight

    assert bound() is None
    assert bound(max_bytes_in_flight=1) == 1000 * (7 + 13)
    assert bound(max_bytes_in_flight="1MiB") == 2**20


def test_windows_are_stored_where_vllm_retains_them() -> None:
    """At intervals, at all blocks (vLLM's None), or where prompts end and part. The connector's own key comes first."""

    def interval(extra: dict[str, object], **retained: object) -> int:
        config = made(num_host_blocks=9, **extra)
        return with_windows_as_retained(config, extra, SimpleNamespace(**retained)).window_interval_tokens

    assert interval({}) == interval({}, prefix_cache_retention_interval=0) == 0
    assert interval({}, prefix_cache_retention_interval=512) == 512
    assert interval({}, prefix_cache_retention_interval=None) == 1
    assert interval({"window_interval_tokens": 0}, prefix_cache_retention_interval=None) == 0
    assert interval({"window_interval_tokens": 96}, prefix_cache_retention_interval=512) == 96
