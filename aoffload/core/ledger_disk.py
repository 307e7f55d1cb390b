"""The ledger's calls about the disk, the tier below the host, and about fetches from there."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from ..arguments import check_callable
from ..errors import InvalidArgument, WrongState
from ..prefix import Prefix
from .answer import PrefixMatch
from .arguments import check_bool, check_int, check_prefix
from .fetches import Fetches
from .hops import Tier
from .kept import Fetch
from .ledger_work import WorkingRequests
from .lifecycle import RequestState, require
from .owners import Holding, nobody
from .plan import TransferPlan
from .records import Job
from .restored import RestoredRun
from .restores import check_restored
from .tiers import DiskBlocks
from .tokens import TokenSequence
from .waiting import is_waiting

__all__ = ["DiskOfLedger"]


class DiskOfLedger(WorkingRequests):
    """Calls that need `OffloadConfig.disk`. Without one, nothing is ever planned for the disk."""

    def fetch(
        self,
        prefix: Prefix,
        wake: Callable[[], object] = nobody,
        *,
        num_remote_tokens: int = 0,
        request: Holding | None = None,
    ) -> Fetch:
        """Start copying into the host what only the disk has of `prefix`: its `plans` have to be launched. Behind that,
        load the cells of a remote store with its first `num_remote_tokens`, whole cells: the caller has asked there.

        All fetches together take at most `max_fetch_share` of the host; of what exceeds it, the front is fetched. Two
        fetches of one prefix share the copies. A cell that is not there ends what is fetched. `wake` is called once it
        is over: if it calls `match_fetched` itself, nothing can be evicted in between. `request` is who waits for it:
        `requests()` and the log say so.
        """
        if self._moves.is_telling:
            raise self._in_report("fetch")
        check_callable("wake", wake)
        if request is not None:
            self._own(request)
        sequence = TokenSequence(check_prefix(prefix), self.layout.unit_tokens)
        remote_stop = check_int("num_remote_tokens", num_remote_tokens, 0) // self.layout.unit_tokens
        cell_tokens = 0 if self._remote_stores is None else self._remote_stores.cell_units * self.layout.unit_tokens
        if num_remote_tokens and (not cell_tokens or num_remote_tokens % cell_tokens):
            raise InvalidArgument("num_remote_tokens", f"must be whole cells of {cell_tokens} tokens")
        return self._need_fetches("fetch").fetch(sequence, wake, self, remote_stop, request)

    def num_fetch_blocks(self, prefix: Prefix) -> int:
        """Blocks that a fetch of `prefix` would copy from the disk now: none that others bring already."""
        sequence = TokenSequence(check_prefix(prefix), self.layout.unit_tokens)
        return self._need_fetches("num_fetch_blocks").num_blocks(sequence)

    def num_remote_fetch_blocks(self, prefix: Prefix, num_remote_tokens: int) -> int:
        """Blocks that a fetch of `prefix` would load from cells with its first `num_remote_tokens` tokens now: neither
        what the disk has nor what others bring already."""
        sequence = TokenSequence(check_prefix(prefix), self.layout.unit_tokens)
        remote_stop = check_int("num_remote_tokens", num_remote_tokens, 0) // self.layout.unit_tokens
        return self._need_fetches("num_remote_fetch_blocks").num_remote_blocks(sequence, remote_stop)

    def match_fetched(self, holding: Holding) -> PrefixMatch:
        """Match a PINNED request again and pin what is there now, in one step: a fetch has brought more of it. Refused
        while it is in the line for room, and once it has blocks."""
        require(self._own(holding), "match_fetched", RequestState.PINNED)
        if holding.waiter is not None:
            raise is_waiting(holding, "match_fetched")
        if self._engine is not None:
            self._engine.matches.match_fetched(holding)
        else:
            self._request_leases.match_again(holding)
            if self._fetches is not None:
                self._fetches.keep(holding)
        self.admission.serve_line()
        return holding.match

    def plan_disk_stores(
        self, max_blocks: int, *, is_idle: bool = False, only_asked_twice: bool = False
    ) -> tuple[TransferPlan, ...]:
        """Stores on the disk of what the host is about to evict, at most `max_blocks` blocks; with `is_idle`, also of
        what was asked for twice. `only_asked_twice`: nothing else. Cheap if nothing has changed."""
        if self._moves.is_telling:
            raise self._in_report("plan_disk_stores")
        check_int("max_blocks", max_blocks, 0)
        check_bool("is_idle", is_idle)
        check_bool("only_asked_twice", only_asked_twice)
        if self._disk_stores is None:
            return ()
        return self._stored(self._disk_stores.plan(max_blocks, is_idle=is_idle, only_asked_twice=only_asked_twice))

    @property
    def disk_stores_are_due(self) -> bool:
        """Whether `plan_disk_stores` may find something that it did not find last time. Cheap."""
        return self._disk_stores is not None and self._disk_stores.are_due

    def plan_disk_flush(self, max_blocks: int) -> tuple[TransferPlan, ...]:
        """Stores on the disk of what is in the host, at most `max_blocks` blocks, what was used last first."""
        if self._moves.is_telling:
            raise self._in_report("plan_disk_flush")
        check_int("max_blocks", max_blocks, 0)
        if self._disk_stores is None:
            return ()
        return self._stored(self._disk_stores.plan_flush(max_blocks))

    def _stored(self, jobs: list[Job]) -> tuple[TransferPlan, ...]:
        if jobs:
            self._restores = None  # what they write to may be what a restart has found
        return tuple([job.plan for job in jobs])

    def take_forgotten_slots(self) -> array[int]:
        """The slots on the disk whose contents `invalidate` has taken back since the last call: whatever a restart
        would find them by is to be erased."""
        disk = self.cache.tiers[-1]
        return disk.take_forgotten() if isinstance(disk, DiskBlocks) else array("i")

    @property
    def num_disk_resets(self) -> int:
        """How often all on the disk was forgotten since this ledger was made: see `TransferPlan.generation`."""
        return self.cache.tiers[Tier.DISK].num_resets if self.cache.has_disk else 0

    def restore(self, run: RestoredRun) -> int:
        """Take up what an earlier process has left on the disk; returns how many of its slots are in use now.

        Runs are given a prefix before what follows it. Requests may go on meanwhile, but all are to be given before the
        first store on the disk: after that, and after a reset, nothing is taken up. What follows nothing that is there
        is left out, and so is what is there already."""
        if self._moves.is_telling:
            raise self._in_report("restore")
        if not self.cache.has_disk:
            raise WrongState("restore: this ledger has no disk: see `OffloadConfig.disk`")
        found = check_restored(run, self.cache)
        return 0 if self._restores is None else self._restores.restore(found)

    def _need_fetches(self, call: str) -> Fetches:
        if self._fetches is None:
            raise WrongState(f"{call}: this ledger has no disk and no remote store: see `OffloadConfig.disk`")
        return self._fetches
