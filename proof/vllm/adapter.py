"""A pytest plugin that provides our connector under the names that vLLM's scheduler tests import.

vLLM's tests call hooks with blocks and block ids that no `KVCacheManager` knows, so the adapter keeps the tables. It
also makes the calls that vLLM's scheduler makes and its tests leave out. What it does not have, it does not pretend to
have: a test that reads an attribute of vLLM's manager fails, and says which.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.v1.simple_kv_offload.manager as theirs
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

from aoffload._vllm.connector import StepReports
from aoffload._vllm.messages import Reports
from aoffload.errors import ConfigError
from aoffload.integrations.vllm import AoffloadConnector
from aoffload.ledger import Completion, Outcome, TransferPlan

from .verdicts import READS, REFUSED

__all__ = ["Adapter"]

Plans = tuple[TransferPlan, ...]

RESULTS = "PROOF_VLLM_RESULTS"
"""Environment variable of this process: the file for the outcome of each test."""


class Adapter:
    """What vLLM's `SimpleCPUOffloadScheduler` is to its tests, done by `AoffloadConnector`."""

    _expected_worker_count = 1

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        cpu_capacity_bytes: int,
        *,
        lazy_offload: bool = False,
        **sizes: Any,
    ) -> None:
        if lazy_offload:
            pytest.skip("asks for lazy stores, which need the order in which the engine evicts")
        # As theirs counts: the size of each tensor is that of all of them.
        block_bytes = kv_cache_config.kv_cache_tensors[0].size // kv_cache_config.num_blocks
        transfer = vllm_config.kv_transfer_config
        transfer.kv_load_failure_policy = "recompute"
        # One of theirs is the null block.
        transfer.kv_connector_extra_config = {"num_host_blocks": max(1, cpu_capacity_bytes // block_bytes - 1)}
        self._num_groups = len(kv_cache_config.kv_cache_groups)
        self._connector = AoffloadConnector(vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config)
        _made.append(self)
        self._requests: dict[str, Any] = {}
        self._tables: dict[str, tuple[list[Any], ...]] = {}
        self._loads: list[TransferPlan] = []
        self._stores: dict[int, Plans] = {}
        self._early_stores: Plans = ()
        self._asked: set[str] = set()
        self._waiting: set[str] = set()
        self._were_scheduled: set[str] = set()

    # -- what an engine would be ------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, pool: Any) -> None:
        self._pool = pool
        self._connector.bind_kv_cache_manager(SimpleNamespace(block_pool=pool, get_blocks=self._blocks_of))

    def _blocks_of(self, request_id: str) -> Any:
        return SimpleNamespace(blocks=self._tables.get(request_id, ([],) * self._num_groups))

    def _extend(self, request_id: str, block_ids: Iterable[Iterable[int]], *, is_new: bool) -> None:
        old = self._tables.get(request_id, ())
        added = tuple([self._pool.blocks[each] for each in ids] for ids in block_ids)
        if is_new or len(old) != len(added):
            self._tables[request_id] = added
        else:
            self._tables[request_id] = tuple([*has, *more] for has, more in zip(old, added, strict=True))

    # -- hooks of the scheduler -------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._requests[request.request_id] = request
        self._asked.add(request.request_id)
        found: tuple[int | None, bool] = self._connector.get_num_new_matched_tokens(request, num_computed_tokens)
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if request.request_id not in self._asked:  # vLLM asks before it allocates
            self.get_num_new_matched_tokens(request, 0)
        self._asked.discard(request.request_id)
        self._tables[request.request_id] = tuple(list(group) for group in blocks.blocks)
        self._connector.update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self._waiting.add(request.request_id)

    def build_connector_meta(self, output: Any) -> Any:
        for new in output.scheduled_new_reqs:
            self._extend(new.req_id, new.block_ids, is_new=True)
        cached = output.scheduled_cached_reqs
        for request_id, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if added is not None:
                self._extend(request_id, added, is_new=request_id in cached.resumed_req_ids)
        waiting, self._waiting = self._waiting, set()  # vLLM schedules nothing of what it waits for
        scheduled = {name: number for name, number in output.num_scheduled_tokens.items() if name not in waiting}
        return self._as_theirs(*self._step(scheduled, output.preempted_req_ids))

    def _step(self, scheduled: Mapping[str, int], preempted: Iterable[str] = ()) -> tuple[Plans, Plans]:
        """A step of the engine. Returns the loads and stores that it has commanded.

        Their tests set `num_computed_tokens` as it is after the step, vLLM's scheduler does so afterwards.
        """
        self._were_scheduled |= scheduled.keys()
        requests = [self._requests[name] for name in scheduled if name in self._requests]
        after = [request.num_computed_tokens for request in requests]
        for request in requests:
            request.num_computed_tokens = max(0, request.num_computed_tokens - scheduled[request.request_id])
        output = SimpleNamespace(num_scheduled_tokens=scheduled, preempted_req_ids=set(preempted or ()))
        commands = self._connector.build_connector_meta(output).commands
        for request, computed in zip(requests, after, strict=True):
            request.num_computed_tokens = computed
        self._loads += commands.loads
        return commands.loads, commands.stores

    def _as_theirs(self, loads: Plans, stores: Plans) -> Any:
        stores, self._early_stores = (*self._early_stores, *stores), ()
        event = len(self._stores) if stores else -1
        if stores:
            self._stores[event] = stores
        return SimpleNamespace(
            store_event=event, load_event=len(self._loads) if loads else -1, need_flush=False,
            store_gpu_blocks=_ids(stores, "source_ids"), store_cpu_blocks=_ids(stores, "destination_ids"),
            load_gpu_blocks=_ids(loads, "destination_ids"), load_cpu_blocks=_ids(loads, "source_ids"),
        )  # fmt: skip

    def update_connector_output(self, output: Any) -> None:
        over: list[TransferPlan] = []
        told = output.kv_connector_worker_meta
        for event in told.completed_store_events if told is not None else ():
            over += self._stores[event]
        over += self._loads_of(output.finished_recving or ())
        if over:
            landed = tuple(Completion(plan.job_id, Outcome.LANDED, plan.num_blocks) for plan in over)
            answer = SimpleNamespace(kv_connector_worker_meta=StepReports(Reports({0: landed})), finished_recving=set())
            self._connector.update_connector_output(answer)

    def _loads_of(self, request_ids: Iterable[str]) -> list[TransferPlan]:
        tables = [group for each in request_ids for group in self._tables.get(each, ())]
        named = {block.block_id for group in tables for block in group}
        found = [plan for plan in self._loads if named.intersection(plan.destination_ids)]
        self._loads = [plan for plan in self._loads if plan not in found]
        return found

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        if self._num_groups > 1:  # vLLM itself passes the ids of all groups
            blocks = self._blocks_of(request.request_id).blocks
            return self.request_finished_all_groups(
                request, tuple([each.block_id for each in table] for table in blocks)
            )
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Any:
        name = request.request_id
        if name in self._requests and name not in self._were_scheduled | self._waiting and request.num_computed_tokens:
            self._compute(request)
        return self._connector.request_finished_all_groups(request, block_ids)

    def _compute(self, request: Any) -> None:
        """The step that computed these tokens, which their tests leave out. Its stores leave with the next one."""
        _, stores = self._step({request.request_id: request.num_computed_tokens})
        self._early_stores = (*self._early_stores, *stores)

    def has_pending_stores(self) -> bool:
        return bool(self._connector.has_pending_push_work())

    def reset(self) -> bool:
        return bool(self._connector.reset_cache())

    def take_events(self) -> Iterable[Any]:
        found: Iterable[Any] = self._connector.take_events()
        return found

    @property
    def off_reason(self) -> str:
        """The error that the connector has hidden from vLLM's scheduler, and turned itself off for."""
        return str(self._connector.off_reason)

    @property
    def ledger(self) -> Any:
        return self._connector.ledger

    @property
    def cpu_block_pool(self) -> Any:
        """Free to them is what nobody refers to."""
        return _HostPool(self.ledger)


class _HostPool:
    def __init__(self, ledger: Any) -> None:
        self._ledger = ledger

    def get_num_free_blocks(self) -> int:
        host = self._ledger.statistics().host
        return int(host.num_free + host.num_cached)


class _Connector:
    """In place of vLLM's connector, for tests that wrap one around a scheduler."""

    scheduler_manager: Adapter

    def __init__(self, *arguments: Any) -> None:
        pytest.skip("is about the keys of vLLM's connector")

    def has_pending_push_work(self) -> bool:
        return self.scheduler_manager.has_pending_stores()


def _ids(plans: Iterable[TransferPlan], side: str) -> list[int]:
    ids: array[int] = array("i")
    for plan in plans:
        ids += getattr(plan, side)
    return list(ids)


# -- the plugin -----------------------------------------------------------------------------------------------------

STAND_INS = (Adapter, _HostPool, _Connector)
_made: list[Adapter] = []
_outcomes: dict[str, Mapping[str, str]] = {}


def pytest_configure(config: Any) -> None:
    import vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector as connector

    config.addinivalue_line("markers", "skip_global_cleanup: of vLLM's own conftest")
    theirs.SimpleCPUOffloadScheduler = Adapter
    connector.SimpleCPUOffloadConnector = _Connector


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    return caplog


@pytest.fixture(autouse=True)
def _stays_on() -> Iterator[None]:
    """No test passes because the connector does nothing any more."""
    _made.clear()
    yield
    assert not [each.off_reason for each in _made if each.off_reason]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    report = yield
    if report.when == "call" or report.outcome != "passed":
        _outcomes[item.name] = {"outcome": report.outcome, "why": _why(report, call)}
    return report


def _why(report: Any, call: Any) -> str:
    if report.outcome == "skipped":
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    if call.excinfo is None:
        return ""
    error = call.excinfo.value
    about = str(error).strip().partition("\n")[0]
    if isinstance(error, AttributeError) and (isinstance(error.obj, STAND_INS) or error.obj in STAND_INS):
        return f"{READS} `{error.name}` of vLLM's manager"
    if isinstance(error, ConfigError):
        return f"{REFUSED}: {about}"
    return f"{type(error).__name__}: {about}"


def pytest_sessionfinish() -> None:
    Path(os.environ[RESULTS]).write_text(json.dumps(_outcomes))
