"""A publisher of KV events with 64 MiB to replay. Says its two addresses, and ends with its input."""

from __future__ import annotations

import sys
import time

from aoffload import KVCacheGroup, Ledger, OffloadConfig
from aoffload._common.prefix import Prefix, Root
from aoffload.kv_events import KVEventPublisher

NUM_TOKENS = 400_000
REPLAY_BYTES = 2**26
ANY_PORT = "tcp://127.0.0.1:*"


def main() -> None:
    config = OffloadConfig(groups=[KVCacheGroup("all", block_size=16)], num_host_blocks=16)
    ledger = Ledger(config, NUM_TOKENS // 16 + 2)
    with KVEventPublisher(ledger, bind=ANY_PORT, replay=ANY_PORT, replay_bytes=REPLAY_BYTES) as publisher:
        record = ledger.admit(Prefix.of(Root("m"), range(1_000_000, 1_000_000 + NUM_TOKENS)))
        ledger.allocate_nowait(record)
        ledger.plan_load(record, 0)
        ledger.commit(record, NUM_TOKENS)
        while publisher._buffer.num_bytes < REPLAY_BYTES * 0.9:
            publisher.tell_anew()
            time.sleep(0.05)
        print(publisher.endpoint, publisher.replay_endpoint, flush=True)
        for _ in sys.stdin:  # what to publish next
            before = publisher.num_batches
            publisher.tell_anew()
            while publisher.num_batches == before:
                time.sleep(0.01)
            print(publisher.failure, flush=True)


if __name__ == "__main__":
    main()
