"""Each block of Python that the documentation shows runs as it stands, in the surroundings that its page takes for
granted."""

from __future__ import annotations

import ast
import inspect
import io
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, cast

import anyio
import pytest
import torch

import aoffload
from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime, Request, RequestState
from aoffload._common.commands import ProgressLine
from aoffload.ledger import Direction, LedgerLog, WorkerFailed
from aoffload.testing import FaultyTransport
from aoffload.trace.command import main as trace_command
from aoffload.trace.events import EventReader, LogLines
from aoffload.trace.output import Progress
from aoffload.transport import LocalTransport

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NUM_ROWS = 25
Names = dict[str, Any]

ELSEWHERE = {
    "docs/tutorial.md": ("tests/test_docs.py", "test_the_tutorial_shows_the_example_line_by_line"),
    "docs/testing.md": ("tests/test_docs.py", "test_what_the_page_of_testing_shows_runs_and_prints_what_it_says"),
    "docs/extending.md": ("tests/test_examples.py", "test_the_page_about_extending_shows_the_examples"),
    "docs/pins.md": ("tests/test_docs.py", "test_the_program_about_keeping_runs_and_prints_what_it_says"),
    "docs/howto/agents.md": ("tests/test_docs.py", "test_the_program_about_agents_runs_and_prints_what_it_says"),
    "docs/howto/it-hangs.md": (
        "tests/trace/test_hanging_programs.py",
        "test_the_page_shows_what_its_programs_print",
    ),
}
"""Pages with whole programs, and the tests that compare what they print with what the page says."""


