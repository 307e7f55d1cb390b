"""Requests, and the other owners of blocks, with all that they own.

Every block that is neither free nor evictable has an owner. One call ends an owner and gives back everything that it
owns. `check_integrity` checks that the owners account for all blocks.

Owner | owns | ends by
--- | --- | ---
`LedgerRequest` | leases on the cached path that it reads or will load, and private blocks | `Ledger.release`
`Waiter` | the blocks of a grant that its request has not accepted | `Ledger.accept`, `Ledger.withdraw`
`Step` | the blocks of its requests, although they may be over | the end of the forward

Jobs (`records.Job`) own the blocks that they write, and lease the blocks that they read. Extensions may own leases and
blocks, too (`LedgerExtension.report_leases`).

**Published units.** The tables of a request name cached blocks before unit `published`, which its device lease pins,
and private blocks from there on, which the request alone reads and frees. (A published unit is private, too, if another
request has cached its own copy first: a duplicate, see `BlockTable`.) The match, the load and commits raise
`published`; `ready_stop` stays where the request began to compute.

    units   [ hit on the device | loaded from the host | computed and committed | allocated )
            0                                  ready_stop               published    num_units

The verbs of the kernel set these fields directly. The state alone is moved by `Moves`, which checks the move and
reports it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .._common.arguments import shown
from ..errors import CommitError, OutOfBlocks
from .plans import NO_MATCH, PrefixMatch
from .records import NO_LIMIT, BlockTable, Lease, Load, Run
from .states import Computing, NoEpoch, RequestState, Tier
from .tokens import TokenSequence

_MAY_MATCH_AGAIN = (
    RequestState.QUEUED, RequestState.MATCHED, RequestState.PINNED, RequestState.REQUEUED, RequestState.STRANDED,
)  # fmt: skip
_LOAD_NOT_OVER = (RequestState.LOADING, RequestState.DRAINING, RequestState.REQUEUED)


class LedgerRequest:
    __slots__ = (
        "computing",
        "epoch",
        "evictions_before",
        "has_committed",
        "has_parent",
        "hit_alignment",
        "hit_limit",
        "hit_stop",
        "last_step",
        "leases",
        "ledger",
        "load",
        "match",
        "nulled",
        "num_computed_tokens",
        "num_lost_tokens",
        "num_steps",
        "num_units",
        "published",
        "ready_stop",
        "reason",
        "request_id",
        "reserve",
        "sequence",
        "since_s",
        "state",
        "store_limit",
        "tables",
        "ticket",
        "waiter",
        "when_idle",
    )  # fmt: skip

    def __init__(
        self, request_id: str, sequence: TokenSequence, epoch: int | NoEpoch, ticket: int, hit_limit: int,
        hit_alignment: int, *, ledger: Any, evictions_before: int = 0, store_limit: int = NO_LIMIT,
    ) -> None:  # fmt: skip
        self.request_id = request_id
        self.sequence = sequence
        self.epoch = epoch
        self.has_parent = False
        """Whether it began with the tokens and blocks of another request."""
        self.ticket = ticket
        """Its place in the wait queue. The request keeps it when it has to wait again."""
        self.hit_limit = hit_limit
        """Maximum units of a match."""
        self.ledger = ledger
        """The ledger that admitted it. Other ledgers refuse it."""
        self.evictions_before = evictions_before
        """`TierBlocks.num_evicted` of the host when it was admitted: whether the host has evicted since."""
        self.hit_alignment = hit_alignment
        """A match ends at a multiple of this number of units."""
        self.store_limit = store_limit
        """End of the units that may be stored."""
        self.state: RequestState = RequestState.QUEUED
        self.reason = ""
        """Why it was aborted, or will be: a cancelled request ends once its task has left it."""
        self.match: PrefixMatch = NO_MATCH
        self.hit_stop = 0
        """End of the hit, in units: on the device up to `published`, from there on in the host."""
        self.load: Load | None = None
        """The load under way; None before `plan_load` and once the load is over."""
        self.tables: tuple[BlockTable, ...] = ()
        """One per component, once the request has blocks."""
        self.num_units = 0
        """Units that the tables cover."""
        self.leases: dict[Tier, Lease] = {}
        """Device: a lease on the cached path that it reads. Host: a lease on the path that it will load."""
        self.reserve: Lease | None = None
        """Only with windows: a second device lease, on window blocks after the device hit, which the load adopts."""
        self.published = 0
        """Number of leading units that are in the index, or were when the request hit, loaded or committed them."""
        self.nulled: list[tuple[int, int, int]] = []
        """(component, start, stop): units that have left the window of a component since the last `Extension`."""
        self.ready_stop = 0
        """Number of leading units that the request did not compute: the device hit, and loaded units."""
        self.num_computed_tokens = 0
        self.has_committed = False
        self.num_lost_tokens = 0
        """Tokens that its loads failed to bring to the device."""
        self.waiter: Waiter | None = None
        self.computing: Computing = Computing.NOTHING
        self.num_steps = 0
        """Number of steps under way that touch its blocks. No block is given back before all of them end."""
        self.last_step = 0
        """The number of its last step that has ended, see `LastUses`. 0: no step has ended, or its blocks were used
        outside of steps since then."""
        self.when_idle: Callable[[], object] = do_nothing
        """Called when the last of its steps has ended."""
        self.since_s = 0.0
        """When it entered its state, if the ledger has a clock."""

    def __repr__(self) -> str:
        return f"<LedgerRequest {self.request_id!r} {self.state.name} {self.num_blocks} blocks>"

    def __str__(self) -> str:
        return f"request {self.request_id}"

    @property
    def is_over(self) -> bool:
        return self.state in (RequestState.DONE, RequestState.ABORTED)

    @property
    def given_tokens(self) -> int:
        """Leading tokens whose KV its caller has on the device besides the hit: see `HostCache`."""
        return 0

    @property
    def device_run(self) -> Run | None:
        """The last run of the path that it leases on the device."""
        lease = self.leases.get(Tier.DEVICE)
        return None if lease is None else lease.run

    @property
    def table(self) -> array[int]:
        """The block ids of full attention, of all its groups."""
        return self.tables[0].ids if self.tables else array("i")

    @property
    def may_match_again(self) -> bool:
        """Whether its match consists of leases only, without block tables. No other request is matched again."""
        return self.state in _MAY_MATCH_AGAIN

    @property
    def is_loading(self) -> bool:
        """Whether its load is not over yet: the request waits for copies, for an overlapping step, or (REQUEUED) for
        free blocks."""
        return self.state in _LOAD_NOT_OVER

    @property
    def holds_device_blocks(self) -> bool:
        granted = self.waiter is not None and bool(self.waiter.granted)
        return self.num_units > 0 or granted or Tier.DEVICE in self.leases or self.reserve is not None

    def all_leases(self) -> list[Lease]:
        return [*self.leases.values()] if self.reserve is None else [self.reserve, *self.leases.values()]

    def private_blocks(self) -> array[int]:
        """Ids of the blocks that only this request reads and frees."""
        found = array("i")
        for table in self.tables:
            found.extend(table.private(self.published))
        return found

    @property
    def is_at_end(self) -> bool:
        """Whether the prompt is computed, and at most one token was generated."""
        num_prompt = self.sequence.num_prompt_tokens
        return num_prompt <= self.num_computed_tokens <= self.sequence.num_tokens <= num_prompt + 1

    def checked_count(self, num_computed_tokens: object, before: int, num_added: int) -> int:
        """`num_computed_tokens`; `CommitError` unless it is an integer, at least `before`, and at most the number of
        known tokens, `num_added` new ones included."""
        name = "num_computed_tokens"
        if type(num_computed_tokens) is not int:
            raise CommitError(name, f"must be an integer, got {shown(num_computed_tokens)}")
        if num_computed_tokens < before:
            raise CommitError(name, f"goes back from {before} to {num_computed_tokens}")
        known = self.sequence.num_tokens + num_added
        if num_computed_tokens > known:
            known_are = f"the {known} tokens that are known, {num_added} of `new_token_ids` included"
            raise CommitError(name, f"is {num_computed_tokens}, beyond {known_are}")
        return num_computed_tokens

    @property
    def num_blocks(self) -> int:
        """Positions in its block tables, including null ones."""
        found = 0
        for table in self.tables:
            found += len(table.ids)
        return found

    @property
    def num_held(self) -> int:
        """Blocks in its tables, without null ones."""
        return sum(table.num_held for table in self.tables)


def do_nothing() -> None:
    """Default `wake`: does nothing."""


def call_all(wakes: Iterator[Callable[[], object]]) -> None:
    """Call all `wakes`, even after one of them raises, because each wakes another request."""
    try:
        for wake in wakes:
            wake()
    except BaseException:
        call_all(wakes)
        raise


class Waiter:
    """One wait of one request for device blocks. When it is over, exactly one of `granted` and `error` is set."""

    __slots__ = ("changes_seen", "error", "granted", "joined_s", "num_missing", "num_units", "request", "wake")

    def __init__(self, request: LedgerRequest, num_units: int, wake: Callable[[], object] = do_nothing) -> None:
        self.request = request
        self.num_units = num_units
        """Units of the whole table, not only those to add."""
        self.wake = wake
        self.granted: array[int] | None = None
        self.error: OutOfBlocks | None = None
        self.num_missing = 0
        """Blocks that it lacked when `serve_queue` last examined it."""
        self.changes_seen = -1
        """`TierBlocks.num_changes` of the device at that time; -1: examine it in any case."""
        self.joined_s: float | None = None
        """When it first joined the wait queue, if the ledger has a clock. It keeps this time if it joins again because
        its grant was withdrawn."""

    def __repr__(self) -> str:
        over = "granted" if self.granted is not None else "failed" if self.error else "waiting"
        return f"<Waiter {self.request.request_id!r} {self.num_units} units {over}>"

    @property
    def is_over(self) -> bool:
        return self.granted is not None or self.error is not None


@dataclass(slots=True, eq=False, repr=False)
class Step:
    """A forward over the blocks of `requests`. It holds the blocks until it ends, even if a request ends before."""

    step_id: int
    requests: tuple[LedgerRequest, ...]
    begun_s: float = 0.0
    """When it began, if the ledger has a clock."""

    def __repr__(self) -> str:
        return f"<Step {self.step_id} {' '.join(request.request_id for request in self.requests)}>"

    @property
    def num_blocks(self) -> int:
        """Device blocks that it holds. A block that several requests share counts for each of them."""
        return sum(request.num_held for request in dict.fromkeys(self.requests))
