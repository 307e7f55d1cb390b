"""Workers that hold the same bytes: each tensor parallel rank of an MLA model has all latents, so they are stored once.

The workers of such a model share one host memory. Each store is made by one of them, and each load by all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from .._transfer.shared_memory import SharedMemory, shared_size
from .._transfer.transport import SharesHostMemory, Transport
from ..errors import ConfigError
from ..ledger import Direction, TransferPlan

_LATENT_KINDS = ("mla_attention", "sliding_window_mla")


def num_replicas_of(vllm_config: Any, kv_cache_config: Any) -> int:
    """The number of workers that hold the same bytes: 1, or the tensor parallel size if all groups of the KV cache hold
    latents. Workers on several machines cannot share memory, and with decode context parallelism each has other
    tokens."""
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    parallel = vllm_config.parallel_config
    is_split = parallel.decode_context_parallel_size > 1 or parallel.nnodes > 1
    if is_split or parallel.distributed_executor_backend != "mp":
        return 1
    kinds = {get_kv_cache_spec_kind(group.kv_cache_spec).value for group in kv_cache_config.kv_cache_groups}
    return int(parallel.tensor_parallel_size) if kinds <= set(_LATENT_KINDS) else 1


@attrs.frozen
class WorkerReplicas:
    """The place of a worker among `number` workers that hold the same bytes."""

    index: int
    number: int
    exchange: Callable[[str], list[str]]
    """Gives every worker the texts of all workers, in order. It returns once all of them have called it."""

    @classmethod
    def of_tensor_parallel_group(cls) -> WorkerReplicas:
        """In a worker, once vLLM has set up its groups."""
        import torch.distributed
        from vllm.distributed import get_tp_group

        group = get_tp_group()

        def exchange(text: str) -> list[str]:
            found: list[Any] = [None] * group.world_size
            torch.distributed.all_gather_object(found, text, group=group.cpu_group)
            return found

        return cls(group.rank_in_group, group.world_size, exchange)

    def stores(self, plan: TransferPlan) -> bool:
        """Whether this worker makes the copy of `plan`, which may be a load. The workers take turns with stores."""
        return plan.direction is Direction.LOAD or plan.job_id % self.number == self.index

    @contextmanager
    def sharing(self, transport: Transport, num_host_blocks: int) -> Iterator[None]:
        """Opening `transport` in this context lets it use the memory that the workers share."""
        if not isinstance(transport, SharesHostMemory):
            problem = "must be a LocalTransport, because the workers of an MLA model share host memory"
            raise ConfigError("make_transport", problem)
        memory = SharedMemory(shared_size(num_host_blocks, transport.block_bytes)) if not self.index else None
        try:
            transport.share_host_memory(self.exchange("" if memory is None else memory.path)[0])
            yield
            self.exchange("")  # until every worker has mapped it
        finally:
            if memory is not None:
                memory.close()
