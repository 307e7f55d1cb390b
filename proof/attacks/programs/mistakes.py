"""Mistakes of an operator, each in the command itself: prints how many did not end with status 2 and one short text."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aoffload._reference.server import command
from aoffload.demo.command import main as demo
from aoffload.integrations.openai_server import ByteTokenizer, write_tokenizer

OPTIONS = (
    ["--log", "/no/such/place"],
    ["--log", "/"],
    ["--host", "x" * 300],
    ["--host", "192.0.2.1"],
    ["--host", "no such host"],
    ["--device-blocks", "10000000"],
    ["--write-tokenizer", "/dev/null/x"],
    ["--model", "no/such/model"],
    ["--max-tokens", "9000"],
)


def cut(name: str, size: int) -> Callable[[Path], Any]:
    return lambda directory: (directory / name).write_bytes((directory / name).read_bytes()[:size])


def written(name: str, data: bytes) -> Callable[[Path], Any]:
    return lambda directory: (directory / name).write_bytes(data)


def configured(**values: Any) -> Callable[[Path], Any]:
    def change(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | values))

    return change


BROKEN: dict[str, Callable[[Path], Any]] = {
    "no weights": lambda directory: (directory / "model.safetensors").unlink(),
    "empty weights": written("model.safetensors", b""),
    "weights cut off in their head": cut("model.safetensors", 40),
    "weights cut off": cut("model.safetensors", 6000),
    "weights that lie about their size": written("model.safetensors", b"\xff" * 64),
    "weights that are a directory": lambda directory: _directory(directory / "model.safetensors"),
    "no config": lambda directory: (directory / "config.json").unlink(),
    "an empty config": written("config.json", b""),
    "a config that is a list": written("config.json", b"[]"),
    "a config that is no text": written("config.json", b"\xff\xfe\x00"),
    "a deep config": written("config.json", b"[" * 100_000),
    "no type": configured(model_type=None),
    "an unknown type": configured(model_type="no such thing"),
    "negative layers": configured(num_hidden_layers=-1),
    "no layers": configured(num_hidden_layers=0),
    "layers in words": configured(num_hidden_layers="two"),
    "heads that do not divide": configured(num_key_value_heads=3),
    "no KV heads": configured(num_key_value_heads=0),
    "negative heads": configured(num_attention_heads=-2),
    "no width": configured(hidden_size=0),
    "another width": configured(hidden_size=64),
    "another vocabulary": configured(vocab_size=7),
    "a type of numbers that there is not": configured(dtype="float99", torch_dtype="float99"),
    "code of its own": configured(auto_map={"AutoModelForCausalLM": "evil.Model"}, model_type="evil"),
    "a tokenizer that is a list": written("tokenizer.json", b"[]"),
    "a tokenizer config that is a list": written("tokenizer_config.json", b"[]"),
    "half a tokenizer": cut("tokenizer.json", 500),
}


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def save_model(directory: Path) -> None:
    """A small model, with a tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = AutoConfig.for_model("llama", **sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    write_tokenizer(ByteTokenizer(300), directory, max_tokens=64)


def is_said(main: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> bool:
    """Whether the command ends with status 2 and says why without a traceback."""
    stderr_text = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr_text), contextlib.redirect_stdout(io.StringIO()):
            status = main(arguments)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException as error:  # noqa: BLE001 - what a traceback would be made of
        print(" ".join(arguments)[-60:], repr(error)[:200], file=sys.stderr)
        return False
    if status != 2 or not stderr_text.getvalue():
        print(" ".join(arguments)[-60:], f"status {status}", stderr_text.getvalue()[:200], file=sys.stderr)
    return status == 2 and bool(stderr_text.getvalue())


def served(*_: Any) -> Any:
    raise AssertionError("it is taken for whole, and would be served")


def main() -> None:
    vars(command)["Listener"] = served
    warnings.simplefilter("ignore")
    tiny = ["--model", "tiny", "--port", "0"]
    found = {" ".join(words): is_said(command.main, [*tiny, *words]) for words in OPTIONS}
    found["--json /dev/full"] = is_said(demo, ["--requests", "1", "--json", "/dev/full"])
    with tempfile.TemporaryDirectory() as directory:
        save_model(whole := Path(directory) / "whole")
        for number, (case, break_it) in enumerate(BROKEN.items()):
            broken = Path(directory) / str(number)
            broken.mkdir()
            for path in whole.iterdir():
                (broken / path.name).write_bytes(path.read_bytes())
            break_it(broken)
            found[case] = is_said(command.main, ["--model", str(broken), "--port", "0"])
    missed = [case for case, is_met in found.items() if not is_met]
    print(json.dumps({"num": len(found), "missed": missed}), flush=True)


if __name__ == "__main__":
    main()
