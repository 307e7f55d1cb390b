"""Loading models: seeds, directories, and models that are refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from aoffload.errors import ConfigError, InvalidArgument, MissingExtra
from aoffload.integrations import PagedBatch, PagedModel, SequenceSlice, load_model


def logits_of(model: PagedModel) -> torch.Tensor:
    tables = [[3 * group + 2, 3 * group, 3 * group + 1] for group in range(len(model.groups))]
    batch = PagedBatch.of([SequenceSlice(list(range(40)), 0, tables)], 16)
    return model.forward(batch, model.new_kv_cache(3 * len(model.groups), 16))


def small_model(kind: str, **changes: Any) -> Any:
    """A model of transformers that is small enough to be saved a few times a second."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = AutoConfig.for_model(kind, **sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=16, **changes)
    with torch.random.fork_rng():
        return AutoModelForCausalLM.from_config(config)


@pytest.fixture(scope="module")
def seeded(request: pytest.FixtureRequest) -> tuple[str, PagedModel, torch.Tensor]:
    """A model's name, the model of seed 1, and its logits."""
    model = load_model(request.param, seed=1)
    return request.param, model, logits_of(model)


@pytest.mark.parametrize("seeded", ["tiny", "llama", "qwen3", "gemma3", "gpt-oss"], indirect=True)
def test_a_seed_is_a_model(seeded: tuple[str, PagedModel, torch.Tensor]) -> None:
    """The same seed, the same weights; another seed, others; torch's global generator is left as it was."""
    name, _, first = seeded
    before = torch.get_rng_state()
    second, third = (logits_of(load_model(name, seed=seed)) for seed in (1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


@pytest.mark.parametrize("seeded", ["llama", "qwen3", "gemma3", "gpt-oss"], indirect=True)
def test_a_directory_is_a_model(seeded: tuple[str, PagedModel, torch.Tensor], tmp_path: Path) -> None:
    """What `save_pretrained` wrote comes back with bit-identical logits, without any network."""
    _, model, logits = seeded
    model.model.save_pretrained(tmp_path)  # type: ignore[attr-defined]
    assert torch.equal(logits_of(load_model(str(tmp_path))), logits)


def test_a_checkpoint_in_half_precision_is_float32_on_a_cpu(tmp_path: Path) -> None:
    """On a CPU the KV is float32 whatever the file holds."""
    small_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).new_kv_cache(2, 16).dtype == torch.float32


@pytest.mark.parametrize("name", ["", "gpt", "no/such/directory", "meta-llama/Llama-3.1-8B", "pyproject.toml"])
def test_a_bad_name_is_named(name: str) -> None:
    """Neither a known name nor a directory: a typed error that names `model`, and no look at the network."""
    with pytest.raises(
        InvalidArgument, match=r"^model: must be one of tiny, 1b, llama, qwen3, gemma3, gpt-oss, qwen3-next or"
    ) as caught:
        load_model(name)
    assert caught.value.argument == "model"


@pytest.mark.parametrize("config", [None, "{", "{}", '{"model_type": "llama"}', '{"model_type": "no-such-model"}'])
def test_a_bad_directory_is_named(config: str | None, tmp_path: Path) -> None:
    """A directory without config or weights, or with a broken config: the same typed error."""
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(InvalidArgument, match=r"^model: .*can't be loaded") as caught:
        load_model(str(tmp_path))
    assert caught.value.argument == "model"


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    """A checkpoint that lacks weights is no model: transformers alone would draw them at random and warn."""
    small_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ConfigError, match="lacks weights"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        ("llama4_text", {"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "later tokens"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ],
)
def test_attention_we_dont_do_is_refused(kind: str, changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    """Other kinds of layers, attention to what comes later, and positions that depend on more than the prefix are
    refused instead of computed wrongly."""
    small_model(kind, **changes).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"^model: .*{problem}"):
        load_model(str(tmp_path))


def test_a_missing_extra_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without transformers the decoder works; the others say what to install."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert load_model("tiny").vocab_size == 4096
    for name in ("llama", "qwen3", "gemma3", "gpt-oss", str(tmp_path)):
        with pytest.raises(MissingExtra, match=r"pip install 'aoffload\[transformers\]'"):
            load_model(name)


GOOD = SequenceSlice([1, 2], 0, [[1]])


@pytest.mark.parametrize(
    ("slices", "problem"),
    [
        ([], "slices: is empty"),
        ([GOOD, SequenceSlice([], 3, [[1]])], r"slices\[1\]: token_ids"),
        ([SequenceSlice([[1]], 0, [[1]])], r"slices\[0\]: token_ids"),  # type: ignore[list-item]
        ([SequenceSlice([1], -1, [[1]])], r"slices\[0\]: start"),
        ([GOOD, GOOD, SequenceSlice([1], 16, [[1]])], r"slices\[2\]: block_ids cover only 16 of 17"),
        ([SequenceSlice([1], 0, [[]])], r"slices\[0\]: block_ids cover only 0 of 1"),
        ([SequenceSlice([1], 0, [[1], []])], r"slices\[0\]: block_ids cover only 0 of 1"),
        ([SequenceSlice([1], 0, [])], r"slices\[0\]: block_ids must hold a block table"),
        ([SequenceSlice([1], 0, [1])], r"slices\[0\]: block_ids must hold a block table"),  # type: ignore[list-item]
        ([GOOD, SequenceSlice([1], 0, [[2], [3]])], r"slices\[1\]: has 2 block tables, not 1"),
        ([SequenceSlice([-1], 0, [[1]])], "must not be negative"),
        ([SequenceSlice([1], 0, [[-1]])], "must not be negative"),
    ],
)
def test_a_bad_slice_is_named(slices: list[SequenceSlice], problem: str) -> None:
    """Nothing that torch would quietly read from the end of a tensor gets into a batch."""
    with pytest.raises(InvalidArgument, match=problem):
        PagedBatch.of(slices, 16)


def test_a_batch_packs_its_slices() -> None:
    """Tokens, positions and each group's slots of two sequences, one after the other; tables may be longer than
    needed."""
    slices = [SequenceSlice([7, 8, 9], 3, [[5, 2, 11], [0, 3]]), SequenceSlice([6], 0, [[1], [4, 12]])]
    batch = PagedBatch.of(slices, 4)
    assert (batch.num_sequences, batch.num_tokens) == (2, 4)
    assert batch.input_ids.tolist() == [7, 8, 9, 6]
    assert batch.positions.tolist() == [3, 4, 5, 0]
    assert [blocks.tolist() for blocks in batch.slot_blocks] == [[5, 2, 2, 1], [0, 3, 3, 4]]
    assert [[table.tolist() for table in span.tables] for span in batch.spans] == [[[5, 2], [0, 3]], [[1], [4]]]
    assert batch.slot_offsets.tolist() == [3, 0, 1, 0]
    assert batch.last_rows.tolist() == [2, 3]
