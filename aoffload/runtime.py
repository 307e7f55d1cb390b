"""The runtime: the ledger, the worker and the transport, wired to one event loop."""

from __future__ import annotations

import math
import warnings
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, Unpack

import anyio
import attrs

from .arguments import check_callable, check_int, check_text, number_of, shown
from .core.answer import PrefixMatch
from .core.hops import Tier
from .core.ledger import LedgerStatistics
from .core.policy import StoreScope
from .errors import InvalidArgument, RequestAborted
from .load_costs import MOST_TOKENS, check_report
from .loading import PendingLoad
from .pins import Identity, PendingDemotion, PendingFetch, PendingPrefetch, PinScope, check_identity, time_to_live
from .prefix import KeySpan, Prefix, TokenIds, prompt_of
from .request import Request
from .runtime_life import RuntimeLife
from .session import RequestOptions
from .steps import Computed, StepScope, commit_step, run_step
from .transfer.fence import Fence
from .transfer.transport import DiskStatistics, RemoteStatistics, TransferStatistics

__all__ = ["OffloadRuntime", "RuntimeStatistics"]

Result = TypeVar("Result")


@attrs.frozen
class RuntimeStatistics(LedgerStatistics):
    """A snapshot. `device` and `host` hold num_blocks, num_free, num_cached, num_pinned, num_quarantined."""

    transfers: TransferStatistics
    disk_transfers: DiskStatistics | None = None
    """None without a disk."""
    remote_transfers: RemoteStatistics | None = None
    """None without a remote tier."""
    num_fetches_declined: int = 0
    """Times that a request computed what a tier below the host had: that was sooner."""
    num_fetches_skipped: int = 0
    """Times that a request computed what a tier below the host may have: that has failed, and is left alone."""
    num_loads_declined: int = 0
    """Times that a request computed what the host had, or a part of it: that was sooner, or better for those behind."""
    off_reason: str = ""
    """Why the cache has turned itself off: nothing is loaded or stored any more. Empty while it is on."""


