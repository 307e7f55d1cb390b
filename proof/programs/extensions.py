"""Programs over the kernel alone, and programs over ledgers with `RandomExtension`."""

from __future__ import annotations

import random
from typing import Any

from aoffload._extensions.assembly import Ledger
from aoffload._host_cache.host_cache import HostCache
from aoffload._kernel.ledger import CoreLedger

from .engine_machine import EngineMachine
from .fingerprint import with_handles
from .ledger_draw import LedgerDraw
from .ledger_laws import Laws
from .ledger_machine import LedgerMachine
from .program import Call, World
from .random_extension import RandomExtension

__all__ = ["KernelDraw", "KernelMachine", "ExtendedEngineMachine", "ExtendedMachine"]


class KernelMachine(LedgerMachine):
    """A ledger without any feature."""

    FAREWELL = ()

    def _open(self, world: World) -> Ledger:
        ledger = Ledger.__new__(Ledger)
        CoreLedger.__init__(ledger, world.config(), world.num_device_blocks, block_bytes=1, observer=self.recorder)
        return ledger


class KernelDraw(LedgerDraw):
    """The calls of the kernel."""

    FEATURES = (
        "preempt", "resume", "fork", "invalidate", "pin", "unpin", "hint", "client_hint", "lapse", "prefetch", "demote",
        "cancel", "watermark", "begin_again", "wrong",
    )  # fmt: skip
    MAY_OVERLAP = CHANGES_WEIGHTS = False

    def __init__(self, rng: random.Random, machine: KernelMachine) -> None:
        super().__init__(rng, machine)
        self.starts_early = False

    def next(self) -> Call:
        while (call := super().next()).name in self.FEATURES:
            pass
        return call


class ExtendedLaws(Laws):
    def _progress(self, call: Call) -> None:
        """A hook may have given blocks back in a call that does not look at the wait queue. The next call does."""
        self._ledger.end_call()
        super()._progress(call)


class ExtendedMachine(LedgerMachine):
    LAWS = ExtendedLaws
    HOOKS_CHANGE = True

    def __init__(self, world: World, **options: Any) -> None:
        self._extension = RandomExtension(world.num_device_blocks)
        super().__init__(world, **options)

    def _open(self, world: World) -> Ledger:
        self._extension = RandomExtension(world.num_device_blocks)
        ledger = Ledger(
            world.config(weights_epoch=self.first_epoch), world.num_device_blocks, block_bytes=1,
            observer=self.recorder, extensions=[self._extension],
        )  # fmt: skip
        with_handles(ledger)
        return ledger

    def do_cancel_cache_transfers(self) -> str:
        said = super().do_cancel_cache_transfers()
        self._extension.is_over = True
        self._extension.return_all()
        return said


class ExtendedEngineMachine(EngineMachine):
    HOOKS_CHANGE = True

    def _open(self, world: World) -> HostCache:  # type: ignore[override]
        super()._open(world)  # makes the pool
        self._extension = RandomExtension(world.num_device_blocks)
        cache = HostCache(
            world.config(weights_epoch=self.first_epoch), world.num_device_blocks, self.pool.engine_blocks(),
            clock=lambda: self.now, observer=self.recorder, extensions=[self._extension],
        )  # fmt: skip
        with_handles(cache)
        return cache

    def do_cancel_cache_transfers(self) -> str:
        said = super().do_cancel_cache_transfers()
        self._extension.is_over = True
        self._extension.return_all()
        return said
