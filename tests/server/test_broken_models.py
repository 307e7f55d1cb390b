"""Directories that are no model: an operator's mistake, so it is one line that names the option."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aoffload.errors import InvalidArgument
from aoffload.integrations import load_model
from aoffload.integrations.openai_server import ServerOptions
from aoffload._reference.server.opening import tokenizer_of


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, with a tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from aoffload.integrations.openai_server import ByteTokenizer, write_tokenizer

    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = AutoConfig.for_model("llama", **sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    found = tmp_path_factory.mktemp("whole")
    with torch.random.fork_rng():
        AutoModelForCausalLM.from_config(config).save_pretrained(found)
    write_tokenizer(ByteTokenizer(300), found, max_tokens=64)
    return found


def cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_bytes((directory / name).read_bytes()[:size]) and None


def written(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_bytes(data) and None


def configured(name: str = "config.json", **values: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        config = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(config | values))

    return change


BROKEN: dict[str, Callable[[Path], None]] = {
    "no weights": lambda directory: (directory / "model.safetensors").unlink(),
    "empty weights": written("model.safetensors", b""),
    "weights cut off in their head": cut("model.safetensors", 40),
    "weights cut off": cut("model.safetensors", 6000),
    "weights that lie about their size": written("model.safetensors", b"\xff" * 64),
    "no config": lambda directory: (directory / "config.json").unlink(),
    "a config that is a list": written("config.json", b"[]"),
    "a config that is no text": written("config.json", b"\xff\xfe\x00"),
    "no type": configured(model_type=None),
    "negative layers": configured(num_hidden_layers=-1),
    "no layers": configured(num_hidden_layers=0),
    "layers in words": configured(num_hidden_layers="two"),
    "heads that do not divide": configured(num_key_value_heads=3, num_attention_heads=2),
    "no KV heads": configured(num_key_value_heads=0),
    "another width": configured(hidden_size=64),
    "another vocabulary": configured(vocab_size=7),
    "a tokenizer that is a list": written("tokenizer.json", b"[]"),
    "a tokenizer config that is a list": written("tokenizer_config.json", b"[]"),
    "half a tokenizer": cut("tokenizer.json", 500),
}


@pytest.mark.filterwarnings("default")  # what transformers thinks of such files is not what is looked at
@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_directory_is_an_argument_that_is_wrong(case: str, whole: Path, tmp_path: Path) -> None:
    """Nothing that a directory may hold is a traceback."""
    for path in whole.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    BROKEN[case](tmp_path)
    with pytest.raises(InvalidArgument) as caught:
        tokenizer_of(ServerOptions(model=str(tmp_path)), load_model(str(tmp_path)))
    assert caught.value.argument == "model"
    assert "\n" not in caught.value.problem
