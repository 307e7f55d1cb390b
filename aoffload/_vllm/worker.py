"""The worker's half of the connector. It makes the copies that the scheduler's half commands, and reports those that
have ended."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import attrs

from .. import KVRegion, Tier
from .._common.env import Env
from .._config.config import OffloadConfig
from .._config.models import fingerprint
from .._kernel.layout import Layout
from .._transfer.breaker import in_words
from .._transfer.transport import GivesUp, HasDisk, HasRemote, TransportDisk, TransportRemote
from ..errors import ConfigError
from ..ledger import Completion, Direction, Outcome, RestoredRun, TransferPlan
from ..transport import DeviceGone, LocalTransport, TransferRefused, Transport
from .blocks import Placement, block_bytes_of, regions_at, tensors_of
from .messages import (
    AdapterUse,
    CellsFound,
    Commands,
    DiskCommands,
    LoadReport,
    Question,
    ReadingOver,
    Refusing,
    Reports,
    ResetOver,
    Said,
)
from .replicas import WorkerReplicas
from .worker_adapters import LoadedAdapters
from .worker_weights import ModelWeights

# -- copies ----------------------------------------------------------------------------------------------------------
#
# The copies of one rank: those in progress, and those that have ended and are not reported yet.


class RankCopies:
    """`end` may be called from any thread, all other methods only from the thread that runs the model."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._under_way: set[int] = set()
        """Launched jobs that touch vLLM's tensors and are not proven to have ended."""
        self._loads: set[int] = set()
        """Loads into vLLM's tensors whose proven end was not reported."""
        self._lost: set[int] = set()
        """Loads whose destination has lost its memory: when they end, nothing has landed."""
        self._over: deque[Completion] = deque()
        self._ended = threading.Condition()

    def begin(self, plan: TransferPlan) -> None:
        """Called before the launch, because the copy may end before the launch returns."""
        if Tier.DEVICE not in plan.link:
            return  # it continues whatever happens to the tensors
        with self._ended:
            self._under_way.add(plan.job_id)
            if plan.destination is Tier.DEVICE:
                self._loads.add(plan.job_id)

    def end(self, completion: Completion) -> None:
        with self._ended:
            self._over.append(completion)
            if completion.outcome is not Outcome.UNPROVEN:
                self._under_way.discard(completion.job_id)
            self._ended.notify_all()

    def take(self) -> tuple[Completion, ...]:
        """The completions since the last call."""
        if not self._over:
            return ()  # in most steps
        with self._ended:
            found = tuple(self._over)
            self._over.clear()
            return tuple([self._told(completion) for completion in found])

    def _told(self, completion: Completion) -> Completion:
        if completion.job_id in self._lost:
            problem = completion.error or "the memory that it was loaded into is gone"
            outcome = Outcome.FAILED if completion.outcome is Outcome.LANDED else completion.outcome
            completion = attrs.evolve(completion, outcome=outcome, num_landed=0, error=problem)
        if completion.outcome is not Outcome.UNPROVEN:
            self._loads.discard(completion.job_id)
            self._lost.discard(completion.job_id)
        return completion

    def lose_loads(self) -> None:
        """The memory that loads were copied into goes away, so loads that were not reported have brought nothing."""
        with self._ended:
            self._lost |= self._loads

    def wait(self, timeout_s: float) -> bool:
        """Wait for the copies in progress, at most `timeout_s` of the clock. Returns whether all of them have ended."""
        deadline = self.clock() + timeout_s
        with self._ended:
            while self._under_way and (left := deadline - self.clock()) > 0:
                self._ended.wait(min(left, threading.TIMEOUT_MAX))
            return not self._under_way

    def wait_for_any(self, timeout_s: float) -> None:
        """Wait until a copy has ended that was not reported, at most `timeout_s`."""
        with self._ended:
            if not self._over:
                self._ended.wait(min(timeout_s, threading.TIMEOUT_MAX))

    def doubt(self, reason: str) -> None:
        """Report the copies in progress as UNPROVEN, because they may still copy. If a copy ends later, its end is the
        late proof."""
        with self._ended:
            self._over += [Completion(job_id, Outcome.UNPROVEN, error=reason) for job_id in sorted(self._under_way)]


# -- worker disk -----------------------------------------------------------------------------------------------------
#
# The disk of a worker: the commands that a step brings, and the reports that leave with the next one.

# -- worker ----------------------------------------------------------------------------------------------------------

