"""Models with recurrent layers: states go through blocks, and resumed prompts give what one pass gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import pytest
import torch

from aoffload._reference.engine import proving_states
from aoffload._reference.engine.hybrid import HybridModel
from aoffload._reference.engine.pretrained import serve
from aoffload._reference.engine.recurrent import RecurrentSlice, Slot
from aoffload.errors import ConfigError, InvalidArgument
from aoffload.integrations import PagedBatch, SequenceSlice, load_model

BLOCK_SIZE = 16
NUM_TOKENS = 160
NUM_BLOCKS = 12
"""Of each sequence, in the one group that these models have."""
BOUND = 1e-4
"""Largest difference of a logit from one pass that counts as rounding. The logits have a standard deviation of about 1.
How sums are rounded depends on the vector instructions of the CPU. Measured for qwen3_next, which differs most: 6e-6 to
2e-5 on CPUs with AVX2 or AVX-512, 4e-5 without (`ATEN_CPU_CAPABILITY=default`). A wrong state differs by `CLEAR`."""
CLEAR = 0.5
"""A lost or wrong state changes some logit by more than this. Measured: 2 to 7."""
VOCABULARY = 128
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 1,
}  # fmt: skip
GATED_DELTA = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 32}
# In transformers 5.24, Nemotron-H raises the time steps of a prompt to `time_step_min`, and not those of decoded ones.
# So with the default, 0.001, a decoded token differs from one pass by up to 6e-4.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": GATED_DELTA,
    "qwen3_5_text": GATED_DELTA,
    "granitemoehybrid": {
        **MAMBA, "num_hidden_layers": 4, "layer_types": ["mamba", "attention"] * 2, "mamba_d_head": 32,
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32,
        "position_embedding_type": "rope",
    },
    "falcon_h1": {**MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": 64, "mamba_d_head": 16},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"], "mamba_num_heads": 4,
        "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 32, "time_step_min": 1e-30,
    },
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 16},
}  # fmt: skip
REFUSED: dict[str, dict[str, Any]] = {
    "jamba": {
        "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 4,
    },
    "mamba": {"num_hidden_layers": 2, "state_size": 8},
    "mamba2": {"num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
    "recurrent_gemma": {"num_hidden_layers": 3},
}  # fmt: skip


def plain_model(kind: str) -> Any:
    """A small model of transformers with random weights, large enough to say something, and a slow decay."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **(SIZES | (FAMILIES | REFUSED)[kind]))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.fill_(-3.0)  # a state halves in about 14 tokens; usual random weights forget it at once
            elif weight.dim() > 1:
                weight.normal_(0.0, 0.5 if "conv" in name else 0.15)
    return model


