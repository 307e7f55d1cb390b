"""Real servers on loopback, for tests: where there is none to start, the test is skipped and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import redis_servers
from benchmarks.redis_servers import NoServerError, free_ports

__all__ = ["RedisServer", "cluster_of", "free_ports"]


class RedisServer(redis_servers.RedisServer):
    def __init__(self, directory: Path, *options: str, port: int | None = None) -> None:
        try:
            super().__init__(directory, *options, port=port)
        except NoServerError as error:
            pytest.skip(str(error))


def cluster_of(directory: Path, num_nodes: int) -> list[redis_servers.RedisServer]:
    try:
        return redis_servers.cluster_of(directory, num_nodes)
    except NoServerError as error:
        pytest.skip(str(error))
