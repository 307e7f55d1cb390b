"""The log of a runtime through a logger of `logging`."""

from __future__ import annotations

import ast
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import pytest
import torch
from engine_serving import own_engine
from serving import BACKENDS, config, prompt, scripted

from aoffload import HostCacheRuntime, InvalidArgument, OffloadRuntime, RequestState
from aoffload._observe import log as ledger_log
from aoffload._observe.log import WRITERS
from aoffload.ledger import JobMoved, LedgerLog, RequestMoved, WorkerFailed

A, B = prompt(1, 9), prompt(2, 9)


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


class Records(logging.Handler):
    """A handler that keeps the records, of a logger that passes them to no other one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[logging.LogRecord] = []
        self.logger = logging.getLogger("engine")
        self.logger.setLevel(logging.DEBUG)
        self.logger.propagate = False
        self.logger.handlers[:] = [self]

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record)

    def of(self, event: str) -> list[dict[str, Any]]:
        return [vars(record) for record in self.found if record.getMessage() == event]


@pytest.fixture
def records() -> Iterator[Records]:
    """Of one test: `logging` keeps its loggers."""
    records = Records()
    yield records
    records.logger.disabled = False
    records.logger.handlers.clear()


@pytest.mark.anyio
@pytest.mark.parametrize("open_with", [scripted, own_engine])
async def test_fields_of_an_event_are_attributes_of_its_record(open_with: Callable[..., Any], records: Records) -> None:
    """The event is the message, its level is the record's, and each of its fields is an attribute, as with `extra`.
    For a runtime of either kind."""
    async with open_with(logger=records.logger) as found:
        engine = found[0] if isinstance(found, tuple) else found
        await engine.serve(A, request_id="r1")
        await engine.runtime.flush()
    (matched,) = records.of("request_matched")
    assert (matched["request_id"], matched["num_tokens"], matched["answer"]) == ("r1", 9, "miss")
    assert (matched["levelname"], matched["name"]) == ("DEBUG", "engine")
    assert [one["levelname"] for one in records.of("request_done")] == ["INFO"]
    assert [one["direction"] for one in records.of("job_completed")] == ["store"]
    assert len(records.of("runtime_opened")) == len(records.of("runtime_closed")) == 1


@pytest.mark.anyio
async def test_a_request_logs_with_its_own_id(records: Records) -> None:
    """`request.log` writes through the same logger, and `exc_info` is the record's."""
    async with scripted(logger=records.logger) as (engine, _):
        async with engine.runtime.request(A, "r1") as request:
            try:
                raise ValueError("bad template")
            except ValueError:
                request.log.warning("tokenised", num_tokens=9, exc_info=True)
    (found,) = records.of("tokenised")
    assert (found["request_id"], found["num_tokens"], found["levelname"]) == ("r1", 9, "WARNING")
    assert found["exc_info"][0] is ValueError


@pytest.mark.anyio
async def test_the_level_of_the_logger_counts(monkeypatch: pytest.MonkeyPatch, records: Records) -> None:
    """Events below the level of the logger are not described: no move of a request or a job is reported for them. A
    level that changes counts from then on."""
    described: list[Any] = []

    def writer(kind: type[Any]) -> Callable[[Any, Any], None]:
        write = WRITERS[kind]

        def noted(log: Any, event: Any) -> None:
            described.append(event)
            write(log, event)

        return noted

    for kind in (RequestMoved, JobMoved):
        monkeypatch.setitem(WRITERS, kind, writer(kind))
    records.logger.setLevel(logging.WARNING)
    async with scripted(logger=records.logger) as (engine, _):
        await engine.serve(A, request_id="before")
        await engine.runtime.flush()
        assert (described, records.found) == ([], [])
        records.logger.setLevel(logging.INFO)
        await engine.serve(B, request_id="after")
    assert [one["request_id"] for one in records.of("request_done")] == ["after"]
    assert len(described) == 1


def test_logging_that_is_disabled_hears_nothing(records: Records) -> None:
    """`logging.disable` and `Logger.disabled` count, too."""
    log = LedgerLog(records.logger)
    assert log.wants_move(RequestMoved, RequestState.DONE)
    records.logger.disabled = True
    assert not log.wants_move(RequestMoved, RequestState.DONE)


def test_an_exception_keeps_its_traceback(records: Records) -> None:
    """A record about a failure has the exception itself, so handlers print its traceback, or group by it. It has the
    text, too, as other loggers get it."""
    try:
        raise ValueError("a bug")
    except ValueError as error:
        LedgerLog(records.logger).observe(WorkerFailed(error))
    (record,) = records.found
    assert record.exc_info is not None and record.exc_info[2] is not None
    text = logging.Formatter().format(record)
    assert text.startswith("worker_failed\nTraceback") and text.endswith("ValueError: a bug")
    assert vars(record)["traceback"].endswith("ValueError: a bug\n")


