"""Calls of a client to a request: allocations, loads, forwards, commits and preemption."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs

from aoffload._kernel.states import RequestState
from aoffload._runtime.steps import Computed
from aoffload.errors import CommitError, WrongState
from aoffload.testing.early import until_given
from aoffload.testing.violations import Violation

from .runtime_requests import Served, Work
from .runtime_stage import Role, Stage

__all__ = ["GIVE_UP_S", "RequestCalls"]

GIVE_UP_S = 0.005
"""How long a client waits in a call about another client's request, which may itself wait for this client."""


@attrs.define(eq=False)
class RequestCalls(Role):
    """Makes each call by its name, and checks its result."""

    stage: Stage
    _steps: list[tuple[AbstractContextManager[None], list[Work]]] = attrs.field(factory=list, init=False)
    """Steps that are held over several calls."""

    # -- room -----------------------------------------------------------------------------------------------------

    def _target(self, args: Any) -> Served | None:
        """The request that a call is about: its own, or that of the client it names."""
        other = self.stage.actors.get(args.get("of", self.name))
        return None if other is None else other.served

    def _give_up_s(self, args: Any) -> float | None:
        """How long the call may wait. None: as long as it takes."""
        given: float | None = args.get("give_up_s")
        return GIVE_UP_S if given is None and args.get("of", self.name) != self.name else given

    @staticmethod
    def _wanted(served: Served, args: Any) -> Any:
        """How many tokens to ask for: `num`, or `by` more than the request knows. None: leave it to the call."""
        if "num" in args:
            return args["num"]
        return max(1, len(served.tokens) + args["by"]) if "by" in args else None

    async def _do_allocate(self, args: Any) -> None:
        if (served := self._target(args)) is not None:
            await self._finish_steps()
            wanted, what = self._wanted(served, args), f"allocate {served.name}"

            async def allocate() -> bool:
                await served.request.allocate(wanted)
                return True

            self._allocated(served, await self.stage.attempt_async(what, allocate, self._give_up_s(args)), "allocate")

    async def _do_allocate_nowait(self, args: Any) -> None:
        if (served := self._target(args)) is not None:
            wanted = self._wanted(served, args)
            found = self.stage.make(f"allocate_nowait {served.name}", lambda: served.request.allocate_nowait(wanted))
            self._allocated(served, found, "allocate_nowait")

    def _allocated(self, served: Served, found: Any, feature: str) -> None:
        if found:
            self.stage.met(feature)
            if served.born == served.engine.num_resets and not served.must_end:
                served.check_match(is_first=False)

    async def _do_extend(self, args: Any) -> None:
        if (served := self._target(args)) is not None:
            await self._finish_steps()
            wanted, what = self._wanted(served, args) or len(served.tokens), f"extend {served.name}"
            found = await self.stage.attempt_async(what, lambda: served.request.extend(wanted), self._give_up_s(args))
            self._extended(served, found)

    async def _do_extend_nowait(self, args: Any) -> None:
        if (served := self._target(args)) is not None:
            wanted = self._wanted(served, args) or len(served.tokens)
            found = self.stage.attempt(f"extend_nowait {served.name}", lambda: served.request.extend_nowait(wanted))
            self._extended(served, found)

    def _extended(self, served: Served, found: Any) -> None:
        if found:
            is_early = served.request.state is RequestState.ALLOCATED
            self.stage.met("extend before load" if is_early else "extend")

    # -- loading --------------------------------------------------------------------------------------------------

    async def _do_load(self, args: Any) -> None:
        if (served := self._target(args)) is None:
            return
        await self._finish_steps()
        before, hit, num_commits = served.request.state, served.request.match.num_tokens, served.num_commits
        num_ready = await self.stage.attempt_async(
            f"load {served.name}", lambda: served.request.load(args.get("max_tokens")), self._give_up_s(args)
        )
        if served.num_commits == num_commits:  # else another task has gone on with the request before this one woke
            self._check_hit_cap(served, num_ready, before, hit)
        self._loaded(served, num_ready, before)

    @staticmethod
    def _check_hit_cap(served: Served, num_ready: int | None, before: RequestState, hit: int) -> None:
        most = max(hit, served.request.match.num_tokens)
        if num_ready is not None and before is RequestState.ALLOCATED and not served.must_end and num_ready > most:
            raise Violation("hit cap", f"{num_ready} tokens of {served.name} are ready after a match of {hit}")

    def _loaded(self, served: Served, num_ready: int | None, before: RequestState) -> None:
        if num_ready is None or served.must_end:
            return
        served.look()
        served.accept_second_answer(num_ready)
        if before is not RequestState.RUNNING and num_ready:
            self.stage.met("load" if served.request.match.num_host_tokens else "device hit")
        served.check_ready(num_ready)

    async def _do_load_nowait(self, args: Any) -> None:
        if (served := self._target(args)) is None:
            return
        what = f"load_nowait {served.name}"
        pending = self.stage.attempt(what, lambda: served.request.load_nowait(args.get("max_tokens")))
        if pending is not None:
            served.pending = pending
            self.stage.met("load_nowait")

    async def _do_wait(self, args: Any) -> None:
        served = self._target(args)
        if served is None or (pending := served.pending) is None:
            return
        await self._finish_steps()
        num_ready = await self.stage.attempt_async(f"wait {served.name}", pending.wait, self._give_up_s(args))
        if num_ready is not None and served.pending is pending:
            served.loaded(pending, num_ready)
            self._loaded(served, num_ready, RequestState.LOADING)

    # -- computing ------------------------------------------------------------------------------------------------

    async def _do_step(self, args: Any) -> None:
        """One forward of one or several requests: at once, in a thread, or held until `end_step`."""
        batch = [actor.served for name in args.get("of", (self.name,)) if (actor := self.stage.actors.get(name))]
        requests = [served for served in dict.fromkeys(batch) if served is not None and served.may_compute]
        if not requests:
            return
        early = bool(args.get("early"))
        style = args.get("style", "inline")
        if style == "thread":
            await self._finish_steps()
            await self._step_in_thread(requests, args, early)
            return
        works: list[Work] = []
        step = self.stage.attempt("step", lambda: self._begin(requests, args, early, works))
        if step is None:
            return
        self._steps.append((step, works))
        if style == "inline":
            await self._finish_steps(last_only=True)

    def _begin(self, requests: list[Served], args: Any, early: bool, works: list[Work]) -> AbstractContextManager[None]:
        pending = self._pending(requests, early)
        named = [load or served.request for served, load in zip(requests, pending, strict=True)]
        step = self._hold(requests, named)
        step.__enter__()
        try:
            self._begin_works(requests, args, pending, works)
        except BaseException as error:
            step.__exit__(type(error), error, error.__traceback__)
            raise
        return step

    def _hold(self, requests: list[Served], named: list[Any]) -> AbstractContextManager[None]:
        """Around a forward: keeps the blocks that it touches."""
        runtime: Any = self.stage.runtime
        step: AbstractContextManager[None] = runtime.step(named)
        return step

    def _pending(self, requests: list[Served], early: bool) -> list[Any]:
        return [served.startable() if early else None for served in requests]

    def _begin_works(self, requests: list[Served], args: Any, pending: list[Any], works: list[Work]) -> None:
        drafts = tuple(args.get("drafts", ()))
        for served, load in zip(requests, pending, strict=True):
            works.append(
                Work.begin(served, args.get("num", 1000), drafts, load, args.get("most", 9), args.get("also", 0))
            )
            self.stage.met("early start" if load is not None else "step")
        if drafts:
            self.stage.met("drafts")
        if len(works) > 1:
            self.stage.met("step of several")

    async def _step_in_thread(self, requests: list[Served], args: Any, early: bool) -> None:
        works: list[Work] = []
        has_begun: list[bool] = []

        def compute() -> None:
            has_begun.append(True)
            for work in works:
                work.check_owners()
            self.stage.engine.env.meanwhile()
            for work in works:
                work.finish()

        async def run() -> bool:
            pending = self._pending(requests, early)
            named = [load or served.request for served, load in zip(requests, pending, strict=True)]
            # The tables of a load can only be read inside a step.
            with self.stage.runtime.step(named):
                self._begin_works(requests, args, pending, works)
                if any(pending):
                    await until_given([region for work in works for region in work.regions])
                await self.stage.runtime.run_step(named, compute)
            return True

        try:
            if await self.stage.attempt_async("run_step", run, self._give_up_s(args)):
                self.stage.met("run_step")
        finally:
            if not has_begun:
                for work in works:
                    work.drop()

    async def _do_end_step(self, args: Any) -> None:
        await self._finish_steps(last_only=True)

    async def _finish_steps(self, *, last_only: bool = False) -> None:
        """Finish the forwards of all held steps (`last_only`: of the last one), and end these steps."""
        for step, works in self._steps[-1 if last_only else 0 :]:
            regions = [region for work in works for region in work.regions]
            if regions:
                await until_given(regions)
            for work in works:
                work.finish()
            self._steps.remove((step, works))
            step.__exit__(None, None, None)

    def _end_steps(self) -> None:
        """Break off the forwards of all held steps, after a check that their blocks still have the same owner."""
        steps, self._steps = self._steps, []
        for step, works in steps:
            for work in works:
                work.check_owners()
                work.drop()
            step.__exit__(None, None, None)

    async def _do_commit(self, args: Any) -> None:
        if (served := self._target(args)) is None:
            return
        new = tuple(args.get("new", ()))
        chain, num_computed = served.accepted(new)
        stop = args.get("num", num_computed - args.get("back", 0))
        if isinstance(stop, int) and "num" not in args:
            served.check_computed(stop, chain)
        named = args.get("checkpoints", () if "num" in args else served.named(stop, chain))

        def commit() -> None:
            with self._naming(served.name, is_right="checkpoints" not in args):
                served.request.commit(stop, new, checkpoints=named)

        found = self.stage.make(f"commit {served.name}", commit)
        if found:
            if "num" in args or "checkpoints" in args:
                raise Violation("not refused", f"commit({stop!r}) of {served.name}")
            served.committed(stop, chain, new, num_computed, named)
            self.stage.met("commit")

    @staticmethod
    @contextmanager
    def _naming(name: str, *, is_right: bool = True) -> Iterator[None]:
        """Around a commit of `name` that names checkpoints; `is_right`: which it has planned and written."""
        try:
            yield
        except CommitError as error:
            if is_right and error.argument == "checkpoints":
                raise Violation("a checkpoint", f"{name} may not commit what it was to write: {error}") from error
            raise

    async def _do_commit_step(self, args: Any) -> None:
        batch = [actor.served for name in args["of"] if (actor := self.stage.actors.get(name)) is not None]
        new = tuple(args.get("new", ()))
        requests = [(served, *served.accepted(new)) for served in dict.fromkeys(batch) if served is not None]
        gone = (RequestState.DONE, RequestState.ABORTED, RequestState.PREEMPTED)
        requests = [one for one in requests if one[0].request.state not in gone]
        named = [served.named(stop, chain) for served, chain, stop in requests]
        computed = [
            Computed(served.request, stop, new, found) for (served, _, stop), found in zip(requests, named, strict=True)
        ]

        def commit() -> None:
            with self._naming("a step"):
                self.stage.runtime.commit_step(computed)

        if self.stage.make("commit_step", commit):
            for (served, chain, stop), found in zip(requests, named, strict=True):
                served.committed(stop, chain, new, stop, found)
                self.stage.met("commit_step")

    async def _do_invalidate(self, args: Any) -> None:
        if (served := self._target(args)) is None:
            return
        start = args.get("num", max(0, served.request.num_computed_tokens - args.get("back", 1)))
        self.stage.num_invalidations += 1
        found = self.stage.make(f"invalidate {served.name}", lambda: served.request.invalidate(start))
        if found:
            self.stage.engine.num_invalidations += 1
            served.taken_back(start)
            self.stage.met("invalidate")
            self.stage.check_told()

    # -- preemption -----------------------------------------------------------------------------------------------

    async def _do_preempt(self, args: Any) -> None:
        if (served := self._target(args)) is not None:
            await self._finish_steps()
            # It waits for steps of other clients, which may wait for this one.
            give_up_s = args.get("give_up_s", GIVE_UP_S)
            await self.stage.attempt_async(f"preempt {served.name}", lambda: self._preempt(served), give_up_s)

    async def _preempt(self, served: Served) -> Any:
        """No error if the request has ended: a task that preempts another task's request cannot see that."""
        try:
            return await served.request.preempt()
        except WrongState as error:
            if not hasattr(served.request, "preempt"):
                raise
            raise Violation("preempt", f"{served.name}: {error}") from error

    async def _do_preempt_nowait(self, args: Any) -> None:
        if (served := self._target(args)) is not None:
            self.stage.attempt(f"preempt_nowait {served.name}", served.request.preempt_nowait)

    async def _do_resume(self, args: Any) -> None:
        if (served := self._target(args)) is None:
            return
        await self._finish_steps()
        wanted = self._wanted(served, args)
        found = await self.stage.attempt_async(
            f"resume {served.name}", lambda: served.request.resume(wanted), self._give_up_s(args)
        )
        if found is not None:
            self.stage.met("resume")
            self._loaded(served, found, RequestState.PREEMPTED)