def blocks(page: Path) -> list[CodeType]:
    """The blocks of a page, compiled as if each stood in an `async def`. Their lines are those of the page."""
    text, found = page.read_text(), []
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        code = "\n" * text.count("\n", 0, block.start(1)) + block[1]
        found.append(compile(code, str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
    return found


def config(**options: Any) -> OffloadConfig:
    group = KVCacheGroup("all", block_size=4)
    return OffloadConfig(groups=[group], **{"num_host_blocks": 64, "namespace": "test", **options})


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A page that opens a transport need not close it."""
    opened: list[LocalTransport] = []
    open_transport = LocalTransport.open

    def noted(self: LocalTransport, *arguments: Any, **options: Any) -> None:
        open_transport(self, *arguments, **options)
        opened.append(self)

    monkeypatch.setattr(LocalTransport, "open", noted)
    yield
    for transport in opened:
        assert transport.close(10.0)


# -- what stands around the blocks of a page ----------------------------------------------------------------------


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[Names]:
    """A runtime, a request of it that has committed its prompt, and a task group."""
    kv_cache = torch.zeros(NUM_ROWS, 8)
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(OffloadRuntime(config(**options), kv_cache))
        group = await stack.enter_async_context(anyio.create_task_group())
        request = await stack.enter_async_context(runtime.request(range(40)))
        await request.allocate()
        await request.load()
        request.commit(40)
        await runtime.flush()
        yield {"runtime": runtime, "request": request, "requests": [request], "group": group, "anyio": anyio}


@asynccontextmanager
async def preempting() -> AsyncIterator[Names]:
    """A full device: `request` needs more, and `victim` ends before the task that preempts it has had its turn."""
    async with running() as names:
        runtime: OffloadRuntime = names["runtime"]
        victims: list[Request] = []
        begun, ends = anyio.Event(), anyio.Event()

        async def serve() -> None:
            async with runtime.request(range(1000, 1040), "victim") as victim:
                await victim.allocate()
                await victim.load()
                victims.append(victim)
                begun.set()
                await ends.wait()
                victim.commit(40)

        names["group"].start_soon(serve)
        await begun.wait()
        ends.set()
        names |= {"victim": victims[0], "num_tokens": 80, "OutOfBlocks": aoffload.OutOfBlocks}
        yield names
        assert victims[0].state is RequestState.DONE, "the victim has ended, and nobody is harmed"
        assert len(names["request"].block_ids[0]) == 20


@asynccontextmanager
async def starting_early() -> AsyncIterator[Names]:
    """A prompt in host memory, whose request has begun."""

    def forward(start: int, tables: list[list[int]], regions: Any) -> bool:
        return bool(tables[0]) and all(region.wait() is None for region in regions)

    async with running() as names:
        runtime: OffloadRuntime = names["runtime"]
        await runtime.transfers.demote(range(36)).wait()
        async with runtime.request(range(200, 240)) as request:
            yield names | {"request": request, "forward": forward, "num_computed_tokens": 40, "partial": partial}
        assert request.state is RequestState.DONE


async def admit(runtime: OffloadRuntime, tasks: Any) -> None:
    """Serves one request."""

    async def serve() -> None:
        async with runtime.request(range(9)) as request:
            await request.allocate()
            request.commit(9)

    tasks.start_soon(serve)


@asynccontextmanager
async def promising() -> AsyncIterator[Names]:
    async with running() as names:
        kv_cache = torch.zeros(NUM_ROWS, 8)
        yield names | {
            "forward": lambda: None, "OffloadRuntime": OffloadRuntime, "config": config(), "kv_cache": kv_cache,
            "admit": admit,
        }  # fmt: skip


def forward_of_floats(kv_cache: torch.Tensor, tokens: range, start: int, table: list[int]) -> None:
    """In the place of a model, whose KV of a token is the token. Checks that the KV before `start` is right."""
    for at in range(start, len(tokens)):
        kv_cache[table[at // 16], at % 16] = float(tokens[at])
    found = kv_cache[table].flatten()[: len(tokens)]
    assert found.tolist() == [float(token) for token in tokens]


def build(rank: int, num_ranks: int) -> torch.Tensor:
    """The KV tensors of a rank."""
    return torch.zeros(NUM_ROWS, 8)


@asynccontextmanager
async def given(**names: Any) -> AsyncIterator[Names]:
    """Values that a page takes for granted."""
    yield names


class Engine:
    """In the place of vLLM's: there is no vLLM here."""

    def __getattr__(self, name: str) -> Callable[..., Awaitable[None]]:
        async def call(*_: object, **__: object) -> None:
            pass

        return call


LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "dtype": "float16"}
GROUPS = [KVCacheGroup("full", block_size=16)]
AROUND: dict[str, Callable[[], Any]] = {
    "docs/disk.md": partial(given, groups=GROUPS, model_path="model"),
    "docs/remote.md": partial(given, groups=GROUPS, model_path="model", secret=b"of eight letters"),
    "docs/layouts.md": partial(given, model_path="model", num_blocks=NUM_ROWS),
    "docs/engines.md": partial(given, forward=forward_of_floats),
    "docs/ranks.md": partial(given, build=build, config=config(), model_path="model"),
    "docs/cuda.md": partial(given, kv_caches=torch.zeros(NUM_ROWS, 8)),
    "docs/loads.md": starting_early,
    "docs/vllm.md": partial(given, engine=Engine()),
    "docs/howto/preempting.md": preempting,
    "docs/howto/the-promise.md": promising,
    "docs/howto/logs-and-spans.md": partial(given, OffloadRuntime=OffloadRuntime),
    "docs/howto/weights.md": partial(
        given,
        OffloadRuntime=OffloadRuntime,
        config=config(),
        kv_caches=torch.zeros(NUM_ROWS, 8),
        model="model",
        load_weights=lambda model, epoch: None,
    ),
}
"""What stands around the blocks of a page; nothing, if it is not here."""


# -- what the blocks have defined, used -----------------------------------------------------------------------------


async def hinting(names: Names, _: Path) -> None:
    async with running(eviction="learned") as found:
        answer = names["before_a_tool_call"](found["runtime"], range(40), "shell")
        assert (answer.verb.value, answer.outcome.value, answer.num_tokens) == ("returns", "accepted", 40)


async def owning_blocks(names: Names, _: Path) -> None:
    """The second request computes the last 4 of 100 tokens; after a failed load, more of them. `forward_of_floats`
    checks the loaded KV. No block is lost."""
    make_pool, pools = names["Pool"], list[Any]()

    def noted(num_rows: int) -> Any:
        pools.append(make_pool(num_rows))
        return pools[-1]

    names["Pool"] = noted
    assert await names["main"]() == 96
    noted(41)
    kv_cache = torch.zeros(41, 16)
    transport = FaultyTransport(LocalTransport(kv_cache), "fail", every=1, direction=Direction.LOAD)
    async with aoffload.HostCacheRuntime(names["config"], transport=transport, engine_blocks=pools[-1]) as runtime:
        starts = []
        for first in (0, 500, 0):
            starts.append(await names["serve"](runtime, kv_cache, pools[-1], range(first, first + 100)))
            await runtime.flush()
    assert starts[:2] == [0, 0] and 0 < starts[2] < 96
    assert [len(pool.free) for pool in pools] == [40, 40]


async def publishing(names: Names, _: Path) -> None:
    publisher = names["KVEventPublisher"]
    names["KVEventPublisher"] = lambda ledger, **to: publisher(ledger, **to | {"replay": "tcp://127.0.0.1:*"})
    await names["serve"](config(), torch.zeros(NUM_ROWS, 8))


async def measuring(names: Names, _: Path) -> None:
    start = names["start_http_server"]
    names["start_http_server"] = lambda port, **to: start(0, **to)
    await names["serve"](config(), torch.zeros(NUM_ROWS, 8))


async def recording(names: Names, _: Path) -> None:
    await names["serve"](config(), torch.zeros(NUM_ROWS, 8))
    assert Path("asked.jsonl").exists()  # noqa: ASYNC240 - a local file


async def viewing(names: Names, _: Path) -> None:
    """What is written to the tensor of a layer is in its region."""
    model, layers = names["model"], names["layers"]
    assert sorted(layers) == [(0, "keys and values"), (1, "keys and values")]
    for region in model.regions:
        (view,) = region.views
        layers[view.layer, view.holds][7, 1, 3] = 1.0
        assert names["kv_caches"][region.name][7, 1, 3].all() and names["kv_caches"][region.name].sum() > 0


async def sliding(names: Names, _: Path) -> None:
    """A long prompt is computed chunk by chunk, and its second request computes the last token only."""
    seen: list[tuple[int, int, list[list[int]]]] = []

    def forward(block_ids: list[list[int]], start: int, stop: int) -> None:
        seen.append((start, stop, [list(table) for table in block_ids]))

    groups = [KVCacheGroup("full", block_size=4), KVCacheGroup("window", aoffload.SlidingWindow(6), 4)]
    async with OffloadRuntime(OffloadConfig(groups=groups, num_host_blocks=40), torch.zeros(20, 8)) as runtime:
        await names["compute"](runtime, range(33), forward, chunk=8)
        await runtime.flush()
        await runtime.reset(aoffload.Tier.DEVICE)
        await names["compute"](runtime, range(33), forward, chunk=8)
    assert [(start, stop) for start, stop, _ in seen] == [(0, 8), (8, 16), (16, 24), (24, 32), (32, 33), (32, 33)]
    for start, stop, (full, window) in seen:
        assert len(full) == len(window) == -(-stop // 4) and all(full)
        first = max(0, start - 5) // 4
        assert not any(window[:first]) and all(window[first:])


async def logging_and_tracing(names: Names, path: Path) -> None:
    """Each function of the page opens a runtime whose events arrive where the page says."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    file, records = io.StringIO(), list[logging.LogRecord]()
    provider, exporter = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    handler, logger = logging.Handler(), logging.getLogger("engine.kv")
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    given = config(), torch.zeros(NUM_ROWS, 8)
    for runtime in (
        names["open_with_json_lines"](*given, file),
        names["open_with_logging"](*given),
        names["open_with_spans"](*given, provider),
    ):
        async with runtime, runtime.request(range(9), "r1") as request:
            await request.allocate()
            await request.load()
            request.commit(9)
    logger.removeHandler(handler)
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    assert {"request_pinned", "request_done", "job_completed"} <= {line["event"] for line in lines}
    found = {record.getMessage(): vars(record) for record in records}
    assert "request_pinned" not in found and found["request_done"]["request_id"] == "r1"
    assert [span.name for span in exporter.get_finished_spans()] == ["aoffload.request", "aoffload.store"]
    await formatting(names, path, logger)


async def formatting(names: Names, path: Path, logger: logging.Logger) -> None:
    """`aoffload trace` reads what the formatter for `logging` writes: every event, with its fields, its level and the
    time of its record."""
    records = list[logging.LogRecord]()
    handler = logging.FileHandler(path / "kv.log")
    handler.setFormatter(names["json_formatter"])
    handler.addFilter(lambda record: records.append(record) or True)
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    async with names["open_with_logging"](config(), torch.zeros(NUM_ROWS, 8)) as runtime:
        async with runtime.request(range(9), "r1") as request:
            await request.allocate()
            await request.load()
            request.commit(9)
    LedgerLog(logger).observe(WorkerFailed(ValueError("a bug")))
    logger.removeHandler(handler)
    handler.close()
    reader = EventReader(LogLines(path / "kv.log", Progress(ProgressLine(io.StringIO()))))
    events = list(reader)
    assert reader.parse_errors.sentences() == [] and len(events) == len(records) > 8
    known = {*vars(logging.makeLogRecord({})), "message", "asctime"}
    for event, record in zip(events, records, strict=True):
        fields = {name: value for name, value in vars(record).items() if name not in known}
        assert json.loads(json.dumps(fields)).items() <= event.fields.items()
        assert (event.name, event.fields["level"]) == (record.getMessage(), record.levelname.lower())
        assert event.at_s == pytest.approx(record.created, abs=60)
    assert trace_command([str(path / "kv.log"), "request", "r1"]) == 0


async def answering(names: Names, _: Path) -> None:
    assert names["asked"] == [("llama", {"cache_salt": "tenant-a"})]
    await names["main"]()


async def checkpointing(names: Names, _: Path) -> None:
    """A request that returns continues from its checkpoint. One that diverges writes a checkpoint of its own."""
    blocks, seen = torch.zeros(65, 2, 16, 4, 32), list[tuple[float, int]]()

    def forward(block_ids: list[list[int]], slot: torch.Tensor, stop: int) -> None:
        seen.append((float(slot.flatten()[0]), stop))
        slot.fill_(stop)

    first = list(range(100))
    async with OffloadRuntime(names["config"], blocks) as runtime:
        for tokens in (first, first, [*first, *range(200, 260)]):
            await names["serve"](runtime, blocks, tokens, torch.zeros(4, 2, 16, 4, 32), forward)
    assert seen == [(0, 96), (96, 100), (96, 100), (96, 144), (144, 160)]


AFTERWARDS: dict[str, Callable[[Names, Path], Awaitable[None]]] = {
    "docs/howto/recurrent.md": checkpointing,
    "docs/engines.md": owning_blocks,
    "docs/hints.md": hinting,
    "docs/layouts.md": viewing,
    "docs/models.md": sliding,
    "docs/kv_events.md": publishing,
    "docs/metrics.md": measuring,
    "docs/plan.md": recording,
    "docs/server.md": answering,
    "docs/howto/logs-and-spans.md": logging_and_tracing,
}
"""Uses what the blocks of a page define, and would otherwise only define."""


class Client:
    """In the place of OpenAI's: there is no server here."""

    def __init__(self, asked: list[tuple[str, object]], base_url: str, api_key: str) -> None:
        assert base_url.endswith("/v1") and api_key
        self.asked = asked
        self.chat = self.completions = self

    def create(self, *, model: str, messages: list[dict[str, str]], extra_body: object) -> None:
        assert messages[0]["role"] == "user"
        self.asked.append((model, extra_body))


# -- tests ----------------------------------------------------------------------------------------------------------


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run(page: Path, names: Names, path: Path) -> None:
    """Blocks without `await` run outside of an event loop: some of them start one."""
    codes = blocks(page)
    awaits = [bool(code.co_flags & inspect.CO_COROUTINE) for code in codes]
    for code in [code for code, is_async in zip(codes, awaits, strict=True) if not is_async]:
        exec(code, names)

    async def rest() -> None:
        for code in [code for code, is_async in zip(codes, awaits, strict=True) if is_async]:
            async with AROUND.get(name_of(page), given)() as around:
                await cast("Callable[[], Awaitable[None]]", FunctionType(code, names | around))()
        if name_of(page) in AFTERWARDS:
            await AFTERWARDS[name_of(page)](names, path)

    anyio.run(rest)


SHOWING = [page for page in PAGES if name_of(page) not in ELSEWHERE and blocks(page)]


@pytest.mark.filterwarnings("ignore:copies will be slow")  # docs/cuda.md, without a device
@pytest.mark.parametrize("page", SHOWING, ids=name_of)
def test_each_block_of_a_page_runs_as_it_stands(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever copies a block from a page and has what the page speaks of has something that runs: all blocks of all
    pages, one after the other, in a directory of their own. The block of docs/howto/preempting.md runs against a
    victim that ends at the very moment at which it is preempted."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/weights.safetensors").write_bytes(b"weights")
    (tmp_path / "model/config.json").write_text(json.dumps(LLAMA))
    asked: list[tuple[str, object]] = []
    names: Names = {"__name__": f"page_{page.stem}", "asked": asked}
    if page.name == "server.md":
        monkeypatch.setattr(pytest.importorskip("openai"), "OpenAI", partial(Client, asked))
    if AROUND.get(name_of(page)) not in (starting_early, preempting, promising, None):
        names |= AROUND[name_of(page)].keywords  # type: ignore[attr-defined]
    run(page, names, tmp_path)


def test_the_pages_that_other_tests_run_are_run_by_them() -> None:
    """Each of them names a test that there is, and that reads the page."""
    for page, (file, test) in ELSEWHERE.items():
        text = (ROOT / file).read_text()
        assert f"def {test}(" in text, page
        assert Path(page).name in text or Path(page).stem.upper() in text, page
    assert {name_of(page) for page in PAGES} >= {*ELSEWHERE, *AROUND, *AFTERWARDS}
