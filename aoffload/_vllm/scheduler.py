"""The scheduler's half of the connector. It decides, with the ledger, which blocks are loaded and stored.

A request's way through it:

    match        at every try to schedule: pins the host blocks that follow vLLM's own hit; None: ask again, because
                 another request loads them, or they come from the disk or the remote store
    allocated    vLLM has blocks for it: the load is planned and starts with the step
    step         commands for the workers: loads, stores of blocks that this step computes, and reports of loads that
                 have ended
    take         reports of the workers' copies; a load that has landed has ended for vLLM at once
    finished     the last offer; vLLM frees the blocks, and copies hold those that they touch; then the hints of the
                 request

vLLM frees and reuses blocks as it likes, and reports preemptions afterwards. So only copies hold blocks.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import attrs

from aoffload import HostCache, OffloadConfig, Tier

from .._runtime.costs import PrefillSpeed
from ..errors import DeviceGone
from ..ledger import Completion, CopyQueue, JobState, LedgerExtension, LoadCosts, TransferPlan
from .adapters import Adapters
from .blocks import BlockTable, EnginePool
from .computing import Computing
from .counts import Counts
from .drafts import NO_DRAFTS, Drafts
from .frees import PendingFrees
from .groups import CachedGroups
from .hints import EngineHints, given_by
from .lower import Lower
from .messages import NOTHING, AdapterUse, Commands, FirstForward, LoadReport, Outbox, Reports, TieredOutbox
from .requests import EngineRequest, Keys, Wait
from .states import NO_CHECKPOINTS, handed_over, move_junction
from .weights import WeightVersion


class SchedulerSide:
    """One per engine. All calls come from the thread of vLLM's scheduler."""

    def __init__(
        self,
        config: OffloadConfig,
        groups: CachedGroups,
        *,
        num_blocks: int,
        block_bytes: int,
        num_ranks: int,
        max_loaded_adapters: int | None = None,
        drafts: Drafts = NO_DRAFTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_loaded_adapters`: LoRA adapters that each worker keeps before it evicts one; None: unknown."""
        self._clock = clock
        self._config, self._groups, self._num_blocks, self._block_bytes = config, groups, num_blocks, block_bytes
        self.counts = Counts(clock)
        self.drafts, self._keys = drafts, Keys(config.root_namespace, drafts)
        has_lower = config.disk is not None or config.remote is not None
        self._competes = has_lower or config.load_choice != "always"
        """Whether computing competes with copies."""
        self._outbox = TieredOutbox(num_ranks) if has_lower else Outbox(num_ranks)
        self.lower: Lower | None = None
        """None without tiers below host memory, and before `bind`."""
        self.steps = Computing(PrefillSpeed(config.prefill_tokens_per_s), clock)
        self.requests: dict[str, EngineRequest] = {}
        """Requests that vLLM has, and has asked about."""
        self._ended: dict[str, Any] = {}
        """By request id, the block hashes of requests that have ended while some of their blocks are deferred."""
        self._loads: list[TransferPlan] = []
        """Loads planned for requests of this step."""
        self._over: list[EngineRequest] = []
        """Requests whose load has ended, before vLLM knows it."""
        self._reports: list[LoadReport] = []
        self._joined: list[Completion] = []
        """Completions that the last `take` received."""
        self.adapters = Adapters(num_ranks, max_loaded_adapters)
        self._uses: dict[int, AdapterUse] = {}
        """By job, the adapter weights for which its copy was planned. An entry leaves with a step or is dropped."""
        self._forwards: list[FirstForward] = []
        """The comparisons of weights that the workers make in this step."""
        self._num_steps = 0
        self.version: WeightVersion | None = None
        """None if this vLLM has no weight version."""
        self._mixed: set[str] = set()
        """Requests that may have KV of other weights than the present ones in vLLM's blocks."""

    def bind(self, kv_cache_manager: Any, extensions: Iterable[LedgerExtension] = ()) -> None:
        """vLLM's block pool and prefix cache exist now: begin."""
        self._manager = kv_cache_manager
        self._pool = EnginePool(
            kv_cache_manager.block_pool, self._groups.ids, self._groups.block_sizes, self._hashes_of
        )
        self.ledger = HostCache(
            self._config,
            self._num_blocks,
            self._pool,
            block_bytes=self._block_bytes,
            clock=self._clock,
            observer=self.counts,
            extensions=extensions,
        )
        self._unit = self.ledger.layout.unit_tokens
        self._least_hit = self._unit + 1 if self.drafts.are_dropped else 1
        """Hits of fewer tokens are not loaded."""
        self._is_plain = not self.ledger.layout.windows and self._config.store_policy == "eager"
        """Whether the last offer of a request adds nothing: there are no windows, and the policy counts nothing."""
        self._queue = CopyQueue(
            self.ledger,
            self._outbox,
            self._config,
            clock=self._clock,
            block_bytes=self._block_bytes,
            observer=self.counts,
        )
        self.hints = EngineHints(self.ledger, self._queue.submit, self._clock)
        self._frees = PendingFrees(self.ledger, self._queue, self._pool, self._clock)
        if self._config.load_choice != "always":
            self.steps.costs = LoadCosts(self.ledger, self._queue, self.steps.speed, self.counts.load_declined)
        if isinstance(self._outbox, TieredOutbox):
            self.lower = Lower.of(
                self._config, self.ledger, self._queue, self._outbox, self.counts, self._block_bytes, self.steps.speed,
                self._clock,
            )  # fmt: skip

    def _hashes_of(self, request_id: str) -> Any:
        """The block hashes of a request. Empty if the request is not known, or if vLLM's blocks with these hashes may
        be of other weights."""
        found = self.requests.get(request_id)
        if found is None:
            return self._ended.get(request_id, ())
        lora = found.engine.lora_request
        is_sure = lora is None or (found.record is not None and not self.adapters.is_mixed(lora))
        return found.engine.block_hashes if is_sure else ()

    def engine_request(self, request_id: str) -> Any:
        """vLLM's own request; None if this id is unknown."""
        found = self.requests.get(request_id)
        return None if found is None else found.engine

    # -- a request begins -----------------------------------------------------------------------------------------

    def match(self, request: Any, num_local: int) -> int | None:
        """Number of tokens to load after the first `num_local`. None: ask again in the next step."""
        if self._follow_weights():
            return None  # `num_local` counts blocks of other weights, which vLLM's cache has forgotten just now
        if self._frees.waits_in == self._num_steps:
            return None  # a running request waits for blocks that this request would take
        if request.lora_request is not None:
            self.adapters.see(request.lora_request)
        found = self.requests.get(request.request_id)
        if found is None:
            found = self._new(request)
            if found is None:
                return 0
        if self._mixed and self._is_mixed(found, num_local):
            return 0
        if request.lora_request is not None and not self._has_weights(found, num_local):
            return None if self.adapters.is_news(request.lora_request.lora_int_id) else 0
        num_failed = self.counts.num_failed
        match = found.answer(num_local, num_failed, self._clock()) or found.ask(self.ledger, num_local, num_failed)
        if self.lower is not None and not match.is_pending:
            match = self.lower.fetched(found, match)
        if match.is_pending:
            return None
        if self._groups.has_states:
            assert found.record is not None, "a match without a record"
            move_junction(request, self.ledger.planned_checkpoints(found.record))
        match = self.steps.chosen(found, match)
        if found.use is not None and len(self._groups.ids) > 1 and self.adapters.may_evict:
            return 0  # vLLM could not discard the result of a forward over loaded KV
        num_external = match.num_tokens - num_local
        return num_external if num_external >= self._least_hit and self._queue.is_accepting else 0

    def _follow_weights(self) -> bool:
        """Set the weights' epoch if vLLM's weight version has changed. Returns whether it has.

        Requests that wait for their first step are matched again. The others continue, but their KV is of old or mixed
        weights, and vLLM caches their blocks. So until they have ended or begin again, nothing is stored of requests
        that hit vLLM's own cache."""
        epoch = None if self.version is None else self.version.changed()
        if epoch is None:
            return False
        self.ledger.weights.set(epoch)
        for found in self.requests.values():
            if found.is_asking:
                found.leave(self.ledger, "weights_changed")
                continue
            if found.is_late:
                found.bar(self.ledger)
            self._mixed.add(found.request_id)
        self._pool.forget_cached()
        return True

    def _is_mixed(self, found: EngineRequest, num_local: int) -> bool:
        """Whether some KV of `found`, which is about to begin, may be of other weights."""
        if num_local:
            self._mixed.add(found.request_id)
            if found.record is not None:
                found.leave(self.ledger, "weights_changed")
            return True
        self._mixed.discard(found.request_id)  # it computes all its KV now
        return False

    def _has_weights(self, found: EngineRequest, num_local: int) -> bool:
        """Whether all KV of a request with an adapter is of one set of weights, which the workers have reported."""
        lora = found.engine.lora_request
        if found.is_barred and not num_local:  # it begins again, so all its KV will be of the weights reported last
            found.is_barred, found.use = False, None
        if found.use is None and (use := self.adapters.use_of(lora.lora_int_id)) is not None:
            self._give_weights(found, use)
        # vLLM also caches the encoder's output for an image by the name of the adapter.
        reads_kept = num_local or found.engine.mm_features
        if found.use is not None and reads_kept and self.adapters.is_mixed(lora):
            found.bar(self.ledger)
        found.num_local = num_local if found.record is None else found.num_local
        found.is_late = found.use is None and not found.is_barred
        return found.use is not None and not found.is_barred

    def _give_weights(self, found: EngineRequest, use: AdapterUse) -> None:
        found.use, found.prefix = use, self._keys.under(found.prefix, found.engine, use.key)

    def _new(self, request: Any) -> EngineRequest | None:
        prefix = self._keys.prefix_of(request)
        if prefix is None:
            return None
        found = self.requests[request.request_id] = EngineRequest(request, request.request_id, self._keys, prefix)
        found.hints = given_by(request)
        if found.hints:
            may_fetch = self.lower is not None and self.lower.may_fetch
            is_known = request.lora_request is None  # else its weights are not known yet
            found.answers = self.hints.prefetch(found.hints, prefix if is_known else None, may_fetch=may_fetch)
        return found

    def arrived(self, request: Any) -> None:
        """vLLM has put `request` into its queue. If it carries hints, they are read now, because a prefetch helps most
        while the request waits."""
        if request.request_id not in self.requests and given_by(request):
            self._new(request)

    def allocated(self, request: Any, num_external: int) -> None:
        """vLLM waits for the load of `num_external` tokens, and has blocks for them. The load is planned at once, so
        that requests that ask later in this step wait for it."""
        if not num_external:
            return
        found = self.requests[request.request_id]
        found.promised, found.wait = found.num_local + num_external, Wait.LOAD
        assert found.record is not None, "blocks for a request that has not asked"
        wake, tables = partial(self._over.append, found), self._all_tables_of(found)
        plans = self.ledger.plan_load(
            found.record, found.promised, wake, into=self._groups.tables(tables),
            into_checkpoint=self._groups.checkpoint_at(tables, found.promised),
        )  # fmt: skip
        if plans:
            self._note(found, plans)
            self._loads += plans
            found.has_to_be_compared = found.use is not None
        else:  # the hit is gone
            self._over.append(found)

    def hit_tiers(self, request_id: str, num_external: int) -> dict[Tier, int]:
        """The number of the `num_external` loaded tokens of a request that come from each tier."""
        found = self.requests.get(request_id)
        brought = Counter[Tier]() if found is None else found.brought(num_external, self._unit)
        brought[Tier.HOST] = num_external - brought.total()
        return {tier: number for tier, number in brought.items() if number}

    def _note(self, found: EngineRequest, plans: Iterable[TransferPlan]) -> None:
        """Note the adapter weights of these copies: workers make a copy only if the weights have not changed since."""
        if found.use is not None:
            self._uses.update(dict.fromkeys([plan.job_id for plan in plans], found.use))

    # -- a step ---------------------------------------------------------------------------------------------------

    def step(self, output: Any) -> Commands:
        """The commands for the workers in the step `output`."""
        self._follow_weights()
        self._num_steps += 1
        if self.hints.lapses_at < math.inf:
            self.hints.lapse()
        for request_id in output.preempted_req_ids or ():
            found = self.requests.get(request_id)
            if found is not None and not found.has_asked_again:
                found.leave(self.ledger, "preempted")
        plans, self._loads = self._loads, []
        plans += self._plan_stores(output)
        if plans:
            self._queue.submit(plans)
        if self._competes:
            self.steps.begins(output.num_scheduled_tokens)
        if self.lower is not None:
            self.lower.look()
        if self.ledger.jobs.unsettled:
            self._queue.give_up_late()
            self._check()
        elif not (self._over or self._reports or self._forwards) and self._outbox.is_empty:
            return NOTHING  # in most steps
        for found in self._take_over():
            self._tell(found)
        return self.end_step()

    def end_step(self) -> Commands:
        """The commands that leave with this step."""
        if not (self._reports or self._forwards) and self._outbox.is_empty:
            return NOTHING
        reports, self._reports = tuple(self._reports), []
        commands = self._outbox.take(reports)
        return self._with_adapters(commands) if self._uses or self._forwards else commands

    def _with_adapters(self, commands: Commands) -> Commands:
        uses, forwards = self._uses, tuple(self._forwards)
        self._forwards.clear()
        leaving = [plan.job_id for plan in (*commands.loads, *commands.stores) if plan.job_id in uses]
        unsettled = self.ledger.jobs.unsettled
        self._uses = {job_id: use for job_id, use in uses.items() if job_id in unsettled}
        return attrs.evolve(commands, uses={job_id: uses[job_id] for job_id in leaving}, forwards=forwards)

    def _plan_stores(self, output: Any) -> list[TransferPlan]:
        """Offer the blocks that earlier steps have deferred, and those that this step computes, with the checkpoints
        that vLLM hands over. The copies start after the forward of this step, and so after every earlier one."""
        plans = [*self.ledger.offer_deferred()]
        for plan in plans:
            found = self.requests.get(self.ledger.jobs.unsettled[plan.job_id].request_id)
            if found is not None:
                self._note(found, [plan])
        if self._ended:
            deferred = self.ledger.deferred_requests
            self._ended = {request_id: hashes for request_id, hashes in self._ended.items() if request_id in deferred}
        handed = handed_over(output) if self._groups.has_states else {}
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            found = self.requests.get(request_id)
            if found is not None and found.is_late and found.use is not None:
                self._admit_late(found)
            if found is None or found.record is None:
                continue
            engine = found.engine
            if found.has_to_be_compared:
                self._compare(found)
            num_computed = engine.num_computed_tokens + num_scheduled
            checkpoints = handed.get(request_id, NO_CHECKPOINTS)
            if num_computed < found.next_offer and not checkpoints:
                continue
            num_computed = found.committed(num_computed)
            if num_computed // self._unit > found.offered_stop or checkpoints:
                found.offers_up_to(num_computed // self._unit, self._unit)
                offered = self.ledger.offer(
                    found.record, num_computed, self._tables_of(found), found.new_tokens(),
                    checkpoints=self._groups.checkpoints(checkpoints, num_computed),
                )  # fmt: skip
                self._note(found, offered)
                plans += offered
        return plans

    def _admit_late(self, found: EngineRequest) -> None:
        """Admit a request that ran its first steps before the workers reported the weights of its adapter."""
        reads_kept = found.num_local or found.engine.mm_features
        if reads_kept and self.adapters.is_mixed(found.engine.lora_request):
            found.bar(self.ledger)
        else:
            found.ask_late(self.ledger)

    def _compare(self, found: EngineRequest) -> None:
        """Have the workers compare weights in this step, which is the first one to compute over the loaded KV."""
        assert found.use is not None, "a request without an adapter"
        found.has_to_be_compared = False
        if len(tables := self._tables_of(found)) == 1:
            size = self._groups.block_sizes[0]
            loaded = tables[0][found.num_local // size : found.engine.num_computed_tokens // size]
            self._forwards.append(FirstForward(found.use, tuple(loaded)))

    def _all_tables_of(self, found: EngineRequest) -> list[BlockTable]:
        """One for each group of vLLM."""
        return [BlockTable(blocks) for blocks in self._manager.get_blocks(found.request_id).blocks]

    def _tables_of(self, found: EngineRequest) -> list[Any]:
        return self._groups.tables(self._all_tables_of(found))

    # -- copies that have ended -----------------------------------------------------------------------------------

    def take(self, reports: Reports) -> set[str]:
        """Settle the copies that the workers report. Returns the requests whose loads have landed. `DeviceGone`: a rank
        can copy nothing any more."""
        if reports.gone:
            raise DeviceGone(reports.gone)
        self._follow_weights()
        self._joined = self._outbox.joined(reports)
        if reports.said:
            self._hear(self.adapters.hear(reports.said))
        if self.lower is not None:
            self.lower.hear(reports.said, self._joined)
        for completion in self._joined:
            self._queue.deliver(completion)
        self._queue.settle_delivered()
        self._check()
        if self.lower is not None:
            self.lower.look()
        landed = set[str]()
        for found in self._take_over():
            if self._has_landed(found):
                found.wait = Wait.NONE
                landed.add(found.request_id)
            else:
                self._tell(found)
        return landed

    def _hear(self, changed: Iterable[AdapterUse]) -> None:
        """The workers have reported new weights. A request without known weights has computed with these. A request
        that began with other weights now has KV of several weights, so it is barred."""
        for use in changed:
            for found in self.requests.values():
                lora = found.engine.lora_request
                if lora is None or lora.lora_int_id != use.adapter:
                    continue
                if found.use is None:
                    self._give_weights(found, use)
                elif found.use != use:
                    found.bar(self.ledger)

    def _check(self) -> None:
        """Raise an error that the ledger raised inside the queue, because the queue only records it."""
        if self.counts.failure is not None:
            raise self.counts.failure

    def _take_over(self) -> list[EngineRequest]:
        """The requests whose load has ended and for which vLLM still waits."""
        if not self._over:
            return []  # in most steps
        over = [found for found in self._over if found.wait is Wait.LOAD]
        self._over.clear()
        return over

    @staticmethod
    def _has_landed(found: EngineRequest) -> bool:
        has_all = found.record is not None and found.record.num_computed_tokens >= found.promised
        return has_all and not found.is_barred

    def _tell(self, found: EngineRequest) -> None:
        """Have the workers report in the next step that a load has ended."""
        if self._has_landed(found):
            found.wait = Wait.NONE
            self._reports.append(LoadReport(found.request_id))
            return
        assert found.record is not None, "a load without a request"
        found.wait, found.max_hit_tokens = Wait.TOLD, found.record.retry_max_hit_tokens
        is_mixed = found.is_barred or found.request_id in self._mixed
        invalid = () if is_mixed else self._invalid_blocks(found)
        if not invalid:
            found.leave(self.ledger, "load_lost")
        self._reports.append(LoadReport(found.request_id, not invalid, invalid))

    def _invalid_blocks(self, found: EngineRequest) -> tuple[int, ...]:
        """The blocks that the load has not brought, if vLLM can compute into them and continue after those that landed.
        That needs one group, so that the ids are unambiguous, and no copy that may still write to the blocks. Otherwise
        empty."""
        assert found.record is not None, "a load without a request"
        ready = found.record.num_computed_tokens
        self.counts.lost(found.promised - ready)
        if len(self._manager.get_blocks(found.request_id).blocks) > 1 or not ready:
            return ()
        size = self._groups.block_sizes[0]
        invalid = self._tables_of(found)[0][ready // size : found.promised // size]
        return tuple(invalid) if all(map(self._pool.is_private, invalid)) else ()

    # -- the end --------------------------------------------------------------------------------------------------

    def finished(self, request: Any, block_ids: Any) -> dict[str, Any] | None:
        """Offer the rest of the blocks that `request` has computed, and forget it. Returns the answers to its hints;
        None: it has carried none."""
        self._follow_weights()
        found = self.requests.get(request.request_id)
        if found is None:
            given = given_by(request)
            return self.hints.finish(request, given, None, {}) if given else None
        if found.is_running and found.offered_stop >= 0 and found.wait is Wait.NONE:
            self._offer_last(found, self._groups.tables(block_ids))
        found.leave(self.ledger, "closed_early")
        if found.engine.lora_request is None and found.request_id in self.ledger.deferred_requests:
            self._ended[found.request_id] = found.engine.block_hashes
        self.forget(found.request_id)
        if not found.hints:
            return None
        is_cached = found.engine.lora_request is None or (found.use is not None and not found.is_barred)
        prefix = self._keys.grown(found.prefix, found.engine) if is_cached else None
        return self.hints.finish(request, found.hints, prefix, found.answers)

    def _offer_last(self, found: EngineRequest, tables: list[list[int]]) -> None:
        assert found.record is not None, "an offer without a request"
        num_computed = found.committed(found.engine.num_computed_tokens)
        if self._is_plain and num_computed // self._unit == found.offered_stop:
            return  # all of it was offered before
        if found.engine.num_computed_tokens >= found.record.num_computed_tokens:
            plans = self.ledger.offer(found.record, num_computed, tables, found.new_tokens(), is_last=True)
            self._note(found, plans)
            self._queue.submit(plans)

    def engine_reset(self) -> None:
        """vLLM has reset its own cache just now, if no block is in use."""
        if self._pool.is_all_free:
            self.adapters.forget_places()

    def reset(self) -> None:
        """Forget everything that is cached, and the matches of all requests."""
        self.ledger.reset()
        if self.lower is not None:
            self.lower.reset()

    @property
    def is_busy(self) -> bool:
        """Whether vLLM has to run more steps, because copies or reports are under way, or blocks are deferred."""
        jobs = self.ledger.jobs.unsettled
        is_waiting = bool(self._reports or jobs or self.ledger.deferred_requests) or not self._outbox.is_empty
        return is_waiting or (self.lower is not None and self.lower.is_busy)

    def frees_soon(self) -> bool:
        """Whether vLLM should wait for blocks that copies hold, instead of preempting a request."""
        return self._frees.are_near(self._num_steps)

    # -- after an error -------------------------------------------------------------------------------------------

    def turn_off(self, reason: str) -> None:
        """Free the blocks of copies that have not started. From now on no copy starts."""
        with suppress(Exception):  # the ledger has raised before, here and below
            self._queue.turn_off(reason)
        for job_id, job in tuple(self.ledger.jobs.unsettled.items()):
            if job.state is JobState.QUEUED:  # planned when the error came, and in no queue yet
                with suppress(Exception):
                    self.ledger.discard(job_id)

    def give_up(self) -> Commands:
        """The commands of a step that plans nothing any more. Every load that vLLM waits for is lost. Copies that take
        too long are still given up, so that a store that hangs frees its blocks."""
        with suppress(Exception):
            self._queue.give_up_late()
        for found in self.requests.values():
            if found.wait is Wait.LOAD:
                found.wait = Wait.TOLD
                self._reports.append(LoadReport(found.request_id, is_lost=True))
        return self.end_step()

    def settle(self, reports: Reports) -> None:
        """Free the blocks of copies that have ended, also those of the `take` that has raised."""
        joined, self._joined = [*self._joined, *self._outbox.joined(reports)], []
        for completion in joined:
            with suppress(Exception):
                self._queue.deliver(completion)
        with suppress(Exception):
            self._queue.settle_delivered()

    @property
    def is_ending(self) -> bool:
        """Whether vLLM has to run more steps after an error: for reports, and for copies until their deadline."""
        return bool(self._reports or self._queue.num_in_flight)

    def refuse(self, request: Any, num_external: int) -> None:
        """vLLM waits for a load that was promised before the error. The next step reports that it is lost."""
        if num_external:
            self.requests[request.request_id].wait = Wait.LOAD

    def forget(self, request_id: str) -> None:
        """The request has ended. If vLLM waits for its load, it keeps the blocks until it learns that the load has
        ended."""
        found = self.requests.pop(request_id, None)
        self._mixed.discard(request_id)
        self.steps.forget(request_id)
        if found is not None and found.wait is Wait.LOAD:
            self._reports.append(LoadReport(request_id))
