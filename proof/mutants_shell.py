"""Planted defects of the shell: requests, the copy worker, the runtime."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["SHELL_MUTANTS"]

REQUEST, WORKER, RUNTIME = "aoffload.request", "aoffload.worker", "aoffload.runtime"

_REQUEST = (
    Mutant(
        "cancelled request keeps its pins",
        REQUEST,
        "        self._close(self._why(error))\n",
        "        if error is None or not _is_cancellation(error):\n            self._close(self._why(error))\n",
        "whatever happens to a request, its pins go",
    ),
    Mutant(
        "failed request keeps its pins",
        REQUEST,
        "        self._close(self._why(error))\n",
        "        if error is None or _is_cancellation(error):\n            self._close(self._why(error))\n",
        "whatever happens to a request, its pins go",
    ),
    Mutant(
        "cancelled request swallows errors",
        REQUEST,
        "        return bool(self._scope.__exit__(exc_type, error, trace))\n",
        "        return bool(self._scope.__exit__(exc_type, error, trace)) or self._scope.cancel_called\n",
        "any other exception passes through",
    ),
    Mutant(
        "own cancellation passes through",
        REQUEST,
        "        return bool(self._scope.__exit__(exc_type, error, trace))\n",
        "        self._scope.__exit__(exc_type, error, trace)\n        return False\n",
        "a cancellation that the request asked for ends with its block",
    ),
    Mutant(
        "reason of a cancellation lost",
        REQUEST,
        "            self._cancel_reason = self._cancel_reason or reason\n",
        "",
        "an aborted request says why",
    ),
    Mutant(
        "any cancellation in a group counts",
        REQUEST,
        "        return all(_is_cancellation(inner) for inner in error.exceptions)",
        "        return any(_is_cancellation(inner) for inner in error.exceptions)",
        "an error beside a cancellation is an error",
    ),
    Mutant(
        "deadline never set",
        REQUEST,
        "            self._scope.deadline = anyio.current_time() + self._options.deadline_s\n",
        "            self._scope.deadline = float('inf')\n",
        "no hang past a deadline",
    ),
    Mutant(
        "abandoned request keeps its pins",
        REQUEST,
        "            self._runtime._abandon(holding)  # first: a warning may be an error\n",
        "",
        "nothing leaks: an abandoned request is released",
    ),
    Mutant(
        "cancelled wait stays in line",
        REQUEST,
        "        try:\n            yield\n        finally:\n            self._runtime.ledger.withdraw(waiter)\n",
        "        yield\n        self._runtime.ledger.withdraw(waiter)\n",
        "a cancelled waiter leaves the line and returns its grant",
    ),
    Mutant(
        "load timeout never fires",
        REQUEST,
        "bound = runtime.config.load_timeout_s if holding.load is not None else None",
        "bound = None",
        "no hang: a load that takes too long is given up",
    ),
    Mutant(
        "grant for a load not taken",
        REQUEST,
        "                self.start()\n                continue\n",
        "                continue\n",
        "after queueing again the load is planned again",
    ),
    Mutant(
        "only one task of a request woken",
        REQUEST,
        "        for event in self._waiting:\n",
        "        for event in tuple(self._waiting)[:1]:\n",
        "no hang: whoever waits is woken",
    ),
    Mutant(
        "closing not noticed in the line",
        REQUEST,
        "self._live()\n            return self._runtime.ledger.accept(waiter)",
        "pass\n            return self._runtime.ledger.accept(waiter)",
        "a runtime closed under a request raises RuntimeClosed",
    ),
)

_WORKER = (
    Mutant(
        "stores before loads",
        WORKER,
        "        for queue in (self._loads, self._stores):\n            while queue:",
        "        for queue in (self._stores, self._loads):\n            while queue:",
        "loads go before stores",
    ),
    Mutant(
        "bytes in flight not bounded",
        WORKER,
        "fits = self._num_bytes + num_bytes <= self._max_bytes",
        "fits = True",
        "in-flight work is bounded in bytes",
    ),
    Mutant(
        "jobs in flight not bounded",
        WORKER,
        "        return fits and len(self._in_flight) < self.config.max_jobs_in_flight",
        "        return fits",
        "in-flight work is bounded in jobs",
    ),
    Mutant(
        "bytes in flight never given back",
        WORKER,
        "            self._num_bytes -= found.num_bytes",
        "            self._num_bytes -= 0",
        "budgets are returned with the job",
    ),
    Mutant(
        "job above the bound never goes",
        WORKER,
        "        if not self._in_flight:\n            return True",
        "        if not self._in_flight and num_bytes <= self._max_bytes:\n            return True",
        "no hang: a job above the bound goes alone",
    ),
    Mutant(
        "discarded job launched",
        WORKER,
        "                if self._tell(self.ledger.launch, job.plan.job_id):\n                    self._launch",
        "                if self._tell(self.ledger.launch, job.plan.job_id) is not None:\n"
        "                    self._launch",
        "a discarded load is never copied",
    ),
    Mutant(
        "store does not wait for its fence",
        WORKER,
        "            queue.append(QueuedJob(plan, after))",
        "            queue.append(QueuedJob(plan, None))",
        "a store's copy waits for the compute that wrote it",
    ),
    Mutant(
        "deadline of a transfer not armed",
        WORKER,
        "            self._wake_by(deadline)  # it may have had none while nothing was in flight\n",
        "            pass\n",
        "no hang: a transfer without an end is given up",
    ),
    Mutant(
        "timer frees what is pinned",
        WORKER,
        "Completion(job_id, Outcome.UNPROVEN, error=error)",
        "Completion(job_id, Outcome.FAILED, error=error)",
        "a timer may quarantine, never free",
    ),
    Mutant(
        "launch error frees the destination",
        WORKER,
        "            self.deliver(Completion(plan.job_id, Outcome.UNPROVEN, error=repr(error)))",
        "            self.deliver(Completion(plan.job_id, Outcome.FAILED, error=repr(error)))",
        "leak, don't corrupt: nobody knows what was started",
    ),
    Mutant(
        "stalled transport makes queues",
        WORKER,
        "if not self.is_accepting or self._overdue:",
        "if not self.is_accepting:",
        "a stalled transport makes misses, not queues",
    ),
    Mutant(
        "transport never recovers",
        WORKER,
        "                self._overdue.discard(completion.job_id)\n",
        "",
        "a transport that reports again is used again",
    ),
    Mutant(
        "flag of the wake-up never cleared",
        WORKER,
        "        self._is_signalled = False\n        while self._calls:",
        "        while self._calls:",
        "no lost wake-up: what comes later signals again",
    ),
    Mutant(
        "worker ends without a last look",
        WORKER,
        "                self.drain()  # what it was woken for and didn't get round to: nobody signals twice\n",
        "",
        "late proof ends a quarantine, also after closing",
    ),
    Mutant(
        "opened before the worker has begun",
        RUNTIME,
        "            await self.worker.has_begun.wait()\n",
        "",
        "what cancels the worker cancels nobody else",
    ),
    Mutant(
        "no fence, no commit",
        RUNTIME,
        "        except TransferRefused as error:\n            self.telemetry",
        "        except ZeroDivisionError as error:\n            self.telemetry",
        "a device without fences harms no request",
    ),
    Mutant(
        "sleep without a look at the inbox",
        WORKER,
        "            if not self._inbox and not self._calls:\n",
        "            if self.is_accepting:\n",
        "no lost wake-up: what came before the task slept counts",
    ),
    Mutant(
        "loop woken only once",
        WORKER,
        "            self._is_signalled = True\n            self._wake_loop()\n",
        "            self._is_signalled = True\n            self._wake_loop()\n"
        "            self._wake_loop = lambda: None\n",
        "no lost wake-up",
    ),
    Mutant(
        "dropped after the worker's end",
        WORKER,
        "        if self._has_ended:\n            self.drain()\n",
        "        if self._has_ended:\n            return\n",
        "late ends count when the task is gone",
    ),
    Mutant(
        "bug in the ledger reaches a request",
        WORKER,
        "                self.discard_queued()\n            return None\n",
        "                self.discard_queued()\n            raise\n",
        "a cache never takes the engine down",
    ),
    Mutant(
        "cancelled worker cancels the engine",
        WORKER,
        "                if self._scope.cancel_called:\n                    raise\n",
        "                if self._scope is not None:\n                    raise\n",
        "a native cancellation of the worker harms nobody",
    ),
    Mutant(
        "queued jobs kept behind a stalled transport",
        WORKER,
        "error=error))\n        self.discard_queued()\n",
        "error=error))\n",
        "a stalled transport makes misses, not queues",
    ),
    Mutant(
        "nobody told of discarded jobs",
        WORKER,
        "            self._tell(self.ledger.discard, job.plan.job_id)\n        self._notify_settled()\n",
        "            self._tell(self.ledger.discard, job.plan.job_id)\n",
        "no hang: a flush ends with the last job",
    ),
)

_RUNTIME = (
    Mutant(
        "queued jobs copied at shutdown",
        RUNTIME,
        "        self.worker.is_accepting = False\n        self.worker.discard_queued()\n",
        "        self.worker.is_accepting = False\n",
        "closing launches nothing more",
    ),
    Mutant(
        "closing does not wait for copies",
        RUNTIME,
        "                await self.worker.wait_idle()\n                await ",
        "                await ",
        "a launched copy is waited for within bounds",
    ),
    Mutant(
        "closing wakes nobody",
        RUNTIME,
        "            request._wake()\n",
        "",
        "no hang: whoever waits hears that the runtime is closed",
    ),
    Mutant(
        "reset copies what is queued",
        RUNTIME,
        "        self.ledger.reset()\n        self.worker.discard_queued()\n",
        "        self.ledger.reset()\n",
        "after a reset nothing queued is copied",
    ),
    Mutant(
        "step of a commit trips on the aborted",
        RUNTIME,
        "            if one.request.state not in (RequestState.DONE, RequestState.ABORTED):\n",
        "            if one.num_computed_tokens >= 0:\n",
        "nobody else is harmed by an aborted request",
    ),
    Mutant(
        "step ends with the task that waits for it",
        RUNTIME,
        "            if begun.acquire(blocking=False):\n                held.close()\n            else:\n",
        "            held.close()\n            if not begun.acquire(blocking=False):\n",
        "a step holds what its thread touches",
    ),
    Mutant(
        "step given up before its thread began leaks",
        RUNTIME,
        "            if begun.acquire(blocking=False):\n                held.close()\n",
        "            if begun.acquire(blocking=False):\n                pass\n",
        "nothing leaks: a step that never began is over",
    ),
    Mutant(
        "stores of a released request not launched",
        RUNTIME,
        "        self.worker.submit(self.ledger.release(holding, reason))\n",
        "        self.ledger.release(holding, reason)\n",
        "what was planned is launched or discarded",
    ),
    Mutant(
        "tainted readers not cancelled",
        RUNTIME,
        '            self.cancel(tainted.request_id, "prefix_invalidated")\n',
        "            del tainted\n",
        "whoever matched wrong bytes is aborted",
    ),
)

SHELL_MUTANTS: tuple[Mutant, ...] = _REQUEST + _WORKER + _RUNTIME
