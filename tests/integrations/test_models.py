"""The models over paged tensors: the results are right, and independent of block ids and of the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from aoffload.integrations import Decoder, PagedBatch, PagedModel, SequenceSlice, load_model

NAMES = ["tiny", "llama", "qwen3", "gemma3", "gpt-oss"]
BLOCK_SIZE = 16
SLICE_TOKENS = 64
NUM_BLOCKS = 64
"""Of each group."""
SCRATCH = 1
"""The block that dummies of a padded decode batch write to."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Bits are compared, so all forwards run with one thread count; one thread, because test machines are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> PagedModel:
    return load_model(request.param, seed=7)


def random_tokens(num_tokens: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 4096, (num_tokens,), generator=generator).tolist()


Tables = list[list[int]]
"""A block table for each group."""


def tables(model: PagedModel, *nums_tokens: int, seed: int = 2) -> list[Tables]:
    """Scattered block tables for each sequence, no two of them sharing a block, none with the first two."""
    generator = torch.Generator().manual_seed(seed)
    ids = iter((torch.randperm(NUM_BLOCKS * len(model.groups) - 2, generator=generator) + 2).tolist())
    counts = [-(-num_tokens // BLOCK_SIZE) for num_tokens in nums_tokens]
    return [[[next(ids) for _ in range(count)] for _ in model.groups] for count in counts]


def new_cache(model: PagedModel, filling: float = 0.0) -> torch.Tensor:
    return model.new_kv_cache(NUM_BLOCKS * len(model.groups), BLOCK_SIZE).fill_(filling)


def forward(model: PagedModel, cache: torch.Tensor, *slices: SequenceSlice) -> torch.Tensor:
    return model.forward(PagedBatch.of(slices, BLOCK_SIZE), cache)


def prefill(
    model: PagedModel, cache: torch.Tensor, tokens: Sequence[int], table: Tables, *, start: int = 0
) -> torch.Tensor:
    """Compute `tokens[start:]` in slices on the fixed grid; the logits after each slice, [num_slices, vocab]."""
    stops = range(start, len(tokens), SLICE_TOKENS)
    slices = [SequenceSlice(tokens[at : at + SLICE_TOKENS], at, table) for at in stops]
    return torch.cat([forward(model, cache, part) for part in slices])


PLAIN = [(name, attention) for name in ("llama", "qwen3", "gemma3") for attention in ("eager", "sdpa")]
PLAIN += [("gpt-oss", "eager")]  # transformers has no other implementation of sinks on a CPU


@pytest.mark.parametrize(("name", "attention"), PLAIN)
def test_logits_equal_plain_transformers(name: str, attention: str) -> None:
    """Two prompts computed in slices, side by side over scattered blocks, then decoded: what transformers computes."""
    model = load_model(name, seed=7)
    plain = plain_transformers(model, attention)
    prompts, drafts = [random_tokens(350, 1), random_tokens(301, 2)], [random_tokens(6, 3), random_tokens(6, 4)]
    cache, block_tables = new_cache(model), tables(model, 356, 307)
    found: list[list[torch.Tensor]] = [[], []]
    for start in range(0, 350, 50):
        slices = [SequenceSlice(prompts[i][start : start + 50], start, block_tables[i]) for i in (0, 1)]
        for i, logits in enumerate(forward(model, cache, *slices)):
            found[i].append(logits)
    for step in range(6):
        slices = [SequenceSlice([drafts[i][step]], len(prompts[i]) + step, block_tables[i]) for i in (0, 1)]
        for i, logits in enumerate(forward(model, cache, *slices)):
            found[i].append(logits)
    for i in (0, 1):
        ends = [*range(50, len(prompts[i]), 50), len(prompts[i])]
        wanted = plain_logits(plain, prompts[i], ends, drafts[i])
        torch.testing.assert_close(torch.stack(found[i]), wanted, atol=1e-5, rtol=0)


def plain_transformers(model: PagedModel, attention: str) -> torch.nn.Module:
    """The same weights in a model of transformers that knows nothing of us."""
    from transformers import AutoConfig, AutoModelForCausalLM

    ours = model.model  # type: ignore[attr-defined]
    config = AutoConfig.for_model(**ours.config.to_dict())
    with torch.random.fork_rng():
        plain = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    plain.load_state_dict(ours.state_dict())
    assert plain.config._attn_implementation == attention
    return plain


def plain_logits(plain: torch.nn.Module, prompt: list[int], ends: list[int], draft: list[int]) -> torch.Tensor:
    """Logits after `prompt[:end]` for each end, then after each token of `draft`, with transformers' own cache."""
    from transformers import DynamicCache

    cache = DynamicCache(config=plain.config)  # given by place: its parameter has another name since 5.24
    with torch.inference_mode():
        prompt_logits = plain(torch.tensor([prompt]), None, None, cache, use_cache=True).logits[0]
        logits = [prompt_logits[end - 1] for end in ends]
        for token in draft:
            logits.append(plain(torch.tensor([[token]]), None, None, cache, use_cache=True).logits[0, -1])
    return torch.stack(logits)


def test_blocks_nobody_wrote_change_no_bit(model: PagedModel) -> None:
    """NaN in every row that the sequence did not write, in its own last block too: the same logits, the same KV."""
    tokens, [table] = random_tokens(150), tables(model, 153)
    results = []
    for filling in (0.0, torch.nan):
        cache = new_cache(model, filling)
        logits = prefill(model, cache, tokens, table)
        more = [forward(model, cache, SequenceSlice([token], 150 + i, table)) for i, token in enumerate((5, 9, 2))]
        written = torch.stack([cache[ids].transpose(1, 3).flatten(0, 1)[:153] for ids in table])
        results.append(torch.cat([logits.flatten(), *(part.flatten() for part in more), written.flatten()]))
    assert not results[1].isnan().any()
    assert torch.equal(*results)


def test_a_loaded_prefix_gives_the_same_bits(model: PagedModel) -> None:
    """Blocks copied away, overwritten, copied back to other ids: the rest of the prompt has bit-identical logits."""
    tokens, [table, new_blocks] = random_tokens(300), tables(model, 300, 128)
    cache = new_cache(model)
    wanted = prefill(model, cache, tokens, table)
    saved = [cache[ids[:8]].clone() for ids in table]
    cache.fill_(torch.nan)
    for ids, blocks in zip(new_blocks, saved, strict=True):
        cache[ids] = blocks
    found = prefill(model, cache, tokens, [[*n, *old[8:]] for n, old in zip(new_blocks, table, strict=True)], start=128)
    assert torch.equal(found, wanted[2:])


def test_swapped_prefix_blocks_change_the_logits(model: PagedModel) -> None:
    """The negative control of the test above: it would notice two loaded blocks in each other's place."""
    tokens, [table] = random_tokens(300), tables(model, 300)
    cache = new_cache(model)
    wanted = prefill(model, cache, tokens, table)
    for ids in table:
        cache[[ids[2], ids[5]]] = cache[[ids[5], ids[2]]]
    found = prefill(model, cache, tokens, table, start=128)
    assert all(not torch.equal(*pair) for pair in zip(found, wanted[2:], strict=True))


def test_decoding_in_a_padded_batch_is_alone(model: PagedModel) -> None:
    """A row's logits are the same bits in every row of a batch of eight, among dummies and among other sequences."""
    lengths = [100, 33, 64, 1, 150, 17, 47, 80]
    cache, block_tables = new_cache(model), tables(model, *(length + 1 for length in lengths))
    for i, length in enumerate(lengths):
        prefill(model, cache, random_tokens(length, i), block_tables[i])
    dummy = SequenceSlice([0], 0, [[SCRATCH]] * len(model.groups))
    live = [SequenceSlice([11 * i + 3], length, block_tables[i]) for i, length in enumerate(lengths)]
    together = forward(model, cache, *live)
    for row, part in enumerate(live):
        alone = [dummy] * 8
        alone[(row + 3) % 8] = part
        assert torch.equal(forward(model, cache, *alone)[(row + 3) % 8], together[row])
    for shift in range(1, 8):
        assert torch.equal(forward(model, cache, *live[shift:], *live[:shift]).roll(shift, 0), together)


def test_sequences_of_one_forward_dont_see_each_other(model: PagedModel) -> None:
    """Prompts of different lengths in one forward: the logits that each has alone, but for rounding."""
    prompts = [random_tokens(length, seed=length) for length in (40, 1, 70)]
    block_tables = tables(model, 40, 1, 70)
    parts = [SequenceSlice(prompt, 0, table) for prompt, table in zip(prompts, block_tables, strict=True)]
    together = forward(model, new_cache(model), *parts)
    alone = [forward(model, new_cache(model), part) for part in parts]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=0)


def test_the_decoder_equals_a_naive_one() -> None:
    """The decoder against full attention over the whole prompt in double precision, written without any of its code."""
    model = load_model("tiny", seed=7)
    assert isinstance(model, Decoder)
    tokens, [table] = random_tokens(150), tables(model, 150)
    found = prefill(model, new_cache(model), tokens, table)
    torch.testing.assert_close(found.double(), naive_logits(model, tokens)[[63, 127, 149]], atol=1e-5, rtol=0)


def naive_logits(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """Logits after every token, [T, vocab], float64: one head at a time, rotation as a product of complex numbers."""
    config = model.config
    size, num_queries, num_keys = config.head_dim, config.num_heads, config.num_kv_heads

    def normalise(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()

    powers = torch.arange(size // 2, dtype=torch.float64) * 2 / size
    angles = torch.arange(len(tokens))[:, None] / config.rope_theta**powers
    turn = torch.polar(torch.ones_like(angles), angles)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        turned = torch.complex(x[:, : size // 2], x[:, size // 2 :]) * turn
        return torch.cat((turned.real, turned.imag), -1)

    future = torch.ones(len(tokens), len(tokens)).triu(1).bool()
    x = model.embedding.double()[tokens]
    for layer in model.layers:
        heads = (normalise(x) @ layer.qkv.double().T).split(size, -1)
        found = []
        for head in range(num_queries):
            shared = num_queries + head // (num_queries // num_keys)
            scores = rotate(heads[head]) @ rotate(heads[shared]).T / size**0.5
            found.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ heads[shared + num_keys])
        x = x + torch.cat(found, -1) @ layer.output.double().T
        gate, up = (normalise(x) @ layer.gate_up.double().T).split(config.intermediate_size, -1)
        x = x + (gate / (1 + (-gate).exp()) * up) @ layer.down.double().T
    return normalise(x) @ model.head.double().T


def test_the_decoder_is_a_llama() -> None:
    """One seed gives the decoder and transformers' Llama the same weights, and then the same logits."""
    models = [load_model(name, seed=3) for name in ("tiny", "llama")]
    tokens, [table] = random_tokens(150), tables(models[0], 150)
    logits = [prefill(model, new_cache(model), tokens, table) for model in models]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=0)


def test_random_weights_say_something(model: PagedModel) -> None:
    """Greedy decoding wanders through the vocabulary, and logits are small enough to be compared within 1e-5."""
    tokens, [table] = random_tokens(64), tables(model, 96)
    cache = new_cache(model)
    logits, outputs = prefill(model, cache, tokens, table), []
    for position in range(64, 96):
        outputs.append(int(logits.argmax()))
        logits = forward(model, cache, SequenceSlice(outputs[-1:], position, table))
        assert 0.1 < logits.std() < 0.5
    assert len(set(outputs)) > 20


def test_blocks_are_contiguous_and_logits_are_plain_numbers(model: PagedModel) -> None:
    """All layers of a block lie in one piece; logits are float32, carry no gradient, and the block size is free."""
    num_groups, size = len(model.groups), len(model.groups[0].layers)
    cache = model.new_kv_cache(num_groups + 4, 8)
    assert cache.shape == (num_groups + 4, size, 2, 8, 2, 32)
    assert num_groups * size == 6
    assert cache[3].is_contiguous()
    table = [[4 + group] for group in range(num_groups)]
    logits = model.forward(PagedBatch.of([SequenceSlice([1, 2, 3], 0, table)], 8), cache)
    assert logits.shape == (1, model.vocab_size)
    assert (logits.dtype, logits.is_inference()) == (torch.float32, True)
    assert cache[:4].count_nonzero() == 0
    assert cache[4:, :, :, 3:].count_nonzero() == 0
    assert cache[4:, :, :, :3].count_nonzero() == cache[4:, :, :, :3].numel()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_computes_the_same(name: str) -> None:
    """The same seed on a GPU: the logits of the CPU within what another order of float32 sums explains."""
    if name != "tiny":
        pytest.importorskip("transformers")
    tokens, logits = random_tokens(150), []
    for device in ("cpu", "cuda"):
        model = load_model(name, seed=7, device=device)
        [table] = tables(model, 150)
        cache = new_cache(model)
        slices = [SequenceSlice(tokens[at : at + 50], at, table) for at in range(0, 150, 50)]
        logits.append(torch.cat([model.forward(PagedBatch.of([s], BLOCK_SIZE, device), cache).cpu() for s in slices]))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)
