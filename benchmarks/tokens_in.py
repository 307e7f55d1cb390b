"""The time of a match: a prompt of 131,072 tokens whose prefix is cached, with nothing precomputed.

The time is from the array of token ids to the cached part of them. The ledger compares token bytes and hashes one block
per run. The peer hashes every block and looks each up. A list of ids instead of an array is converted first: that row
shows the cost.
"""

from __future__ import annotations

from aoffload.ledger import Prefix

from .cycle import BLOCK_SIZE, ROOT, PerBlock, ledger_with, prompts_of
from .harness import SAMPLE_S, Row, Subject, interleave, timed
from .peer import Peer

__all__ = ["run"]

NUM_BLOCKS = 8192
WANTED = 50.0
SECONDS = 6.0


def run(vllm: Peer | None) -> list[Row]:
    """One row for an array of int32, one for a list."""
    prompts = prompts_of(NUM_BLOCKS, 2)
    ledger = ledger_with(NUM_BLOCKS, prompts)
    array, as_list = prompts[0], prompts[0].tolist()
    assert ledger.lookup(Prefix.of(ROOT, array)).num_tokens == NUM_BLOCKS * BLOCK_SIZE
    against, other = _other(vllm)
    subjects: dict[str, Subject] = {
        "array": lambda: timed(lambda: ledger.lookup(Prefix.of(ROOT, array)), SAMPLE_S),
        "list": lambda: timed(lambda: ledger.lookup(Prefix.of(ROOT, as_list)), SAMPLE_S),
        against: other,
    }
    found = interleave(subjects, seconds=SECONDS)
    wanted = {"array": None if vllm is None else WANTED, "list": None}
    return [
        Row.faster(f"tokens in, match out, 131,072 tokens, {name}", found[name], against, found[against], wanted[name])
        for name in ("array", "list")
    ]


def _other(vllm: Peer | None) -> tuple[str, Subject]:
    if vllm is not None:
        vllm.ask("prepare_cycle", num_blocks=NUM_BLOCKS)
        return "vLLM hash and match", vllm.matches(NUM_BLOCKS)
    prompts = prompts_of(NUM_BLOCKS, 1)
    by_blocks = PerBlock(NUM_BLOCKS + 1, prompts)
    return "block by block", lambda: timed(lambda: by_blocks.num_cached(prompts[0]), SAMPLE_S)