def random_tokens(num_tokens: int, seed: int = 1) -> list[int]:
    return torch.randint(2, VOCABULARY, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Bits are compared, so all forwards run with one thread count; one thread, because test machines are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@attrs.define(eq=False, repr=False)
class Served:
    """A model, and a KV tensor with the blocks of three sequences and the rows of their checkpoints."""

    plain: Any
    model: HybridModel
    kv_cache: torch.Tensor = attrs.field(init=False)

    @classmethod
    def of(cls, kind: str) -> Served:
        model = serve(plain_model(kind))
        assert isinstance(model, HybridModel)
        return cls(plain_model(kind), model)

    @kv_cache.default
    def _new_kv_cache(self) -> torch.Tensor:
        num_rows = self.model.states.num_rows(self.model.new_kv_cache(1, BLOCK_SIZE))
        return self.model.new_kv_cache(1 + 3 * (NUM_BLOCKS + num_rows), BLOCK_SIZE)

    def new_slot(self) -> Slot:
        return self.model.states.new_slot(self.kv_cache)

    def rows(self, which: int = 0) -> list[int]:
        """The rows for a checkpoint of a sequence, in an order of their own."""
        num_rows = self.model.states.num_rows(self.kv_cache)
        return [1 + 3 * NUM_BLOCKS + which + 3 * at for at in range(num_rows)][::-1]

    def part(
        self, tokens: Sequence[int], start: int, stop: int, slot: Slot | None, which: int = 0, **moves: Any
    ) -> RecurrentSlice:
        table = [1 + which + 3 * block for block in range(NUM_BLOCKS)]
        return RecurrentSlice(tokens[start:stop], start, [table], slot=slot, **moves)

    def forward(self, *parts: SequenceSlice) -> torch.Tensor:
        return self.model.forward(PagedBatch.of(parts, BLOCK_SIZE), self.kv_cache)

    def compute(self, tokens: Sequence[int], ends: Sequence[int], slot: Slot, which: int = 0) -> torch.Tensor:
        """Compute slices up to `ends`, from the slot's position on; the logits after the last one."""
        for end in ends:
            logits = self.forward(self.part(tokens, slot.num_tokens, end, slot, which))
        return logits[0]

    def one_pass(self, tokens: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self.plain(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
        return logits


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest) -> Served:
    return Served.of(request.param)


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max())


@pytest.mark.parametrize("cut", [1, 3, 64, 77, 144, NUM_TOKENS - 1])
def test_two_segments_equal_one_pass(served: Served, cut: int) -> None:
    """The state at any token, exported into blocks and imported into a fresh slot, goes on as if nothing had happened:
    the logits are those of the model's own forward over the whole prompt, but for rounding."""
    tokens = random_tokens(NUM_TOKENS)
    served.forward(served.part(tokens, 0, cut, served.new_slot(), checkpoint=served.rows()))
    [logits] = served.forward(served.part(tokens, cut, NUM_TOKENS, served.new_slot(), resume=served.rows()))
    wanted = served.one_pass(tokens)
    assert wanted.std() > 0.5
    assert difference(logits, wanted) < BOUND


@pytest.mark.parametrize("cut", [16, 64, 128])
def test_on_one_grid_a_resumed_prompt_has_the_same_bits(served: Served, cut: int) -> None:
    """In slices of one grid, a prompt that resumes from a checkpoint at any of its points has bit-identical logits, the
    grid of the scan's chunks or not."""
    tokens = random_tokens(NUM_TOKENS)
    ends = [*range(16, NUM_TOKENS, 16), NUM_TOKENS]
    wanted = served.compute(tokens, ends, served.new_slot())
    first = served.new_slot()
    served.compute(tokens, [end for end in ends if end <= cut], first)
    first.save(served.kv_cache, served.rows())
    second = served.new_slot()
    second.load(served.kv_cache, served.rows(), cut)
    assert torch.equal(second.memory, first.memory)
    assert torch.equal(served.compute(tokens, [end for end in ends if end > cut], second), wanted)


def test_a_lost_or_foreign_state_changes_the_logits(served: Served) -> None:
    """The negative control of the tests above: with a state of zeros, of another prefix, or of another position, and
    the right KV, the logits are clearly others."""
    tokens, others, cut = random_tokens(NUM_TOKENS), random_tokens(NUM_TOKENS, seed=2), 128
    wanted = served.one_pass(tokens[: cut + 1])
    for wrong in (None, (others, cut), (tokens, cut - 16)):
        slot = served.new_slot()
        if wrong is not None:
            served.compute(wrong[0], [wrong[1]], slot)
        served.compute(tokens, [cut], served.new_slot())  # the KV is right
        slot.num_tokens = cut
        assert difference(served.compute(tokens, [cut + 1], slot), wanted) > CLEAR


def test_ragged_batches_equal_single_runs(served: Served) -> None:
    """Requests of different lengths in one forward, one of them resumed and one decoding, among dummies: each gets the
    logits that it has alone, and its slot the states."""
    prompts = [random_tokens(size, seed=size) for size in (50, 97, 33)]
    starts = (0, 64, 32)
    slots = [served.new_slot() for _ in prompts]
    for which, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
        if start:
            served.compute(prompt, [start], slots[which], which)
    parts = [
        served.part(prompt, start, len(prompt), slot, which)
        for which, (prompt, start, slot) in enumerate(zip(prompts, starts, slots, strict=True))
    ]
    dummy = RecurrentSlice([0], 0, [[0]], slot=None)
    together = served.forward(dummy, parts[0], dummy, *parts[1:])
    for row, which, prompt in zip((1, 3, 4), range(3), prompts, strict=True):
        assert difference(together[row], served.one_pass(prompt)) < BOUND
        alone = served.new_slot()
        served.compute(prompt, [end for end in (starts[which], len(prompt)) if end], alone, which)
        for found, wanted in zip(slots[which].views, alone.views, strict=True):
            torch.testing.assert_close(found, wanted, atol=BOUND, rtol=BOUND)


def test_decoded_tokens_equal_one_pass(served: Served) -> None:
    """Three requests that decode together, token by token: the logits of one pass over all tokens so far."""
    prompts = [random_tokens(size, seed=size) for size in (40, 2, 17)]
    slots = [served.new_slot() for _ in prompts]
    for which, prompt in enumerate(prompts):
        served.compute(prompt, [len(prompt) - 1], slots[which], which)
    for _ in range(4):
        parts = [served.part(p, len(p) - 1, len(p), slots[which], which) for which, p in enumerate(prompts)]
        logits = served.forward(*parts)
        for prompt, row in zip(prompts, logits, strict=True):
            assert difference(row, served.one_pass(prompt)) < BOUND
            prompt.append(2 + int(row[2:].argmax()))


def test_a_batch_without_slots_is_refused(served: Served) -> None:
    """A plain slice has no state to go on from: it is an error, and no wrong token."""
    with pytest.raises(InvalidArgument, match="must be RecurrentSlice"):
        served.forward(SequenceSlice([5, 6], 0, [[1]]))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("jamba", "cannot resume from a recurrent state: the scan of layer 0 takes no initial state"),
        ("mamba", "cannot resume from a recurrent state: the scan of layer 0 takes no initial state"),
        ("mamba2", "has no attention layer"),
        ("recurrent_gemma", "layer 0 keeps its recurrent state outside of transformers' cache"),
    ],
)
def test_a_model_that_cannot_resume_is_refused(kind: str, reason: str) -> None:
    """The error names the model and the reason, before the first answer."""
    with pytest.raises(ConfigError, match=f"^model: .*{reason}"):
        serve(plain_model(kind))


