"""Hostile hints, given to a runtime or to the connector for vLLM, and what they have done, as a line of JSON.

A victim has two prompts in the cache, one of them pinned. A client of another salt sends hints about the same tokens,
among requests of its own.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import torch

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime
from aoffload._extensions.pins import pinned_parts
from proof.attacks.payloads import hostile

BLOCK, NUM_BLOCKS, SHARE = 16, 96, 0.25
PROMPTS = [[number * 1000 + at for at in range(BLOCK * 6 + 1)] for number in range(8)]
VICTIMS = (PROMPTS[0], PROMPTS[1])


class Damage:
    def __init__(self) -> None:
        self.errors: list[str] = []
        self.num_beyond = 0
        """The most blocks that hints have pinned beyond their share."""
        self.num_touched = 0
        """Looks at which something of the victim had changed."""
        self.before: Any = None

    def look(self, ledger: Any, salt: str) -> None:
        for tier in ledger.cache.tiers:
            if tier.is_outside:
                continue
            leases = [lease for pin in ledger.hints.pins for lease in pin.leases if lease.tier is tier.tier]
            parts = {part for lease in leases for part in pinned_parts(lease)}
            most = int(tier.pool.num_blocks * SHARE)
            self.num_beyond = max(self.num_beyond, sum(len(part.blocks) for part in parts) - most)
        runs = [run for run in ledger.cache.index.runs.values() if run.root.cache_salt == salt]
        pinned = sorted(
            (run.start, run.stop, [(part.first, part.stop, part.num_references) for part in run.parts])
            for run in runs
            if any(part.num_references for part in run.parts)
        )
        self.before = self.before or pinned
        self.num_touched += pinned != self.before

    def said(self, **more: Any) -> str:
        return json.dumps(
            {"errors": len(self.errors), "first": self.errors[:1], "beyond": self.num_beyond,
             "touched": self.num_touched, **more}
        )  # fmt: skip


async def serve(runtime: OffloadRuntime, tokens: list[int], salt: str) -> None:
    async with runtime.request(tokens, cache_salt=salt) as request:
        await request.allocate()
        await request.load()
        with runtime.step([request]):
            pass
        request.commit(len(tokens))


async def runtime_attacked(num_hints: int) -> None:
    rng, damage = random.Random(1), Damage()
    config = OffloadConfig(
        groups=[KVCacheGroup("all", block_size=BLOCK)], num_host_blocks=NUM_BLOCKS, max_hint_pinned_share=SHARE,
        eviction="learned",
    )  # fmt: skip
    async with OffloadRuntime(config, torch.zeros(NUM_BLOCKS + 1, 4)) as runtime:
        for tokens in VICTIMS:
            await serve(runtime, tokens, "victim")
        await runtime.flush()
        runtime.hints.pin(VICTIMS[0], 3600, cache_salt="victim")
        with runtime.pins.hold(VICTIMS[1], 3600, cache_salt="victim"):
            damage.look(runtime.ledger, "victim")
            for number in range(num_hints):
                tokens = rng.choice(PROMPTS)
                try:
                    if number % 40 == 0:
                        await serve(runtime, tokens, rng.choice(("client", "another")))
                    runtime.hints.apply(tokens[: rng.choice((5, 40, 97))], hostile(rng), cache_salt="client")
                except Exception as error:  # noqa: BLE001 - it is what is counted
                    damage.errors.append(repr(error))
                damage.look(runtime.ledger, "victim")
                if number % 100 == 0:
                    await anyio.lowlevel.checkpoint()
                    runtime.check_integrity()
            await runtime.flush()
        found = runtime.statistics().hints
    print(damage.said(answers=0 if found is None else sum(found.answers.values())))


def vllm_attacked(num_hints: int) -> None:
    sys.path.insert(0, str(Path(__file__).parents[3] / "tests/integrations/vllm_connector"))
    from engine_doubles import TEXT, Request
    from small_engine import SmallEngine

    rng, damage = random.Random(2), Damage()
    engine = SmallEngine(num_blocks=60, num_host_blocks=NUM_BLOCKS, max_hint_pinned_share=SHARE)
    pin = [{"action_type": "pin", "payload": {"ttl_s": 3000}}]
    engine.run(Request("victim", TEXT, cache_salt="victim", kv_transfer_params={"kv_hints": pin}))
    ledger = engine.connector.ledger
    damage.look(ledger, "victim")
    for number in range(num_hints):
        tokens = [*TEXT[: rng.randrange(4, 30)], number % 50]
        where = {"kv_hints": hostile(rng)} if number % 3 else {"kv_transfer_params": {"kv_hints": hostile(rng)}}
        try:
            request = Request(f"r{number}", tokens, cache_salt="client", **where)
            engine.connector.on_new_request(request)
            engine.run(request)
        except Exception as error:  # noqa: BLE001 - it is what is counted
            damage.errors.append(repr(error))
        if engine.connector.off_reason:
            damage.errors.append(engine.connector.off_reason)
            break
        damage.look(ledger, "victim")
        engine.now += rng.choice((0.0, 0.1, 0.2))
    damage.errors += engine.wrong
    ledger.check_integrity()
    found = ledger.statistics().hints
    engine.close()
    print(damage.said(answers=0 if found is None else sum(found.answers.values())))


if __name__ == "__main__":
    if sys.argv[1] == "vllm":
        vllm_attacked(int(sys.argv[2]))
    else:
        anyio.run(runtime_attacked, int(sys.argv[2]), backend=sys.argv[1])