_log = logging.getLogger("vllm.aoffload")
RUNS_A_STEP = 256
"""Runs reported with one step. The scheduler takes them in between two steps."""


@attrs.frozen
class Identity:
    """The identity of KV that outlives an engine. An engine may use such KV only if its identity is the same."""

    given: str
    """The key `namespace`. If it is empty, the files of `models` take its place."""
    models: tuple[str, ...]
    """The directory of the model, and the directory of its draft layers if they have their own."""
    others: str
    """The other parts of the engine's configuration that change KV, or the layout of a block."""

    def text(self) -> str:
        """Without a `namespace`, this reads all files of the models. `InvalidArgument` if they cannot be read."""
        return f"{self.given or ' '.join(map(fingerprint, self.models))}\n{self.others}"


def strides_of(kv_caches: Mapping[str, Any], num_blocks: int) -> str:
    """The strides of all layers' tensors, independent of the number of blocks. They are part of the identity, because a
    block has the same size with heads before tokens and with tokens before heads."""

    def size(number: int) -> str:
        return str(number) if number % num_blocks else f"{number // num_blocks}n"

    return repr([
        (name, str(cache.dtype), *map(size, cache.shape), "strides", *map(size, cache.stride()))
        for name, cache in sorted(tensors_of(kv_caches), key=lambda each: each[0])
    ])  # fmt: skip


class WorkerDisk:
    """Starts to read the blocks of an earlier process at once. Calls come from the thread that runs the model."""

    def __init__(self, disk: TransportDisk) -> None:
        self._disk = disk
        self._told: deque[Said] = deque()
        """Threads of the disk append to it."""
        try:
            disk.read_back(self._found, lambda problem: self._told.append(ReadingOver(problem)), self._told.append)
        except TransferRefused as error:
            self._told.append(ReadingOver(str(error)))

    def _found(self, runs: Sequence[RestoredRun]) -> None:
        self._told.extend(runs)

    def obey(self, commands: DiskCommands) -> None:
        """Called before the worker copies anything of the step."""
        try:
            if commands.forgotten:
                self._disk.forget(commands.forgotten)
            if commands.num_resets:
                self._disk.disown()  # weights may have changed since `Identity` was made
                self._disk.reset(commands.num_resets, partial(self._reset_over, commands.num_resets))
        except TransferRefused as error:  # it is closed, or off already
            _log.warning("aoffload: the disk: %s", error)
            if commands.num_resets:
                self._reset_over(commands.num_resets, str(error))

    def _reset_over(self, num_resets: int, problem: str) -> None:
        self._told.append(ResetOver(num_resets, problem))

    def take(self) -> tuple[Said, ...]:
        """Reports since the last call, some of them at a time."""
        return tuple([self._told.popleft() for _ in range(min(RUNS_A_STEP, len(self._told)))])


def disk_of(transport: Transport, config: OffloadConfig) -> TransportDisk | None:
    """The disk of `transport`, with the identity of KV that it may use. `ConfigError` if it is not the disk of
    `config`."""
    found = transport.disk if isinstance(transport, HasDisk) else None
    if (None if found is None else found.tier) != config.disk:
        raise ConfigError(
            "disk", "must be the same in the transport: your `make_transport` must give it to the transport"
        )
    return found


def identify(
    disk: TransportDisk | None, remote: TransportRemote | None, config: OffloadConfig, identity: Identity, strides: str
) -> None:
    """Called before the transport is opened. KV that was stored under another identity is never found."""
    layout, text = Layout.of(config.groups), f"{config.root_namespace}\n{identity.text()}\n{strides}"  # type: ignore[arg-type]
    for tier in (disk, remote):
        if tier is not None:
            tier.identify(layout, text)


# -- worker remote ---------------------------------------------------------------------------------------------------
#
# The remote store of a worker: the questions that a step brings, and the answers that leave with a later one.


LATE_S = 0.01
"""Extra time for an answer that is given just in time."""


