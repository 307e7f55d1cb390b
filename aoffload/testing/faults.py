"""Faults: the kinds that can be injected, their opportunities, and the permitted outcomes of affected requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import attrs

from ..errors import InvalidArgument

__all__ = ["DISK_FAULTS", "FAULTS", "REMOTE_FAULTS", "Fault", "FaultKind", "Faults"]


@attrs.frozen
class FaultKind:
    """One row of the fault list."""

    name: str
    about: str
    needs_verify: bool = False
    """Whether the fault is injected only into runtimes with `verify=True`, because only checksums can notice it."""
    may_time_out: bool = False
    """Whether an affected request may have no way to end except a timeout."""
    may_take_room: bool = False
    """Whether blocks may end in quarantine, so that a request may no longer fit."""


_KINDS = (
    FaultKind("refuse", "the transport refuses a launch"),
    FaultKind("raise", "a launch raises, and nobody knows whether the copy was started", may_take_room=True),
    FaultKind("fail", "a copy breaks off half-way"),
    FaultKind("hang", "a copy never ends", may_time_out=True, may_take_room=True),
    FaultKind("stuck_fence", "the fence that a copy waits for never passes", may_time_out=True, may_take_room=True),
    FaultKind("lose", "a copy ends unproven; the proof comes late", may_take_room=True),
    FaultKind("vanish", "a copy ends unproven; no proof ever comes", may_take_room=True),
    FaultKind("twice", "a second completion is delivered, which may say otherwise"),
    FaultKind("early", "a store is reported over before its last bytes arrive", needs_verify=True),
    FaultKind("flip", "bytes change on their way to the device", needs_verify=True),
    FaultKind("rot", "bytes change in host memory", needs_verify=True),
    FaultKind("die", "a copy thread dies with everything it had begun", may_take_room=True),
    FaultKind("device_lost", "the device is lost: what runs is in doubt, and nothing begins", may_take_room=True),
    FaultKind("no_fence", "recording a fence fails"),
    FaultKind("leap", "the clock leaps by minutes", may_time_out=True, may_take_room=True),
    FaultKind("block", "the event loop is blocked for a second"),
    FaultKind("log", "the logger raises"),
    FaultKind("worker", "the copy worker's task is cancelled natively", may_time_out=True, may_take_room=True),
    FaultKind("bug", "the ledger has a bug: settling or discarding a job raises once it is done"),
    FaultKind("close", "closing the transport raises"),
    FaultKind("compute", "a forward fails"),
    FaultKind("disk_error", "a job of the disk ends in EIO or ENOSPC, with a block written or read in part"),
    FaultKind("disk_hang", "a job of the disk never ends", may_time_out=True, may_take_room=True),
    FaultKind("disk_late", "a job of the disk ends after its time", may_time_out=True, may_take_room=True),
    FaultKind("disk_lost", "the disk tells a write as done that is not"),
    FaultKind("disk_rot", "bytes change on the disk"),
    FaultKind("disk_unread", "what an earlier process left cannot be read to its end"),
    FaultKind("disk_reset", "a reset does not reach the disk, nor any other new generation"),
    FaultKind("disk_erase", "a record of what was taken back is not erased"),
    FaultKind("remote_slow", "a call of the store takes longer than a question may"),
    FaultKind("remote_late", "a call of the store is done long after its job was given up"),
    FaultKind("remote_hang", "a call of the store never ends, and may have been done"),
    FaultKind("remote_error", "a call of the store fails, and nothing was done"),
    FaultKind("remote_doubt", "a call of the store fails, and was done"),
    FaultKind("remote_later", "a write or a removal fails, and reaches the store later"),
    FaultKind("remote_gone", "the store evicts what it was just asked for, or was given"),
    FaultKind("remote_lost", "the store tells a write or a removal as done that is not"),
    FaultKind("remote_poisoned", "a cell is read that somebody has written to"),
    FaultKind("remote_short", "a part of a cell is read"),
    FaultKind("remote_foreign", "another cell is read"),
)
FAULTS: Mapping[str, FaultKind] = {kind.name: kind for kind in _KINDS}
"""All kinds of faults that a run may inject, by name."""
DISK_FAULTS = tuple(name for name in FAULTS if name.startswith("disk_"))
"""Faults that need a disk."""
REMOTE_FAULTS = tuple(name for name in FAULTS if name.startswith("remote_"))
"""Faults that need a remote store. None of them takes blocks, because a store never leaves the contents of host memory
in doubt."""


def _known(_: object, attribute: object, value: str) -> None:
    if not isinstance(value, str) or value not in FAULTS:
        raise InvalidArgument("kind", f"must be one of {', '.join(FAULTS)}, got {value!r}")


@attrs.frozen
class Fault:
    """`kind` happens at its `at`-th opportunity, counted from 0. With `lasting`, it also happens at every later
    opportunity."""

    kind: str = attrs.field(validator=_known)
    at: int = 0
    lasting: bool = False

    def __str__(self) -> str:
        return f"{self.kind}@{self.at}{'+' if self.lasting else ''}"

    @classmethod
    def parse(cls, text: str) -> Fault:
        kind, _, at = text.partition("@")
        try:
            return cls(kind, int(at.removesuffix("+")), at.endswith("+"))
        except InvalidArgument:
            raise
        except ValueError:
            raise InvalidArgument("fault", f"must be KIND@NUMBER or KIND@NUMBER+, got {text!r}") from None


class Faults:
    """The faults of one run. Decides at each opportunity whether one happens, and counts."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.planned = tuple(faults)
        self.opportunities: Counter[str] = Counter()
        self.fired: Counter[str] = Counter()

    def fire(self, kind: str) -> bool:
        """Count this opportunity of `kind`. Returns whether the fault happens here."""
        number = self.opportunities[kind]
        self.opportunities[kind] += 1
        for fault in self.planned:
            if fault.kind == kind and (fault.at == number or (fault.lasting and fault.at < number)):
                self.fired[kind] += 1
                return True
        return False

    @property
    def may_time_out(self) -> bool:
        return any(FAULTS[kind].may_time_out for kind in self.fired)

    @property
    def may_take_room(self) -> bool:
        return any(FAULTS[kind].may_take_room for kind in self.fired)
