"""Models of transformers: each type is served right or refused, and nothing is believed that was not compared."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aoffload import FullAttention, RecurrentState, SlidingWindow, groups_of
from aoffload._reference.engine.transformers import TransformersModel
from aoffload.errors import ConfigError
from aoffload.integrations import PagedBatch, SequenceSlice, load_model
from proof.model_types import BEGIN, END, PAGE, difference, examine, model_types, tiny_model

TABLE = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
WRITTEN_WITH = re.search(r"^transformers ([\w.]+):", TABLE, re.MULTILINE)
SAMPLE = (
    "bert", "bert-generation", "electra", "ernie", "roc_bert",  # encoders
    "diffllama", "hrm_text", "doge",  # attend twice in a layer, or again in the next cycle; have a mask of their own
    "gemma4_text", "deepseek_v3", "mimo_v2_flash", "nemotron",  # what transformers' errors were about
    "bert, `is_decoder`", "gemma3n_text", "mistral", "gpt2",  # served
)  # fmt: skip


def is_written_with_this_version() -> bool:
    import transformers

    return WRITTEN_WITH is not None and WRITTEN_WITH[1] == transformers.__version__


@pytest.mark.parametrize("kind", SAMPLE)
def test_a_type_is_served_right_or_refused(kind: str) -> None:
    """A small model of the type either gives what it gives by itself, over prompts longer than its windows, or is
    refused by an error of ours before its first answer; tests/model_types.md says which, and why."""
    found = examine(kind)
    assert found.verdict != "wrong", found.reason
    if is_written_with_this_version():
        assert found.row in TABLE, "run python -m proof.model_types"


def test_the_table_lists_every_type() -> None:
    """tests/model_types.md has a row for each type of causal language model in the transformers that it names."""
    if not is_written_with_this_version():
        pytest.skip("another version of transformers")
    rows = [line.split(" | ") for line in TABLE.splitlines() if " | " in line][1:]
    assert [row[0] for row in rows] == model_types()
    assert {row[1] for row in rows} == {"served", "refused", "not built"}


def test_groups_of_agrees_with_what_is_served() -> None:
    """For each type that `load_model` serves, `groups_of` finds the same kinds of attention in transformers' default
    configuration, or refuses it."""
    if not is_written_with_this_version():
        pytest.skip("another version of transformers")
    from transformers import AutoConfig

    names = {FullAttention: "full attention", SlidingWindow: "windows", RecurrentState: "recurrent states"}
    agreed = []
    for kind, verdict, attends in (row.split(" | ") for row in TABLE.splitlines() if row.count(" | ") == 2):
        if verdict != "served" or "," in kind:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = groups_of(AutoConfig.for_model(kind), dtype="bfloat16")
        except ConfigError:
            continue
        found = sorted({names[type(group.attention)] for group in model.groups}, reverse=True)
        assert " and ".join(found) == attends, kind
        agreed.append(kind)
    assert len(agreed) >= 60


@pytest.mark.parametrize(
    ("kind", "reason"), [("diffllama", "attends twice in a forward"), ("gemma4_text", "does not fit all its layers")]
)
def test_a_directory_is_refused_for_the_same_reasons(kind: str, reason: str, tmp_path: Path) -> None:
    """`load_model` raises `ConfigError`, which names the model and the reason, and no error of transformers."""
    tiny_model(kind).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"^model: .*{reason}"):
        load_model(str(tmp_path))


def refusal(model: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        TransformersModel(model)
    assert caught.value.argument == "model"
    return caught.value.problem


def changed(model: Any, change: Callable[[torch.Tensor], torch.Tensor], layer: int = 2) -> Any:
    """The model, with the attention of a layer changed."""
    attention = model.model.layers[layer].self_attn
    forward = attention.forward

    def changed_forward(*args: Any, **options: Any) -> Any:
        output, weights = forward(*args, **options)
        return change(output), weights

    attention.forward = changed_forward
    return model


def test_a_model_that_depends_on_its_slices_is_refused() -> None:
    """A layer that computes something else when a prompt comes in parts gives wrong tokens over paged KV: the proof
    compares the attention of every layer with the model's own forward."""
    model = changed(tiny_model("llama"), lambda output: output * (1 + 0.01 * output.shape[1]))
    assert "attention of layer 2, the first slice, has a relative error of" in refusal(model)


