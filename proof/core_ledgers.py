"""Ledgers in several states, and unusual values, for `proof/core_answers.py`."""

from __future__ import annotations

import decimal
import enum
import math
import re
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

import aoffload
from aoffload import DiskTier, KVCacheGroup, Ledger, OffloadConfig, RemoteTier, SlidingWindow
from aoffload.ledger import Completion, Outcome, Prefix, Root

ADDRESS = re.compile(
    r"<function .+? at 0x[0-9a-f]+>|(?: at|@) 0x[0-9a-f]+|<[^<>]*mypyc_lambda[^<>]*>|<built-in [^>]+>|<Run .*"
)
"""What differs from process to process. Of several runs that are wrong, any is named."""
ROOT = Root("asked")
TOKENS = list(range(40))


class Small(int):
    """An integer of another class."""


class Count(enum.IntEnum):
    TWO = 2


class Text(str):
    """A text of another class."""


ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 5, 17, 40, 41, 2**31, 2**63, 2**70, -(2**70), Small(4), Count.TWO, np.int64(4),
    np.bool_(True), 1.0, 1.5, -0.0, math.nan, math.inf, np.float64(2.5), decimal.Decimal(3), 4j, "", "4",
    "prompt", Text("all"), b"", b"4", (), [], [3], (1, 2), [[1, 2]], [[1.5]], [1.5], [True], [2**40], {}, {1}, range(3),
    array("i", [7]), np.arange(3), object, object(), len, Root("other"), Prefix.of(ROOT, TOKENS), aoffload.Tier.HOST,
    ...,
)  # fmt: skip


class Nowhere:
    """A store that nobody asks: a ledger does not."""

    def _refuse(self, *_: object) -> Any:
        raise NotImplementedError

    exist = get = put = remove = node_of = close = _refuse


class LedgersInStates:
    """Ledgers in one state each, with a request."""

    def __init__(self, **options: Any) -> None:
        groups = [KVCacheGroup("full", block_size=4)]
        if options.pop("windows", False):
            groups.append(KVCacheGroup("window", SlidingWindow(8), block_size=4))
        self.options = options
        self.config = OffloadConfig(groups=groups, num_host_blocks=24, **options)

    def ledger(self, **plugged: Any) -> Ledger:
        return Ledger(self.config, 24, **plugged)

    def pinned(self, **plugged: Any) -> tuple[Ledger, Any]:
        """Of its prompt, the host has a part."""
        ledger = self.ledger(**plugged)
        serve(ledger, TOKENS[:24])
        ledger.reset(aoffload.Tier.DEVICE)
        return ledger, ledger.admit(Prefix.of(ROOT, TOKENS), request_id="asked")

    def allocated(self, **plugged: Any) -> tuple[Ledger, Any]:
        ledger, record = self.pinned(**plugged)
        ledger.allocate_nowait(record)
        return ledger, record

    def loading(self, **plugged: Any) -> tuple[Ledger, Any]:
        ledger, record = self.allocated(**plugged)
        ledger.plan_load(record)
        return ledger, record

    def running(self, **plugged: Any) -> tuple[Ledger, Any]:
        ledger, record = self.allocated(**plugged)
        land(ledger, ledger.plan_load(record))
        ledger.commit(record, len(TOKENS))
        return ledger, record

    def preempted(self, **plugged: Any) -> tuple[Ledger, Any]:
        ledger, record = self.running(**plugged)
        ledger.preemption.preempt(record)
        return ledger, record

    def waiting(self, **plugged: Any) -> tuple[Ledger, Any]:
        ledger, record = self.running(**plugged)
        ledger.queue_extension(record, 80)
        return ledger, record

    def over(self, **plugged: Any) -> tuple[Ledger, Any]:
        ledger, record = self.running(**plugged)
        ledger.release(record)
        return ledger, record


STATES = ("pinned", "allocated", "loading", "running", "preempted", "waiting", "over")
RICH = ("pinned", "running")
LEDGERS = {
    "plain": LedgersInStates(),
    "windows": LedgersInStates(windows=True),
    "learned": LedgersInStates(
        eviction="learned",
        disk=DiskTier("/none", size=1 << 20),
        remote=RemoteTier(Nowhere(), cell_bytes=2),
        namespace="asked",
    ),
}
SITUATIONS = [("plain", state) for state in STATES] + [
    (world, state) for world in ("windows", "learned") for state in RICH
]


def land(ledger: Ledger, plans: Any) -> None:
    for plan in plans:
        if ledger.launch(plan.job_id):
            ledger.settle(Completion(plan.job_id, Outcome.LANDED, plan.num_blocks))


def serve(ledger: Ledger, tokens: list[int]) -> None:
    record = ledger.admit(Prefix.of(ROOT, tokens))
    ledger.allocate_nowait(record)
    land(ledger, ledger.plan_load(record))
    land(ledger, ledger.commit(record, len(tokens)))
    land(ledger, ledger.release(record))


def outcome_of(make: Callable[[], Any]) -> str:
    """What a call answers, or how it refuses."""
    try:
        found = make()
    except BaseException as error:  # noqa: BLE001
        found = f"{type(error).__name__}: {error}"
        if error.__cause__ is not None:
            found += f" from {error.__cause__!r}"
        return ADDRESS.sub("", found)
    return ADDRESS.sub("", repr(found))
