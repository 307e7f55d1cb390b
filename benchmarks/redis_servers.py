"""Real servers with the protocol of Redis, on loopback: one, or a cluster. Each is ended through its process."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

__all__ = ["NoServerError", "RedisServer", "cluster_of", "free_ports"]

SERVER = next((found for name in ("redis-server", "valkey-server") if (found := shutil.which(name))), None)
START_S = 30.0
NUM_SLOTS = 16_384


class NoServerError(Exception):
    """There is no server to start, or no client for it."""


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


class RedisServer:
    """A server with its files in `directory`. `with` ends it."""

    def __init__(self, directory: Path, *options: str, port: int | None = None) -> None:
        if SERVER is None:
            raise NoServerError("neither redis-server nor valkey-server is on the path")
        self.directory, self.options = directory, options
        self.port, self.bus_port = free_ports(2) if port is None else (port, free_ports(1)[0])
        self.start()

    def start(self) -> None:
        assert SERVER is not None
        self.directory.mkdir(exist_ok=True)
        given = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory), "--save", ""]
        if "--cluster-enabled" in self.options:
            given += ["--cluster-port", str(self.bus_port)]
        command = [SERVER, *given, *self.options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:
            said.append(line)
            if "Ready to accept connections" in line:
                break
        else:
            raise AssertionError("".join(said))
        self._reader = threading.Thread(target=self.process.stdout.read, daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def pause(self) -> None:
        """From now on it accepts connections and answers nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def say(self, *words: str | int) -> object:
        """Send a command as an administrator."""
        import redis

        with redis.Redis(port=self.port, protocol=2) as client:
            return client.execute_command(*words)

    def takes_part_among(self, num_nodes: int) -> bool:
        """Whether it knows `num_nodes` nodes with slots, and answers commands."""
        info, slots = self.say("CLUSTER", "INFO"), self.say("CLUSTER", "SLOTS")
        assert isinstance(slots, list)
        return len(slots) == num_nodes and re.search(r"cluster_state\W+ok", str(info)) is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def cluster_of(directory: Path, num_nodes: int) -> list[RedisServer]:
    """Nodes without replicas, each with an even share of the slots, that continue without one another."""
    options = ["--cluster-enabled", "yes", "--cluster-require-full-coverage", "no", "--cluster-node-timeout", "1000"]
    servers: list[RedisServer] = []
    try:
        for number in range(num_nodes):
            servers.append(RedisServer(directory / f"node-{number}", *options))
        for number, server in enumerate(servers):
            first, stop = (NUM_SLOTS * edge // num_nodes for edge in (number, number + 1))
            server.say("CLUSTER", "ADDSLOTSRANGE", first, stop - 1)
            server.say("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for server in servers[1:]:
            servers[0].say("CLUSTER", "MEET", "127.0.0.1", server.port, server.bus_port)
        wait_until_one(servers)
    except BaseException:
        for server in servers:
            server.end()
        raise
    return servers


def wait_until_one(servers: Sequence[RedisServer]) -> None:
    """Wait until every node knows the slots of all, and takes part."""
    deadline_s, tick = time.monotonic() + START_S, threading.Event()
    for server in servers:
        while not server.takes_part_among(len(servers)):
            assert time.monotonic() < deadline_s, "the nodes do not find one another"
            tick.wait(0.05)