def test_in_float32_no_token_may_differ() -> None:
    """One token of twenty-six is enough."""

    def one_token(output: torch.Tensor) -> torch.Tensor:
        factors = torch.ones(output.shape[1], 1)
        factors[3] += 0.001 * output.shape[1]
        return output * factors

    assert "attention of layer 2" in refusal(changed(tiny_model("llama"), one_token))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_proven_as_well(dtype: torch.dtype) -> None:
    """Rounding in bfloat16 or float16 is no reason to refuse a mixture of experts, and does not hide a mistake."""
    TransformersModel(tiny_model("gpt_oss").to(dtype))
    model = changed(tiny_model("gpt_oss").to(dtype), lambda output: output * (1 + 0.02 * output.shape[1]))
    assert "attention of layer 2" in refusal(model)


def test_a_mask_is_asked_about_positions_far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that stops reading what is more than 100 tokens away looks like full attention in a short prompt: its
    mask's rule shows what it does up to the model's last position."""
    from transformers.models.llama import modeling_llama

    def near(_b: Any, _h: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return query - key <= 100

    model = tiny_model("llama")
    changed_mask = functools.partial(modeling_llama.create_causal_mask, and_mask_function=near)
    monkeypatch.setattr(modeling_llama, "create_causal_mask", changed_mask)
    assert refusal(model) == "layer 0 has a mask other than full attention: position 128 does not read position 0"


def test_a_layer_that_never_attends_is_refused() -> None:
    """A model that leaves out a layer of its config would leave its KV unwritten."""
    model = tiny_model("llama")
    del model.model.layers[-1]
    assert refusal(model) == "layer 5 does not call transformers' attention interface"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda model: model.lm_head.weight.zero_(), "the same logit"),
        (lambda model: model.lm_head.weight.fill_(torch.nan), "not finite"),
        (lambda model: [layer.self_attn.o_proj.weight.zero_() for layer in model.model.layers], "whatever KV it reads"),
        (lambda model: model.model.layers[3].self_attn.o_proj.weight.zero_(), None),
    ],
)
def test_weights_that_prove_nothing_are_refused(change: Callable[[Any], Any], problem: str | None) -> None:
    """Equal logits, logits that are no numbers, and attention that adds nothing compare equal whatever is read. A
    single layer whose weights are zero harms nobody."""
    model = tiny_model("llama")
    with torch.no_grad():
        change(model)
    if problem is None:
        TransformersModel(model)
    else:
        assert problem in refusal(model)


def test_a_layer_that_reads_no_kv_is_refused() -> None:
    """A layer whose output is a function of its input alone, and the same over other KV, was not proven by comparing
    it. The layers before it do not hide that: it gets the input of the model's own forward."""
    model = tiny_model("llama")
    attention = model.model.layers[2].self_attn
    forward = attention.forward

    def of_its_input(hidden_states: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        forward(hidden_states, **options)
        return hidden_states * 2, None

    attention.forward = of_its_input
    assert "gives the same values whatever KV it reads (attention of layer 2)" in refusal(model)


def test_what_a_model_turns_to_later_fails_the_request() -> None:
    """A mask that a layer makes only in a longer prompt, and weights that are dropped in training mode, were in no
    proof: the forward raises, and gives no wrong token."""
    model = tiny_model("llama")
    served = TransformersModel(model)
    batch = PagedBatch.of([SequenceSlice([5, 6, 7], 0, [[1]])], 8)
    served.forward(batch, served.new_kv_cache(2, 8))
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    with pytest.raises(ConfigError, match="training mode"):
        served.forward(batch, served.new_kv_cache(2, 8))
    model.eval()
    attention = model.model.layers[0].self_attn
    mask = {"attention_mask": torch.zeros(1, 1, 3, 3)}
    attention.register_forward_pre_hook(lambda _, args, options: (args, options | mask), with_kwargs=True)
    with pytest.raises(ConfigError, match="layer 0 builds its own attention mask"):
        served.forward(batch, served.new_kv_cache(2, 8))


def test_the_check_of_the_table_can_fail() -> None:
    """The table's own comparison notices a model that was changed after its proof."""
    plain, served = tiny_model("llama"), TransformersModel(tiny_model("llama"))
    assert difference(plain, served) == ""
    with torch.no_grad():
        served.model.model.layers[0].self_attn.v_proj.weight.mul_(1.5)
    assert "of their size off" in difference(plain, served)
