"""The `Ledger` in a synchronous step loop, for an engine that cannot await: plans come out, settlements go in.

Prints:
    step 0: a computes tokens 0 to 59
    step 1: b computes tokens 0 to 59
    step 3: a-again computes tokens 48 to 59, what was loaded is right: True
    pinned: 0 device blocks
"""

import itertools
from collections import deque

import numpy as np

from aoffload import KVCacheGroup, Ledger, OffloadConfig, OutOfBlocks, RequestState, Tier
from aoffload.ledger import Completion, Holding, Outcome, Prefix, Root, TransferPlan

memory = {Tier.DEVICE: np.zeros((5, 16)), Tier.HOST: np.zeros((64, 16))}  # [blocks, tokens]: a token's KV is itself
config = OffloadConfig(groups=[KVCacheGroup("full", block_size=16)], num_host_blocks=64)
ledger = Ledger(config, num_device_blocks=5)  # block 0 is the null block: room for one request of 60 tokens
in_flight: list[TransferPlan] = []
waiting = deque([("a", range(60)), ("b", range(100, 160)), ("a-again", range(60))])
running: dict[Holding, range] = {}


def launch(plans: tuple[TransferPlan, ...]) -> None:
    in_flight.extend(plan for plan in plans if ledger.launch(plan.job_id))  # False: the job was discarded


def start(name: str, token_ids: range) -> Holding | None:
    holding = ledger.admit(Prefix.of(Root("toy"), token_ids), request_id=name)
    try:
        ledger.allocate_nowait(holding)
    except OutOfBlocks:
        ledger.release(holding, "no_room")  # nothing is held while it waits
        return None
    launch(ledger.plan_load(holding))
    return holding


for step in itertools.count():
    for plan in in_flight:  # a copy takes one step here: those of the last step have landed by now
        memory[plan.destination][plan.destination_ids] = memory[plan.source][plan.source_ids]
        ledger.settle(Completion(plan.job_id, Outcome.LANDED, plan.num_blocks))
    in_flight.clear()
    while waiting and (started := start(*waiting[0])):
        running[started] = waiting.popleft()[1]
    for holding in [holding for holding in running if holding.state is RequestState.RUNNING]:
        token_ids, num_ready = running.pop(holding), holding.num_computed_tokens
        kv = memory[Tier.DEVICE][ledger.block_ids(holding)[0]].ravel()
        checked = f", what was loaded is right: {list(kv[:48]) == list(token_ids[:48])}" if num_ready else ""
        print(f"step {step}: {holding.request_id} computes tokens {num_ready} to {len(token_ids) - 1}{checked}")
        for position in range(num_ready, len(token_ids)):
            memory[Tier.DEVICE][ledger.block_ids(holding)[0][position // 16], position % 16] = token_ids[position]
        launch(ledger.commit(holding, len(token_ids)) + ledger.release(holding))
    if not (waiting or running or in_flight):
        break
print(f"pinned: {ledger.statistics().device.num_pinned} device blocks")
