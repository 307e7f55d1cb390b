"""The server as a program: its output, and its exit."""

from __future__ import annotations

import contextlib
import json
import os
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
import torch
from http_bench import GUARD_S, OPTIONS, SmallModel, events_of

from aoffload._common.commands import by_option
from aoffload._reference.server.command import _OPTIONS, main
from aoffload._reference.server.options import ServerOptions, make_parser, parse_options
from aoffload.errors import ConfigError, InvalidArgument
from aoffload.integrations.openai_server import open_service

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
            output = b"".join([part async for part in self.process.stderr])
            return await self.process.wait(), output.decode()


@contextlib.asynccontextmanager
async def program(*options: str, num_files: int | None = None) -> AsyncIterator[Program]:
    """The server with the smallest model, on a free port, once it says where it listens. `num_files`: descriptors that
    it may have."""
    command = [*COMMAND, "--model", "tiny", "--port", "0", *options]
    if num_files is not None:
        command = ["sh", "-c", f'ulimit -n {num_files}; exec "$@"', "sh", *command]
    async with await anyio.open_process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            with anyio.fail_after(GUARD_S):
                line = (await process.stdout.receive()).decode()
            found = re.search(r"http://[\d.]+:\d+", line)
            assert found is not None, line
            yield Program(process, found[0].replace("0.0.0.0", "127.0.0.1"))
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


@marked
async def test_more_connections_than_descriptors(tmp_path: Path) -> None:
    """The server keeps below its limit: whoever is connected is served, whoever comes is, and nothing is written."""
    async with program(num_files=120) as server, httpx.AsyncClient(base_url=server.url, timeout=GUARD_S) as client:
        assert (await client.get("/health")).status_code == 200
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        with contextlib.ExitStack() as idle:
            for _ in range(142):
                idle.enter_context(socket.create_connection(address, GUARD_S))
            for _ in range(3):
                async with httpx.AsyncClient(base_url=server.url, timeout=GUARD_S) as new:
                    assert (await new.get("/health")).status_code == 200
            assert (await client.get("/health")).status_code == 200
        server.signal()
        assert await server.wait() == (0, "")


@marked
async def test_half_sent_bodies_are_told_when_it_ends() -> None:
    """503 at once, and not a word on stderr."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    async with program() as server, httpx.AsyncClient(base_url=server.url, timeout=GUARD_S) as client:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        with contextlib.ExitStack() as clients:
            halves = [clients.enter_context(socket.create_connection(address, GUARD_S)) for _ in range(20)]
            for half in halves:
                half.sendall(head + b"content-length: 9\r\n\r\n{")
            assert (await client.get("/health")).status_code == 200  # they have been accepted before
            server.signal()
            for half in halves:
                assert (await anyio.to_thread.run_sync(half.recv, 100)).startswith(b"HTTP/1.1 503")
        assert await server.wait() == (0, "")


@marked
async def test_no_number_of_signals_kills_it() -> None:
    """The exit status says that it has ended in order, however often it was told to."""
    async with program() as server:
        while server.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server.process.pid, signal.SIGTERM)  # `send_signal` may collect its exit status before asyncio
            await anyio.to_thread.run_sync(lambda: None)
        assert await server.wait() == (0, "")


@marked
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
async def test_a_log_on_a_full_disk_harms_nothing() -> None:
    """It is said once that events are lost, and at the end how many; every answer comes."""
    async with program("--log", "/dev/full") as server, httpx.AsyncClient(base_url=server.url) as client:
        for _ in range(2):
            answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 2})
            assert answer.status_code == 200
        server.signal()
        status, output = await server.wait()
    assert status == 0
    first, last = output.splitlines()
    assert first.startswith("/dev/full: events are lost from here on: ")
    assert re.fullmatch(r"/dev/full: \d+ events were lost in all", last)


@marked
async def test_a_server_for_everybody_without_a_key_is_warned_of(tmp_path: Path) -> None:
    """With a key it is not, and the key is asked for and never printed."""
    for options, is_warned in (((), True), (("--api-key-file", str(tmp_path / "key")), False)):
        (tmp_path / "key").write_text("sesame\n")
        async with program("--host", "0.0.0.0", *options) as server, httpx.AsyncClient(base_url=server.url) as client:
            status = (await client.get("/v1/models")).status_code
            server.signal()
            ended, output = await server.wait()
        assert (ended, status) == (0, 200 if is_warned else 401)
        assert output.startswith("warning: every client that can reach 0.0.0.0") if is_warned else output == ""


def test_a_model_that_does_not_fit_is_an_option_that_is_wrong() -> None:
    """What torch raises for more memory than there is."""

    class Large(SmallModel):
        def new_kv_cache(self, num_blocks: int, block_size: int) -> torch.Tensor:
            raise RuntimeError("can't allocate memory\nand a backtrace")

    async def run() -> None:
        async with open_service(OPTIONS, Large()):
            raise AssertionError

    with pytest.raises(ConfigError, match=r"^num_device_blocks: 69 blocks cannot be allocated: can't allocate memory$"):
        anyio.run(run)


@pytest.mark.parametrize(
    ("error", "name"),
    [(ConfigError("num_host_blocks", "x"), "host-blocks"), (InvalidArgument("directory", "x"), "write-tokenizer"),
     (ConfigError("num_device_blocks", "x"), "device-blocks"), (ConfigError("store_policy", "x"), "store")],
)  # fmt: skip
def test_an_error_names_the_option_and_not_the_argument(error: InvalidArgument, name: str) -> None:
    """The operator has never heard of the argument."""
    assert by_option(error, _OPTIONS) == f"argument --{name}: x"
    assert f"--{name}" in {option for action in make_parser()._actions for option in action.option_strings}


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
     (["--host", "no such host"], "--host"), (["--host", "x" * 300], "--host"), (["--host", "192.0.2.1"], "--host"),
     (["--load", "never"], "--load"), (["--eviction", "fifo"], "--eviction"),
     (["--log", "/no/such/place"], "--log"), (["--log", "/"], "--log"), (["--api-key", ""], "--api-key"),
     (["--max-reading-bytes", "2000"], "--max-reading-bytes"), (["--api-key-file", "/"], "--api-key-file"),
     (["--disk", "/dev/null/x"], "--disk"), (["--disk", "build/x", "--disk-size", "big"], "--disk-size"),
     (["--remote", "http://x"], "--remote"), (["--remote", "redis://x", "--remote-secret", "/"], "--remote-secret"),
     (["--write-tokenizer", "/dev/null/x"], "--write-tokenizer"), (["--max-body-bytes", "5"], "--max-body-bytes")],
)  # fmt: skip
def test_bad_options_are_named(arguments: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, and which one it is."""
    with pytest.raises(SystemExit) as ended:
        main(["--model", "tiny", "--port", "0", *arguments])
    assert ended.value.code == 2
    output = capsys.readouterr().err
    assert f"argument {name}" in output
    assert "Traceback" not in output


