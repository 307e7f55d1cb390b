"""Access control: keys, host names, content types, and errors that reveal nothing about other clients."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import attrs
import pytest
from http_bench import BACKENDS, OPTIONS, serving

from aoffload._reference.server.errors import LOGGER
from aoffload._reference.server.gate import VARIABLE, Rules, find_key, is_loopback
from aoffload._reference.server.listening import MAX_LINES, PERIOD_S, BoundedLog
from aoffload.errors import InvalidArgument
from aoffload.integrations.openai_server import ServerOptions

pytestmark = pytest.mark.anyio
JSON = {"content-type": "application/json"}
BODY = b'{"model": "tiny", "prompt": "x", "max_tokens": 1}'


async def statuses(options: ServerOptions, *headers: dict[str, str], path: str = "/v1/completions") -> list[int]:
    """Of one request with each of these headers."""
    async with serving(options) as bench:
        return [(await bench.client.post(path, content=BODY, headers=each)).status_code for each in headers]


@BACKENDS
async def test_another_content_type_is_refused() -> None:
    """A web page can have a browser send plain text and forms anywhere; for JSON the browser asks first."""
    kinds = ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-8", "APPLICATION/JSON"]
    found = await statuses(OPTIONS, {}, *({"content-type": kind} for kind in kinds))
    assert found == [415, 415, 415, 200, 200]


@BACKENDS
@pytest.mark.parametrize(
    ("header", "value", "status"),
    [
        ("host", "localhost:8000", 200), ("host", "127.0.0.1", 200), ("host", "[::1]:80", 200),
        ("host", "LOCALHOST", 200), ("host", "localhost.:80", 200),
        ("host", "evil.example", 403), ("host", "127.0.0.1.evil.example", 403), ("host", "", 403), ("host", "[", 403),
        ("host", "mine.example", 200), ("origin", "http://localhost:3000", 200),
        ("origin", "https://evil.example", 403),
        ("origin", "null", 403), ("origin", "https://mine.example", 200),
    ],
)  # fmt: skip
async def test_a_server_on_loopback_answers_to_its_own_names(header: str, value: str, status: int) -> None:
    """Not to a web page, whether under a name of its own or across origins; other names have to be allowed."""
    options = attrs.evolve(OPTIONS, allowed_hosts=("Mine.example",))
    assert await statuses(options, {**JSON, header: value}) == [status]


@BACKENDS
async def test_a_server_for_everybody_answers_to_any_name() -> None:
    """It is not found by a page's rebinding alone; with names of its own, it answers to those and no other."""
    foreign = {**JSON, "host": "any.example"}
    assert await statuses(attrs.evolve(OPTIONS, host="0.0.0.0"), foreign) == [200]
    assert await statuses(attrs.evolve(OPTIONS, host="0.0.0.0", allowed_hosts=("a.example",)), foreign) == [403]


@pytest.mark.parametrize(("host", "expected"), [("localhost", True), ("127.9.9.9", True), ("::1", True), ("x", False),
                                                ("0.0.0.0", False), ("::", False), ("10.0.0.1", False)])  # fmt: skip
def test_what_loopback_is(host: str, expected: bool) -> None:
    """Names and addresses that only this machine reaches."""
    assert is_loopback(host) is expected


@BACKENDS
async def test_a_key_is_asked_for_everywhere_but_for_health() -> None:
    """401 before anything is read; the scheme is Bearer, and the key is the whole one."""
    options = attrs.evolve(OPTIONS, api_key="sesame")
    wrong = ["", "sesame", "Basic sesame", "Bearer", "Bearer sesam", "Bearer sesamee", "Bearer s\u00e9same"]
    headers = [JSON, *({**JSON, "authorization": value.encode("latin-1")} for value in wrong)]
    right = [{**JSON, "authorization": value} for value in ("Bearer sesame", "bearer  sesame")]
    assert await statuses(options, *headers, *right) == [401] * len(headers) + [200, 200]
    async with serving(options) as bench:
        paths = ["/health", "/v1/models", "/v1/models/tiny", "/metrics", "/nothing"]
        found = [await bench.client.get(path) for path in paths]
    assert [response.status_code for response in found] == [200, 401, 401, 401, 401]
    assert found[1].json()["error"]["code"] == "invalid_api_key"
    assert found[1].headers["www-authenticate"] == "Bearer"


