"""The state of a program over the ledger: the ledger, its engine's requests, its copies and its bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import attrs

from aoffload._common.prefix import Root
from aoffload._common.tiers import Tier
from aoffload._extensions.assembly import Ledger
from aoffload._extensions.pins import Pin
from aoffload._extensions.transfers import CacheTransfer
from aoffload._kernel.plans import Checkpoint, Completion, TransferPlan
from aoffload._kernel.records import Job, LedgerRequest
from aoffload._kernel.states import RequestState
from aoffload.testing.violations import Violation

from .fingerprint import with_handles
from .ledger_recorder import Recorder
from .program import EPOCHS, TENANTS, World
from .provenance import Bytes, Text

__all__ = ["Client", "Forward", "LedgerState", "Step"]


_LOADING = (RequestState.LOADING, RequestState.DRAINING, RequestState.REQUEUED)


@attrs.define(eq=False)
class Client:
    """One request as its engine knows it."""

    name: str
    record: Any
    """A `LedgerRequest`, or a `HostCacheRequest`."""
    text: Text
    num_prompt: int
    must_end: bool = False
    """It has to be aborted: what it has read was invalidated. Its bytes are not checked any more."""
    born: int = 0
    """How often the weights had changed when it was admitted."""
    state: RequestState = RequestState.QUEUED
    """Its state after the last call."""
    oldest: int = 0
    """How often the weights had changed when the request got its blocks or its load ended. It reads no earlier KV,
    unless equal weights computed it."""
    state_at: int = -1
    """The token up to which its running state is computed; -1: it has none. The running state changes with a commit."""
    state_marks: int = 0
    marks: list[int] = attrs.field(factory=list)
    """The mark of each token that it has computed itself, 0 where it was loaded."""

    def computed(self, start: int, marks: Sequence[int]) -> None:
        self.marks[start:] = [0] * (start - len(self.marks))
        self.marks += marks


@attrs.define(eq=False)
class Forward:
    """What one step computes for one client, in the tables as they were when it began."""

    client: Client
    start: int
    stop: int
    tables: list[list[int]]
    is_early: bool
    is_void: bool = False
    """Its request has invalidated tokens since it began, or was over when another one did."""
    resume: Checkpoint | None = None
    """The checkpoint from which it continues."""
    passed: tuple[Checkpoint, ...] = ()
    """The planned checkpoints that it passes."""
    written: list[int] = attrs.field(factory=list)
    """The positions of those that it has written."""
    state_marks: int = 0
    """The marks of its state at its end."""


@attrs.define(eq=False)
class Step:
    held: ExitStack
    forwards: list[Forward]


class LedgerState:
    """A ledger, what its engine knows of it, and its memories."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.first_epoch = ""
        """The weights' epoch with which the next ledger begins."""
        self.start_empty()
        self.unit, self.groups = self.ledger.layout.unit_tokens, self.ledger.layout.groups
        self.bytes = Bytes(self.groups, world.num_device_blocks, world.num_host_blocks, world.num_disk_blocks)
        self.features: set[str] = set()
        self.num_planned: Counter[str] = Counter()
        self.num_served = 0

    def start_empty(self) -> None:
        """A new ledger, with nothing under way."""
        self.recorder = Recorder()
        self._epochs: dict[bytes, str] = {}
        self.ledger = self._open(self.world)
        self.recorder.calls_to(self.ledger)
        self.clients: dict[str, Client] = {}
        self.steps: dict[str, Step] = {}
        self.pins: dict[str, Pin] = {}
        self.cache_transfers: dict[str, CacheTransfer] = {}
        self.plans: dict[str, TransferPlan] = {}
        """Jobs that are not over, by name: request, direction and running number."""
        self.unproven: dict[str, TransferPlan] = {}
        self.over: dict[str, Completion] = {}
        self.rotten: dict[tuple[Tier, int], Job] = {}
        """Blocks that hold other bytes than were stored, each with the job that has reported it."""

    def _open(self, world: World) -> Ledger:
        ledger = Ledger(
            world.config(weights_epoch=self.first_epoch), world.num_device_blocks, block_bytes=1, observer=self.recorder
        )
        with_handles(ledger)
        return ledger

    def epoch_of(self, root: Root) -> str:
        """The weights' epoch of KV under `root`. The keys of a root that was read from a disk are unknown: the digest
        is compared with those of all roots of the program."""
        if root.weights_epoch is not None:
            return root.weights_epoch
        if not self._epochs:
            roots = [Root("programs", salt) for salt in TENANTS]
            self._epochs = {each.under_weights(epoch).digest: epoch for each in roots for epoch in EPOCHS}
        return self._epochs.get(root.digest, self.bytes.epoch)

    def _note(self, feature: str, happened: object) -> None:
        if happened:
            self.features.add(feature)

    def _require(self, law: bool, what: str, about: object) -> None:
        if not law:
            raise Violation("an answer", f"{what}: {about}")

    def read(self, client: Client, tables: Sequence[Sequence[int]], stop: int) -> int:
        """Read the KV that computing token `stop` of `client` reads, except for hits in an engine's own cache."""
        start = client.record.given_tokens
        return self.bytes.read(client.text, tables, stop, client.name, client.oldest, start)

    def note_answers(self, call: str) -> None:
        """Note the oldest weights whose KV each request may read: the weights when the request got its blocks, or, if
        it loads, when its load ended."""
        for client in self.clients.values():
            before, client.state = client.state, client.record.state
            is_loaded = before in _LOADING or call == "load"
            if client.state is before or not (
                client.state is RequestState.ALLOCATED or (client.state is RequestState.RUNNING and is_loaded)
            ):
                continue
            client.oldest = self.bytes.weights

    def _tables(self, client: Client) -> str:
        return f"{client.record.state.name} {self.ledger.block_ids(client.record)}"

    def _forget(self, client: Client, from_token: int, affected: Sequence[LedgerRequest]) -> None:
        """Mark as invalid what `client` has computed from `from_token` on, drop the tokens sampled after it, and mark
        the requests that were told."""
        for marks in client.marks[from_token:]:
            self.bytes.invalid |= marks
        del client.marks[from_token:]
        if from_token < client.state_at:
            client.state_at = -1
        del client.text.tokens[max(client.num_prompt, from_token + 1) :]
        del client.text.prefixes[len(client.text.tokens) + 1 :]
        del client.text.sampled_marks[max(0, from_token + 1 - client.num_prompt) :]
        for record in affected:
            self.clients[record.request_id].must_end = True

    def enter_state(self, client: Client, start: int, resume: Checkpoint | None) -> int:
        """Get the running state of `client` at token `start`: the initial one, that of `resume`, or its own. Returns
        its marks."""
        if not self.bytes.num_rows:
            return 0
        if resume is not None:
            if resume.num_tokens != start:
                raise Violation("no state", f"{client.name} continues at {start}, and its checkpoint is of {resume}")
            return self.bytes.read_checkpoint(client.text, resume.block_ids, start, client.name, client.oldest)
        if start and client.state_at != start:
            raise Violation("no state", f"{client.name} continues at {start}, and has the state of {client.state_at}")
        return client.state_marks if start else 0

    def written_by(self, forward: Forward) -> list[int]:
        """The blocks that a forward writes to."""
        found: list[int] = []
        for group, table in zip(self.groups, forward.tables, strict=True):
            found += [b for b in table[forward.start // group.block_size : -(-forward.stop // group.block_size)] if b]
        for checkpoint in forward.passed:
            found += checkpoint.block_ids
        return found if forward.stop > forward.start else []

    def read_by(self, forward: Forward) -> list[int]:
        """The blocks that a forward reads."""
        found: list[int] = []
        for group, table in zip(self.groups, forward.tables, strict=True):
            if group.is_recurrent:
                continue
            needed = group.attention.required_blocks(forward.start, group.block_size)
            found += [b for b in table[needed.start : needed.stop] if b]
        return found if forward.resume is None else [*found, *forward.resume.block_ids]
