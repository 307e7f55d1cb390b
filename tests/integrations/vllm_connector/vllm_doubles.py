"""Stand-ins for the modules of vLLM that the connector imports, so that it runs where vLLM is not installed.

Each name is here because the connector names it; that vLLM has them all is tested where vLLM is installed.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from types import ModuleType
from typing import Any

import attrs

from aoffload._vllm.internals import FIELDS

HAS_VLLM = importlib.util.find_spec("vllm") is not None
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"
OURS = ("connector", "statistics")
"""The modules of the connector that import vLLM as they are imported."""


class Role(Enum):
    SCHEDULER = 0
    WORKER = 1


class Connector:
    def __init__(self, vllm_config: Any, role: Role, kv_cache_config: Any) -> None:
        self._kv_transfer_config, self._role = vllm_config.kv_transfer_config, role
        self._connector_metadata: Any = None
        self._kv_cache_manager: Any = None

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._kv_cache_manager = kv_cache_manager

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None


class Metadata:
    pass


class WorkerMetadata:
    pass


class SupportsHMA:
    pass


@attrs.define
class TransferResults:
    finished_sending: set[str] = attrs.field(factory=set)
    finished_recving: set[str] = attrs.field(factory=set)
    failed_recving: set[str] = attrs.field(factory=set)


class CacheHitSource(Enum):
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    EXTERNAL_UNSPECIFIED = "external_unspecified"


@attrs.frozen(kw_only=True)
class BlockStored:
    block_hashes: list[Any]
    parent_block_hash: Any
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


@attrs.frozen(kw_only=True)
class BlockRemoved:
    block_hashes: list[Any]
    medium: str | None
    group_idx: int | None = None


def converted(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


@attrs.define
class Statistics:
    data: dict[str, Any] = attrs.field(factory=dict)


class PromMetrics:
    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        from prometheus_client import Counter, Gauge

        self._gauge_cls, self._counter_cls = metric_types[Gauge], metric_types[Counter]
        self._labelnames, self.per_engine_labelvalues = labelnames, per_engine_labelvalues


class WorkerLoRAManager:
    def list_adapters(self) -> set[int]:
        return set()


class Kind(Enum):
    FULL_ATTENTION = "full_attention"
    MLA_ATTENTION = "mla_attention"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL_ATTENTION = "chunked_local_attention"
    MAMBA = "mamba"
    CROSS_ATTENTION = "cross_attention"


@attrs.frozen(kw_only=True)
class FullAttentionSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: Any
    dcp_sharded: bool = True
    kind = Kind.FULL_ATTENTION


@attrs.frozen(kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    kind = Kind.MLA_ATTENTION


@attrs.frozen(kw_only=True)
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int
    extra_retained_tokens: int = 0
    kind = Kind.SLIDING_WINDOW


@attrs.frozen(kw_only=True)
class ChunkedLocalAttentionSpec(FullAttentionSpec):
    attention_chunk_size: int
    kind = Kind.CHUNKED_LOCAL_ATTENTION


@attrs.frozen(kw_only=True)
class MambaSpec:
    block_size: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    mamba_cache_mode: str = "none"
    num_speculative_blocks: int = 0
    dcp_sharded: bool = False
    kind = Kind.MAMBA


@attrs.frozen(kw_only=True)
class UniformTypeKVCacheSpecs:
    """Of layers with unequal pages, as workers get it."""

    block_size: int
    kv_cache_specs: dict[str, Any]
    dcp_sharded: bool = True

    @property
    def kind(self) -> Any:
        return next(iter(self.kv_cache_specs.values())).kind

    @property
    def sliding_window(self) -> int | None:
        return window_of(next(iter(self.kv_cache_specs.values())))


@attrs.frozen(kw_only=True)
class CrossAttentionSpec(FullAttentionSpec):
    kind = Kind.CROSS_ATTENTION


def kind_of(spec: Any) -> Kind:
    found: Kind = spec.kind
    return found


def window_of(spec: Any) -> int | None:
    found: int | None = getattr(spec, "sliding_window", None)
    return found


class Factory:
    """Only looked for."""


NAMES: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": "0.32.0"},
    "vllm.distributed.kv_events": {"BlockRemoved": BlockRemoved, "BlockStored": BlockStored},
    "vllm.v1.core.kv_cache_utils": {"maybe_convert_block_hash": converted},
    "vllm.distributed.kv_transfer": {"get_kv_transfer_group": Connector, "has_kv_transfer_group": bool},
    f"{CONNECTOR}.v1.base": {
        "KVConnectorBase_V1": Connector,
        "KVConnectorMetadata": Metadata,
        "KVConnectorRole": Role,
        "KVConnectorTransferResults": TransferResults,
        "KVConnectorWorkerMetadata": WorkerMetadata,
        "SupportsHMA": SupportsHMA,
    },
    f"{CONNECTOR}.v1.metrics": {"KVConnectorPromMetrics": PromMetrics, "KVConnectorStats": Statistics},
    f"{CONNECTOR}.factory": {"KVConnectorFactory": Factory},
    "vllm.distributed": {"get_tp_group": Connector},
    "vllm.lora.worker_manager": {"WorkerLoRAManager": WorkerLoRAManager},
    "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": CacheHitSource},
    "vllm.v1.kv_cache_interface": {
        "FullAttentionSpec": FullAttentionSpec,
        "MLAAttentionSpec": MLAAttentionSpec,
        "SlidingWindowSpec": SlidingWindowSpec,
        "ChunkedLocalAttentionSpec": ChunkedLocalAttentionSpec,
        "MambaSpec": MambaSpec,
        "UniformTypeKVCacheSpecs": UniformTypeKVCacheSpecs,
        "CrossAttentionSpec": CrossAttentionSpec,
        "get_kv_cache_spec_kind": kind_of,
        "get_kv_cache_spec_sliding_window": window_of,
    },
}

for module_name, made in FIELDS.items():
    for class_name, fields in made.items():
        stand_in = type(class_name, (), {"__annotations__": dict.fromkeys(fields, object)})
        NAMES.setdefault(module_name, {}).setdefault(class_name, stand_in)


@contextmanager
def vllm_importable() -> Iterator[None]:
    """vLLM where it is installed. Else the stand-ins, which are gone afterwards, with what was imported over them."""
    if HAS_VLLM:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what it imports
            yield
        return
    made = {name: ModuleType(name) for name in NAMES}
    for name, module in made.items():
        module.__dict__.update(NAMES[name], __path__=[])
    sys.modules.update(made)
    try:
        yield
    finally:
        package = sys.modules["aoffload._vllm"]
        for name in OURS:
            if sys.modules.pop(f"{package.__name__}.{name}", None) is not None:
                delattr(package, name)
        for name in made:
            del sys.modules[name]


with vllm_importable():
    from aoffload._vllm import statistics as statistics
    from aoffload._vllm.connector import AoffloadConnector as AoffloadConnector

    KVConnectorRole = sys.modules[f"{CONNECTOR}.v1.base"].KVConnectorRole
    interface = __import__("vllm.v1.kv_cache_interface", fromlist=["FullAttentionSpec"])
