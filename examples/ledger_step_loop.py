"""A synchronous step loop with a `Ledger`. A `CopyQueue` launches the copies that the ledger plans.

Copies may fail, bring corrupt bytes, end without proof, or hang. The engine computes the tokens that are not loaded.
Its "model" reads the KV of all earlier tokens, so one wrong byte changes the output.

Prints:
    a computes tokens 0 to 59
    b computes tokens 0 to 59
    c computes tokens 0 to 59
    a-again computes tokens 48 to 59
    4 outputs like those without a cache: True
    3 blocks loaded; pinned at the end: 0 device blocks, 0 host blocks
"""

import threading
from collections import deque
from time import monotonic

import torch

from aoffload import KVCacheGroup, Ledger, OffloadConfig, OutOfBlocks, RequestState
from aoffload.ledger import CopyQueue, LedgerRequest, Prefix, Root
from aoffload.transport import Env, LocalTransport

BLOCK = 16


def kv_of(token: int, before: torch.Tensor) -> int:
    return (token * 7919 + int(before.sum()) * 31 + len(before)) % 1_000_003


def output(tokens: range) -> int:
    kv = torch.zeros(len(tokens), dtype=torch.int64)
    for at, token in enumerate(tokens):
        kv[at] = kv_of(token, kv[:at])
    return int(kv.sum())


class Engine:
    def __init__(self, kv: torch.Tensor, transport: LocalTransport, **options: object) -> None:
        config = OffloadConfig(groups=[KVCacheGroup("full", block_size=BLOCK)], num_host_blocks=64, **options)
        sizes, self.kv = {"block_bytes": transport.block_bytes}, kv
        self.ledger, self.transport = Ledger(config, transport.num_device_blocks, **sizes), transport
        self.woken = threading.Event()  # set by the copy threads
        self.copies = CopyQueue(self.ledger, transport, config, clock=monotonic, wake=self.woken.set, **sizes)
        transport.open(config.num_host_blocks, verify=config.verify, deliver=self.copies.deliver, env=Env())
        self.waiting, self.running = deque[tuple[str, range]](), dict[LedgerRequest, range]()
        self.outputs = dict[str, int | OutOfBlocks]()

    def step(self) -> None:
        self.woken.clear()
        self.copies.advance()  # settle ended copies, give up late ones, launch waiting ones
        while self.waiting and self.start(*self.waiting[0]):
            self.waiting.popleft()
        ready = [request for request in self.running if self.is_ready(request)]
        for request in ready:
            self.forward(request, self.running.pop(request))
        if not ready and (self.waiting or self.running):  # only copies can help: wait until one ends, or is late
            self.woken.wait(max(0.0, min(self.copies.next_deadline - monotonic(), 3600)))

    def start(self, name: str, tokens: range) -> bool:
        request = self.ledger.admit(Prefix.of(Root("toy"), tokens), request_id=name)
        try:
            self.ledger.allocate_nowait(request)
        except OutOfBlocks as error:
            self.ledger.release(request, "no_room")  # nothing is held while it waits
            if not error.retryable or not (self.running or self.copies.num_in_flight):
                self.outputs[name] = error  # no request will free the blocks that it needs
            return name in self.outputs
        self.running[request] = tokens
        self.copies.submit(self.ledger.plan_load(request))
        return True

    def is_ready(self, request: LedgerRequest) -> bool:
        if request.state is RequestState.REQUEUED and request.waiter.is_over:  # its load fell short and lacked blocks
            self.ledger.accept(request.waiter)
            self.copies.submit(self.ledger.plan_load(request))
        return request.state is RequestState.RUNNING

    def forward(self, request: LedgerRequest, tokens: range) -> None:
        start, table = request.num_computed_tokens, torch.tensor(self.ledger.block_ids(request)[0])
        print(f"{request.request_id} computes tokens {start} to {len(tokens) - 1}")
        for at in range(start, len(tokens)):
            before = self.kv[table].flatten()[:at]
            self.kv[table[at // BLOCK], at % BLOCK] = kv_of(tokens[at], before)
        self.outputs[request.request_id] = int(self.kv[table].flatten()[: len(tokens)].sum())
        after = self.transport.record_fence()  # a store copies after the forward
        self.copies.submit(self.ledger.commit(request, len(tokens)), after)
        self.copies.submit(self.ledger.release(request), after)

    def close(self, timeout_s: float = 10.0) -> None:
        self.transport.close(timeout_s)  # waits for the copies in flight
        self.copies.stop("the engine has ended")  # settles them; copies that have not ended are quarantined


def run(engine: Engine, prompts: dict[str, range]) -> bool:
    """Whether every prompt has the output of a run without a cache."""
    engine.waiting.extend(prompts.items())
    while engine.waiting or engine.running:
        engine.step()
    return engine.outputs == {name: output(tokens) for name, tokens in prompts.items()}


if __name__ == "__main__":
    kv = torch.zeros(6, BLOCK, dtype=torch.int64)  # block 0 is the null block; the others fit one prompt of 60 tokens
    engine = Engine(kv, LocalTransport([kv]))
    prompts = {"a": range(60), "b": range(100, 160), "c": range(200, 260), "a-again": range(60)}
    print(f"{len(prompts)} outputs like those without a cache: {run(engine, prompts)}")
    engine.close()
    found, num_loaded = engine.ledger.statistics(), engine.transport.statistics().blocks_loaded
    pinned = f"{found.device.num_pinned} device blocks, {found.host.num_pinned} host blocks"
    print(f"{num_loaded} blocks loaded; pinned at the end: {pinned}")
