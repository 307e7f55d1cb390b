"""Models with windows: keys before a window are never read, and other results equal those of the plain model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from aoffload._reference.engine.transformers import TransformersModel
from aoffload.integrations import PagedBatch, SequenceSlice, load_model

BLOCK_SIZE = 16
SLICE_TOKENS = 64
NUM_TOKENS, NUM_DECODED = 400, 24
VOCABULARY = 256
NULL = 0


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Bits are compared, so all forwards run with one thread count; one thread, because test machines are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_model(kind: str, **changes: Any) -> Any:
    """A plain model of transformers, with random weights that say something."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.3}
    sizes |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False}
    if kind == "gpt_oss":
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
        sizes |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    if kind == "gemma3_text":
        sizes |= {"query_pre_attn_scalar": 16}
    config = AutoConfig.for_model(kind, **(sizes | changes))
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
        model = model.eval()
        for name, weight in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                torch.nn.init.normal_(weight)
    return model


def random_tokens(num_tokens: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (num_tokens,), generator=generator).tolist()


class Served:
    """One sequence on scattered blocks, in slices and then token by token; perhaps with what left a window taken away.

    `hides_blocks`: before every forward the positions before each window become null, and what their blocks held NaN.
    """

    def __init__(self, model: Any, *, hides_blocks: bool) -> None:
        num_blocks = -(-(NUM_TOKENS + NUM_DECODED) // BLOCK_SIZE)
        num_rows = num_blocks * len(model.groups) + 1
        order = (torch.randperm(num_rows - 1, generator=torch.Generator().manual_seed(3)) + 1).tolist()
        self.model = model
        self.hides_blocks = hides_blocks
        self.cache = model.new_kv_cache(num_rows, BLOCK_SIZE).fill_(torch.nan)
        self.tables = [order[at :: len(model.groups)] for at in range(len(model.groups))]
        self.num_computed = 0
        self.num_nulls = 0

    def compute(self, tokens: list[int]) -> torch.Tensor:
        if self.hides_blocks:
            self._zero_out()
        part = SequenceSlice(tokens, self.num_computed, self.tables)
        self.num_computed += len(tokens)
        return self.model.forward(PagedBatch.of([part], BLOCK_SIZE), self.cache)[0]

    def _zero_out(self) -> None:
        for group, table in zip(self.model.groups, self.tables, strict=True):
            if group.window is None:
                continue
            for position in range(group.attention.required_blocks(self.num_computed, BLOCK_SIZE).start):
                self.cache[table[position]] = torch.nan
                self.num_nulls += table[position] != NULL
                table[position] = NULL
            # The block that the window cuts in two stays, and what lies before the cut is of no interest either.
            first = max(0, self.num_computed - group.window + 1)
            if first % BLOCK_SIZE and first < self.num_computed:
                self.cache[table[first // BLOCK_SIZE], :, :, : first % BLOCK_SIZE] = torch.nan

    def compute_all(self, tokens: list[int], slice_tokens: int = SLICE_TOKENS) -> torch.Tensor:
        """Logits after every slice of the prompt and every decoded token."""
        found = [
            self.compute(tokens[at : min(at + slice_tokens, NUM_TOKENS)]) for at in range(0, NUM_TOKENS, slice_tokens)
        ]
        return torch.stack(found + [self.compute([token]) for token in tokens[NUM_TOKENS:]])


def plain_logits(plain: Any, tokens: list[int], slice_tokens: int = SLICE_TOKENS) -> torch.Tensor:
    """What transformers computes without any cache."""
    with torch.inference_mode():
        logits = plain(torch.tensor([tokens]), use_cache=False).logits[0]
    ends = [min(at + slice_tokens, NUM_TOKENS) for at in range(0, NUM_TOKENS, slice_tokens)]
    return logits[[end - 1 for end in [*ends, *range(NUM_TOKENS + 1, len(tokens) + 1)]]]


CASES = [
    ("gemma3_text", {"sliding_window": 100, "num_hidden_layers": 12}),
    ("gemma3_text", {"sliding_window": 1, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    ("gemma3_text", {"sliding_window": 16, "layer_types": ["full_attention", *["sliding_attention"] * 3]}),
    ("gemma3_text", {"sliding_window": 1000}),
    ("gpt_oss", {"sliding_window": 17}),
    ("gpt_oss", {"sliding_window": 128}),
    ("mistral", {"sliding_window": 33}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 15, "max_window_layers": 2}),
]


@pytest.mark.parametrize("hides_blocks", [False, True])
@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_logits_equal_plain_transformers(kind: str, changes: dict[str, Any], hides_blocks: bool) -> None:
    """Any window, with sinks and without, over scattered blocks: also after positions have become null. In double
    precision: how far single precision rounds apart what is added up in another order depends on the processor."""
    plain = small_model(kind, **changes).double()
    tokens = random_tokens(NUM_TOKENS + NUM_DECODED)
    wanted = plain_logits(plain, tokens)
    served = Served(TransformersModel(plain), hides_blocks=hides_blocks)
    found = served.compute_all(tokens)
    torch.testing.assert_close(found.double(), wanted.double(), atol=1e-5, rtol=1e-5)
    assert bool(served.num_nulls) == (hides_blocks and changes["sliding_window"] < NUM_TOKENS)


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss"])
def test_what_lies_before_a_window_changes_no_bit(name: str) -> None:
    """Null positions, NaN in the null row, in the blocks that were there and in front of the cut in the window's first
    block: bit for bit the logits that one gets with everything in its place."""
    model = load_model(name, seed=7)
    tokens = random_tokens(NUM_TOKENS + NUM_DECODED)
    kept, taken = (Served(model, hides_blocks=hides_blocks) for hides_blocks in (False, True))
    wanted, found = kept.compute_all(tokens), taken.compute_all(tokens)
    assert taken.num_nulls > 0
    assert not wanted.isnan().any()
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss"])
def test_a_block_inside_a_window_is_read(name: str) -> None:
    """The negative control: NaN in the first position of a window, or any later one, does arrive in the logits."""
    model = load_model(name, seed=7)
    for position in (NUM_TOKENS - 127, NUM_TOKENS - 1):
        served = Served(model, hides_blocks=True)
        served.compute_all(random_tokens(NUM_TOKENS))
        table = next(t for t, group in zip(served.tables, model.groups, strict=True) if group.window)
        served.cache[table[position // BLOCK_SIZE], :, :, position % BLOCK_SIZE] = torch.nan
        assert served.compute([5]).isnan().any()


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss"])
def test_only_new_tokens_are_written(name: str) -> None:
    """A slice changes its own positions in its own blocks, in every group and layer, and no other byte."""
    model = load_model(name, seed=7)
    served = Served(model, hides_blocks=False)
    served.compute(random_tokens(64))
    before = served.cache.clone()
    served.compute(random_tokens(40, seed=2))
    for table in served.tables:
        rows = before[table].transpose(1, 3).flatten(0, 1), served.cache[table].transpose(1, 3).flatten(0, 1)
        assert torch.equal(rows[0][:64], rows[1][:64])
        assert rows[0][64:].isnan().all() and not rows[1][64:104].isnan().any() and rows[1][104:].isnan().all()
    assert served.cache[NULL].isnan().all()


def test_sinks_take_weight() -> None:
    """With sinks far below all scores a head attends as without them, with sinks above all scores to hardly a token."""
    logits = []
    for sink in (-1e9, 0.0, 8.0):
        plain = small_model("gpt_oss", sliding_window=33)
        for name, weight in plain.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.constant_(weight, sink)
        wanted = plain_logits(plain, random_tokens(NUM_TOKENS))
        logits.append(Served(TransformersModel(plain), hides_blocks=True).compute_all(random_tokens(NUM_TOKENS)))
        torch.testing.assert_close(logits[-1], wanted, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits[0], logits[1], atol=1e-3)
    assert not torch.allclose(logits[1], logits[2], atol=1e-3)


@pytest.mark.parametrize("slice_tokens", [1, 7, 400])
def test_any_slices_give_the_same_logits(slice_tokens: int) -> None:
    """Token by token, across blocks, or all at once: what the plain model computes."""
    plain = small_model("gemma3_text", sliding_window=40)
    tokens = random_tokens(NUM_TOKENS + NUM_DECODED)
    wanted = plain_logits(plain, tokens, slice_tokens)
    found = Served(TransformersModel(plain), hides_blocks=True).compute_all(tokens, slice_tokens)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
