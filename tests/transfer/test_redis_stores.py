"""Stores in real servers with the protocol of Redis: values that were put are read back, and failures are reported in
time."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("redis", reason="redis, of the extra `remote`, is not installed")
pytest.importorskip("hiredis", reason="hiredis, of the extra `remote`, is not installed")
pytest.importorskip("xxhash", reason="xxhash, of the extra `remote`, is not installed")

from redis_servers import RedisServer, cluster_of
from remotes import CELL, SECRET, RemoteCopies, cell

from aoffload import ConfigError
from aoffload._config.tiers import ObjectStore
from aoffload._kernel.states import Direction, Outcome
from aoffload._tiers.remote.clients.redis import RedisLibrary, RedisNode, key_of, packed, slot_of
from aoffload.stores import RedisClusterStore, RedisStore, StoreError
from aoffload.transport import Env
from benchmarks.redis_servers import RedisServer as AnyServer

SOON_S = 0.2
"""Long enough for a server on a loaded machine to be missed only if it is stopped."""
LONG_S = 20.0
KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as found:
        yield found


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    server.say("FLUSHALL")
    found = RedisStore.from_url(server.url)
    yield found
    found.close()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[AnyServer]]:
    servers = cluster_of(tmp_path, 3)
    yield servers
    for server in servers:
        server.end()


@pytest.fixture
def cluster(nodes: list[AnyServer]) -> Iterator[RedisClusterStore]:
    found = RedisClusterStore.from_url(nodes[0].url)
    yield found
    found.close()


def keys_of(store: RedisClusterStore, server: AnyServer, count: int) -> list[bytes]:
    """Keys that this server has."""
    drawn = random.Random(1)
    keys = (drawn.randbytes(32) for _ in range(10_000))
    return [key for key in keys if store.node_of(key).endswith(f":{server.port}")][:count]


# -- one server -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [0, 1, 6001, 4 * 2**20 + 300])
def test_what_is_put_is_got(store: ObjectStore, num_bytes: int) -> None:
    """Whatever its bytes and length; a second put replaces it, and what was never put or is removed is not there."""
    value = os.urandom(num_bytes)
    assert store.get(KEY, LONG_S) is None
    store.put(KEY, memoryview(b"older"), LONG_S)
    store.put(KEY, memoryview(value), LONG_S)
    assert store.get(KEY, LONG_S) == value
    assert list(store.exist([OTHER, KEY, OTHER], LONG_S)) == [False, True, False]
    store.remove(KEY, LONG_S)
    store.remove(KEY, LONG_S)
    assert store.get(KEY, LONG_S) is None
    assert list(store.exist([], LONG_S)) == []


def test_commands_are_packed_without_copying_values() -> None:
    """The value goes to the socket from where it is."""
    value = memoryview(b"\r\n$0")
    assert packed([(b"SET", b"a", value), (b"GET", b"b")]) == [
        b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$4\r\n",
        value,
        b"\r\n*2\r\n$3\r\nGET\r\n$1\r\nb\r\n",
    ]


def test_a_server_that_does_not_answer_costs_the_time_out(server: RedisServer, store: RedisStore) -> None:
    """Each kind of call, also with a connection that is there already, and a value that no buffer holds."""
    store.put(KEY, memoryview(b"value"), LONG_S)
    server.pause()
    try:
        for call in (
            lambda: store.get(KEY, SOON_S),
            lambda: store.exist([KEY], SOON_S),
            lambda: store.put(KEY, memoryview(bytes(2**24)), SOON_S),
            lambda: store.remove(KEY, SOON_S),
        ):
            began_s = time.monotonic()
            with pytest.raises(StoreError):
                call()
            assert time.monotonic() - began_s < SOON_S * 10
    finally:
        server.go_on()
    store.put(KEY, memoryview(b"value"), LONG_S)
    assert store.get(KEY, LONG_S) == b"value"


def test_a_time_out_is_that_of_the_call(server: RedisServer, store: RedisStore) -> None:
    """Not that of the call that has opened the connection."""
    store.exist([KEY], LONG_S)
    server.pause()
    try:
        began_s = time.monotonic()
        with pytest.raises(StoreError):
            store.exist([KEY], SOON_S)
        assert time.monotonic() - began_s < LONG_S / 2
    finally:
        server.go_on()


def test_connecting_may_take_longer_than_the_command_that_connects() -> None:
    """Or a store that was gone for a moment would never be used again where connecting takes longer than a question
    may. The command itself has its own time."""
    timeouts: list[float] = []

    class Connection:
        """Takes 100 ms to connect."""

        def __init__(self, **settings: float) -> None:
            self.settings = settings
            self._sock = self

        def connect(self) -> None:
            if min(self.settings["socket_timeout"], self.settings["socket_connect_timeout"]) < 0.1:
                raise OSError("timed out")

        def settimeout(self, seconds: float) -> None:
            timeouts.append(seconds)

        def send_packed_command(self, packed: object, check_health: bool) -> None: ...

        def read_response(self, **options: bool) -> int:
            return 0

    node = RedisNode(RedisLibrary(), Connection, {}, "far away")
    assert node.run([(b"EXISTS", b"a")], 0.02) == [0]
    assert timeouts == [0.02]


def test_a_server_that_is_gone_fails_and_comes_back(tmp_path: Path) -> None:
    """Connections from before are not used again."""
    with RedisServer(tmp_path / "redis") as server:
        store = RedisStore.from_url(server.url)
        store.put(KEY, memoryview(b"value"), LONG_S)
        server.end()
        with pytest.raises(StoreError):
            store.get(KEY, LONG_S)
        with pytest.raises(StoreError):
            store.get(KEY, LONG_S)
        server.start()
        assert store.get(KEY, LONG_S) is None
        store.close()


def test_a_full_server_says_so(server: RedisServer, store: RedisStore) -> None:
    """It is an error of that store, and loads go on."""
    store.put(KEY, memoryview(b"value"), LONG_S)
    server.say("CONFIG", "SET", "maxmemory-policy", "noeviction")
    server.say("CONFIG", "SET", "maxmemory", 1)
    try:
        with pytest.raises(StoreError, match="maxmemory"):
            store.put(OTHER, memoryview(b"value"), LONG_S)
        assert store.get(KEY, LONG_S) == b"value"
    finally:
        server.say("CONFIG", "SET", "maxmemory", 0)


def test_a_password_is_used_and_never_shown(tmp_path: Path) -> None:
    """A wrong one is a failure, whose text does not have it."""
    with RedisServer(tmp_path / "redis", "--requirepass", "open-sesame") as server:
        good = RedisStore.from_url(f"redis://:open-sesame@127.0.0.1:{server.port}")
        good.put(KEY, memoryview(b"value"), LONG_S)
        assert good.get(KEY, LONG_S) == b"value"
        for url in (server.url, f"redis://:nearly-right@127.0.0.1:{server.port}"):
            with pytest.raises(StoreError) as caught:
                RedisStore.from_url(url).get(KEY, LONG_S)
            assert "nearly-right" not in str(caught.value)
        assert "sesame" not in repr(good)
        good.close()


def test_a_socket_in_the_file_system_will_do(tmp_path: Path) -> None:
    """As redis-py names it."""
    path = tmp_path / "s"
    with RedisServer(tmp_path / "redis", "--unixsocket", str(path)):
        store = RedisStore.from_url(f"unix://{path}")
        store.put(KEY, memoryview(b"value"), LONG_S)
        assert store.get(KEY, LONG_S) == b"value" and store.node_of(KEY) == str(path)
        store.close()


@pytest.mark.parametrize("url", ["http://name:hidden@host", "", 7, "redis://host:port"])
def test_what_is_no_url_is_refused(url: object) -> None:
    """By name, and without the password that it may have."""
    for make in (RedisStore.from_url, RedisClusterStore.from_url):
        with pytest.raises(Exception) as caught:
            make(url)  # type: ignore[arg-type]
        assert getattr(caught.value, "argument", "") == "url" and "hidden" not in str(caught.value)
    with pytest.raises(ConfigError):
        RedisClusterStore.from_url("redis://host/3")


def test_several_threads_use_one_store(store: RedisStore) -> None:
    """Each with a connection of its own."""
    wrong: list[int] = []

    def work(number: int) -> None:
        key, drawn = bytes([number]) * 32, random.Random(number)
        for _ in range(20):
            value = drawn.randbytes(drawn.randrange(20_000))
            store.put(key, memoryview(value), LONG_S)
            if store.get(key, LONG_S) != value:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# -- a cluster --------------------------------------------------------------------------------------------------------


def test_a_cluster_has_each_key_on_one_node(nodes: list[AnyServer], cluster: RedisClusterStore) -> None:
    """Which is that of its slot, as the servers count; all calls find it there."""
    assert cluster.node_of(KEY) == "cluster"
    drawn = random.Random(2)
    keys = [drawn.randbytes(32) for _ in range(60)]
    for key in keys[::2]:
        cluster.put(key, memoryview(key), LONG_S)
    assert cluster.exist(keys, LONG_S) == [True, False] * 30
    assert [cluster.get(key, LONG_S) for key in keys] == [key if n % 2 == 0 else None for n, key in enumerate(keys)]
    assert {cluster.node_of(key) for key in keys} == {f"127.0.0.1:{server.port}" for server in nodes}
    assert [slot_of(key_of(key)) for key in keys] == [
        nodes[0].say("CLUSTER", "KEYSLOT", key_of(key))
        for key in keys  # type: ignore[arg-type]
    ]
    for key in keys:
        cluster.remove(key, LONG_S)
    assert cluster.exist(keys, LONG_S) == [False] * 60


def test_a_slot_that_moves_is_followed(nodes: list[AnyServer], cluster: RedisClusterStore) -> None:
    """At the first call, which succeeds; and a question about it is not an error."""
    cluster.exist([KEY], LONG_S)
    old = next(server for server in nodes if cluster.node_of(KEY).endswith(f":{server.port}"))
    new = next(server for server in nodes if server is not old)
    new_id = bytes(new.say("CLUSTER", "MYID")).decode()  # type: ignore[call-overload]
    for server in (new, old):
        server.say("CLUSTER", "SETSLOT", slot_of(key_of(KEY)), "NODE", new_id)
    assert cluster.exist([KEY], LONG_S) == [False]
    cluster._slots[slot_of(key_of(KEY))] = f"127.0.0.1:{old.port}"
    cluster.put(KEY, memoryview(b"value"), LONG_S)
    assert cluster.node_of(KEY) == f"127.0.0.1:{new.port}"
    assert cluster.get(KEY, LONG_S) == b"value"


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "stopped"])
def test_a_lost_node_loses_its_cells_only(nodes: list[AnyServer], cluster: RedisClusterStore, is_killed: bool) -> None:
    """Its cells are misses that soon take no time, and those of the others are loaded and stored as ever; when it is
    back, it is used again."""
    copies = RemoteCopies(cluster, load_timeout_s=1.0, store_timeout_s=1.0, ask_timeout_s=1.0, env=Env())
    try:
        labels = [cell(number) for number in range(24)]
        for label in labels:
            assert copies.store(label).outcome is Outcome.LANDED
        assert copies.ask(labels) == 24
        lost = nodes[2]
        is_lost = [cluster.node_of(copies.name(label)).endswith(f":{lost.port}") for label in labels]
        assert 0 < sum(is_lost) < 24
        if is_killed:
            lost.end()
        else:
            lost.pause()
        try:
            for _ in range(2):
                found = [copies.load(label).outcome is Outcome.LANDED for label in labels]
                assert found == [not each for each in is_lost]
            assert copies.ask(labels) <= is_lost.index(True)
            assert not copies.remote.refuses(Direction.LOAD)
        finally:
            if not is_killed:
                lost.go_on()
    finally:
        assert copies.close()


def test_a_cluster_of_which_the_first_node_is_gone(nodes: list[AnyServer]) -> None:
    """Any other that was named will do; with none of them, every call fails and says so."""
    nodes[0].end()
    store = RedisClusterStore.from_url(*(server.url for server in nodes))
    assert store.exist([], LONG_S) == []
    key = keys_of(store, nodes[1], 1)[0]
    store.put(key, memoryview(b"value"), LONG_S)
    assert store.get(key, LONG_S) == b"value"
    store.close()
    alone = RedisClusterStore.from_url(nodes[0].url)
    with pytest.raises(StoreError, match="no node of the cluster"):
        alone.get(KEY, LONG_S)


def test_a_single_server_is_no_cluster(server: RedisServer) -> None:
    """It fails, and no thread dies of it."""
    store = RedisClusterStore.from_url(server.url)
    with pytest.raises(StoreError):
        store.get(KEY, LONG_S)
    store.close()


# -- with the tier ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [None, SECRET], ids=["sum", "secret"])
def test_two_processes_share_what_one_has_stored(server: RedisServer, secret: bytes | None) -> None:
    """Through a real server, byte by byte; poisoned there, it is a miss."""
    if secret is not None:
        pytest.importorskip("cryptography", reason="cryptography is not installed")
    server.say("FLUSHALL")
    first, second = (
        RemoteCopies(RedisStore.from_url(server.url), secret, ask_timeout_s=LONG_S, load_timeout_s=LONG_S, env=Env())
        for _ in range(2)
    )
    try:
        for number in range(3):
            assert first.store(cell(number), range(number, number + CELL)).outcome is Outcome.LANDED
        assert second.ask([cell(number) for number in range(9)]) == 3
        assert second.load(cell(2)).outcome is Outcome.LANDED
        assert (second.host[8:12] == first.host[2:6]).all()
        server.say("SETRANGE", key_of(first.name(cell(1))), 70_000, "poisoned")  # type: ignore[arg-type]
        assert second.load(cell(1)).outcome is Outcome.FAILED
        assert second.remote.statistics().cells_corrupt == 1
    finally:
        assert first.close() and second.close()
