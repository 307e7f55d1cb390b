"""The server as a program: what it prints, how it ends."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import attrs
import httpx
import pytest
from http_bench import GUARD_S, events_of

from aoffload.integrations import openai_server
from aoffload.integrations.openai_server.command import main
from aoffload.integrations.openai_server.options import ServerOptions, make_parser, parse_options

COMMAND = [sys.executable, "-W", "error", "-m", "aoffload.integrations.openai_server"]
asynchronous = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


def marked(test: Any) -> Any:
    for mark in asynchronous:
        test = mark(test)
    return test


@attrs.frozen
class Program:
    process: anyio.abc.Process
    url: str

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    async def wait(self) -> tuple[int, str]:
        """Its exit status, and what it wrote on stderr."""
        with anyio.fail_after(GUARD_S):
            assert self.process.stderr is not None
            said = b"".join([part async for part in self.process.stderr])
            return await self.process.wait(), said.decode()


@contextlib.asynccontextmanager
async def program(*options: str) -> AsyncIterator[Program]:
    """The server with the smallest model, on a free port, once it says where it listens."""
    command = [*COMMAND, "--model", "tiny", "--port", "0", *options]
    async with await anyio.open_process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            with anyio.fail_after(GUARD_S):
                line = (await process.stdout.receive()).decode()
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert found is not None, line
            yield Program(process, found[0])
        finally:
            if process.returncode is None:
                process.kill()


@attrs.define(eq=False)
class Reader:
    """Reads a stream to its end, and says when it has begun."""

    num_tokens: int
    content: bytes = b""
    status: int = 0
    has_begun: anyio.Event = attrs.field(factory=anyio.Event)
    is_half_through: anyio.Event = attrs.field(factory=anyio.Event)

    async def read(self, client: httpx.AsyncClient, number: int) -> None:
        body = {"model": "tiny", "prompt": f"{number} " * 20, "max_tokens": self.num_tokens, "stream": True}
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            self.status = response.status_code
            async for part in response.aiter_bytes():
                self.content += part
                self.has_begun.set()
                if self.content.count(b"data: ") > self.num_tokens / 2:
                    self.is_half_through.set()


@contextlib.asynccontextmanager
async def reading(server: Program, num_readers: int, num_tokens: int) -> AsyncIterator[list[Reader]]:
    """Readers in the middle of their streams; on leaving, they have read to the end."""
    readers = [Reader(num_tokens) for _ in range(num_readers)]
    async with httpx.AsyncClient(base_url=server.url, timeout=GUARD_S) as client:
        async with anyio.create_task_group() as group:
            for number, reader in enumerate(readers):
                group.start_soon(reader.read, client, number)
            for reader in readers:
                await reader.has_begun.wait()
            yield readers


@marked
async def test_sigterm_lets_those_inside_finish() -> None:
    """Under load: every answer is complete, nobody new is taken in, and the exit status is 0."""
    async with program("--drain-timeout", "1000") as server:
        async with reading(server, 4, 400) as readers:
            server.signal()
            async with httpx.AsyncClient(base_url=server.url) as client:
                while (health := await client.get("/health")).status_code == 200:
                    pass  # the signal has not arrived yet
                refused = await client.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
                for reader in readers:
                    await reader.is_half_through.wait()
                assert (await client.get("/health")).status_code == 503
        assert health.json()["status"] == "draining"
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert await server.wait() == (0, "")
    for reader in readers:
        events = events_of(reader.content)
        assert (reader.status, events[-1]) == (200, "[DONE]")
        assert events[-2]["usage"]["completion_tokens"] == 400


@marked
async def test_sigterm_ends_who_is_not_done_in_time() -> None:
    """Past the deadline: a clean error as the last event, and the exit status is 0."""
    async with program("--drain-timeout", "0.1") as server:
        async with reading(server, 4, 1500) as readers:
            server.signal()
        assert await server.wait() == (0, "")
    for reader in readers:
        assert events_of(reader.content)[-1]["error"]["code"] == "unavailable"


@marked
async def test_a_second_signal_leaves_no_more_time() -> None:
    """Ctrl-C twice: the deadline of the first one is over."""
    async with program("--drain-timeout", "1000") as server:
        async with reading(server, 2, 1500) as readers, httpx.AsyncClient(base_url=server.url) as client:
            server.signal(signal.SIGINT)
            while (await client.get("/health")).status_code == 200:
                pass
            server.signal(signal.SIGINT)
        assert await server.wait() == (0, "")
    for reader in readers:
        assert events_of(reader.content)[-1]["error"]["code"] == "unavailable"


@marked
async def test_an_idle_server_ends_at_once_and_its_log_is_whole(tmp_path: Path) -> None:
    """Connections that nobody uses are closed; the log has every event of the requests before."""
    log = tmp_path / "log"
    async with program("--log", str(log), "--served-name", "mine", "--host-blocks", "0") as server:
        async with httpx.AsyncClient(base_url=server.url) as client:
            answer = await client.post("/v1/completions", json={"model": "mine", "prompt": "x", "max_tokens": 2})
            server.signal()
            assert await server.wait() == (0, "")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [event["event"] for event in events if event.get("request_id") == answer.json()["id"]][-1] == "request_done"


def test_a_port_that_is_taken_is_said_before_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2 and the option's name."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SystemExit) as ended:
            main(["--model", "tiny", "--port", str(taken.getsockname()[1])])
    assert ended.value.code == 2
    assert "argument --port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "name"),
    [(["--model", "nothing/here"], "--model"), (["--port", "x"], "--port"), (["--max-tokens", "9000"], "--max-tokens"),
     (["--device-blocks", "0"], "--device-blocks"), (["--drain-timeout", "nan"], "--drain-timeout"),
     (["--host", "no such host"], "--host"), (["--max-body-bytes", "5"], "--max-body-bytes")],
)  # fmt: skip
def test_bad_options_are_named(arguments: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, and which one it is."""
    with pytest.raises(SystemExit) as ended:
        main(["--model", "tiny", "--port", "0", *arguments])
    assert ended.value.code == 2
    assert f"argument {name}" in capsys.readouterr().err


def test_the_defaults_of_the_command_are_those_of_the_options() -> None:
    """On loopback, above all."""
    assert parse_options([]) == ServerOptions()
    assert ServerOptions().host == "127.0.0.1"


def test_the_tokenizer_is_written_for_load_generators(tmp_path: Path) -> None:
    """A directory that `AutoTokenizer` loads, of the size of the model's vocabulary; nothing is served."""
    assert main(["--model", "tiny", "--write-tokenizer", str(tmp_path / "there")]) == 0
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def test_every_option_and_public_name_is_documented() -> None:
    """docs/server.md lists the options of the command, docs/api.md the names of the package."""
    docs = Path(__file__).parents[2] / "docs"
    options = {name for action in make_parser()._actions for name in action.option_strings} - {"-h", "--help"}
    assert options - set(re.findall(r"--[a-z-]+", (docs / "server.md").read_text())) == set()
    assert set(openai_server.__all__) - set(re.findall(r"\w+", (docs / "api.md").read_text())) == set()


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    """Without starlette and uvicorn: one line that says how to get them, and no traceback."""
    for name in ("starlette", "uvicorn"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('no {name}', name='{name}')\n")
    program = (
        f"import sys, runpy; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['server', '--model', 'tiny'];"
        "runpy.run_module('aoffload.integrations.openai_server', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    said = r"aoffload serve: the server needs \w+, which is not installed: pip install 'aoffload\[server\]'\n"
    assert re.fullmatch(said, done.stderr)
