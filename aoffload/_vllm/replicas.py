"""Workers that hold the same bytes.

Every tensor parallel rank of an MLA model holds all latents, so its workers share one host memory: they take turns with
stores, and each worker makes every load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from .._transfer.shared_memory import SharedMemory, shared_size
from .._transfer.transport import SharesHostMemory, Transport
from ..errors import AoffloadError, ConfigError
from ..ledger import Direction, TransferPlan

_LATENT_KINDS = ("mla_attention", "sliding_window_mla")
_CLOSE_S = 1.0
"""How long a transport may take to close if another worker could not open its own."""
_ERROR = "error: "


def num_replicas_of(vllm_config: Any, kv_cache_config: Any) -> int:
    """The number of workers that hold the same bytes: the tensor parallel size if all KV cache groups hold latents,
    else 1. Also 1 if the workers may run on several machines, which cannot share memory, or with decode context
    parallelism, because then each worker holds other tokens."""
    from .internals import get_kv_cache_spec_kind

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
    """Sends a text to all workers and returns the texts of all, by rank. Returns once every worker has called it."""

    @classmethod
    def of_tensor_parallel_group(cls) -> WorkerReplicas:
        """In a worker, once vLLM has set up its groups."""
        import torch.distributed

        from .internals import get_tp_group

        group = get_tp_group()

        def exchange(text: str) -> list[str]:
            found: list[Any] = [None] * group.world_size
            torch.distributed.all_gather_object(found, text, group=group.cpu_group)
            return found

        return cls(group.rank_in_group, group.world_size, exchange)

    def copies(self, plan: TransferPlan) -> bool:
        """Whether this worker copies the blocks of `plan`. Every worker makes each load; the workers take turns with
        stores."""
        return plan.direction is Direction.LOAD or plan.job_id % self.number == self.index

    @contextmanager
    def sharing(self, transport: Transport, num_host_blocks: int) -> Iterator[None]:
        """Within this context, `transport.open` maps the host memory that the workers share.

        If a worker cannot make or map the memory, no worker waits for it: every worker raises, and a transport that was
        opened is closed. `ConfigError` names the worker that failed.
        """
        memory: SharedMemory | None = None
        failure: Exception | None = None
        try:
            try:
                shares = _checked(transport)
                if not self.index:
                    memory = SharedMemory(shared_size(num_host_blocks, transport.block_bytes))
            except Exception as error:  # noqa: BLE001 - the other workers have to hear of any error
                failure = error
            path = self._exchange("" if memory is None else memory.path, failure)[0]
            try:
                shares.share_host_memory(path)
                yield
            except Exception as error:  # noqa: BLE001 - as above
                failure = error
            try:
                self._exchange("", failure)  # until every worker has mapped the memory
            except BaseException:
                if failure is None:
                    transport.close(_CLOSE_S)
                raise
        finally:
            if memory is not None:
                memory.close()

    def _exchange(self, text: str, failure: Exception | None) -> list[str]:
        """The texts of all workers. If this worker has failed, it tells the others so, and raises `failure`; if only
        another one has, it raises `ConfigError` with the reason of that one."""
        heard = [_Message.of(each) for each in self.exchange(_Message(text, _problem(failure)).encoded())]
        if failure is not None:
            raise _in_words_of_vllm(failure)
        for rank, message in enumerate(heard):
            if message.problem:
                raise ConfigError("make_transport", f"worker {rank}: {message.problem}")
        return [message.text for message in heard]


@attrs.frozen
class _Message:
    """What one worker tells the others."""

    text: str
    problem: str = ""
    """Why the worker cannot share its memory; empty if it can."""

    def encoded(self) -> str:
        return _ERROR + self.problem if self.problem else self.text

    @classmethod
    def of(cls, text: str) -> _Message:
        return cls("", text.removeprefix(_ERROR)) if text.startswith(_ERROR) else cls(text)


def _checked(transport: Transport) -> SharesHostMemory:
    if not isinstance(transport, SharesHostMemory):
        problem = "must return a transport that can share host memory, because the workers of an MLA model share it"
        raise ConfigError("make_transport", problem)
    return transport


def _problem(failure: Exception | None) -> str:
    if failure is None:
        return ""
    found = _in_words_of_vllm(failure)
    return str(found) if isinstance(found, AoffloadError) else f"{type(found).__name__}: {found}"


def _in_words_of_vllm(error: Exception) -> Exception:
    """`error`, without the argument `num_replicas`, which users of vLLM do not set."""
    if isinstance(error, ConfigError) and error.argument == "num_replicas":
        found = ConfigError("make_transport", error.problem)
        found.__cause__ = error
        return found
    return error
