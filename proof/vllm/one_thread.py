"""The connector with copies in the calling thread, as the peer's: neither scheduler shares its time with copy threads.

On a CPU a copy thread takes the GIL and the caches of a processor from the scheduler. On a GPU the device copies.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Semaphore
from typing import Any

from aoffload.integrations.vllm import AoffloadConnector
from aoffload.ledger import Completion, TransferPlan
from aoffload.transport import Env, Fence, LocalTransport

__all__ = ["InOneThread", "WaitingTransport"]


class WaitingTransport(LocalTransport):
    """A launch returns when its copy is over."""

    def open(self, num_host_blocks: int, *, verify: bool, deliver: Callable[[Completion], None], env: Env) -> None:
        self._ended = Semaphore(0)

        def end(completion: Completion) -> None:
            deliver(completion)
            self._ended.release()

        super().open(num_host_blocks, verify=verify, deliver=end, env=env)

    def launch(self, plan: TransferPlan, after: Fence | None) -> None:
        super().launch(plan, after)
        self._ended.acquire()


class InOneThread(AoffloadConnector):  # type: ignore[misc]
    def make_transport(self, regions: Any) -> LocalTransport:
        return WaitingTransport(regions)
