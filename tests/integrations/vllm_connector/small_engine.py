"""A scheduler that calls the connector's hooks in vLLM's order. The KV of a token is a hash of all tokens up to it, so
that wrong bytes are detected."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import attrs
from engine_doubles import BLOCK, PAGE_BYTES, LoraManager, Manager, Request, Worker, kv_tensor
from vllm_configs import kv_cache_config, vllm_config
from vllm_doubles import AoffloadConnector, KVConnectorRole, vllm_importable

from aoffload._vllm import refusals
from aoffload._vllm.messages import Commands
from aoffload._vllm.replicas import WorkerReplicas
from aoffload._vllm.scheduler import SchedulerSide
from aoffload._vllm.worker import WorkerSide
from aoffload._vllm.worker_adapters import watch
from aoffload.ledger import Completion, Outcome, TransferPlan

assert watch(LoraManager)
PATIENCE_S = 30.0


def replicas_of(num_ranks: int) -> list[WorkerReplicas]:
    """The workers of one group, which run in threads and hear the texts of each other."""
    texts, meeting = [""] * num_ranks, threading.Barrier(num_ranks)

    def exchange(rank: int, text: str) -> list[str]:
        texts[rank] = text
        meeting.wait(PATIENCE_S)
        heard = list(texts)
        meeting.wait(PATIENCE_S)
        return heard

    return [WorkerReplicas(rank, num_ranks, partial(exchange, rank)) for rank in range(num_ranks)]


class SmallEngine:
    def __init__(
        self,
        num_blocks: int = 24,
        num_ranks: int = 1,
        *,
        windows: tuple[int, ...] = (0,),
        most_tokens: int = 1_000,
        has_latents: bool = False,
        drafts: Any = None,
        can_sleep: bool = False,
        **extra: Any,
    ) -> None:
        """`drafts`: vLLM's speculative configuration. The second layer is then a draft layer, and each request is given
        drafts, some of which are rejected."""
        self.manager = Manager(num_blocks, windows)
        self.drafts = drafts
        self.most_tokens = most_tokens
        """Tokens that a request computes in one step, at most."""
        self.now = 0.0
        self.weight_version = "default"
        described = kv_cache_config(num_blocks, windows, has_latents=has_latents)
        next_replica = iter(replicas_of(num_ranks)).__next__
        with vllm_importable(), patch.object(WorkerReplicas, "of_tensor_parallel_group", next_replica):
            configs = [vllm_config(num_ranks, rank, drafts=drafts, **extra) for rank in range(num_ranks)]
            for config in configs:
                config.model_config.enable_sleep_mode = can_sleep
            with patch.object(refusals, "tells_of_sleep", lambda: can_sleep):
                self.connector = AoffloadConnector(configs[0], KVConnectorRole.SCHEDULER, described)
                self.copiers = [AoffloadConnector(config, KVConnectorRole.WORKER, described) for config in configs]
        self.files: dict[str, int] = {}
        """What adapters there are, by path: a number stands for their weights."""
        self.loras = [LoraManager(config.lora_config, self.files) for config in configs]
        self.half._clock = lambda: self.now
        here = {"has_kv_transfer_group": lambda: num_ranks == 1, "get_kv_transfer_group": lambda: self.copiers[0]}
        with patch.dict(AoffloadConnector.bind_kv_cache_manager.__globals__, here):
            with vllm_importable():
                self.connector.bind_kv_cache_manager(self.manager)
        self.memories = [kv_tensor(num_blocks)[0] for _ in self.copiers]
        self.owners = [Worker(copier, memory) for copier, memory in zip(self.copiers, self.memories, strict=True)]
        """vLLM's workers."""
        layers = kv_tensor(num_blocks)[1].layers
        with ThreadPoolExecutor(num_ranks) as workers:  # as processes do, they register at the same time
            done = [workers.submit(worker.register, layers) for worker in self.owners]
        for one in done:
            one.result()
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.loading: dict[str, Request] = {}
        """Those for whose load the engine waits. Their blocks stay until it is over, also if they have finished."""
        self.over: set[str] = set()
        self.failed: set[str] = set()
        self.preempted: set[str] = set()
        """Since the last step was told of."""
        self.has_preempted = False
        self.num_preemptions = self.num_waits = 0
        """`num_waits`: steps in which a request was not preempted, because copies give blocks back."""
        self.alter: Callable[[Commands], Commands] = lambda commands: commands
        """What a test makes of the commands on their way to the workers."""
        self.worker_outputs: list[Any] = []
        """What the workers have told vLLM, step by step."""
        self.events: list[Any] = []
        """KV events that the connector has made."""
        self.wrong: list[str] = []
        self.may_be_off = False

    @property
    def half(self) -> SchedulerSide:
        found: SchedulerSide = self.connector._deciding.half
        return found

    @property
    def workers(self) -> list[WorkerSide]:
        return [copier._worker for copier in self.copiers]

    def close(self) -> None:
        for copier in self.copiers:
            copier.shutdown()

    # -- the scheduler --------------------------------------------------------------------------------------------

    def submit(self, *requests: Request) -> None:
        self.waiting += requests

    def step(self) -> None:
        """One step of everything that is ready. A request that has computed and generated all is finished."""
        ready, num_waits = [], self.num_waits
        for request in tuple(self.running):
            if request in self.running and self._has_room(request):
                ready.append(request)
            if self.num_waits > num_waits:
                break
        if not self.has_preempted:
            ready += [request for request in tuple(self.waiting) if self._may_run(request)]
        self.has_preempted = False
        if not ready and not self.loading and self.num_waits == num_waits:
            self._make_room()
        scheduled = {}
        for request in ready:
            scheduled[request.request_id] = self._num_next(request)
            if request not in self.running:
                self.waiting.remove(request)
                self.running.append(request)
        self._execute(ready, scheduled)

    def _make_room(self) -> None:
        """Requests that have loaded hold all blocks between them, and none can go on: the last one gives its up."""
        record = [one for one in self.waiting if one.num_computed_tokens]
        if len(record) > 1:
            self._take_blocks(record[-1])

    def _num_next(self, request: Request) -> int:
        return min(self.most_tokens, request.num_tokens - request.num_computed_tokens) + self._num_drafts(request)

    def _num_drafts(self, request: Request) -> int:
        """Drafts that the next step of `request` verifies."""
        is_decoding = request.num_new and request.num_tokens - request.num_computed_tokens == 1
        return self.drafts.num_speculative_tokens if self.drafts and is_decoding else 0

    def _num_rejected(self, request: Request) -> int:
        return sum(request.all_token_ids) % (self._num_drafts(request) + 1)

    def _has_room(self, request: Request) -> bool:
        """Give it blocks for what it computes next; the last of those that run lose theirs for that, unless copies give
        some back soon."""
        num_computed = request.num_computed_tokens
        while not self.manager.grow(request, num_computed, num_computed + self._num_next(request)):
            if self.connector.has_pending_block_frees():
                self.num_waits += 1
                return False
            victim = self.running[-1]
            self.preempt(victim)
            self.has_preempted = True
            if victim is request:
                return False
        return True

    def _may_run(self, request: Request) -> bool:
        name = request.request_id
        if name in self.loading:
            if name not in self.over:
                return False
            self._promote(request)
        if request.num_computed_tokens:
            num_computed = request.num_computed_tokens
            return self.manager.grow(request, num_computed, num_computed + self._num_next(request))
        return self._match(request)

    def _promote(self, request: Request) -> None:
        name = request.request_id
        del self.loading[name]
        self.over.discard(name)
        if name not in self.failed or request.num_computed_tokens:
            self.manager.cache(request, request.num_computed_tokens)
        else:
            self.manager.release(request)
        self.failed.discard(name)

    def _match(self, request: Request) -> bool:
        """Whether it can be computed in this step."""
        hit = self.manager.hit(request)
        local = hit * BLOCK
        external, is_async = self.connector.get_num_new_matched_tokens(request, local)
        if request.skip_reading_prefix_cache:
            external, is_async, hit, local = 0, False, 0, 0
        if external is None:
            return False
        stop = local + external
        if not self.manager.has_room(
            request, hit, stop if is_async else min(stop + self.most_tokens, request.num_tokens)
        ):
            return False
        self.allocate(request, hit, external)
        if is_async:
            self.loading[request.request_id] = request
            return False
        return self.manager.grow(request, stop, stop + self._num_next(request))

    def allocate(self, request: Request, num_blocks: int, num_external: int) -> None:
        """Blocks for what it has: those of the engine's own hit, and some to load into."""
        request.num_computed_tokens = num_blocks * BLOCK + num_external
        self.manager.adopt(request, num_blocks)
        assert self.manager.grow(request, request.num_computed_tokens, request.num_computed_tokens)
        blocks = self.manager.get_blocks(request.request_id)
        self.connector.update_state_after_alloc(request, blocks, num_external)

    def preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.waiting.insert(0, request)
        self._take_blocks(request)

    def _take_blocks(self, request: Request) -> None:
        self.manager.release(request)
        request.num_computed_tokens = 0
        self.preempted.add(request.request_id)
        self.num_preemptions += 1

    def _execute(self, ready: list[Request], scheduled: dict[str, int]) -> None:
        output = SimpleNamespace(num_scheduled_tokens=scheduled, preempted_req_ids=self.preempted)
        bound = self.connector.build_connector_meta(output)
        bound = type(bound)(self.alter(bound.commands))  # steps without commands share one object
        self.preempted = set()
        for request in ready:
            self.manager.cache(request, request.num_computed_tokens + scheduled[request.request_id])
        num_wrong = len(self.wrong)
        worker_outputs = [
            self._work(owner, bound, lora, ready, scheduled)
            for owner, lora in zip(self.owners, self.loras, strict=True)
        ]
        self.worker_outputs.append(worker_outputs)
        self._handle_lost(worker_outputs)
        taken_back = self._take_back(ready, {block_id for one in worker_outputs for block_id in one.invalid})
        if taken_back:  # what was computed from these blocks is nobody's
            said = self.wrong[num_wrong:]
            self.wrong[num_wrong:] = [each for each in said if each.partition(" ")[0] not in taken_back]
        for request in ready:
            if request.request_id not in taken_back:
                self._advance(request, scheduled[request.request_id])
        self._handle_over(worker_outputs)
        self.events += self.connector.take_events()
        self.half.steps.ends()  # vLLM asks for statistics here

    def _take_back(self, ready: list[Request], invalid: set[int]) -> set[str]:
        """Requests that have computed in this step over blocks that are invalid begin again at the first of these."""
        found = set()
        for request in ready if invalid else ():
            table = self.manager.block_ids(request.request_id)[0][: request.num_computed_tokens // BLOCK]
            stop = next((at for at, block_id in enumerate(table) if block_id in invalid), None)
            if stop is not None:
                request.num_computed_tokens = stop * BLOCK
                found.add(request.request_id)
        return found

    def _work(
        self, owner: Worker, bound: Any, lora: LoraManager, ready: list[Request], scheduled: dict[str, int]
    ) -> Any:
        """What vLLM's model runner does in a step."""
        copier = owner.copier
        copier.bind_connector_metadata(bound)
        copier.start_load_kv(None)
        lora.set_active_adapters([request.lora_request for request in ready if request.lora_request is not None], None)
        for request in ready:
            weights = owner.number + lora.number(request.lora_request)
            self._forward(owner.memory, request, scheduled[request.request_id], weights)
        copier.wait_for_save()
        results = copier.get_transfer_results(set())
        invalid = copier.get_block_ids_with_load_errors()
        meta = copier.build_connector_worker_meta()
        copier.clear_connector_metadata()
        return SimpleNamespace(results=results, invalid=invalid, meta=meta)

    def _handle_lost(self, worker_outputs: list[Any]) -> None:
        lost = {name for one in worker_outputs for name in one.results.failed_recving}
        invalid = {block_id for one in worker_outputs for block_id in one.invalid}
        assert not invalid or len(self.manager.windows) == 1, "ids of blocks are told with one group only"
        for name, request in self.loading.items():
            table = self.manager.block_ids(name)[0]
            stop = next((at for at, block_id in enumerate(table) if block_id in invalid), None)
            if name in lost:
                request.num_computed_tokens = 0
            elif stop is not None:
                request.num_computed_tokens = stop * BLOCK
            if name in lost or stop is not None:
                self.failed.add(name)

    def _handle_over(self, worker_outputs: list[Any]) -> None:
        """A load is over when every rank says so, or the scheduler's half of the connector does."""
        metas = [one.meta for one in worker_outputs if one.meta is not None]
        output = SimpleNamespace(
            kv_connector_worker_meta=reduce(lambda one, other: one.aggregate(other), metas) if metas else None,
            finished_recving=set.intersection(*(one.results.finished_recving for one in worker_outputs)),
        )
        self.connector.update_connector_output(output)
        for name in output.finished_recving:
            assert name in self.loading, "a load is over for which vLLM does not wait"
            assert name not in self.over, "a load is over twice"
            if self.loading[name] in self.waiting:
                self.over.add(name)
            else:
                self.manager.release(self.loading.pop(name))

    def _advance(self, request: Request, number: int) -> None:
        """`number` tokens were computed, drafts included."""
        num_accepted = self._num_drafts(request) - self._num_rejected(request)
        request.num_computed_tokens += number - self._num_rejected(request)
        if request.num_computed_tokens < request.num_tokens:
            return
        if request.num_new:
            num_sampled = min(request.num_new, num_accepted + 1)
            request.num_new -= num_sampled
            request.all_token_ids[:] = continued(request, num_sampled)
        if request.num_computed_tokens >= request.num_tokens:  # also where more drafts were accepted than wanted
            self.finish(request)

    def finish(self, request: Request) -> None:
        ids = self.manager.block_ids(request.request_id)
        is_kept, _ = self.connector.request_finished_all_groups(request, ids)
        assert not is_kept, "nothing but copies keeps blocks"
        (self.running if request in self.running else self.waiting).remove(request)
        if request.request_id not in self.loading or request.request_id in self.over:
            self.loading.pop(request.request_id, None)
            self.over.discard(request.request_id)
            self.manager.release(request)

    def run(self, *requests: Request, most_steps: int = 20_000) -> None:
        """Until every request has finished and the connector is at rest."""
        self.submit(*requests)
        for _ in range(most_steps):
            if not (self.waiting or self.running or self.connector.has_pending_push_work()):
                return
            self.step()
        raise AssertionError(f"not at rest: {[request.request_id for request in self.waiting]}")

    def get_weight_version(self) -> str:
        """As vLLM's engine core has it."""
        return self.weight_version

    def update_weights(self, number: int, version: str, *, preempts: bool = True) -> None:
        """Load other weights between two steps, and name them. `preempts`: all requests begin again, as after vLLM's
        `reset_prefix_cache(reset_running_requests=True)`, which also empties its own cache."""
        for owner in self.owners:
            owner.load_weights(number)
        self.weight_version = version
        if preempts:
            while self.running:
                self.preempt(self.running[-1])
            self.manager.reset()

    def sleep(self, level: int = 1) -> None:
        """As vLLM 0.33. Before the workers sleep, it preempts all requests, and resets both caches."""
        while self.running:
            self.preempt(self.running[-1])
        self.manager.evict_all()
        assert self.connector.reset_cache()
        for owner in self.owners:
            owner.sleep(level)

    def wake_up(self) -> None:
        for owner in self.owners:
            owner.wake_up()

    # -- the model ------------------------------------------------------------------------------------------------

    def _forward(self, memory: Any, request: Request, number: int, adapter: int) -> None:
        """Compute `number` tokens, and note a request that would have read wrong KV."""
        pages, start = memory.view(2, -1, PAGE_BYTES), request.num_computed_tokens
        stop = start + number - self._num_rejected(request)
        num_ahead = (0, self.drafts.num_ahead if self.drafts else 0)
        tokens = continued(request, number + max(num_ahead))
        for group, table in enumerate(self.manager.tables[request.request_id]):
            window = self.manager.windows[group]
            for at in range(max(0, start - window + 1) if window else 0, start + number):
                page = pages[:, table[at // BLOCK].block_id, at % BLOCK * 4 : at % BLOCK * 4 + 4]
                before = bytes([group, adapter])
                read = [before + bytes(tokens[: at + 1 + ahead]) if at < stop else b"rejected" for ahead in num_ahead]
                right = [zlib.crc32(each).to_bytes(4, "little") for each in read]
                if at >= start:
                    page[:] = page.new_tensor([list(each) for each in right])
                elif [bytes(each.tolist()) for each in page] != right:
                    self.wrong.append(f"{request.request_id} at {at} of group {group}")
                    return


def continued(request: Request, number: int) -> list[int]:
    """The tokens of `request`, and `number` tokens that the model generates after them."""
    tokens = [*request.all_token_ids]
    for _ in range(number):
        tokens.append((tokens[-1] * 7 + 3) % 200)
    return tokens


def held(engine: SmallEngine) -> int:
    return sum(block.ref_cnt for block in engine.manager.block_pool.blocks)


def to_rest(engine: SmallEngine) -> None:
    """Go on until copies that were under way have given their blocks back."""
    engine.run()
    for _ in range(20_000):
        if not held(engine):
            return
        engine.step()
    raise AssertionError(f"{held(engine)} blocks stay held")


def counted(engine: SmallEngine, name: str) -> float:
    found: float = engine.half.counts.counted[name]
    return found


def over(outcome: Outcome, **fields: Any) -> Callable[[TransferPlan], Completion | None]:
    return lambda plan: Completion(plan.job_id, outcome, **fields)


def instead(engine: SmallEngine, end: Callable[[TransferPlan], Completion | None]) -> list[TransferPlan]:
    """Loads end like that instead of being copied. Returns the list of their plans."""
    seen: list[TransferPlan] = []

    def alter(commands: Commands) -> Commands:
        for plan in commands.loads:
            seen.append(plan)
            assert len(seen) < 9, "the same load is tried for ever"
            completion = end(plan)
            for worker in engine.workers:
                if completion is not None:
                    worker.copies.end(completion)
        return attrs.evolve(commands, loads=())

    engine.alter = alter
    return seen
