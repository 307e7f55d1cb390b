"""Processes that share a store in a real server: one hits what another has computed, and nothing that it must not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for extra in ("redis", "hiredis", "cryptography", "xxhash"):
    pytest.importorskip(extra, reason=f"{extra}, of the extra `remote`, is not installed")

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "transfer"))  # the servers are those of the tests of stores
from redis_servers import RedisServer  # noqa: E402

SECRET = "00112233445566778899aabbccddeeff"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as found:
        yield found


def in_a_process(url: str, secret: str, num_times: int = 1, seeds: str = "1 2 3") -> Any:
    command = [sys.executable, str(HERE / "remote_child.py"), url, secret, str(num_times), *seeds.split()]
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE), *sys.path])
    child = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, check=False)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


@pytest.mark.slow
def test_a_process_hits_what_another_one_has_computed(server: RedisServer) -> None:
    """All of it, with the right bytes; a process with another secret hits nothing, and stores beside it."""
    first = in_a_process(server.url, SECRET, num_times=2)
    assert first["stored"] == 3 * 4
    second = in_a_process(server.url, SECRET)
    assert second == {"hits": {"1": 16, "2": 16, "3": 16}, "corrupt": 0, "stored": 0}
    other = in_a_process(server.url, SECRET[::-1], num_times=2)
    assert other["stored"] == 3 * 4 and other["corrupt"] == 0
    assert server.say("DBSIZE") == 2 * 6


@pytest.mark.slow
def test_what_was_poisoned_is_a_miss(server: RedisServer) -> None:
    """Without a secret, too: whoever changes bytes in the store makes misses; what was served after that is right in
    the store again."""
    import redis

    in_a_process(server.url, "", num_times=2)
    with redis.Redis(port=server.port, protocol=2) as client:
        for number, key in enumerate(sorted(client.scan_iter())):
            size = client.strlen(key)
            at = (number * 37 + size // 3) % size
            (byte,) = client.getrange(key, at, at)
            client.setrange(key, at, bytes([byte ^ 1]))
    poisoned = in_a_process(server.url, "", num_times=2)
    assert poisoned["corrupt"] >= 3
    assert in_a_process(server.url, "")["hits"] == {"1": 16, "2": 16, "3": 16}


@pytest.mark.slow
def test_two_demos_share_a_store(server: RedisServer, tmp_path: Path) -> None:
    """The second one begins with what the first has computed: tokens and logits are those of the reference, and it
    computes less."""
    (tmp_path / "secret").write_text(SECRET)
    found = []
    for number in range(2):
        file = tmp_path / f"{number}.json"
        command = [sys.executable, "-m", "aoffload", "demo", "--requests", "8", "--json", str(file)]
        command += ["--remote", server.url, "--remote-secret", str(tmp_path / "secret")]
        path = os.pathsep.join([str(HERE.parents[1]), *sys.path])
        environment = os.environ | {"PYTHONPATH": path}
        run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
        found.append(json.loads(file.read_text()))
    first, second = found
    assert first["outputs_identical"] and second["outputs_identical"]
    assert first["remote_blocks_stored"] and not first["remote_blocks_loaded"]
    assert second["remote_blocks_loaded"] and not second["remote_cells_corrupt"]
    assert second["computed_tokens"] < first["computed_tokens"]
