from __future__ import annotations

import subprocess
import sys


def test_the_ledger_needs_no_torch() -> None:
    """A program that uses a `Ledger` without a runtime never imports torch, which takes seconds."""
    program = (
        "import sys, aoffload, aoffload.host_cache, aoffload.ledger; ledger = aoffload.Ledger;"
        "assert 'torch' not in sys.modules;"
        "from aoffload import OffloadRuntime; assert 'torch' in sys.modules; assert 'KVRegion' in dir(aoffload)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_the_cuda_backend_is_there_without_a_gpu() -> None:
    """Its names can be imported, and options made, without NVIDIA's bindings or Triton: they are asked for later."""
    program = (
        "import sys, aoffload;"
        "sys.modules |= dict.fromkeys(('cuda', 'cuda.bindings', 'triton'));"  # as if they were not installed
        "from aoffload.cuda import AdaptivePolling, BlockingWait, BreakEven, CudaBackend, CudaOptions;"
        "from aoffload._transfer.backends.cuda import backend;"
        "assert backend.CudaBackend is CudaBackend;"
        "CudaOptions(break_even=BreakEven(1, 2), waiting=AdaptivePolling())"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_a_tree_that_is_not_installed_is_imported() -> None:
    """Sources on the path are enough: the package imports without the metadata of an installation, and its version says
    so, also that of the command line."""
    program = (
        "import importlib.metadata as metadata\n"
        "def version(name): raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = version\n"
        "import aoffload; assert aoffload.__version__ == '0+unknown', aoffload.__version__\n"
        "from aoffload.__main__ import versions; assert versions().startswith('aoffload 0+unknown'), versions()"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


BLOCKED = """
import sys


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "structlog"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Missing())
"""
LEDGER_ALONE = """
from aoffload import HostCache, InvalidArgument, KVCacheGroup, OffloadConfig, RequestState
from aoffload.ledger import JobMoved, Completion, LedgerLog, Observers, Outcome, Prefix, Root


class Pool:
    held = 0

    def hold(self, block_ids):
        self.held += len(block_ids)

    def give(self, block_ids):
        self.held -= len(block_ids)


class Logger:
    events = []

    def bind(self):
        return self

    def info(self, event, **fields):
        self.events.append(event)

    debug = warning = error = info


class Moves:
    jobs = []

    def observe(self, event):
        if isinstance(event, JobMoved):
            self.jobs.append(event.new.value)


def land(ledger, plans):
    for plan in plans:
        assert ledger.launch(plan.job_id)
        ledger.settle(Completion(plan.job_id, Outcome.LANDED, plan.num_blocks))


def serve(observer=None):
    pool, prompt = Pool(), Prefix.of(Root("toy"), range(40))
    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=16)], num_host_blocks=8)
    ledger = HostCache(config, 17, engine_blocks=pool, clock=lambda: 0.0, observer=observer)
    first = ledger.admit(prompt)
    land(ledger, ledger.offer(first, 40, [[1, 2, 3]], is_last=True))
    ledger.release(first)
    second = ledger.admit(prompt)
    assert second.match.num_host_tokens == 32
    plans = ledger.plan_load(second, into=[[4, 5, 6]])
    assert pool.held == 2
    land(ledger, plans)
    assert (second.state, second.num_computed_tokens) == (RequestState.RUNNING, 32)
    ledger.offer(second, 40, [[4, 5, 6]], is_last=True)
    ledger.release(second)
    ledger.check_integrity()
    assert pool.held == 0


serve()
serve(Observers(LedgerLog(Logger()), Moves()))
assert Logger.events.count("request_done") == 2 and Logger.events.count("job_completed") == 2
assert Moves.jobs == ["launched", "completed"] * 2
try:
    LedgerLog()
except InvalidArgument as error:
    assert error.argument == "logger" and "structlog is not installed" in str(error)
else:
    raise AssertionError("a log without a logger")
assert not {"torch", "structlog"} & set(sys.modules)
"""


def test_a_ledger_can_be_driven_where_neither_torch_nor_structlog_is_installed() -> None:
    """Engines' environments differ: a ledger is imported, made, driven and observed with anyio, attrs and numpy alone.
    A log without a logger of its own is refused there by name."""
    subprocess.run([sys.executable, "-W", "error", "-c", BLOCKED + LEDGER_ALONE], check=True)


LEDGER_WATCHED = """
import threading

from aoffload import KVCacheGroup, Ledger, OffloadConfig
from aoffload.kv_events import KVEventPublisher
from aoffload.metrics import LedgerCollector, Metrics

metrics = Metrics()
ledger = Ledger(OffloadConfig(groups=[KVCacheGroup("full")], num_host_blocks=8), 9, observer=metrics)
assert {family.name for family in LedgerCollector(ledger, metrics, threading.Lock()).collect()} > {"aoffload_blocks"}
with KVEventPublisher(ledger, bind="inproc://nobody"):
    pass
assert not {"torch", "structlog"} & set(sys.modules)
"""


def test_metrics_and_events_of_a_ledger_need_neither_as_well() -> None:
    """What they need comes with their extras."""
    subprocess.run([sys.executable, "-W", "error", "-c", BLOCKED + LEDGER_WATCHED], check=True)
