"""A master of Mooncake Store and one machine that takes part, in a network namespace of their own: says `ok`."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback

from aoffload.stores import MooncakeStore

KEY, OTHER = b"k" * 32, b"o" * 32
LONG_S = 20.0


def main(master: str) -> None:
    where = "127.0.0.1:50051"
    command = [master, "-rpc_port=50051", "-rpc_address=127.0.0.1", "-metrics_port=50052"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        assert any("50051" in line or "started" in line.lower() for line in process.stdout)
        check(MooncakeStore.from_addresses(where, "127.0.0.1", memory="128MiB"))
        print("ok", flush=True)
    except BaseException:  # noqa: BLE001 - said, and the process ends
        traceback.print_exc()
    process.kill()
    process.wait()
    os._exit(0)  # its threads would report for seconds that the master is gone


def check(store: MooncakeStore) -> None:
    value = memoryview(os.urandom(4 * 2**20))
    assert store.get(KEY, LONG_S) is None and store.exist([], LONG_S) == []
    store.put(KEY, value, LONG_S)
    store.put(KEY, memoryview(b"another"), LONG_S)
    assert store.get(KEY, LONG_S) == value, "a second put has changed something"
    assert store.exist([OTHER, KEY], LONG_S) == [False, True]
    store.remove(KEY, LONG_S)
    store.remove(KEY, LONG_S)
    assert store.get(KEY, LONG_S) is None and store.exist([KEY], LONG_S) == [False]
    store.put(KEY, memoryview(b"another"), LONG_S)
    assert store.get(KEY, LONG_S) == b"another"


if __name__ == "__main__":
    main(sys.argv[1])
