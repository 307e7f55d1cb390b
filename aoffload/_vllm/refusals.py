"""Refusals of configurations of vLLM in which the connector cannot work, each with the reason and a way out.

vLLM makes connectors after it has loaded the weights of the model. But vLLM imports the class of the connector earlier,
while it checks its configuration. `check_early` finds that configuration at the import. Under `MultiConnector`, vLLM
imports the classes in their order, up to the first class that does not support several KV cache groups.

The connector itself makes the checks that need the KV cache: of the kinds of the model's KV caches, their layout in
memory, and the number of bytes of a block.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import FrameType
from typing import Any

from aoffload import KVCacheGroup

from .._common.arguments import shown
from .._common.extras import needed
from .._config.tiers import DiskTier, parse_bytes
from .._tiers.disk.files import check_directory
from .._transfer.backends.cuda.page_locked import memory_limit
from ..errors import ConfigError
from .drafts import model_paths
from .groups import NO_DRAFTS_WITH_STATES, check_mode
from .internals import tells_of_sleep
from .internals import version as vllm_version
from .settings import BYTES, event_media, given_namespace, offload_config


def check_early() -> None:
    """Refuse the configuration that vLLM is checking now. If vLLM checks none, the connector makes its checks when it
    is made."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__post_init__":
            found: Any = frame.f_locals.get("self")
            if type(found).__name__ == "VllmConfig":
                if found.kv_transfer_config is not None and found.model_config:
                    _check_each(found)
                return
        frame = frame.f_back


def _check_each(vllm_config: Any) -> None:
    """Check the configuration of each connector of this package, as `MultiConnector` makes it."""
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_connector == "AoffloadConnector":
        check_all(vllm_config)
    elif transfer.kv_connector == "MultiConnector":
        for number, given in enumerate(_connectors_of(transfer)):
            child = copy.copy(vllm_config)
            child.kv_transfer_config = type(transfer)(**{"engine_id": transfer.engine_id, **given})
            try:
                if child.kv_transfer_config.kv_connector == "AoffloadConnector":
                    _check_policy(transfer)  # vLLM follows the policy of MultiConnector, not the child's
                _check_each(child)
            except ConfigError as error:
                place = f"`connectors[{number}]` of MultiConnector"
                raise ConfigError(error.argument, f"{error.problem} ({place})") from error


def _connectors_of(transfer: Any) -> Sequence[Mapping[str, Any]]:
    """The key `connectors` of a `MultiConnector`."""
    found = (transfer.kv_connector_extra_config or {}).get("connectors") or ()
    is_list = isinstance(found, list | tuple)
    if not is_list or not all(isinstance(one, Mapping) and all(isinstance(key, str) for key in one) for one in found):
        problem = 'must be a list of configurations, such as [{"kv_connector": "AoffloadConnector", ...}]'
        raise ConfigError("connectors", f"{problem}, got {shown(found)}")
    return found


def check_all(vllm_config: Any) -> None:
    """Raise `ConfigError` for unsupported configurations. It names the option of vLLM, or the key of
    `kv_connector_extra_config`, and gives a way out."""
    _check_transfer(vllm_config)
    _check_engine(vllm_config)
    transfer, model = vllm_config.kv_transfer_config, vllm_config.model_config
    extra = transfer.kv_connector_extra_config or {}
    given_namespace(extra, model_paths(vllm_config))
    event_media(extra)
    any_groups = [KVCacheGroup("any")]  # the real groups are known only after the weights are loaded
    parallel = vllm_config.parallel_config
    config = offload_config(extra, any_groups, namespace=f"vllm/{model.model}", num_ranks=parallel.world_size)
    if parallel.nnodes == 1 and parallel.distributed_executor_backend != "ray":  # the workers run on this machine
        _check_memory(extra)
        if config.disk is not None:
            _check_disk(config.disk)


def _check_transfer(vllm_config: Any) -> None:
    transfer = vllm_config.kv_transfer_config
    _check_policy(transfer)
    if transfer.kv_role != "kv_both":
        problem = f'must be "kv_both": one engine stores and loads (got {transfer.kv_role!r})'
        raise ConfigError("kv_role", f"{problem}. Set it in --kv-transfer-config")


def _check_policy(transfer: Any) -> None:
    if transfer.kv_load_failure_policy != "recompute":
        name = transfer.kv_connector
        got = f"{name} got {transfer.kv_load_failure_policy!r}"
        problem = 'must be "recompute", because a cache must not fail a request'
        raise ConfigError("kv_load_failure_policy", f"{problem} ({got}). Set it for {name} in --kv-transfer-config")


def _check_engine(vllm_config: Any) -> None:
    extra, parallel = vllm_config.kv_transfer_config.kv_connector_extra_config or {}, vllm_config.parallel_config
    if not vllm_config.cache_config.enable_prefix_caching:
        problem = "must be on: the connector loads into vLLM's prefix cache"
        raise ConfigError("enable_prefix_caching", f"{problem}. Start without --no-enable-prefix-caching")
    if parallel.pipeline_parallel_size > 1:
        problem = "must be 1: stages hold different layers, which is not supported"
        raise ConfigError("pipeline_parallel_size", f"{problem}. Use --tensor-parallel-size instead")
    if parallel.data_parallel_size > 1 and extra.get("disk"):
        problem = "supports one engine: with data_parallel_size, all engines would write to one directory"
        raise ConfigError("disk", f"{problem}. Start each engine by itself, with a `path` of its own, or use `remote`")
    if vllm_config.model_config.is_hybrid:
        _check_recurrent(vllm_config)
    if vllm_config.model_config.enable_sleep_mode and not tells_of_sleep():
        problem = f"does not work with vLLM {vllm_version()}, which unmaps KV tensors while connectors copy from them"
        raise ConfigError("enable_sleep_mode", f"{problem}. Use vLLM 0.33, or start without --enable-sleep-mode")


def _check_recurrent(vllm_config: Any) -> None:
    """Of a model with recurrent layers. vLLM itself turns its cache mode to `align` with prefix caching."""
    check_mode(vllm_config.cache_config.mamba_cache_mode)
    if vllm_config.speculative_config is not None:
        raise ConfigError("speculative_config", f"{NO_DRAFTS_WITH_STATES}. Start without --speculative-config")
    if (vllm_config.kv_transfer_config.kv_connector_extra_config or {}).get("remote"):
        raise ConfigError("remote", "supports full attention only, but this model has recurrent layers. Use `disk`")


def _check_memory(extra: Mapping[str, Any]) -> None:
    """Refuse more bytes than there are. The size of a block is not known yet, so `num_host_blocks` is not checked."""
    limit = memory_limit()
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most_here = most if limit is None else min(most, limit.limit_bytes)
    for key in BYTES:
        if extra.get(key) is not None and (num_bytes := parse_bytes(key, extra[key])) >= most_here:
            problem = f"is {num_bytes:,} bytes of host memory, but this machine or container has {most_here:,}"
            raise ConfigError(key, f"{problem}. Set a smaller size, and use `disk` for the rest")


def _check_disk(tier: DiskTier) -> None:
    with needed("disk", "the key `disk` of AoffloadConnector"):
        import_module("xxhash")
    check_directory(tier.path, tier.size_bytes)
