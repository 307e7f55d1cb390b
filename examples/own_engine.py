"""A small engine that uses `OffloadRuntime`, from the model to a check of every token. docs/tutorial.md explains it.

Prints:
    How are you? 80 of 311 prompt tokens were cached
    And what is a block? 360 of 476 prompt tokens were cached
    eve is aborted (client_gone) after 30 tokens
    Who may touch it? 520 of 626 prompt tokens were cached
    cached: 64 blocks, 32 fit on the device; loaded back: True
    right, bit for bit: 174 of 174 tokens; still pinned: 0 blocks
"""

from functools import partial

import anyio
import torch

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime

BLOCK, SIZE, NUM_NEW = 8, 128, 12  # tokens per block, model size, tokens per answer
embedding, to_key, to_value, to_logits = torch.randn(4, SIZE, SIZE, generator=torch.Generator().manual_seed(0)) / 10
kv_cache = torch.zeros(33, BLOCK, 2, SIZE)  # one row per block
torch.set_num_threads(1)  # the model is tiny


def forward(kv_cache: torch.Tensor, block_ids: list[int], tokens: list[int], first: int) -> torch.Tensor:
    """Compute `tokens[first:]`. Each token reads the KV of all earlier tokens. Return the logits of the last token."""
    table = torch.tensor(block_ids)
    for at in range(first, len(tokens)):
        token, (keys, values) = embedding[tokens[at]], kv_cache[table].flatten(0, 1)[:at].unbind(1)
        hidden = torch.tanh(token + torch.softmax(keys @ token, 0) @ values)
        kv_cache[table[at // BLOCK], at % BLOCK] = torch.stack([hidden @ to_key, hidden @ to_value])
    return hidden @ to_logits


class Client:
    def __init__(self, name: str, patience: int = 99) -> None:
        self.name, self.patience = name, patience  # disconnects after `patience` tokens
        self.tokens = list(f"You are a terse assistant, and polite. I am {name}. ".encode())
        self.seen = list[tuple[list[int], torch.Tensor]]()  # for each answer token: the earlier tokens, the logits

    async def ask(self, runtime: OffloadRuntime, question: str) -> None:
        self.tokens += question.encode()
        self.num_asked = len(self.tokens)
        async with runtime.request(self.tokens, self.name) as request:
            await request.allocate(self.num_asked + NUM_NEW)  # waits while too few blocks are free
            self.num_found = num_computed = await request.load()
            for _ in range(NUM_NEW):
                compute = partial(forward, kv_cache, request.block_ids[0], self.tokens, num_computed)
                logits = await runtime.run_step([request], compute)  # runs in a thread
                self.seen.append((list(self.tokens), logits))
                self.tokens.append(int(logits.argmax()))
                num_computed = len(self.tokens) - 1  # the newest token has no KV yet
                request.commit(num_computed, self.tokens[-1:])
                if len(self.seen) == self.patience:
                    runtime.cancel(self.name, "client_gone")  # as a connection handler would
        if request.reason:  # `async with` does not raise if this request was cancelled
            print(f"{self.name} is {request.state.value} ({request.reason}) after {len(self.seen)} tokens")


async def main() -> None:
    clients = [*map(Client, ("ada", "ben", "cleo", "dan")), Client("eve", patience=30)]
    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=BLOCK)], num_host_blocks=256)
    async with OffloadRuntime(config, kv_cache) as runtime:
        for question in ("How are you? ", "And what is a block? ", "Who may touch it? "):
            async with anyio.create_task_group() as group:
                for client in clients:
                    group.start_soon(client.ask, runtime, question)
            num_found, num_asked = sum(c.num_found for c in clients), sum(c.num_asked for c in clients)
            print(f"{question}{num_found} of {num_asked} prompt tokens were cached")
        await runtime.flush()  # waits until all stores have ended
        runtime.check_integrity()  # raises unless every block has exactly one owner
        found, seen = runtime.statistics(), [token for client in clients for token in client.seen]
    num_cached, num_loads = found.host.num_cached, found.transfers.num_loads
    print(f"cached: {num_cached} blocks, {found.device.num_blocks} fit on the device; loaded back: {num_loads > 0}")
    right = [torch.equal(forward(torch.zeros_like(kv_cache), [*range(1, 33)], ids, 0), logits) for ids, logits in seen]
    print(f"right, bit for bit: {sum(right)} of {len(seen)} tokens; still pinned: {found.device.num_pinned} blocks")


if __name__ == "__main__":
    anyio.run(main)
