"""A store in object storage: memory, a directory, and S3 where a server for it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="obstore, of the extra `object-storage`, is not installed")
pytest.importorskip("xxhash", reason="xxhash, of the extra `object-storage`, is not installed")

import obstore
from redis_servers import free_ports
from remotes import RemoteCopies, cell

from aoffload import ConfigError, InvalidArgument
from aoffload._kernel.states import Outcome
from aoffload.stores import ObstoreStore, StoreError
from aoffload.transport import Env

KEY, OTHER = b"k" * 32, b"o" * 32
LONG_S = 20.0
INSTALLED = Path(__file__).parents[2] / "build/peers/s3/bin/moto_server"  # by `make s3-server`
MOTO = str(INSTALLED) if INSTALLED.exists() else shutil.which("moto_server")
S3_OPTIONS = {"access_key_id": "any", "secret_access_key": "any", "region": "us-east-1"}


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    """Of a server that speaks the protocol of S3, with a bucket."""
    if MOTO is None:
        pytest.skip("no server of S3 is installed: make s3-server")
    (port,) = free_ports(1)
    command = [MOTO, "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    reader = threading.Thread(target=process.stdout.read, daemon=True)
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if "Running on" in line:
                break
        else:
            raise AssertionError("".join(said))
        reader.start()
        url = f"http://127.0.0.1:{port}"
        with urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT"), timeout=LONG_S):
            yield url
    finally:
        process.kill()
        process.wait()
        if reader.ident is not None:
            reader.join()
        process.stdout.close()


def s3(url: str, **options: object) -> ObstoreStore:
    client = {"allow_http": True}
    return ObstoreStore.from_url("s3://bucket", endpoint=url, client_options=client, **S3_OPTIONS, **options)  # type: ignore[arg-type]


@pytest.fixture(params=["memory", "directory", "s3"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], ObstoreStore]]:
    """Makes stores that have the same objects."""
    opened: list[ObstoreStore] = []
    inner = obstore.store.MemoryStore()
    url = request.getfixturevalue("s3_url") if request.param == "s3" else ""

    def open_one() -> ObstoreStore:
        if request.param == "memory":
            opened.append(ObstoreStore(inner))
        else:
            opened.append(s3(url) if url else ObstoreStore.from_url(tmp_path.as_uri()))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.mark.parametrize("num_bytes", [1, 4 * 2**20 + 300])
def test_what_is_put_is_got(open_store: Callable[[], ObstoreStore], num_bytes: int) -> None:
    """By whomever; a second put replaces it, and its bytes are those that were given, whatever becomes of their
    memory."""
    store, other = open_store(), open_store()
    value = bytearray(os.urandom(num_bytes))
    before = bytes(value)
    store.put(KEY, memoryview(b"older"), LONG_S)
    store.put(KEY, memoryview(value), LONG_S)
    value[:] = bytes(num_bytes)
    assert other.get(KEY, LONG_S) == before
    assert other.exist([OTHER, KEY, OTHER], LONG_S) == [False, True, False]
    assert other.exist([KEY], LONG_S) == [True] and other.exist([], LONG_S) == []
    other.remove(KEY, LONG_S)
    other.remove(KEY, LONG_S)
    assert store.get(KEY, LONG_S) is None
    store.close()
    assert store.exist([KEY, OTHER], LONG_S) == [False, False]


def test_two_runtimes_share_a_store(open_store: Callable[[], ObstoreStore]) -> None:
    """What one has stored the other one loads."""
    first, second = (
        RemoteCopies(open_store(), ask_timeout_s=LONG_S, load_timeout_s=LONG_S, env=Env()) for _ in range(2)
    )
    try:
        assert first.store(cell(0)).outcome is Outcome.LANDED
        assert second.ask([cell(0), cell(1)]) == 1
        assert second.load(cell(0)).outcome is Outcome.LANDED
        assert (second.host[8:12] == first.host[:4]).all()
    finally:
        assert first.close() and second.close()


def test_a_server_that_is_not_there_fails_in_time() -> None:
    """Every call, and nothing is tried again for long."""
    (port,) = free_ports(1)
    store = s3(f"http://127.0.0.1:{port}", timeout_s=0.5)
    began_s = time.monotonic()
    for call in (
        lambda: store.get(KEY, 0.5),
        lambda: store.put(KEY, memoryview(b"value"), 0.5),
        lambda: store.remove(KEY, 0.5),
        lambda: store.exist([KEY, OTHER], 0.5),
    ):
        with pytest.raises(StoreError):
            call()
    assert time.monotonic() - began_s < LONG_S
    store.close()


def test_a_directory_that_is_gone_is_a_miss_or_an_error(tmp_path: Path) -> None:
    """And nothing but a `StoreError` leaves the store."""
    path = tmp_path / "objects"
    path.mkdir()
    store = ObstoreStore.from_url(path.as_uri())
    store.put(KEY, memoryview(b"value"), LONG_S)
    shutil.rmtree(path)
    assert store.get(KEY, LONG_S) is None and store.exist([KEY], LONG_S) == [False]
    path.write_text("not a directory")
    with pytest.raises(StoreError):
        store.put(KEY, memoryview(b"value"), LONG_S)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("url", lambda: ObstoreStore.from_url("nonsense://here")),
        ("url", lambda: ObstoreStore.from_url("not a URL")),
        ("url", lambda: ObstoreStore.from_url(7)),  # type: ignore[arg-type]
        ("url", lambda: ObstoreStore.from_url("s3://bucket", no_such_option="x")),
        ("timeout_s", lambda: ObstoreStore.from_url("memory:///", timeout_s=0)),
        ("store", lambda: ObstoreStore("s3://bucket")),
    ],
)
def test_what_cannot_work_is_refused_by_name(name: str, make: Callable[[], ObstoreStore]) -> None:
    """Before anything is asked."""
    with pytest.raises(InvalidArgument) as caught:
        make()
    assert caught.value.argument == name
    assert issubclass(ConfigError, InvalidArgument)
