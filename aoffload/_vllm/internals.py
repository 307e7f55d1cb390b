"""All that this package imports from vLLM, and a list of all that it reads of vLLM's objects.

vLLM documents one interface for connectors: the hooks of `KVConnectorBase_V1`, and the classes that these hooks pass.
Any release of vLLM may move everything else: modules, and the fields of requests, blocks, configurations and the block
pool. No other file of the package imports vLLM. When vLLM imports the class of the connector, `check` looks for every
field by its name. So a version that lacks a field is refused while vLLM checks its configuration. The other files read
the fields directly, because a function for each field would slow down the scheduler's step.

`from .internals import VllmConfig` imports `vllm.config` at that moment. So this file can be imported without vLLM.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any

from .._common.extras import needed
from ..errors import UnsupportedVersion

RUN_WITH = ("0.32.0", "0.33.0")
"""The versions with which the connector was run. The tables below were compared with their sources."""
SUPPORTED = "vLLM 0.32 or 0.33"
USER = "AoffloadConnector"
_BASE = "vllm.distributed.kv_transfer.kv_connector"

NAMES: Mapping[str, str] = {
    # the interface for connectors
    "KVConnectorBase_V1": f"{_BASE}.v1.base",
    "KVConnectorMetadata": f"{_BASE}.v1.base",
    "KVConnectorRole": f"{_BASE}.v1.base",
    "KVConnectorTransferResults": f"{_BASE}.v1.base",
    "KVConnectorWorkerMetadata": f"{_BASE}.v1.base",
    "SupportsHMA": f"{_BASE}.v1.base",
    "KVConnectorPromMetrics": f"{_BASE}.v1.metrics",
    "KVConnectorStats": f"{_BASE}.v1.metrics",
    "KVConnectorFactory": f"{_BASE}.factory",
    "CacheHitSource": "vllm.v1.metrics.cache_hit_source",
    # what no interface promises
    "VllmConfig": "vllm.config",
    "get_kv_transfer_group": "vllm.distributed.kv_transfer",
    "has_kv_transfer_group": "vllm.distributed.kv_transfer",
    "get_tp_group": "vllm.distributed",
    "get_kv_cache_spec_kind": "vllm.v1.kv_cache_interface",
    "get_kv_cache_spec_sliding_window": "vllm.v1.kv_cache_interface",
    "BlockRemoved": "vllm.distributed.kv_events",
    "BlockStored": "vllm.distributed.kv_events",
    "maybe_convert_block_hash": "vllm.v1.core.kv_cache_utils",
    "WorkerLoRAManager": "vllm.lora.worker_manager",
}
"""Names, each with its module."""

FIELDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "vllm.config": {
        "VllmConfig": (
            "kv_transfer_config", "model_config", "cache_config", "parallel_config", "scheduler_config",
            "attention_config", "speculative_config", "lora_config", "kv_events_config", "num_prefill_lookahead_tokens",
        ),
        "KVEventsConfig": ("enable_kv_cache_events",),
        "KVTransferConfig": ("kv_connector", "kv_role", "kv_load_failure_policy", "kv_connector_extra_config"),
        "ModelConfig": (
            "model", "revision", "dtype", "multimodal_config", "is_hybrid", "enable_sleep_mode", "compute_hash",
        ),
        "CacheConfig": ("enable_prefix_caching", "cache_dtype", "mamba_cache_mode"),
        "ParallelConfig": (
            "rank", "world_size", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
            "decode_context_parallel_size", "distributed_executor_backend", "nnodes",
        ),
        "SchedulerConfig": ("max_num_batched_tokens",),
        "AttentionConfig": ("compute_hash",),
        "SpeculativeConfig": ("use_eagle", "use_eagle_block_drop", "draft_model_config"),
        "LoRAConfig": ("max_cpu_loras",),
    },
    "vllm.v1.kv_cache_interface": {
        "KVCacheConfig": (
            "num_blocks", "kv_cache_tensors", "kv_cache_groups", "prefix_cacheable_group_ids",
        ),
        "KVCacheGroupSpec": ("kv_cache_spec",),
        "KVCacheTensor": ("layers", "layer_stride", "block_stride", "offset", "host_resident"),
        "FullAttentionSpec": ("block_size", "dcp_sharded"),
        "SlidingWindowSpec": ("block_size", "dcp_sharded", "extra_retained_tokens"),
        "ChunkedLocalAttentionSpec": ("block_size", "dcp_sharded", "attention_chunk_size"),
        "MambaSpec": ("block_size", "dcp_sharded", "mamba_cache_mode", "num_speculative_blocks"),
        "UniformTypeKVCacheSpecs": ("block_size", "dcp_sharded", "kv_cache_specs"),
    },
    "vllm.v1.core.kv_cache_manager": {
        "KVCacheManager": ("block_pool", "get_blocks"),
        "KVCacheBlocks": ("blocks",),
    },
    "vllm.v1.core.block_pool": {
        "BlockPool": (
            "blocks", "hash_block_size", "cached_block_hash_to_block", "touch", "free_blocks", "get_cached_block",
            "get_num_free_blocks", "evict_blocks", "reset_prefix_cache",
        ),
    },
    "vllm.v1.core.kv_cache_utils": {"KVCacheBlock": ("block_id", "ref_cnt")},
    "vllm.v1.core.sched.output": {
        "SchedulerOutput": ("num_scheduled_tokens", "preempted_req_ids", "kv_connector_block_state"),
        "KVConnectorBlockState": ("boundary_state_offloads",),
    },
    "vllm.v1.outputs": {"KVConnectorOutput": ("kv_connector_worker_meta", "finished_recving")},
    "vllm.v1.request": {
        "Request": (
            "request_id", "all_token_ids", "num_tokens", "num_computed_tokens", "block_hashes", "cache_salt",
            "lora_request", "mm_features", "prompt_embeds", "resumable", "skip_reading_prefix_cache",
            "shared_prefix_boundary",
        ),
    },
    "vllm.lora.request": {"LoRARequest": ("lora_int_id", "lora_name", "lora_path")},
    "vllm.multimodal.inputs": {
        "MultiModalFeatureSpec": ("identifier", "modality", "mm_position"),
        "PlaceholderRange": ("offset", "length"),
    },
}  # fmt: skip
"""By module and class, the fields and methods that the connector reads and calls. `prefix_cache_retention_interval` of
`CacheConfig` and the fields of `WorkerLoRAManager` are not here, because the connector works without them."""


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _found(NAMES[name], name)


def check() -> None:
    """Import all names, and look for all fields. `UnsupportedVersion` names the first that is missing."""
    for name, module in NAMES.items():
        if name != "WorkerLoRAManager":  # only with LoRA
            _found(module, name)
    for module, classes in FIELDS.items():
        for name, fields in classes.items():
            found = _found(module, name)
            for field in fields:
                if not has_field(found, field):
                    lacks = f"{module}.{name}.{field}"
                    raise UnsupportedVersion("vllm", version(), lacks, USER, f"install {SUPPORTED}")


def has_field(found: Any, field: str) -> bool:
    """Whether class `found` has `field`: as a method or property, as a field that it declares, or as an attribute that
    its constructor assigns."""
    return hasattr(found, field) or any(
        field in inspect.get_annotations(base) or field in _assigned(base) for base in found.__mro__
    )


def _assigned(found: type) -> Iterator[str]:
    code = getattr(found.__dict__.get("__init__"), "__code__", None)
    if code is not None:
        yield from (each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR")


def version() -> str:
    """The installed version of vLLM; empty if vLLM has no `__version__`."""
    with _vllm():
        return str(getattr(import_module("vllm"), "__version__", ""))


def untried() -> str:
    """A warning about the installed version if the connector was not run with that version; else empty."""
    installed = version().partition("+")[0]
    return (
        "" if installed in RUN_WITH else f"vLLM {installed} is not tested with aoffload; {' and '.join(RUN_WITH)} are"
    )


def _found(module: str, name: str) -> Any:
    with _vllm():
        found = import_module(module)
        if not hasattr(found, name):
            raise ImportError(f"cannot import name {name!r} from {module!r}", name=module)
        return getattr(found, name)


@contextmanager
def _vllm() -> Iterator[None]:
    """A context for imports from vLLM. It raises `MissingExtra` if vLLM is not installed, and `UnsupportedVersion` if
    the installed version lacks the module or the name."""
    with needed("vllm", USER, SUPPORTED):
        yield


def tells_of_sleep() -> bool:
    """Whether this version of vLLM calls connectors before it unmaps the KV tensors. 0.33 does; 0.32 does not."""
    return hasattr(_found(NAMES["KVConnectorBase_V1"], "KVConnectorBase_V1"), "unregister_kv_caches")


# -- the worker ------------------------------------------------------------------------------------------------------


def calling_worker() -> Any:
    """vLLM's worker that calls the connector, to register KV tensors or before it sleeps. None if no caller is a
    worker."""
    return _caller(lambda found: hasattr(type(found), "get_model") and hasattr(found, "model_runner"))


def calling_engine() -> Any:
    """vLLM's engine core, which makes the scheduler and, with it, the connector. It has vLLM's weight version. None if
    no caller is an engine core, or if this version of vLLM has no weight version."""
    return _caller(lambda found: hasattr(type(found), "get_weight_version"))


def _caller(is_wanted: Callable[[Any], bool]) -> Any:
    """The nearest object for which `is_wanted` is true and one of whose methods is running in this thread, or None."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        found = frame.f_locals.get("self")
        if is_wanted(found):
            return found
        frame = frame.f_back
    return None


def models_of(worker: Any) -> list[Any]:
    """The model of a worker, and its draft model if there is one."""
    draft = getattr(worker, "get_draft_model", lambda: None)()
    return [worker.get_model(), *([] if draft is None else [draft])]
