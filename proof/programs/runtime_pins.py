"""The calls that a client makes beside its request: pins, prefetches, demotions, resets, aborts, further requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import attrs

from aoffload._common.tiers import Tier
from aoffload._extensions.pins import PinState
from aoffload._runtime.handles import PendingDemotion, PendingFetch, PendingPrefetch, PinScope
from aoffload._runtime.request import Request
from aoffload._runtime.runtime import OffloadRuntime
from aoffload.errors import RuntimeClosed, WrongThread
from aoffload.testing.violations import Violation

from .runtime_calls import RequestCalls
from .runtime_requests import Served, Work
from .runtime_state import picture

__all__ = ["ClientCalls"]

PATIENCE_S = 0.08


@attrs.define(eq=False)
class ClientCalls(RequestCalls):
    """Makes the rest of the public calls, and checks their results."""

    _num_requests: int = attrs.field(default=0, init=False)
    _pins: list[PinScope] = attrs.field(factory=list, init=False)
    _cache_transfers: list[PendingPrefetch | PendingFetch | PendingDemotion] = attrs.field(factory=list, init=False)

    # -- beside requests ------------------------------------------------------------------------------------------

    async def _do_pin(self, args: Any) -> None:
        def pin() -> PinScope:
            scope: PinScope = self.stage.runtime.pins.hold(args["tokens"], args["ttl_s"], **self.stage.identity(args))
            scope.__enter__()
            return scope

        if (found := self.stage.attempt("pin", pin)) is not None:
            self._pins.append(found)
            if found.match.num_tokens:
                self.stage.met("pin")

    async def _do_client_hint(self, args: Any) -> None:
        """Answers, raises nothing for good arguments, and its pins end in time."""
        runtime, verb = self.stage.runtime, args["verb"]
        hints, tokens, identity = runtime.hints, args["tokens"], self.stage.identity(args)
        timed = {"pin": {"ttl_s": args.get("ttl_s", 5.0)}, "returns": {"in_s": args.get("ttl_s")}}.get(verb, {})
        answer = self.stage.attempt(f"client {verb}", lambda: getattr(hints, verb)(tokens, **timed, **identity))
        if answer is None:
            return
        latest = runtime._session.now() + runtime.config.max_hint_pin_s
        if any(pin.expires_at > latest for pin in runtime.ledger.hints.pins):
            raise Violation("a leak", "the pin of a hint lasts too long")
        self.stage.met("client hint")

    async def _do_unpin(self, args: Any) -> None:
        if self._pins:
            pin = self._pins.pop(0)
            self.stage.make("unpin", lambda: pin.__exit__(None, None, None))
            if pin.state is PinState.HELD:
                raise Violation("a leak", f"{pin} outlives its block")

    async def _do_prefetch(self, args: Any) -> None:
        await self._transfer("prefetch", args)

    async def _do_demote(self, args: Any) -> None:
        await self._transfer("demote", args)

    def _started(self, name: str, args: Any) -> PendingPrefetch | PendingFetch | PendingDemotion:
        runtime: Any = self.stage.runtime
        handle = runtime.fetches if name == "fetch" else runtime.transfers
        found: PendingPrefetch | PendingFetch | PendingDemotion = getattr(handle, name)(
            args["tokens"], **self.stage.identity(args)
        )
        return found

    async def _transfer(self, name: str, args: Any) -> None:
        """A transfer that is given up when its wait is."""
        await self._finish_steps()

        async def transfer() -> int:
            with self._started(name, args) as pending:
                return await pending.wait()

        if await self.stage.attempt_async(name, transfer, self._give_up_s(args)):
            self.stage.met(name)

    async def _do_begin_prefetch(self, args: Any) -> None:
        self._begin_transfer("prefetch", args)

    async def _do_begin_demote(self, args: Any) -> None:
        self._begin_transfer("demote", args)

    def _begin_transfer(self, name: str, args: Any) -> None:
        found = self.stage.attempt(f"begin {name}", lambda: self._started(name, args))
        if found is not None:
            self._cache_transfers.append(found)
            if not found.is_over:
                self.stage.met(name)

    async def _do_fetch(self, args: Any) -> None:
        await self._transfer("fetch", args)

    async def _do_begin_fetch(self, args: Any) -> None:
        self._begin_transfer("fetch", args)

    async def _do_request_fetch(self, args: Any) -> None:
        """Bring what the disk has for a request that has no blocks."""
        if (served := self._target(args)) is None:
            return
        await self._finish_steps()
        what, call = f"fetch of {served.name}", served.request.fetch
        if await self.stage.attempt_async(what, call, self._give_up_s(args)) is not None and not served.must_end:
            if served.born == served.engine.num_resets:
                served.check_match(is_first=False)
            self.stage.met("fetch")

    async def _do_restored(self, args: Any) -> None:
        runtime = self.stage.runtime
        if await self.stage.attempt_async("restored", lambda: runtime.disk.wait_restored(), self._give_up_s(args)):
            self.stage.met("restored")

    async def _do_transfer_wait(self, args: Any) -> None:
        if self._cache_transfers:
            await self._finish_steps()
            await self.stage.attempt_async("transfer wait", self._cache_transfers.pop(0).wait, self._give_up_s(args))

    async def _do_transfer_cancel(self, args: Any) -> None:
        if self._cache_transfers:
            self.stage.make("transfer cancel", self._cache_transfers.pop(0).cancel)

    async def _do_flush(self, args: Any) -> None:
        await self._finish_steps()
        if await self.stage.attempt_async("flush", self._flush, self._give_up_s(args)):
            self.stage.met("flush")

    async def _flush(self) -> bool:
        await self.stage.runtime.flush()
        return True

    async def _do_reset(self, args: Any) -> None:
        await self._finish_steps()
        tier = args.get("tier")
        which = Tier[tier] if tier in Tier.__members__ else tier
        found = await self.stage.attempt_async(
            "reset", lambda: self.stage.runtime.reset(which, args.get("timeout_s")), self._give_up_s(args)
        )
        if found is not None:
            self.stage.met(f"reset {tier.lower()}" if tier else "reset")

    async def _do_weights(self, args: Any) -> None:
        """Other weights compute from now on, or those of an earlier epoch again."""
        runtime, epoch, before = self.stage.runtime, args["epoch"], self.stage.epoch
        if self.stage.make("weights", lambda: runtime.weights.set(epoch)):
            if runtime.weights.epoch != epoch or runtime.statistics().weights_epoch != epoch:
                raise Violation("an answer", f"the epoch is {runtime.weights.epoch!r}, and {epoch!r} was set")
            self.stage.engine.check_findable()
            if epoch != before:
                self.stage.met("weights")

    async def _do_lookup(self, args: Any) -> None:
        self.stage.attempt("lookup", lambda: self.stage.runtime.lookup(args["tokens"], **self.stage.identity(args)))

    async def _do_statistics(self, args: Any) -> None:
        self.stage.attempt("statistics", self.stage.runtime.statistics)
        self._ask_elsewhere()

    def _ask_elsewhere(self) -> None:
        """A second thread makes one call of each kind. The runtime refuses each of them, and none changes anything."""
        runtime: Any = self.stage.runtime
        answers: dict[str, Any] = {}
        if runtime._session.is_over:
            return
        calls: dict[str, Callable[[], object]] = {
            "statistics": runtime.statistics,
            "requests": runtime.reports.requests,
            "explain": runtime.explain,
            "holders": runtime.reports.holders,
            "lookup": lambda: runtime.lookup((1, 2)),
            "cancel": lambda: runtime.cancel("nobody"),
        }
        if isinstance(runtime, OffloadRuntime):
            calls["prefetch"] = lambda: runtime.transfers.prefetch((1, 2))
            calls["step"] = lambda: runtime.step([])

        def ask() -> None:
            for what, call in calls.items():
                with suppress(WrongThread, RuntimeClosed):
                    answers[what] = call()

        before = picture(runtime.ledger)
        thread = threading.Thread(target=ask, name="elsewhere")
        thread.start()
        thread.join()
        if answers or picture(runtime.ledger) != before:
            raise Violation("threads", f"another thread was answered by {', '.join(answers) or 'nothing'}")

    async def _do_report_queue(self, args: Any) -> None:
        self.stage.make("report_queue", lambda: self.stage.runtime.report_queue(args["num_tokens"]))

    async def _do_report_compute(self, args: Any) -> None:
        what = args["num_tokens"], args["seconds"]
        self.stage.make("report_compute", lambda: self.stage.runtime.report_compute(*what))

    async def _do_integrity(self, args: Any) -> None:
        self.stage.make("check_integrity", self.stage.runtime.check_integrity)

    async def _do_pause(self, args: Any) -> None:
        await anyio.sleep(args["s"])

    async def _do_leave(self, args: Any) -> None:
        """Does nothing: the client has no request to leave."""

    async def _do_abort(self, args: Any) -> None:
        """Cancel a request by its own method, or by its id."""
        if (served := self._target(args)) is None:
            return
        self.stage.struck(served)
        if args.get("how") == "runtime":
            if self.stage.attempt("cancel", lambda: self.stage.runtime.cancel(served.name, "injected")):
                self.stage.met("cancel runtime")
        else:
            served.request.cancel("injected")
            self.stage.met("cancel request")

    async def _do_serve(self, args: Any) -> None:
        """A whole request in a task of its own."""
        await self._finish_steps()
        self._num_requests += 1
        name = f"{self.name}{self._num_requests}"

        async def serve(request: Request) -> bool:
            served = self.stage.admitted(request, args)
            try:
                served.check_match(is_first=True)
                await self._compute(served, args)
            finally:
                self.stage.left(served)
            return True

        tokens, options = args["tokens"], self.stage.options(args)
        # A client that waits for room while its own request holds some may wait for itself.
        give_up_s = self._give_up_s(args) if self.served is None else args.get("give_up_s", PATIENCE_S)
        found = await self.stage.attempt_async(
            "run", lambda: self.stage.runtime.run(serve, tokens, request_id=name, **options), give_up_s
        )
        if found:
            self.stage.met("run")

    async def _compute(self, served: Served, args: Any) -> None:
        request = served.request
        await request.allocate()
        served.check_ready(await request.load())
        with self.stage.runtime.step([request]):
            Work.begin(served, 1000, (), None).finish()
        chain, stop = served.accepted(tuple(args.get("new", ())))
        served.check_computed(stop, chain)
        named = served.named(stop, chain)
        with self._naming(served.name):
            request.commit(stop, args.get("new", ()), checkpoints=named)
        served.committed(stop, chain, tuple(args.get("new", ())), stop, named)