class OffloadRuntime(RuntimeLife):
    """An async context manager around one engine's KV cache.

    `kv_caches`: a tensor `[num_blocks, ...]`, a sequence or mapping of them, or `KVRegion`s, all of one block pool;
    row 0 is the null block. `transport` replaces them if the tensors are elsewhere. `device_pool` hands out the block
    ids; by default a free list of the runtime's own. `engine_blocks`, in its place: the blocks of an engine that has a
    pool and a prefix cache itself (docs/engines.md). `observers` receive the same events as the log.
    """

    # -- requests -------------------------------------------------------------------------------------------------

    def request(
        self,
        token_ids: TokenIds,
        request_id: str | None = None,
        *,
        cache_salt: str | bytes | None = None,
        adapter_key: str | bytes | None = None,
        key_spans: Iterable[KeySpan] = (),
        deadline_s: float | None = None,
        max_hit_tokens: int | None = None,
        hit_alignment: int = 1,
        reads_cache: bool = True,
        store: StoreScope | str = StoreScope.ALL,
        max_store_tokens: int | None = None,
        num_device_tokens: int = 0,
    ) -> Request:
        """A request for the prompt `token_ids` (one dimension of ids in `[0, 2**31)`, copied here).

        `cache_salt`, `adapter_key` and `key_spans` are part of the identity of KV: it is shared only where they are
        equal. `deadline_s` counts from entering. `max_hit_tokens` and `hit_alignment` limit the cache hit;
        `reads_cache=False` disables it. `store` (all, the prompt, or nothing) and `max_store_tokens` (first tokens)
        limit what is stored to the host. `num_device_tokens`: with `engine_blocks`, the hit in the engine's own cache.

        An array of any length is read here. A list or tuple of more than 8,192 ids is read on entering, with turns for
        other tasks in between. It must not change until then, and `cancel(request_id)` finds the request only later.
        """
        self._session.check_usable()
        seconds = None if deadline_s is None else _seconds("deadline_s", deadline_s)
        if seconds is not None and seconds < 0:  # no error: the rest of a time-out may be negative
            over = "is over before the request begins; None is no deadline"
            warnings.warn(f"deadline_s: {shown(deadline_s)} {over}", UserWarning, stacklevel=2)
        prompt = prompt_of(self._roots.of(cache_salt, adapter_key), token_ids, key_spans)
        options = RequestOptions(
            request_id, seconds, max_hit_tokens, hit_alignment, reads_cache, store, max_store_tokens, num_device_tokens
        )
        request = Request(self._session, prompt, options)
        request._runtime = self
        return request

    async def run(
        self, function: Callable[[Request], Awaitable[Result]], token_ids: TokenIds, /, **options: Any
    ) -> Result:
        """Run `function(request)` in a new task; returns its result. `RequestAborted` if the request was cancelled.

        Only this method spawns a task for a request: cancelling the caller, natively too, cancels only this request.
        """
        check_callable("function", function)
        request = self.request(token_ids, **options)
        results: list[Result] = []
        errors: list[Exception] = []

        async def serve() -> None:
            try:
                async with request:
                    results.append(await function(request))
            except Exception as error:  # noqa: BLE001 - raised again in the caller's task, out of the group
                errors.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(serve, name=f"aoffload {request.request_id}")
        if errors:
            raise errors[0]
        if not results:
            raise RequestAborted(request.request_id, request.reason)
        return results[0]

    def cancel(self, request_id: str, reason: str = "cancelled") -> bool:
        """Cancel the live request with that id. Returns whether there was one."""
        self._session.check_usable()
        reason = check_text("reason", reason)
        return self._session.cancel(check_text("request_id", request_id), reason)

    def lookup(
        self,
        token_ids: TokenIds,
        *,
        cache_salt: str | bytes | None = None,
        adapter_key: str | bytes | None = None,
        key_spans: Iterable[KeySpan] = (),
    ) -> PrefixMatch:
        """The cached part of a prompt. Pins nothing, refreshes nothing: it may be evicted at the next await."""
        self._session.check_usable()
        return self.ledger.lookup(self._prefix(token_ids, cache_salt, adapter_key, key_spans))

    def pin(self, token_ids: TokenIds, ttl_s: float, **identity: Unpack[Identity]) -> PinScope:
        """A context manager that pins the cached part of a prompt from entering on, for at most `ttl_s` seconds."""
        pin = PinScope(self._session, self._prefix_for("pin", token_ids, identity), time_to_live(ttl_s))
        pin._runtime = self
        return pin

    def hint(self, token_ids: TokenIds, *, expected_s: float, category: str = "", **identity: Unpack[Identity]) -> int:
        """Say that a prompt will be asked for again within `expected_s` seconds, as after an agent's tool call: what
        is cached of it is evicted last until then. Pins nothing. Returns the tokens spared, 0 unless eviction learns.

        `category`: hints of one kind, such as the tool's name. While less than a quarter of them comes true, they spare
        nothing."""
        prefix = self._prefix_for("hint", token_ids, identity)
        expires_at = anyio.current_time() + time_to_live(expected_s, "expected_s")
        found = self.ledger.hint(prefix, expires_at=expires_at, category=category)
        self._session.worker.watch(expires_at)
        return found

    async def prefetch(self, token_ids: TokenIds, **identity: Unpack[Identity]) -> int:
        """Load the host hit of a prompt onto the device. Returns how many of its tokens are there then.

        Best effort: it takes only blocks that no request waits for, and never raises for a failed copy. A cancellation
        drops its jobs that are not launched yet.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        with PendingPrefetch(self._session, self._prefix_for("prefetch", token_ids, identity)) as pending:
            return await pending.wait()

    def prefetch_nowait(self, token_ids: TokenIds, **identity: Unpack[Identity]) -> PendingPrefetch:
        """As `prefetch`, but returns at once, and the transfer goes on in the background."""
        return PendingPrefetch(self._session, self._prefix_for("prefetch_nowait", token_ids, identity))

    async def fetch(self, token_ids: TokenIds, **identity: Unpack[Identity]) -> int:
        """Bring what the disk has of a prompt into host memory. Returns how many of its tokens would hit then.

        Best effort, as `prefetch`: it takes at most `max_fetch_share` of the host, and never raises for a failed copy.
        `Request.allocate` does it for its own prompt. `WrongState` without a disk.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        with PendingFetch(self._session, self._prefix_for("fetch", token_ids, identity)) as pending:
            return await pending.wait()

    def fetch_nowait(self, token_ids: TokenIds, **identity: Unpack[Identity]) -> PendingFetch:
        """As `fetch`, but returns at once, and the transfer goes on in the background."""
        return PendingFetch(self._session, self._prefix_for("fetch_nowait", token_ids, identity))

    async def demote(self, token_ids: TokenIds, **identity: Unpack[Identity]) -> int:
        """Move the blocks of a prompt from the device to host memory. Returns how many device blocks were freed.

        Pinned blocks, prefix blocks of other cached prompts, and blocks for which the host has no room stay.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        with PendingDemotion(self._session, self._prefix_for("demote", token_ids, identity)) as pending:
            return await pending.wait()

    def demote_nowait(self, token_ids: TokenIds, **identity: Unpack[Identity]) -> PendingDemotion:
        """As `demote`, but returns at once, and the transfer goes on in the background."""
        return PendingDemotion(self._session, self._prefix_for("demote_nowait", token_ids, identity))

    def _prefix(
        self, token_ids: TokenIds, cache_salt: Any = None, adapter_key: Any = None, key_spans: Iterable[KeySpan] = ()
    ) -> Prefix:
        return Prefix.of(self._roots.of(cache_salt, adapter_key), token_ids, key_spans)

    def _prefix_for(self, call: str, token_ids: TokenIds, identity: Identity) -> Prefix:
        self._session.check_usable()
        check_identity(f"{type(self).__name__}.{call}", identity)
        return self._prefix(token_ids, **identity)

    # -- computing ------------------------------------------------------------------------------------------------

    def step(self, requests: Iterable[Request | PendingLoad]) -> AbstractContextManager[None]:
        """Hold the blocks of `requests` while a forward uses them, in any thread, even if a request ends meanwhile.

        A load waits only for the steps that used the blocks it writes to, and not for all compute so far. So once you
        use steps, run every forward in one, also a forward whose result you may discard, and commit once for each step.
        If you never use steps, loads wait for all compute so far.

        A pending load in place of its request: the forward starts before the load is over (see `PendingLoad`).
        """
        self._session.check_usable()
        return StepScope(self._session, requests)

    async def run_step(self, requests: Iterable[Request | PendingLoad], function: Callable[[], Result]) -> Result:
        """Run `function()` in a worker thread and hold the blocks of `requests` until the *thread* has finished.

        A natively cancelled asyncio task leaves a `with runtime.step(...)` while the thread it awaits still runs; here
        the step belongs to the thread. A task that waits to the end goes on with nothing in between: if it commits at
        once, nobody has preempted a request meanwhile. `cancel` and a deadline of a request wait for the thread, too.
        """
        return await run_step(self._session, requests, function)

    def offer_deferred(self, after: Fence | None = None) -> None:
        """With `engine_blocks`, at the beginning of each step: store blocks that offers have deferred because too many
        were in flight, up to the bound of stores in flight. This includes blocks of requests that are over, because
        `find` says which block of the engine holds their KV.

        `after` is a fence after all compute so far; None: after all work on the current stream so far.
        """
        self._session.check_usable()
        self._session.offer_deferred(after)

    def report_queue(self, num_tokens: int) -> None:
        """The engine will compute so many tokens of prompts before those of the next request. Call it at each step, or
        never: the runtime counts what requests have to compute from their load on."""
        self._session.check_usable()
        check_int("num_tokens", num_tokens, 0, MOST_TOKENS)
        if self._session.costs is not None:
            self._session.costs.report_queue(num_tokens)

    def report_compute(self, num_tokens: int, seconds: float) -> None:
        """Computing `num_tokens` tokens of prompts took so long. For engines whose steps the runtime does not see: with
        `engine_blocks`, or where a commit comes before its forward is over."""
        self._session.check_usable()
        check_report(num_tokens, seconds)
        if self._session.speed is not None:
            self._session.speed.report(num_tokens, float(seconds))

    def commit_step(self, computed: Iterable[Computed], after: Fence | None = None) -> tuple[Request, ...]:
        """Commit several requests of one forward behind one fence, all or nothing.

        Requests that have ended or were preempted meanwhile, even if they were resumed since, are left out and
        returned: what was computed for them is lost.
        """
        return commit_step(self._session, computed, after)

    # -- whole cache ----------------------------------------------------------------------------------------------

    async def wait_restored(self) -> int:
        """Wait until what an earlier process left on the disk is known. Returns how many of its blocks were found."""
        self._session.check_usable()
        await anyio.lowlevel.checkpoint_if_cancelled()
        disk = self._session.disk
        if disk is None:
            return 0
        await disk.is_restored.wait()
        return disk.num_restored

    async def flush(self) -> None:
        """Wait until every transfer planned so far has ended or is given up."""
        self._session.check_usable()
        self._session.check_loop(self.env.running_loop())
        await self.worker.wait_idle()

    async def reset(self, tier: Tier | None = None, timeout_s: float | None = None) -> tuple[int, ...]:
        """Drop the whole cache, or that of `tier`, end all pins, and wait for the transfers in flight: the blocks that
        they bring there are not published. Returns the ids of the jobs that are not over within `timeout_s` seconds
        (None: no limit); empty if all are.

        No request begins to compute with KV from before the reset: a request whose load is not over, because `load`,
        `resume` or `PendingLoad.wait` has not returned, computes from its first token. Requests whose load is over, or
        that compute without a load, keep their blocks and go on. If one of them has begun no step and committed
        nothing since its load, a further `load` gives its old blocks up and returns 0. Requests from before the reset
        publish and store nothing any more, unless `tier` is below the device.

        No restart finds what was on the disk before the reset. If the disk cannot assure that, `TransferRefused` is
        raised. The runtime then stops using a disk that has failed. If the disk is only late, the runtime uses it again
        once the reset is complete. The cells of a remote store stay there for other users of its namespace, and this
        runtime stops using the store.
        """
        self._session.check_usable()
        self._session.check_loop(self.env.running_loop())
        seconds = math.inf if timeout_s is None else _seconds("timeout_s", timeout_s)
        if seconds < 0:
            raise InvalidArgument("timeout_s", f"must not be negative, got {shown(timeout_s)}")
        self.ledger.reset(tier)
        self.worker.discard_queued()
        last_id, deadline = self.ledger.jobs.last_id, anyio.current_time() + seconds
        disk, remote = self._session.disk, self._session.remote
        if remote is not None and tier is None:
            remote.turn_off("a reset: what the store has under this namespace is of before")
        if disk is not None and tier in (None, Tier.DISK):
            await disk.reset(min(seconds, self.config.transfer_timeout_s))
        with anyio.CancelScope(deadline=deadline):
            await self.worker.wait_over(last_id)
        return self.worker.copies.in_flight_up_to(last_id)

    def statistics(self) -> RuntimeStatistics:
        self._session.check_may_look()
        found = self.ledger.statistics()
        disk, remote = self._session.disk, self._session.remote
        return RuntimeStatistics(
            **attrs.asdict(found, recurse=False),
            transfers=self.transport.statistics(),
            disk_transfers=None if disk is None else disk.disk.statistics(),
            remote_transfers=None if remote is None else remote.remote.statistics(),
            num_fetches_declined=self._session.num_fetches_declined,
            num_fetches_skipped=sum(one.num_fetches_skipped for one in (disk, remote) if one is not None),
            num_loads_declined=0 if self._session.costs is None else self._session.costs.num_declined,
            off_reason=self.worker.off_reason,
        )

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every block has exactly one owner. Looks at every block."""
        self._session.check_may_look()
        self.ledger.check_integrity()


def _seconds(name: str, value: object) -> float:
    seconds = number_of(value)
    if seconds is None:
        raise InvalidArgument(name, f"must be a number of seconds, got {shown(value)}")
    return seconds
