"""A model's config.json: found, parsed, and read field by field.

The reader notes which fields were read. If a field that was not read has a name that suggests that it changes what is
cached, the model is refused. To ignore such a field by mistake would give blocks of the wrong size, or groups that give
up KV that a layer still reads.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from .._common.arguments import shown
from ..errors import ConfigError

MAX_COUNT, MAX_LAYERS = 2**31 - 1, 4096
_MAY_DECIDE = re.compile(
    r"(?<!q)kv_|_kv|key_value|v_head|head_dim|head_size|window|chunk|local|global|layer_type|layers_block|block_type"
    r"|attn_type|attention_type|latent|lora_rank|compress|index|sparse|ssm|mamba|conv_|recurrent|state|rwkv|linear_"
    r"|hybrid|interval|pattern|period|cross|shared_layer|cache|bidirectional|causal|multi_query|n_head|mla_|memory"
    r"|block_config|ut_steps|dilat|sink_size|attn_config|attention_config|loop|recur|num_blocks|eviction|quant_algo|per_layer_config"
)
"""Names of fields that may decide which KV a layer stores, or how far back it reads."""
_OTHER_MODEL_PARTS = re.compile(
    r"expert|moe_|vision|audio|image|video|_token_id|mlp_|rope_|sparsity|decoder_sparse_step"
)
"""Names of fields about other parts of a model."""
_HARMLESS_FIELDS = frozenset(
    {
        # of the whole model, of generation, or of weights
        "use_cache", "cache_implementation", "initializer_range", "output_hidden_states", "image_token_index",
        "boi_token_index", "eoi_token_index", "eoa_token_index", "boa_token_index", "audio_token_index",
        "video_token_index", "mm_tokens_per_image", "pad_token_index", "tie_encoder_decoder", "latent_moe_use_norm",
        "moe_latent_size", "mlp_layer_types", "q_lora_rank", "o_lora_rank",
        # of queries and scores: they change the values of KV, which the namespace names, and not their layout
        "num_attention_heads", "num_key_value_groups", "rope_local_base_freq", "local_rope_theta",
        "global_rope_theta", "attn_logit_softcapping", "attention_sink_bias",
    }
)  # fmt: skip
_WITH_DEFAULTS = "transformers' AutoConfig.from_pretrained(...) fills in the fields that a config.json leaves out"


def refusal(problem: str) -> ConfigError:
    return ConfigError("config", problem)


@attrs.define
class ConfigReader:
    """The configuration of a model's text decoder."""

    model_type: str
    outer: Mapping[str, Any]
    """The whole configuration. It equals `fields` unless the decoder's part is nested in `text_config`."""
    fields: Mapping[str, Any]
    _read: set[str] = attrs.field(factory=set)

    def get(self, name: str) -> Any:
        """The value of a field; None if it is absent."""
        self._read.add(name)
        return self.fields.get(name)

    def ignore(self, *names: str) -> None:
        """Note fields that decide nothing in this type of model."""
        self._read.update(names)

    def refuse(self, problem: str) -> ConfigError:
        return refusal(f"{self.model_type} {problem}")

    def count(self, name: str, default: int | None = None) -> int:
        """A positive integer; `default` if the field is absent or null."""
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise self.refuse(f"has no `{name}`: {_WITH_DEFAULTS}")
        if type(value) is not int or not 1 <= value <= MAX_COUNT:
            raise self.refuse(f"has a `{name}` that is not a positive integer: {shown(value)}")
        return value

    def num_layers(self) -> int:
        found = self.count("num_hidden_layers")
        if found > MAX_LAYERS:
            raise self.refuse(f"has {found} layers; the limit is {MAX_LAYERS}")
        return found

    def optional_count(self, name: str) -> int | None:
        return None if self.get(name) is None else self.count(name)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(f"has a `{name}` that is neither true nor false: {shown(value)}")
        return value

    def per_layer(self, name: str, num_layers: int, of: type = int, *, allow_longer: bool = False) -> list[Any] | None:
        """A list with an item of type `of` for each layer; None if the field is absent, null or empty. `allow_longer`:
        Accept a longer list; its further items belong to draft layers."""
        value = self.get(name)
        if value is None or value == []:
            return None
        if not isinstance(value, (list, tuple)) or any(type(item) is not of for item in value):
            raise self.refuse(f"has a `{name}` that is not a list of {of.__name__}: {shown(value)}")
        if len(value) < num_layers or (len(value) > num_layers and not allow_longer):
            raise self.refuse(f"has {num_layers} layers, but a `{name}` for {len(value)}")
        return list(value[:num_layers])

    def part(self, name: str) -> ConfigReader:
        """A reader of the table `name` inside the configuration. Its error messages name the table."""
        table = self.get(name)
        if not isinstance(table, Mapping):
            raise self.refuse(f"has a `{name}` that is not a table: {shown(table)}")
        return ConfigReader(f"{self.model_type}, `{name}`,", table, table)

    def dtype(self) -> str | None:
        """The name of the dtype that the configuration gives for the weights."""
        for fields in (self.fields, self.outer):
            for name in ("dtype", "torch_dtype"):
                if fields.get(name) is not None:
                    return str(fields[name]).removeprefix("torch.")
        return None

    def check_all_read(self, also: Iterable[ConfigReader] = ()) -> None:
        """Raise if a field that may change the cached KV was not read."""
        for reader in (self, *also):
            unread = sorted(name for name, value in reader.fields.items() if reader._matters(name, value))
            if unread:
                names = ", ".join(f"`{name}`" for name in unread[:4])
                problem = "may change what is cached, and groups_of does not know what they mean for this type of model"
                raise reader.refuse(f"has fields that {problem}: {names}")

    def _matters(self, name: object, value: object) -> bool:
        if not isinstance(name, str) or name in self._read or name in _HARMLESS_FIELDS or not _MAY_DECIDE.search(name):
            return False
        if _OTHER_MODEL_PARTS.search(name) and "kv_" not in name:
            return False
        return not _is_off(value)


def _is_off(value: object) -> bool:
    """Whether a value switches its field off. A table or a list counts as off if it is empty."""
    return value is None or (isinstance(value, (int, float, str, list, tuple, dict)) and not value)


def read_config(config: object) -> ConfigReader:
    """The decoder's part of `config`: a dict, the path of a config.json or of its directory, or an object with
    `to_dict`. `ConfigError("config")` if it is none of these, or cannot be read."""
    outer = _parsed(config)
    fields = outer if outer.get("text_config") is None else outer["text_config"]
    if not isinstance(fields, Mapping):
        raise refusal(f"has a `text_config` that is not a table: {shown(outer['text_config'])}")
    model_type = fields.get("model_type", outer.get("model_type"))
    if not isinstance(model_type, str) or not model_type:
        raise refusal(f"has no `model_type`, so its fields cannot be understood; got {shown(model_type)}")
    return ConfigReader(model_type, outer, fields)


def _parsed(config: object) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if isinstance(config, (str, os.PathLike)):
        return _from_file(config)
    to_dict = getattr(config, "to_dict", None)
    found = to_dict() if callable(to_dict) and not isinstance(config, type) else None
    if not isinstance(found, Mapping):
        kinds = "a dict, the path of a config.json or of its directory, or an object with `to_dict`"
        raise refusal(f"must be {kinds}; got {shown(config)}")
    return found


def _from_file(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    place = f"{os.fspath(path)!r:.300}"
    try:
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise refusal(f"{place} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise refusal(f"{place} is not a JSON file: {error}") from error
    if not isinstance(found, dict):
        raise refusal(f"{place} does not contain a JSON object")
    return found