def refusal(model: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        serve(model)
    assert caught.value.argument == "model"
    return caught.value.problem


def changed(change: Callable[[torch.Tensor, Any], torch.Tensor], layer: int = 1) -> Any:
    """A Qwen3-Next in which the output of a recurrent layer is changed. `change` gets the output and the cache."""
    model = plain_model("qwen3_next")
    mixer = model.model.layers[layer].linear_attn
    forward = mixer.forward

    def changed_forward(hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        return change(forward(hidden_states, **options), options.get("cache"))

    mixer.forward = changed_forward
    return model


def test_a_layer_that_depends_on_its_slices_is_refused() -> None:
    """A recurrent layer that computes something else when a prompt comes in parts."""
    found = refusal(changed(lambda output, _: output * (1 + 0.01 * output.shape[1])))
    assert "cannot resume from a recurrent state: layer 1, tokens" in found


def test_a_state_kept_in_another_place_is_refused() -> None:
    """A layer that keeps a part of its state in itself has the wrong one in a fresh slot."""
    kept = torch.zeros(64)

    def remember(output: torch.Tensor, cache: Any) -> torch.Tensor:
        found = output + kept
        if cache is not None:
            kept.copy_(output[0, -1])
        return found

    assert "cannot resume from a recurrent state: layer 1, tokens" in refusal(changed(remember))


def test_a_state_that_changes_nothing_is_refused() -> None:
    """If a result does not depend on the state, comparing results does not prove that the state is right."""
    model = plain_model("lfm2")
    with torch.no_grad():
        model.model.layers[2].conv.conv.weight[..., :-1] = 0
    assert "gives nearly the same values without the conv state of layer 2" in refusal(model)


def test_a_fast_decay_is_no_reason_to_refuse() -> None:
    """With weights that forget a state at once, the proof uses a slow decay in their place: it is about the code. The
    weights come back bit for bit. A layer that ignores its state is refused all the same."""
    model = plain_model("granitemoehybrid")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.fill_(5.0)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    serve(model)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    slow = proving_states.SLOW_A_LOG
    assert all(slow not in weight for name, weight in model.named_parameters() if name.endswith("A_log"))

    model = plain_model("granitemoehybrid")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.fill_(5.0)
    mixer = model.model.layers[0].mamba
    forward = mixer.forward

    def forgetting(hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        cache = options.get("cache")
        if cache is not None and hidden_states.shape[1] > 1:
            state = cache.get_recurrent_state(0, state_idx=0)
            if state is not None:
                state.zero_()
        output: torch.Tensor = forward(hidden_states, **options)
        return output

    mixer.forward = forgetting
    assert "the scan of layer 0 takes no initial state" in refusal(model)


@pytest.mark.parametrize("kind", ["qwen3_next", "granitemoehybrid", "lfm2"])
def test_half_precision_is_proven_as_well(kind: str) -> None:
    """States of bfloat16 and float32 side by side come through blocks, and rounding is no reason to refuse."""
    served = serve(plain_model(kind).to(torch.bfloat16))
    assert isinstance(served, HybridModel)
    assert torch.bfloat16 in {piece.dtype for piece in served.states.pieces}


def test_a_failed_forward_breaks_its_slots() -> None:
    """Some layers have advanced their state and others not, so nothing computes with the slot any more."""
    served = Served.of("qwen3_next")
    slot, tokens = served.new_slot(), random_tokens(64)
    served.compute(tokens, [16], slot)
    handle = served.model.model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        served.compute(tokens, [32], slot)
    handle.remove()
    with pytest.raises(InvalidArgument, match="its slot is broken"):
        served.forward(served.part(tokens, 16, 32, slot))
    with pytest.raises(InvalidArgument, match="failed forward"):
        slot.save(served.kv_cache, served.rows())


def test_the_named_model_remembers() -> None:
    """`load_model("qwen3-next")`: the state of 192 tokens matters for the logits after 256, and with it they are the
    same bits. Greedy decoding wanders through the vocabulary."""
    model = load_model("qwen3-next", seed=7)
    assert isinstance(model, HybridModel)
    assert (model.groups[0].layers, model.states.layers) == ((3, 7), (0, 1, 2, 4, 5, 6))
    kv_cache = model.new_kv_cache(40, BLOCK_SIZE)
    rows = list(range(20, 20 + model.states.num_rows(kv_cache)))
    tokens = torch.randint(0, 4096, (256,), generator=torch.Generator().manual_seed(1)).tolist()

    def forward(slot: Slot, start: int, ids: Sequence[int], **moves: Any) -> torch.Tensor:
        part = RecurrentSlice(ids, start, [list(range(1, 19))], slot=slot, **moves)
        return model.forward(PagedBatch.of([part], BLOCK_SIZE), kv_cache)[0]

    slot = model.states.new_slot(kv_cache)
    for start in (0, 64, 128):
        forward(slot, start, tokens[start : start + 64], checkpoint=rows)
    wanted = forward(slot, 192, tokens[192:])
    assert torch.equal(forward(model.states.new_slot(kv_cache), 192, tokens[192:], resume=rows), wanted)
    empty = model.states.new_slot(kv_cache)
    empty.num_tokens = 192
    assert difference(forward(empty, 192, tokens[192:]), wanted) > 0.1
    outputs, logits = [], wanted
    for position in range(256, 280):
        outputs.append(int(logits.argmax()))
        logits = forward(slot, position, outputs[-1:])
        assert 0.1 < logits.std() < 0.5
    assert len(set(outputs)) > 16
