"""The worker's half of the connector: it copies what the scheduler's half commands, and reports what is over."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from aoffload import KVRegion, Tier

from .._config.config import OffloadConfig
from .._transfer.transport import GivesUp
from .._common.env import Env
from ..ledger import Completion, Outcome, TransferPlan
from ..transport import DeviceGone, LocalTransport, TransferRefused, Transport
from .copies import RankCopies
from .messages import AdapterUse, Commands, LoadReport, Reports, Said
from .regions import Placement, block_bytes_of, regions_at
from .worker_adapters import LoadedAdapters
from .worker_disk import Identity, WorkerDisk, disk_of, identify, strides_of
from .worker_remote import WorkerRemote, remote_of

__all__ = ["WorkerSide"]

_log = logging.getLogger("vllm.aoffload")
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
    ) -> None:
        """`identity`: identifies KV that outlives the engine; None without disk and remote store. `adapters`: None
        without LoRA, or if the connector cannot see them in this version of vLLM."""
        self.adapters = adapters
        self._identity = identity
        self._disk: WorkerDisk | None = None
        self._remote: WorkerRemote | None = None
        self._make_transport = make_transport
        self._num_groups = len(tuple(config.groups))
        self._config, self._placements, self._num_blocks, self._rank = config, placements, num_blocks, rank
        self._transport: Transport | None = None
        """None before the tensors are registered, while the engine sleeps, and once closed."""
        self._asleep: Transport | None = None
        self.copies = RankCopies(clock)
        self._gone = ""
        """Why nothing is ever copied again: a copy hung while the memory of the tensors went."""

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Allocate the host memory behind vLLM's tensors, and open the tiers below it. `RegionError`, `ConfigError`: it
        cannot be had.

        With such a tier and no `namespace`, it reads all files of the model."""
        regions = regions_at(self._placements, kv_caches, self._num_blocks)
        num_host_blocks = self._config.resolve_host_blocks(block_bytes_of(self._placements))
        transport = self._make_transport(regions)
        disk, remote = disk_of(transport, self._config), remote_of(transport, self._config)
        if self._identity is not None:
            identify(disk, remote, self._config, self._identity, strides_of(kv_caches, self._num_blocks))
        transport.open(num_host_blocks, verify=self._config.verify, deliver=self.copies.end, env=Env())
        self._transport = transport
        self._disk = None if disk is None else WorkerDisk(disk)
        self._remote = None if remote is None else WorkerRemote(remote, self.copies.clock)
        if self._remote is not None:
            self._remote.connect()
        _log.info(
            "aoffload: rank %d has %d host blocks of %d bytes behind %d device blocks in %d regions",
            self._rank, num_host_blocks, transport.block_bytes, self._num_blocks, len(regions),
        )  # fmt: skip

    def load(self, commands: Commands) -> None:
        """Tell the tiers below host memory what they are told, and start the loads of a step."""
        transport = self._transport or self._asleep
        if commands.given_up and isinstance(transport, GivesUp):
            for job_id in commands.given_up:
                transport.give_up(job_id)
        if commands.disk is not None and self._disk is not None:
            self._disk.obey(commands.disk)
        if commands.questions and self._remote is not None:
            self._remote.ask(commands.questions)
        self.start(commands.loads, commands.uses)

    def start(self, plans: Iterable[TransferPlan], uses: Mapping[int, AdapterUse] = NO_USES) -> None:
        """Start copies after all work that was submitted to the device so far. A copy in `uses` fails if the weights of
        its adapter have changed since it was planned."""
        for plan in plans:
            self.copies.begin(plan)
            try:
                if (use := uses.get(plan.job_id)) is not None:
                    self._check_weights(plan, use)
                self._open_transport().launch(plan, None)
            except (TransferRefused, DeviceGone) as error:
                self.copies.end(Completion(plan.job_id, Outcome.FAILED, error=str(error)))

    def _check_weights(self, plan: TransferPlan, use: AdapterUse) -> None:
        if not self._has_weights(use):
            raise TransferRefused(f"LoRA adapter {use.adapter} has other weights now")
        is_load, adapters = plan.destination is Tier.DEVICE, self.adapters
        if is_load and self._num_groups > 1 and adapters is not None and not adapters.is_loaded(use.adapter):
            raise TransferRefused(f"LoRA adapter {use.adapter} would be read again, maybe with other weights")

    def _has_weights(self, use: AdapterUse) -> bool:
        return self.adapters is not None and self.adapters.is_current(use)

    def changed_blocks(self, commands: Commands) -> set[int]:
        """Ids of loaded blocks that a first forward has read although the weights of the adapter had changed."""
        changed = (each.block_ids for each in commands.forwards if not self._has_weights(each.use))
        return {block_id for block_ids in changed for block_id in block_ids}

    def _open_transport(self) -> Transport:
        if self._transport is None:
            raise TransferRefused(self._gone or "there are no KV tensors now")
        return self._transport

    def sleep(self) -> None:
        """The memory of the tensors goes away for a while, when this returns. Until it is back, copies fail; what the
        host holds stays.

        Waits for copies that are under way, `transfer_timeout_s` at most. One that does not end is UNPROVEN, what waits
        behind it never starts, and nothing is copied any more: it may hold the host memory for ever.
        """
        transport, self._transport = self._transport, None
        if transport is None:
            return
        self.copies.lose_loads()
        if self.copies.wait(self._config.transfer_timeout_s):
            self._asleep = transport
            return
        transport.close(0.0)
        self._gone = f"rank {self._rank} had a copy that did not end when the memory of the KV tensors went"
        self.copies.doubt(self._gone)
        _log.error("aoffload: %s", self._gone)

    def wake_up(self) -> None:
        """The tensors are back, at the same addresses."""
        if self._asleep is not None:
            self._transport, self._asleep = self._asleep, None

    def take_reports(self) -> Reports | None:
        """What is over since the last call."""
        found, said = self.copies.take(), tuple[Said, ...]()
        for each in (self._disk, self._remote, self.adapters):
            if each is not None:
                said += each.take()
        return Reports({self._rank: found}, self._gone, said) if found or said else None

    def close(self) -> None:
        transport, self._transport, self._asleep = self._transport or self._asleep, None, None
        if transport is not None and not transport.close(self._config.close_timeout_s):
            _log.warning("aoffload: rank %d leaves copies behind that do not end", self._rank)


def lost_requests(reports: Iterable[LoadReport]) -> set[str]:
    """The requests whose whole load is lost."""
    return {report.request_id for report in reports if report.is_lost}


def invalid_blocks(reports: Iterable[LoadReport]) -> set[int]:
    return {block_id for report in reports for block_id in report.invalid_block_ids}
