"""A store in Mooncake Store: with a scripted client, and with the real one where it runs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aoffload import ConfigError, InvalidArgument
from aoffload.errors import MissingExtra
from aoffload.stores import MooncakeStore, StoreError

KEY = b"k" * 32
LONG_S = 20.0
CHILD = Path(__file__).parent / "mooncake_child.py"


class Client:
    """Answers every call with `code`."""

    def __init__(self, code: int, exists: int = 1) -> None:
        self.code, self.exists = code, exists

    def put(self, key: str, value: memoryview) -> int:
        return self.code

    def get(self, key: str) -> bytes:
        return b""

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [self.exists] * len(keys)

    def remove(self, key: str, force: bool) -> int:
        return self.code

    def close(self) -> None: ...


def test_a_code_that_is_no_success_is_an_error() -> None:
    """An object that is not there is a miss, and its removal a success."""
    store = MooncakeStore(Client(-704, exists=-1))
    for call in (
        lambda: store.put(KEY, memoryview(b"value"), LONG_S),
        lambda: store.remove(KEY, LONG_S),
        lambda: store.exist([KEY], LONG_S),
    ):
        with pytest.raises(StoreError):
            call()
    assert store.get(KEY, LONG_S) is None
    MooncakeStore(Client(-704, exists=0)).remove(KEY, LONG_S)


def test_what_is_no_client_is_refused_by_name() -> None:
    """As are sizes and addresses."""
    with pytest.raises(ConfigError) as caught:
        MooncakeStore("127.0.0.1:50051")
    assert caught.value.argument == "client"
    for name, options in (("memory", {"memory": "much"}), ("protocol", {"protocol": 7})):
        with pytest.raises(InvalidArgument) as refused:
            MooncakeStore.from_addresses("127.0.0.1:1", "127.0.0.1", **options)  # type: ignore[arg-type]
        assert refused.value.argument == name


def test_without_mooncake_the_extra_is_named() -> None:
    """Only once a store is made."""
    if importlib.util.find_spec("mooncake") is not None:
        pytest.skip("mooncake is installed")
    with pytest.raises(MissingExtra, match=r"aoffload\[mooncake\]"):
        MooncakeStore.from_addresses("127.0.0.1:1", "127.0.0.1")


def test_a_real_store_keeps_what_it_is_given() -> None:
    """In a network namespace of its own, since it listens on every address: put, put again, get, remove."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None or spec.origin is None:
        pytest.skip("mooncake is not installed")
    inside = ["unshare", "-Urn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("no network namespace can be made here")
    probe = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"mooncake does not load: {probe.stderr.strip().splitlines()[-1]}")
    master = Path(spec.origin).parent / "mooncake_master"
    if not os.access(master, os.X_OK):
        pytest.skip("mooncake_master cannot be run")
    command = [*inside, sys.executable, str(CHILD), str(master)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "ok" in done.stdout.splitlines(), done.stdout[-2000:] + done.stderr[-2000:]
