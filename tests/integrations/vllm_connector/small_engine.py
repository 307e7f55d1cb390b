"""A scheduler like vLLM's around both halves of the connector: it calls the hooks in vLLM's order. The KV of a token is
a hash of all tokens up to it, so wrong bytes are seen."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from functools import reduce
from types import SimpleNamespace
from typing import Any

from engine_doubles import BLOCK, PAGE_BYTES, Manager, Request, kv_tensor

from aoffload import FullAttention, KVCacheGroup
from aoffload.integrations.vllm.groups import CachedGroups
from aoffload.integrations.vllm.guard import Guard
from aoffload.integrations.vllm.messages import Commands, Reports
from aoffload.integrations.vllm.regions import block_bytes_of, placements_of
from aoffload.integrations.vllm.scheduler import SchedulerSide
from aoffload.integrations.vllm.settings import offload_config
from aoffload.integrations.vllm.worker import WorkerSide, invalid_blocks, lost_requests

GROUPS = CachedGroups((0,), (KVCacheGroup("full", FullAttention(), BLOCK),))


class SmallEngine:
    def __init__(self, num_blocks: int = 24, num_ranks: int = 1, **extra: Any) -> None:
        config = offload_config({"num_host_blocks": 64, **extra}, GROUPS.groups, namespace="m", num_ranks=num_ranks)
        self.manager = Manager(num_blocks)
        self.memories, placed = [], kv_tensor(num_blocks)[1]
        places = placements_of([placed], num_blocks)
        self.now = 0.0
        self.half = SchedulerSide(
            config,
            GROUPS,
            num_blocks=num_blocks,
            block_bytes=block_bytes_of(places),
            num_ranks=num_ranks,
            clock=lambda: self.now,
        )
        self.half.bind(self.manager)
        self.guard = Guard(self.half)
        self.workers = [WorkerSide(config, places, num_blocks, rank) for rank in range(num_ranks)]
        for worker in self.workers:
            self.memories.append(kv_tensor(num_blocks)[0])
            worker.register(dict.fromkeys(placed.layers, self.memories[-1]))
        self.waiting: list[Request] = []
        self.loading: dict[str, Request] = {}
        self.over: set[str] = set()
        self.requests: dict[str, Request] = {}
        self.alter: Callable[[Commands], Commands] = lambda commands: commands
        """What a test makes of the commands on their way to the workers."""
        self.wrong: list[str] = []

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    # -- the scheduler --------------------------------------------------------------------------------------------

    def submit(self, *requests: Request) -> None:
        self.waiting += requests
        self.requests |= {request.request_id: request for request in requests}

    def step(self, preempted: Iterable[str] = ()) -> None:
        """Every request that is ready is computed to its end, and finishes."""
        scheduled: dict[str, int] = {}
        for request in tuple(self.waiting):
            name = request.request_id
            if name in self.loading:
                if name not in self.over:
                    continue
                del self.loading[name]
                self.over.discard(name)
                if request.num_computed_tokens:
                    self.manager.cache(request, request.num_computed_tokens)
                else:
                    self.manager.release(request)
            if not request.num_computed_tokens and not self._match(request):
                continue
            self.manager.grow(request, request.num_tokens)
            scheduled[name] = request.num_tokens - request.num_computed_tokens
        self._execute(scheduled, preempted)

    def _match(self, request: Request) -> bool:
        """Whether it can be computed in this step."""
        hit = self.manager.hit(request)
        local = len(hit) * BLOCK
        external = self.guard.match(request, local)
        if external is None:
            return False
        self.manager.adopt(request, hit)
        request.num_computed_tokens = local + external
        if external:
            self.manager.grow(request, local + external)
            self.loading[request.request_id] = request
        self.guard.allocated(request, external)
        return not external

    def _execute(self, scheduled: dict[str, int], preempted: Iterable[str]) -> None:
        output = SimpleNamespace(num_scheduled_tokens=scheduled, preempted_req_ids=set(preempted))
        commands = self.alter(self.guard.step(output))
        for name in scheduled:
            self.manager.cache(self.requests[name], self.requests[name].num_tokens)
        for memory in self.memories:
            for name in scheduled:
                self._forward(memory, self.requests[name])
        for worker in self.workers:
            worker.start((*commands.loads, *commands.stores))
        told = [reports for worker in self.workers if (reports := worker.take_reports()) is not None]
        self._update(commands, scheduled)
        if told:
            self.over |= self.guard.take(reduce(Reports.joined, told))

    def _update(self, commands: Commands, scheduled: dict[str, int]) -> None:
        invalid, lost = invalid_blocks(commands.reports), lost_requests(commands.reports)
        for name, request in self.loading.items():
            if name in lost:
                request.num_computed_tokens = 0
            for at, block in enumerate(self.manager.tables.get(name, [])):
                if block.block_id in invalid:
                    request.num_computed_tokens = min(request.num_computed_tokens, at * BLOCK)
        self.over |= {report.request_id for report in commands.reports}
        for name in scheduled:
            request = self.requests[name]
            request.num_computed_tokens = request.num_tokens
            self.finish(request)

    def finish(self, request: Request) -> None:
        ids = [block.block_id for block in self.manager.tables.get(request.request_id, [])]
        self.guard.finished(request, (ids,))
        self.waiting.remove(request)
        if request.request_id not in self.loading:
            self.manager.release(request)

    def run(self, *requests: Request, most_steps: int = 20_000) -> None:
        """Until every request has finished and the connector is at rest."""
        self.submit(*requests)
        for _ in range(most_steps):
            if not self.waiting and not self.guard.is_busy:
                return
            self.step()
        raise AssertionError(f"not at rest: {[request.request_id for request in self.waiting]}")

    # -- the model ------------------------------------------------------------------------------------------------

    def _forward(self, memory: Any, request: Request) -> None:
        """Compute what is not computed, and note a request that would have read wrong KV."""
        blocks, pages = self.manager.tables[request.request_id], memory.view(2, -1, PAGE_BYTES)
        for at in range(request.num_tokens):
            place = slice(at % BLOCK * 4, at % BLOCK * 4 + 4)
            right = zlib.crc32(bytes(request.all_token_ids[: at + 1])).to_bytes(4, "little")
            page = pages[:, blocks[at // BLOCK].block_id, place]
            if at >= request.num_computed_tokens:
                page[:] = page.new_tensor(list(right))
            elif any(bytes(each.tolist()) != right for each in page):
                self.wrong.append(f"{request.request_id} at {at}")
                return