class WorkerRemote:
    """Calls come from the thread that runs the model."""

    def __init__(self, remote: TransportRemote, clock: Callable[[], float]) -> None:
        self._remote, self._clock = remote, clock
        self._heard: deque[CellsFound] = deque()
        """Threads of the store append to it."""
        self._asked: dict[int, float] = {}
        """By question without an answer, its deadline."""
        self._refusing = Refusing()
        """The state that the scheduler knows."""

    def connect(self) -> None:
        """Wait until the store has connected or failed, at most `load_timeout_s`. Otherwise the first questions would
        time out, because they have less time."""
        is_over = threading.Event()
        self._remote.connect(is_over.set)
        is_over.wait(self._remote.tier.load_timeout_s + LATE_S)

    def ask(self, questions: Iterable[Question]) -> None:
        for question in questions:
            self._asked[question.number] = self._clock() + self._remote.tier.ask_timeout_s + LATE_S
            self._remote.ask(question.labels, partial(self._hear, question.number))

    def _hear(self, number: int, num_cells: int) -> None:
        self._heard.append(CellsFound(number, num_cells))

    def take(self) -> tuple[Said, ...]:
        """Reports since the last call. A question that the store has not answered in time is answered with no cells."""
        said: list[Said] = []
        for _ in range(len(self._heard)):
            found = self._heard.popleft()
            if self._asked.pop(found.number, None) is not None:
                said.append(found)
        now = self._clock() if self._asked else 0.0
        for number in [number for number, until in self._asked.items() if until <= now]:
            del self._asked[number]
            said.append(CellsFound(number, 0))
        for move in self._remote.take_moves():
            _log.warning("aoffload: %s", in_words(move))
        refusing = Refusing(self._remote.refuses(Direction.LOAD), self._remote.refuses(Direction.STORE))
        if refusing != self._refusing:
            self._refusing = refusing
            said.append(refusing)
        return tuple(said)


def remote_of(transport: Transport, config: OffloadConfig) -> TransportRemote | None:
    """The remote tier of `transport`. `ConfigError` if it is not the remote tier of `config`."""
    found = transport.remote if isinstance(transport, HasRemote) else None
    if (None if found is None else found.tier) != config.remote:
        raise ConfigError(
            "remote", "must be the same in the transport: your `make_transport` must give it to the transport"
        )
    return found


NO_USES: Mapping[int, AdapterUse] = {}


