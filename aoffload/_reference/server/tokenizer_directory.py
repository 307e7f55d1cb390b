"""The byte-level tokenizer as files: a directory that `AutoTokenizer.from_pretrained` loads without a network.

For programs that count or make tokens on the client's side, load generators above all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...errors import InvalidArgument
from .tokenizer import NUM_BYTES, SPECIALS, ByteTokenizer, word

__all__ = ["write_tokenizer"]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + ('system' if message.role == 'developer' else message.role) + '|>' + message.content + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_tokenizer(tokenizer: ByteTokenizer, directory: str | Path, *, max_tokens: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`; makes the directory if it is missing.

    The files encode text as the server does, except for the four markers of a chat, which the server encodes as plain
    text. Programs read `max_tokens` as the longest prompt. Raises `InvalidArgument` naming `directory`.
    """
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_tokens,
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
        "additional_special_tokens": list(SPECIALS[1:]),
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        _write(Path(directory) / "tokenizer.json", _tokenizer_json(tokenizer))
        _write(Path(directory) / "tokenizer_config.json", config)
    except OSError as error:
        raise InvalidArgument("directory", f"cannot be written: {error}") from error


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _tokenizer_json(tokenizer: ByteTokenizer) -> dict[str, Any]:
    """The format of the tokenizers library: byte-pair encoding without merges."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(name, token_id) for name, token_id in tokenizer.special_ids.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": _vocabulary(tokenizer), "merges": [],
        },
    }  # fmt: skip


def _added_token(name: str, token_id: int) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token_id, "content": name, **flags}


def _vocabulary(tokenizer: ByteTokenizer) -> dict[str, int]:
    characters = _byte_characters()
    names = [*characters, *SPECIALS]
    num_words = tokenizer.vocab_size - len(names)
    names += ["".join(characters[byte] for byte in word(number).encode()) for number in range(num_words)]
    return {name: token_id for token_id, name in enumerate(names)}


def _byte_characters() -> list[str]:
    """The character that stands for each byte in such files: itself if it is visible, else one from 256 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(NUM_BYTES) if byte not in seen]
    return [chr(byte if byte in seen else NUM_BYTES + hidden.index(byte)) for byte in range(NUM_BYTES)]
