"""One run: the clients of all conversations at once, against an engine on a pool of a given size."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import attrs

from .. import DiskTier, OffloadConfig, OffloadRuntime, RemoteTier, fingerprint
from .._config.sources import secret_in, store_of
from .._reference.engine.batching import PrefillStart
from .._reference.engine.checkpoints import engine_groups
from .._reference.engine.engine import PagedEngine
from .._reference.engine.layers import layer_regions
from .._reference.engine.models import MODEL_NAMES
from .._reference.engine.paged import PagedModel
from .._reference.engine.sequence import Generation
from .._transfer.local import LocalTransport
from ..errors import IntegrityError
from ..plan import Recorder
from .backends import Throttle
from .interrupt import Progress
from .options import DemoOptions
from .outcome import DemoOutcome, RunKind, RunOutcome
from .workload import ENGINE, Conversation, Pools, Workload

# -- departures ------------------------------------------------------------------------------------------------------
#
# Clients that leave: a client's own scope is cancelled at a seeded point, whatever the request's state is then.

MAX_PASSES = 40
"""The most passes of the event loop after which a client leaves while it waits for blocks or loads."""
MAX_STEPS = 60
"""The most engine steps after which a client leaves while it computes."""


@attrs.define(eq=False)
class Departures:
    """Decides which clients leave, and when: after some passes of the event loop or engine steps. If the client ends
    first, this has no effect."""

    rate: float
    tasks: anyio.abc.TaskGroup
    _random: random.Random
    _num_steps: int = 0
    _due: dict[anyio.CancelScope, int] = attrs.field(factory=dict)

    @classmethod
    def seeded(cls, rate: float, seed: int, tasks: anyio.abc.TaskGroup) -> Departures:
        return cls(rate, tasks, random.Random(f"departures {seed}"))

    def arrange(self, scope: anyio.CancelScope) -> None:
        """Perhaps cancel `scope` later on."""
        if self._random.random() >= self.rate:
            return
        if self._random.random() < 0.5:
            self.tasks.start_soon(_leave_after, self._random.randint(1, MAX_PASSES), scope)
        else:
            self._due[scope] = self._num_steps + self._random.randint(1, MAX_STEPS)

    def forget(self, scope: anyio.CancelScope) -> None:
        """Do not cancel `scope` any more, because its client has ended or left."""
        self._due.pop(scope, None)

    def step_done(self, num_steps: int) -> None:
        """Called by the engine after every step."""
        self._num_steps = num_steps
        for scope, due in list(self._due.items()):
            if num_steps >= due:
                del self._due[scope]
                scope.cancel()


async def _leave_after(num_passes: int, scope: anyio.CancelScope) -> None:
    for _ in range(num_passes):
        await anyio.lowlevel.checkpoint()
    scope.cancel()


# -- runner ----------------------------------------------------------------------------------------------------------

RECORDED = "with offload"
DISK_SIZE = "1GiB"
CELL_BYTES = "128KiB"
"""The models are small: 4 MiB would be the KV of more tokens than a prompt has."""
FLUSH_TIMEOUT_S = 10.0
LAST_FLUSH_TIMEOUT_S = 0.3
CLOSE_TIMEOUT_S = 0.5
"""With these last two values, Ctrl-C ends the demo within two seconds. A copy takes milliseconds."""


def run_kinds(pools: Pools, options: DemoOptions) -> tuple[RunKind, ...]:
    """The runs, in order."""
    disk = None if options.disk is None else DiskTier(options.disk, DISK_SIZE)
    offload = RunKind(
        RECORDED,
        pools.num_device_blocks,
        pools.num_host_blocks,
        options.store,
        disk=disk,
        remote=_remote_of(options),
        load=options.load,
        eviction=options.eviction,
    )
    kinds = (
        RunKind("reference", pools.num_reference_blocks, 0, "off"),
        RunKind("without offload", pools.num_device_blocks, 0, "off"),
        offload,
    )
    layered = attrs.evolve(offload, name="layer by layer", prefill_start=PrefillStart.BY_LAYER, disk=None, remote=None)
    return (*kinds, layered) if options.layered else kinds


def _remote_of(options: DemoOptions) -> RemoteTier | None:
    if options.remote is None:
        return None
    return RemoteTier(store_of(options.remote), secret_in(options.remote_secret), cell_bytes=CELL_BYTES)


@attrs.define(eq=False)
class Runner:
    model: PagedModel
    workload: Workload
    outcome: DemoOutcome
    progress: Progress
    logger: Any
    recorder: Recorder | None = None
    """The recorder of the run with offload."""

    async def run(self, kind: RunKind, cancel_rate: float) -> None:
        """Serve the workload once. The results are in `self.outcome`, also if this is cancelled."""
        result = RunOutcome(kind, num_requests=self.workload.num_requests)
        self.outcome.runs.append(result)
        self.progress.start(kind.name, self.workload.num_requests)
        kv_cache = self.model.new_kv_cache(kind.num_device_blocks + 1 + ENGINE.num_scratch_blocks, ENGINE.block_size)
        transport = self._transport(kind, kv_cache[: kind.num_device_blocks + 1])  # without the engine's scratch
        config = self.make_config(kind)
        result.block_bytes = kv_cache[0].nbytes
        observers = [self.recorder] if self.recorder is not None and kind.name == RECORDED else []
        started = time.monotonic()
        try:
            logger = self.logger.bind(run=kind.name)
            async with OffloadRuntime(config, transport=transport, logger=logger, observers=observers) as runtime:
                try:
                    if config.disk is not None:
                        result.num_restored = await runtime.disk.wait_restored()
                    await self._serve(runtime, kv_cache, result, cancel_rate)
                    result.is_over = True
                finally:
                    # Background stores hold the blocks that they copy. Blocks that are still pinned after them are a
                    # leak.
                    with anyio.move_on_after(FLUSH_TIMEOUT_S if result.is_over else LAST_FLUSH_TIMEOUT_S, shield=True):
                        await runtime.flush()
                        while runtime.statistics().num_jobs:  # an idle disk gets more stores
                            await runtime.flush()
                    _take_stock(runtime, transport, result)
        finally:
            result.wall_s = time.monotonic() - started

    def _transport(self, kind: RunKind, kv_cache: Any) -> LocalTransport:
        tampering = self.outcome.tampering if kind.has_offload else None
        slow = self.outcome.options.host_gbs if kind.has_offload else None
        backend = tampering.make_backend if tampering is not None else None
        if slow is not None:
            backend = Throttle(slow * 1e9).make_backend
        regions = layer_regions(kv_cache) if kind.prefill_start is PrefillStart.BY_LAYER else kv_cache
        return LocalTransport(
            regions,
            backend=backend,
            disk=kind.disk,
            remote=kind.remote,
        )

    def make_config(self, kind: RunKind) -> OffloadConfig:
        """Raises `ConfigError` for unsupported groups or an unknown store policy."""
        return OffloadConfig(
            groups=engine_groups(self.model, ENGINE),
            num_host_blocks=kind.num_host_blocks,
            namespace=self._namespace(kind),
            disk=kind.disk,
            remote=kind.remote,
            store_policy=kind.store,
            load_choice=kind.load,
            eviction=kind.eviction,
            verify=kind.has_offload,
            close_timeout_s=CLOSE_TIMEOUT_S,
        )

    def _namespace(self, kind: RunKind) -> str:
        """The identity of the KV. If KV outlives the process, it includes the files of a model that has some."""
        options = self.outcome.options
        name = f"{options.model}@{options.seed}"
        is_kept = kind.disk is not None or kind.remote is not None
        return f"{name} {fingerprint(options.model)}" if is_kept and options.model not in MODEL_NAMES else name

    async def _serve(self, runtime: OffloadRuntime, kv_cache: Any, result: RunOutcome, cancel_rate: float) -> None:
        async with anyio.create_task_group() as tasks:
            departures = Departures.seeded(cancel_rate, self.outcome.options.seed, tasks)

            def on_step(num_steps: int) -> None:
                departures.step_done(num_steps)
                done = len(result.generations) + result.num_aborted
                self.progress.update(done, f"{engine.statistics().num_prefilled_tokens:,} prompt tokens computed")

            answers = self.outcome.runs[0].generations  # of the reference run, also while it is running
            engine_options = attrs.evolve(ENGINE, prefill_start=result.kind.prefill_start)
            async with PagedEngine(self.model, runtime, kv_cache, engine_options, on_step=on_step) as engine:
                try:
                    async with anyio.create_task_group() as clients:
                        for conversation in self.workload.conversations:
                            client = Client(conversation, engine, result, departures, answers)
                            clients.start_soon(client.converse)
                finally:
                    result.engine = engine.statistics()
            tasks.cancel_scope.cancel()


@attrs.define(eq=False)
class Client:
    """A client that asks, reads the answer and asks again. It may leave before the answer is complete."""

    conversation: Conversation
    engine: PagedEngine
    result: RunOutcome
    departures: Departures
    answers: Mapping[str, Generation]
    """The answers that later prompts contain, by turn id."""

    async def converse(self) -> None:
        for index, turn in enumerate(self.conversation.turns):
            answers = {turn_id: generation.token_ids for turn_id, generation in self.answers.items()}
            prompt = self.conversation.prompt(index, answers)
            await self._ask(turn.turn_id, prompt, turn.num_answer_tokens)

    async def _ask(self, turn_id: str, prompt: Sequence[int], num_answer_tokens: int) -> None:
        request_id = f"{self.result.kind.name.replace(' ', '-')}-{turn_id}"
        with anyio.CancelScope() as scope:
            self.departures.arrange(scope)
            try:
                generation = await self.engine.generate(prompt, num_answer_tokens, request_id=request_id)
                self.result.generations[turn_id] = generation
            finally:
                self.departures.forget(scope)
                if turn_id not in self.result.generations:
                    self.result.num_aborted += 1


def _take_stock(runtime: OffloadRuntime, transport: LocalTransport, result: RunOutcome) -> None:
    statistics = runtime.statistics()
    result.num_pinned = statistics.device.num_pinned + statistics.host.num_pinned
    result.num_quarantined = statistics.device.num_quarantined + statistics.host.num_quarantined
    result.num_declined = statistics.num_loads_declined
    result.num_fetches_declined = statistics.num_fetches_declined
    result.num_host_free, result.learned = statistics.host.num_free, statistics.learned
    result.transfers = attrs.asdict(transport.statistics())
    if statistics.disk_transfers is not None:
        result.disk_transfers = attrs.asdict(statistics.disk_transfers)
    if statistics.remote_transfers is not None:
        result.remote_transfers = attrs.asdict(statistics.remote_transfers)
    try:
        runtime.check_integrity()
    except IntegrityError as error:
        result.integrity_error = str(error)
