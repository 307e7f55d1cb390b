"""vLLM's own `SimpleCPUOffloadConnector` on a machine without CUDA: its scheduler's side as it is, and copies here.

It is what ours is measured beside.
"""

from __future__ import annotations

from typing import Any, ClassVar
from unittest import mock

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import SimpleCPUOffloadConnector
from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

__all__ = ["CPUPeer", "Copies"]


class _Over:
    """The event of a copy that has been made."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _Stream:
    """In place of `torch.cuda.Stream`, which cannot be made here."""

    def __init__(self, **options: Any) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


class Copies(SimpleCPUOffloadWorker):
    """Copies in the calling thread."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        with mock.patch.object(torch.cuda, "Stream", _Stream):
            super().register_kv_caches(kv_caches)

    def _init_cpu_mode(self, regions: dict[str, torch.Tensor], block_bytes: int, device: torch.device) -> None:
        self.cpu_kv_caches = {
            name: torch.zeros((self.num_cpu_blocks, *region.shape[1:]), dtype=region.dtype)
            for name, region in regions.items()
        }

    def start_load_kv(self) -> None:
        found = self._connector_metadata
        if found is not None and found.load_cpu_blocks:
            _copy(self.cpu_kv_caches, found.load_cpu_blocks, self.gpu_kv_caches, found.load_gpu_blocks)
            self._load_events.append((found.load_event, _Over()))

    def wait_for_save(self) -> None:
        found = self._connector_metadata
        if found is not None and found.store_gpu_blocks:
            self.store(found.store_gpu_blocks, found.store_cpu_blocks)
            self._store_events.append((found.store_event, _Over()))

    def store(self, device_ids: list[int], host_ids: list[int]) -> None:
        _copy(self.gpu_kv_caches, device_ids, self.cpu_kv_caches, host_ids)


def _copy(source: Any, source_ids: list[int], destination: Any, destination_ids: list[int]) -> None:
    at, to = torch.tensor(source_ids), torch.tensor(destination_ids)
    for name, region in source.items():
        destination[name][to] = region[at]


class CPUPeer(SimpleCPUOffloadConnector):
    copies_class: ClassVar[type[Copies]] = Copies

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        worker = self.worker_handler
        if worker is not None:
            self.worker_handler = self.copies_class(vllm_config, kv_cache_config, worker.cpu_capacity_bytes)