class Tagged(logging.LoggerAdapter[Any]):
    """An adapter with a `process` of its own."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"[kv] {msg}", kwargs


@pytest.mark.anyio
async def test_an_adapter_adds_its_fields(records: Records) -> None:
    """A `LoggerAdapter` adds what it adds to other messages, also around another one. Fields of the event stay."""
    adapter = logging.LoggerAdapter(Tagged(records.logger), {"tenant": "blue", "num_tokens": -1})
    async with scripted(logger=adapter) as (engine, _):
        await engine.serve(A, request_id="r1")
    (matched,) = records.of("[kv] request_matched")
    assert (matched["tenant"], matched["request_id"], matched["num_tokens"]) == ("blue", "r1", 9)
    records.logger.setLevel(logging.ERROR)
    assert not LedgerLog(adapter).wants_move(RequestMoved, RequestState.DONE)


@pytest.mark.anyio
async def test_a_field_with_the_name_of_an_attribute_of_a_record_is_renamed(records: Records) -> None:
    """`logging` refuses such a field. It gets an underscore, whether an event has it or an adapter, so no event is
    lost and `request.log` does not raise."""
    adapter = logging.LoggerAdapter(records.logger, {"module": "kv", "message": "m", "name": "n"})
    for logger in (records.logger, adapter):
        async with scripted(logger=logger) as (engine, _):
            async with engine.runtime.request(A, "r1") as request:
                request.log.info("plain", name="clash", name_="other", asctime=1)
        assert engine.runtime.telemetry.num_lost_events == 0
    for plain in records.of("plain"):
        found = (plain["name"], plain["name__"], plain["name_"], plain["asctime_"], plain["request_id"])
        assert found == ("engine", "clash", "other", 1, "r1")
    assert [plain.get("module_") for plain in records.of("plain")] == [None, "kv"]
    matched = records.of("request_matched")[-1]
    assert (matched["module_"], matched["message_"], matched["name_"]) == ("kv", "m", "n")


class Quiet(logging.LoggerAdapter[Any]):
    """An adapter with a level of its own."""

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - the name that `logging` has
        return level >= logging.WARNING


@pytest.mark.anyio
async def test_an_adapter_decides_which_levels_are_heard(records: Records) -> None:
    """For the events of a ledger and for `request.log`, also inside another adapter."""
    for logger in (Quiet(records.logger, {}), logging.LoggerAdapter(Quiet(records.logger, {}), {})):
        assert not LedgerLog(logger).wants_move(RequestMoved, RequestState.DONE)
        async with scripted(logger=logger) as (engine, _):
            async with engine.runtime.request(A, "r1") as request:
                request.log.info("tokenised")
                request.log.warning("truncated")
                request.log.exception("failed", exc_info=False)
    assert [record.getMessage() for record in records.found] == ["truncated", "failed"] * 2


class Equal(logging.LoggerAdapter[Any]):
    """An adapter that is equal to any other object."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def test_adapters_are_told_apart_by_identity(records: Records) -> None:
    """An adapter with an `__eq__` of its own is not mistaken for one that adapts itself."""
    LedgerLog(Equal(Equal(records.logger, {"a": 1}), {})).observe(WorkerFailed(ValueError("a bug")))
    (found,) = records.of("worker_failed")
    assert found["a"] == 1


def test_no_field_has_the_name_of_an_attribute_of_each_record() -> None:
    """`logging` refuses such a field, and the event would be lost."""
    nodes = [*ast.walk(ast.parse(inspect.getsource(ledger_log)))]
    fields = {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg}
    keys = [key for node in nodes if isinstance(node, ast.Dict) for key in node.keys if isinstance(key, ast.Constant)]
    fields |= {key.value for key in keys if isinstance(key.value, str)}
    taken = {*vars(logging.makeLogRecord({})), "message", "asctime"}
    assert len(fields) > 50 and fields & taken == {"exc_info"}


class Cyclic(logging.LoggerAdapter[Any]):
    def __init__(self) -> None:
        super().__init__(self)  # type: ignore[arg-type]


BAD = [3, "aoffload", logging, logging.Logger, logging.LoggerAdapter(None), Cyclic(), print]  # type: ignore[arg-type]
BAD += [logging.LoggerAdapter(logging.LoggerAdapter(logging.getLogger("engine"), [("a", 1)]), {})]  # type: ignore


@pytest.mark.parametrize("bad", BAD, ids=[str(type(bad).__name__) for bad in BAD])
def test_what_is_no_logger_is_refused(bad: Any) -> None:
    """The error names the argument, for a log and for either runtime."""
    with pytest.raises(InvalidArgument, match=r"^logger: must") as refused:
        LedgerLog(bad)
    assert refused.value.argument == "logger"
    for make in (OffloadRuntime, HostCacheRuntime):
        options = {"engine_blocks": None} if make is HostCacheRuntime else {}
        with pytest.raises(InvalidArgument) as refused:
            make(config(), torch.zeros(9, 8), logger=bad, **options)
        assert refused.value.argument == "logger"


def test_logging_needs_structlog(monkeypatch: pytest.MonkeyPatch, records: Records) -> None:
    """structlog is the bridge. Where it is not installed, the error says so."""
    monkeypatch.setitem(sys.modules, "structlog", None)
    with pytest.raises(InvalidArgument, match=r"a logging\.Logger needs structlog, which is not installed"):
        LedgerLog(records.logger)
