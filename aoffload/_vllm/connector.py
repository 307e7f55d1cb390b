"""The connector that vLLM loads, once in its scheduler and once in each worker. Its hooks call the two halves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from aoffload import HostCache, KVRegion, Tier

from .._observe.kv_events.events import EventGroup
from ..transport import LocalTransport, Transport
from .blocks import block_bytes_of, placements_of
from .drafts import Drafts, draft_model_of, model_paths
from .groups import CachedGroups
from .guard import Guard, SleepGuard
from .internals import (
    CacheHitSource,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
    VllmConfig,
    calling_engine,
    get_kv_transfer_group,
    has_kv_transfer_group,
    untried,
)
from .internals import check as check_version
from .internals import version as vllm_version
from .kv_events import RouterEvents, event_groups, event_maker, hash_converter
from .messages import NOTHING, Commands, Reports
from .refusals import check_all
from .replicas import WorkerReplicas, num_replicas_of
from .scheduler import SchedulerSide
from .settings import event_media, given_namespace, offload_config, with_a_step_in_flight, with_windows_as_retained
from .statistics import OffloadMetrics, OffloadStatistics
from .weights import WeightVersion
from .worker import Identity, WorkerSide, invalid_blocks, lost_requests
from .worker_adapters import LoadedAdapters, watch
from .worker_weights import ModelWeights

check_version()
_VLLM = vllm_version()
_log = logging.getLogger("vllm.aoffload")


class StepCommands(KVConnectorMetadata):  # type: ignore[misc]
    def __init__(self, commands: Commands) -> None:
        self.commands = commands


class StepReports(KVConnectorWorkerMetadata):  # type: ignore[misc]
    def __init__(self, reports: Reports) -> None:
        self.reports = reports

    def aggregate(self, other: StepReports) -> StepReports:
        return StepReports(self.reports.joined(other.reports))


_PROCESS_INPUTS = ("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate")
"""Options that change how vLLM preprocesses an image or a video for its model. Neither vLLM's hash of the input nor
its hash of the model depends on these options."""
_IDLE = StepCommands(NOTHING)
"""The usual case: the step copies nothing."""


_SOURCES = {
    Tier.HOST: CacheHitSource.HOST,
    Tier.DISK: CacheHitSource.DISK,
    Tier.REMOTE: CacheHitSource.EXTERNAL_UNSPECIFIED,
}
"""vLLM's names of the tiers. vLLM has no name for a remote store."""


class AoffloadConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Host memory as a tier below vLLM's own prefix cache."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_all(vllm_config)
        parallel = vllm_config.parallel_config
        groups = CachedGroups.of(kv_cache_config, parallel.decode_context_parallel_size)
        extra = self._kv_transfer_config.kv_connector_extra_config or {}
        given = given_namespace(extra, model_paths(vllm_config))
        namespace = "/".join([_namespace(vllm_config), *([given] if given else [])])
        replicas = num_replicas_of(vllm_config, kv_cache_config)
        self._config = config = offload_config(
            extra, groups.groups, namespace=namespace, num_ranks=parallel.world_size, num_replicas=replicas
        )
        num_blocks = kv_cache_config.num_blocks
        placements = placements_of(kv_cache_config.kv_cache_tensors, num_blocks)
        self._deciding: Guard | SleepGuard
        """Only in the scheduler."""
        self._media = event_media(extra)
        self._event_groups: list[EventGroup] = []
        """Empty if vLLM publishes no KV events."""
        events = vllm_config.kv_events_config
        if events is not None and events.enable_kv_cache_events and role is KVConnectorRole.SCHEDULER:
            self._event_groups = event_groups(kv_cache_config, groups)
        self._take_events: Callable[[], list[Any]] = list
        self._has_events: Callable[[], bool] = bool
        """Whether there are events for another step."""
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            block_bytes = block_bytes_of(placements)
            config = with_a_step_in_flight(config, vllm_config.scheduler_config.max_num_batched_tokens, block_bytes)
            config = with_windows_as_retained(config, extra, vllm_config.cache_config)
            if about := untried():
                _log.warning("aoffload: %s", about)
            half = SchedulerSide(
                config, groups, num_blocks=num_blocks, block_bytes=block_bytes, num_ranks=parallel.world_size,
                max_loaded_adapters=None if vllm_config.lora_config is None else vllm_config.lora_config.max_cpu_loras,
                drafts=Drafts.of(vllm_config),
            )  # fmt: skip
            can_sleep = vllm_config.model_config.enable_sleep_mode
            self._deciding = SleepGuard(Guard(half), parallel.world_size) if can_sleep else Guard(half)
        else:
            is_kept = config.disk is not None or config.remote is not None
            identity = _identity(vllm_config, kv_cache_config, given) if is_kept else None
            self._worker = WorkerSide(
                config, placements, num_blocks, parallel.rank, self.make_transport, identity=identity,
                adapters=_adapters(vllm_config, parallel.rank),
                replicas=WorkerReplicas.of_tensor_parallel_group() if replicas > 1 else None,
                weights=ModelWeights(parallel.rank) if vllm_config.model_config.enable_sleep_mode else None,
            )  # fmt: skip
        self._at_end: Callable[[WorkerSide], None] = lambda worker: None
        """Called in a worker before it closes."""

    def make_transport(self, regions: Sequence[KVRegion]) -> Transport:
        """The transport that copies between vLLM's tensors, host memory and the tiers below, in a worker. A subclass
        may return another one."""
        return LocalTransport(regions, disk=self._config.disk, remote=self._config.remote)

    @property
    def ledger(self) -> HostCache:
        """The ledger, in the scheduler. It is here for inspection from outside."""
        return self._deciding.half.ledger

    @property
    def off_reason(self) -> str:
        """Why the cache has turned itself off, in the scheduler; empty while it is on."""
        return self._deciding.off_reason

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # -- in the scheduler -----------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        extensions = []
        if self._event_groups:
            events = self._events_of(kv_cache_manager.block_pool)
            extensions.append(events)
            self._take_events, self._has_events = events.take, lambda: events.is_waiting
        self._deciding.half.bind(kv_cache_manager, extensions)
        core = calling_engine()
        if core is not None:
            self._deciding.half.version = WeightVersion(core, self._config.weights_epoch)
        worker = _worker_of_this_process()
        if self._config.disk is not None and worker is not None:
            worker._at_end = self._deciding.flush

    def _events_of(self, pool: Any) -> RouterEvents:
        half = self._deciding.half
        return RouterEvents(
            self._event_groups,
            self._media,
            pool.hash_block_size,
            find=half.engine_request,
            cleared=lambda: pool.cached_block_hash_to_block,  # `BlockPool.reset_prefix_cache` makes another one
            is_off=lambda: self.off_reason,
            convert=hash_converter(),
            make=event_maker(),
            num_ahead=half.drafts.num_ahead,
        )

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        found = self._deciding.match(request, num_computed_tokens)
        return found, bool(found)

    def on_new_request(self, request: Any) -> None:
        self._deciding.arrived(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._deciding.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepCommands:
        commands = self._deciding.step(scheduler_output)
        return _IDLE if commands is NOTHING else StepCommands(commands)

    def update_connector_output(self, connector_output: Any) -> None:
        told = connector_output.kv_connector_worker_meta
        if told is None:  # in most steps; the next statement costs more
            return
        if isinstance(told, StepReports) and (landed := self._deciding.take(told.reports)):
            connector_output.finished_recving = {*(connector_output.finished_recving or ()), *landed}

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._deciding.finished(request, block_ids)

    def has_pending_block_frees(self) -> bool:
        return self._deciding.frees_soon()

    def has_pending_push_work(self) -> bool:
        return self._deciding.is_busy or self._has_events()

    def take_events(self) -> list[Any]:
        return self._take_events()

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        found = self._deciding.hit_tiers(request.request_id, num_external_tokens)
        return {_SOURCES[tier]: number for tier, number in found.items()}

    def reset_cache(self) -> bool:
        self._deciding.reset()
        return True

    def get_kv_connector_stats(self) -> OffloadStatistics | None:
        if self._worker is not None:
            return None  # workers report to the scheduler, which counts
        self._deciding.half.steps.ends()  # vLLM asks once at the end of each step
        found = self._deciding.take_counts()
        return OffloadStatistics(data=found) if found else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> OffloadStatistics:
        return OffloadStatistics(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> OffloadMetrics:
        return OffloadMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- in a worker ----------------------------------------------------------------------------------------------

    @property
    def _copying(self) -> WorkerSide:
        assert self._worker is not None, "a hook of a worker in the scheduler"
        return self._worker

    @property
    def _commands(self) -> Commands:
        bound = self._connector_metadata
        return bound.commands if isinstance(bound, StepCommands) else Commands()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._copying.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        self._copying.sleep()

    def restore_kv_caches(self) -> None:
        self._copying.wake_up()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._copying.load(self._commands)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing, because vLLM schedules a request only after its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing, because stores begin after the forward."""

    def wait_for_save(self) -> None:
        self._copying.start(self._commands.stores, self._commands.uses)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        reports = self._commands.reports
        over = {report.request_id for report in reports}
        return KVConnectorTransferResults(finished_recving=over, failed_recving=lost_requests(reports))

    def get_block_ids_with_load_errors(self) -> set[int]:
        return invalid_blocks(self._commands.reports) | self._copying.changed_blocks(self._commands)

    def build_connector_worker_meta(self) -> StepReports | None:
        reports = self._copying.take_reports()
        return None if reports is None else StepReports(reports)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._at_end(self._worker)
            self._worker.close()


def _worker_of_this_process() -> AoffloadConnector | None:
    """The worker's half, if one process has both halves. vLLM ends the workers first. After that, the scheduler has no
    other way to send the last blocks to the disk."""
    found = get_kv_transfer_group() if has_kv_transfer_group() else None
    return found if isinstance(found, AoffloadConnector) else None


def _adapters(vllm_config: VllmConfig, rank: int) -> LoadedAdapters | None:
    """None without LoRA, or if the connector cannot see the adapters in this version of vLLM. Then their KV is not
    cached."""
    if vllm_config.lora_config is None:
        return None
    from .internals import WorkerLoRAManager

    if watch(WorkerLoRAManager):
        return LoadedAdapters(rank, vllm_config.lora_config)
    _log.warning("aoffload: vLLM %s hides its LoRA adapters, so requests with adapters are not cached", _VLLM)
    return None


def _identity(vllm_config: VllmConfig, kv_cache_config: Any, given: str) -> Identity:
    """The identity of KV that outlives the engine. It differs for another version, attention backend or override of the
    model."""
    model = vllm_config.model_config
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    processors = [getattr(model.multimodal_config, name, None) for name in _PROCESS_INPUTS]
    drafts = draft_model_of(vllm_config)
    hashes = model.compute_hash(), vllm_config.attention_config.compute_hash()
    others = (
        _VLLM, *hashes, specs, *([processors] if any(processors) else ()),
        *([] if drafts is None else [drafts.compute_hash()]),
    )  # fmt: skip
    return Identity(given, model_paths(vllm_config), repr(others))


def _namespace(vllm_config: VllmConfig) -> str:
    model = vllm_config.model_config
    return f"vllm/{model.model}@{model.revision or ''}/{model.dtype}/{vllm_config.cache_config.cache_dtype}"
