"""The disk of a worker: what it is told with a step, and what it has to say with the next one."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from .._config.config import OffloadConfig
from .._config.models import fingerprint
from .._kernel.layout import Layout
from .._transfer.transport import HasDisk, TransportDisk, TransportRemote
from ..errors import ConfigError, TransferRefused
from ..ledger import RestoredRun
from ..transport import Transport
from .messages import DiskCommands, ReadingOver, ResetOver, Said

__all__ = ["Identity", "WorkerDisk", "disk_of", "strides_of"]

_log = logging.getLogger("vllm.aoffload")
RUNS_A_STEP = 256
"""Reported with one step: the scheduler takes them up between two others."""


@attrs.frozen
class Identity:
    """What KV that outlives an engine must have been computed by, so that this one may use it."""

    given: str
    """The key `namespace`; empty: the files of `model` say it."""
    model: str
    others: str
    """What else of the engine's configuration changes KV, or how it lies in a block."""

    def text(self) -> str:
        """Reads all files of the model, where no `namespace` is given. `InvalidArgument`: they cannot be read."""
        return f"{self.given or fingerprint(self.model)}\n{self.others}"


def strides_of(kv_caches: Mapping[str, Any], num_blocks: int) -> str:
    """How the tensors of all layers lie in memory, whatever the number of blocks: a block has as many bytes with heads
    before tokens as behind them."""

    def size(number: int) -> str:
        return str(number) if number % num_blocks else f"{number // num_blocks}n"

    return repr([
        (name, str(cache.dtype), *map(size, cache.shape), "strides", *map(size, cache.stride()))
        for name, cache in sorted(kv_caches.items())
    ])  # fmt: skip


class WorkerDisk:
    """Reads back what an earlier process has left, at once. Calls come from the thread that runs the model."""

    def __init__(self, disk: TransportDisk) -> None:
        self._disk = disk
        self._told: deque[Said] = deque()
        """The threads of the disk append."""
        try:
            disk.read_back(self._found, lambda problem: self._told.append(ReadingOver(problem)), self._told.append)
        except TransferRefused as error:
            self._told.append(ReadingOver(str(error)))

    def _found(self, runs: Sequence[RestoredRun]) -> None:
        self._told.extend(runs)

    def obey(self, commands: DiskCommands) -> None:
        """Before anything of the step is copied."""
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
        """What it has to say since the last call, a part at a time."""
        return tuple([self._told.popleft() for _ in range(min(RUNS_A_STEP, len(self._told)))])


def disk_of(transport: Transport, config: OffloadConfig) -> TransportDisk | None:
    """The disk of `transport`, told what its contents may be used for. `ConfigError`: it is not that of `config`."""
    found = transport.disk if isinstance(transport, HasDisk) else None
    if (None if found is None else found.tier) != config.disk:
        raise ConfigError("disk", "must be that of the transport: a `make_transport` of your own has to give it one")
    return found


def identify(
    disk: TransportDisk | None, remote: TransportRemote | None, config: OffloadConfig, identity: Identity, strides: str
) -> None:
    """Before the transport is opened: what was stored for another identity is never found."""
    layout, text = Layout.of(config.groups), f"{config.root_namespace}\n{identity.text()}\n{strides}"  # type: ignore[arg-type]
    for tier in (disk, remote):
        if tier is not None:
            tier.identify(layout, text)