def test_a_key_is_never_shown() -> None:
    """Not where options or rules are printed."""
    options = ServerOptions(api_key="sesame")
    assert "sesame" not in repr(options) + repr(Rules.of("::", (), options.api_key))


def test_where_a_key_comes_from(tmp_path: Path) -> None:
    """The option, the first line of a file, the environment; what no header can carry is refused, and not repeated."""
    file = tmp_path / "key"
    file.write_text("from-file\nand more")
    assert find_key(None, None, {}) is None
    assert find_key("mine", None, {VARIABLE: "env"}) == "mine"
    assert find_key(None, file, {VARIABLE: "env"}) == "from-file"
    assert find_key(None, None, {VARIABLE: "env"}) == "env"
    for wrong in ("", "two words", "k\u00e9y", "x\x7f"):
        with pytest.raises(InvalidArgument, match=r"^api_key: ") as caught:
            find_key(None, None, {VARIABLE: wrong})
        assert not wrong or wrong not in str(caught.value)
    with pytest.raises(InvalidArgument, match=r"^api_key_file: "):
        find_key(None, tmp_path, {})
    with pytest.raises(InvalidArgument, match=r"^api_key_file: "):
        find_key("x", file, {})


@BACKENDS
async def test_nothing_is_redirected() -> None:
    """A slash too many is a path that there is not, and no answer names a host that a client has named."""
    async with serving(attrs.evolve(OPTIONS, host="0.0.0.0")) as bench:
        for path in ("/v1/completions/", "/v1/models/", "/health/"):
            response = await bench.client.get(path, headers={"host": "evil.example"})
            assert (response.status_code, "location" in response.headers) == (404, False)


@BACKENDS
async def test_a_salt_may_be_required() -> None:
    """The error for a missing or empty salt names the field."""
    async with serving(attrs.evolve(OPTIONS, requires_salt=True)) as bench:
        for body in (BODY, BODY.replace(b"}", b', "cache_salt": null}')):
            refused = await bench.post("/v1/completions", body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")
        assert (await bench.complete(cache_salt="a"))["choices"]


@BACKENDS
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_of_the_engine_says_nothing_of_others(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The client hears that there was one; what it was, and whose requests it has met, is in the log."""
    async with serving() as bench:
        bench.model.fails = True
        answer = await bench.post("/v1/completions", {"model": "tiny", "prompt": "x", "stream": stream})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "internal error"
    (record,) = [record for record in caplog.records if record.name == LOGGER]
    assert "the device is on fire" in record.getMessage() and "cmpl-" in record.getMessage()


@BACKENDS
async def test_what_a_client_sends_comes_back_cut() -> None:
    """A name of a megabyte is not echoed, wherever it stands."""
    name = "\u00e9" * 400_000
    async with serving() as bench:
        for fields in (
            {name: 1},
            {"kv_offload": {name: 1}},
            {"model": name},
            {"stream_options": {name: 1}, "stream": 1},
        ):
            answer = await bench.post("/v1/completions", {"model": "tiny", "prompt": "x", **fields})
            assert answer.status_code in (400, 404)
            assert len(answer.content) < 2500


def test_a_log_is_bounded_by_kind_and_time() -> None:
    """A few lines of each kind in a minute; the next minute's first one says how many there were."""
    now, said = 0.0, []
    bound = BoundedLog(lambda: now)

    def log(text: str, *arguments: Any) -> None:
        record = logging.LogRecord("uvicorn.error", logging.WARNING, "", 0, text, arguments, None)
        if bound(record):
            said.append(record.getMessage())

    for number in range(1000):
        log("bad request")
        log("other %d", number)
    assert said.count("bad request") == MAX_LINES and len(said) == 2 * MAX_LINES
    now = PERIOD_S
    log("bad request")
    assert said[-1] == "bad request (and 995 more like it)"
    for number in range(10_000):
        log(f"{number} kinds")
    assert len(bound._counts) <= 256