def test_an_address_that_cannot_be_had_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """No usage of thirty lines for what is no mistake of spelling."""
    with pytest.raises(SystemExit):
        main(["--model", "tiny", "--host", "192.0.2.1"])
    assert capsys.readouterr().err.count("\n") == 1


def test_the_defaults_of_the_command_are_those_of_the_options() -> None:
    """On loopback, above all."""
    assert parse_options([]) == ServerOptions()
    assert ServerOptions().host == "127.0.0.1"


@marked
@pytest.mark.parametrize("num_host_blocks", [0, 256])
async def test_loads_and_eviction_are_chosen(num_host_blocks: int) -> None:
    """By name, as in the demo, also without offload; answers stay what they are."""
    given = parse_options(["--model", "tiny", "--load", "cost", "--eviction", "learned"])
    options = attrs.evolve(OPTIONS, load=given.load, eviction=given.eviction, num_host_blocks=num_host_blocks)
    found = []
    for each in (OPTIONS, options):
        async with open_service(each, SmallModel()) as service:
            found.append((await service.engine.generate(list(range(100)), 4)).token_ids)
            config, eviction = service.engine.runtime.config, service.engine.runtime.statistics().eviction
    assert found[0] == found[1]
    assert (config.load_choice, config.eviction) == ("cost", "learned") and eviction is not None


def test_the_tokenizer_is_written_for_load_generators(tmp_path: Path) -> None:
    """A directory that `AutoTokenizer` loads, of the size of the model's vocabulary; nothing is served."""
    assert main(["--model", "tiny", "--write-tokenizer", str(tmp_path / "there")]) == 0
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def test_every_option_is_documented() -> None:
    """`--help` explains each option, and docs/server.md names no option that does not exist."""
    actions = make_parser()._actions
    assert all(action.help for action in actions)
    named = set(re.findall(r"(?<!-)--[a-z][a-z-]+", (Path(__file__).parents[2] / "docs/server.md").read_text()))
    assert named and named - {name for action in actions for name in action.option_strings} == set()


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
    output = r"aoffload serve: the server needs \w+, which is not installed: pip install 'aoffload\[server\]'\n"
    assert re.fullmatch(output, done.stderr)