class WorkerSide:
    """One per rank. Calls come from the thread that runs the model; copies run in threads of the transport."""

    def __init__(
        self,
        config: OffloadConfig,
        placements: Sequence[Placement],
        num_blocks: int,
        rank: int,
        make_transport: Callable[[Sequence[KVRegion]], Transport] = LocalTransport,
        clock: Callable[[], float] = time.monotonic,
        identity: Identity | None = None,
        adapters: LoadedAdapters | None = None,
        replicas: WorkerReplicas | None = None,
        weights: ModelWeights | None = None,
    ) -> None:
        """`identity`: identifies KV that outlives the engine; None without disk and remote store. `adapters`: None
        without LoRA, or if the connector cannot see them in this version of vLLM. `replicas`: None if no other worker
        holds the same bytes. `weights`: None without sleep mode."""
        self._weights = weights
        self.adapters = adapters
        self._replicas = replicas
        self._identity = identity
        self._disk: WorkerDisk | None = None
        self._remote: WorkerRemote | None = None
        self._make_transport = make_transport
        self._num_groups = len(tuple(config.groups))
        self._config, self._placements, self._num_blocks, self._rank = config, placements, num_blocks, rank
        self._transport: Transport | None = None
        """None before the tensors are registered, while the engine sleeps, and after close."""
        self._asleep: Transport | None = None
        self.copies = RankCopies(clock)
        self._gone = ""
        """Why nothing is ever copied again: a copy hung while the memory of the tensors went away."""

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Allocate the host memory for blocks of vLLM's tensors, and open the tiers below it. `RegionError` or
        `ConfigError` if that fails.

        With such a tier and no `namespace`, it reads all files of the model.
        """
        if self._weights is not None:
            self._weights.begin()
        regions = regions_at(self._placements, kv_caches, self._num_blocks)
        num_host_blocks = self._config.resolve_host_blocks(block_bytes_of(self._placements))
        transport = self._make_transport(regions)
        disk, remote = disk_of(transport, self._config), remote_of(transport, self._config)
        if self._identity is not None:
            identify(disk, remote, self._config, self._identity, strides_of(kv_caches, self._num_blocks))
        with nullcontext() if self._replicas is None else self._replicas.sharing(transport, num_host_blocks):
            transport.open(num_host_blocks, verify=self._config.verify, deliver=self.copies.end, env=Env())
        self._transport = transport
        self._disk = None if disk is None else WorkerDisk(disk)
        self._remote = None if remote is None else WorkerRemote(remote, self.copies.clock)
        if self._remote is not None:
            self._remote.connect()
        _log.info(
            "aoffload: rank %d has %d host blocks of %d bytes for %d device blocks in %d regions",
            self._rank, num_host_blocks, transport.block_bytes, self._num_blocks, len(regions),
        )  # fmt: skip

    def load(self, commands: Commands) -> None:
        """Pass the step's commands to the tiers below host memory, and start the loads of the step."""
        transport = self._transport or self._asleep
        if commands.given_up and isinstance(transport, GivesUp):
            for job_id in commands.given_up:
                transport.give_up(job_id)
        if commands.disk is not None and self._disk is not None:
            self._disk.obey(commands.disk)
        if commands.questions and self._remote is not None:
            self._remote.ask(commands.questions)
        if commands.weights_asked and self._weights is not None:
            self._weights.answer(commands.weights_asked)
        self.start(commands.loads, commands.uses)

    def start(self, plans: Iterable[TransferPlan], uses: Mapping[int, AdapterUse] = NO_USES) -> None:
        """Start copies after all work that was submitted to the device so far. A copy in `uses` fails if the weights of
        its adapter have changed since it was planned."""
        for plan in plans:
            if self._replicas is not None and not self._replicas.copies(plan):
                self.copies.end(Completion(plan.job_id, Outcome.LANDED, plan.num_blocks))  # another worker stores it
                continue
            self.copies.begin(plan)
            try:
                if (use := uses.get(plan.job_id)) is not None:
                    self._check_weights(plan, use)
                self._open_transport().launch(plan, None)
            except (TransferRefused, DeviceGone) as error:
                self.copies.end(Completion(plan.job_id, Outcome.FAILED, error=str(error)))

    def _check_weights(self, plan: TransferPlan, use: AdapterUse) -> None:
        if not self._has_weights(use):
            raise TransferRefused(f"LoRA adapter {use.adapter} has changed its weights")
        is_load, adapters = plan.destination is Tier.DEVICE, self.adapters
        if is_load and self._num_groups > 1 and adapters is not None and not adapters.is_loaded(use.adapter):
            raise TransferRefused(f"LoRA adapter {use.adapter} would be loaded again, perhaps with other weights")

    def _has_weights(self, use: AdapterUse) -> bool:
        return self.adapters is not None and self.adapters.is_current(use)

    def changed_blocks(self, commands: Commands) -> set[int]:
        """Ids of loaded blocks that a first forward has read although the weights of the adapter had changed."""
        changed = (each.block_ids for each in commands.forwards if not self._has_weights(each.use))
        return {block_id for block_ids in changed for block_id in block_ids}

    def _open_transport(self) -> Transport:
        if self._transport is None:
            raise TransferRefused(self._gone or "vLLM has no KV tensors at present")
        return self._transport

    def sleep(self) -> None:
        """Prepare for sleep: after this returns, the memory of the tensors goes away for a while. Until it is back,
        copies fail. The contents of host memory stay.

        It waits for copies in progress, at most `transfer_timeout_s`. A copy that does not end is UNPROVEN. Copies
        queued after it never start, and nothing is copied any more, because that copy may hold the host memory for
        ever.
        """
        transport, self._transport = self._transport, None
        if transport is None:
            return
        if self._weights is not None:
            self._weights.sleep()
        self.copies.lose_loads()
        if self.copies.wait(self._config.transfer_timeout_s):
            self._asleep = transport
            return
        transport.close(0.0)
        self._gone = f"rank {self._rank} had a copy that did not end before the KV tensors were released"
        self.copies.doubt(self._gone)
        _log.error("aoffload: %s", self._gone)

    def wake_up(self) -> None:
        """The tensors are back, at the same addresses."""
        if self._asleep is not None:
            self._transport, self._asleep = self._asleep, None

    def take_reports(self) -> Reports | None:
        """The completions since the last call."""
        found, said = self.copies.take(), tuple[Said, ...]()
        for each in (self._disk, self._remote, self.adapters, self._weights):
            if each is not None:
                said += each.take()
        return Reports({self._rank: found}, self._gone, said) if found or said else None

    def close(self) -> None:
        transport, self._transport, self._asleep = self._transport or self._asleep, None, None
        if transport is not None and not transport.close(self._config.close_timeout_s):
            _log.warning("aoffload: rank %d has closed, but some of its copies have not ended", self._rank)


def lost_requests(reports: Iterable[LoadReport]) -> set[str]:
    """The requests whose whole load is lost."""
    return {report.request_id for report in reports if report.is_lost}


def invalid_blocks(reports: Iterable[LoadReport]) -> set[int]:
    return {block_id for report in reports for block_id in report.invalid_block_ids}
