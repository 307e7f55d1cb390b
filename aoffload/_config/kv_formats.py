"""Formats of stored keys, values and latents, and the vectors that one layer stores for a token."""

from __future__ import annotations

import attrs

from .._common.arguments import shown
from ..errors import ConfigError
from .groups import AttentionKind

ITEM_BYTES = {
    "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1,
}  # fmt: skip
"""Bytes of an element, by the name of its dtype in torch."""
_ELEMENTS = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8": "int8",
    "fp8_ds_mla": "uint8",
}
_SCALES = {
    "fp8_e4m3": ("per_tensor", "per_token_head"),
    "fp8_e5m2": ("per_tensor", "per_token_head"),
    "int8": ("per_token_head",),
    "fp8_ds_mla": ("in_row",),
}
"""The scale modes of each quantized dtype, the default first. The other dtypes have no scales."""
SCALES = ("none", "per_tensor", "per_token_head", "in_row")
LAYOUTS = ("NHD", "HND")


@attrs.frozen
class KVFormat:
    """A dtype of the KV cache with its scales.

    Scales per tensor are constants of the model, so no block holds them. Scales per token and head are a region of
    their own. Rows of `fp8_ds_mla` hold their scales themselves.
    """

    dtype: str
    """As the argument `dtype` of `groups_of` gives it, and never "auto"."""
    scales: str

    @classmethod
    def of(cls, dtype: object, scales: object, model_dtype: str | None) -> KVFormat:
        """`model_dtype`: the dtype of the weights, for "auto". `ConfigError` names the argument that is wrong."""
        if dtype == "auto":
            if model_dtype not in ("bfloat16", "float16", "float32"):
                problem = f"is 'auto', but the config gives no dtype of 16 or 32 bits ({shown(model_dtype)})"
                raise ConfigError("dtype", f"{problem}: give {', '.join(_ELEMENTS)}")
            dtype = model_dtype
        if not isinstance(dtype, str) or dtype not in _ELEMENTS:
            raise ConfigError("dtype", f"must be one of auto, {', '.join(_ELEMENTS)}; got {shown(dtype)}")
        allowed = _SCALES.get(dtype, ("none",))
        if scales == "auto":
            scales = allowed[0]
        if not isinstance(scales, str) or scales not in allowed:
            raise ConfigError("scales", f"must be auto or {' or '.join(allowed)} for {dtype}; got {shown(scales)}")
        return cls(dtype, scales)

    @property
    def element(self) -> str:
        """The dtype of stored elements in torch."""
        return _ELEMENTS[self.dtype]

    @property
    def is_ds_mla(self) -> bool:
        return self.dtype == "fp8_ds_mla"


@attrs.frozen
class LayerPart:
    """A named part of the KV of one layer: for each token, and all tensor parallel ranks together."""

    holds: str
    """Such as "keys and values", "latent" or "indexer keys"."""
    size: int
    """Elements of a head, or of the one vector of a token."""
    dtype: str
    heads: int = 0
    """0: one vector a token, which every rank holds."""
    sides: int = 1
    """2: keys and values, one after the other in a block."""

    def rank_heads(self, tensor_parallel_size: int) -> int:
        """The heads that one rank holds. Raises `ConfigError` if the ranks cannot hold equal numbers of heads."""
        more, fewer = max(self.heads, tensor_parallel_size), min(self.heads, tensor_parallel_size)
        if fewer and more % fewer:
            problem = f"is {tensor_parallel_size}, which neither divides the {self.heads} KV heads nor is a multiple"
            raise ConfigError("tensor_parallel_size", f"{problem} of their number")
        return max(1, self.heads // tensor_parallel_size) if self.heads else 0

    def num_replicas(self, tensor_parallel_size: int) -> int:
        """The number of ranks that hold the same bytes."""
        return max(1, tensor_parallel_size // self.heads) if self.heads else tensor_parallel_size

    def token_bytes(self, tensor_parallel_size: int) -> int:
        heads = self.rank_heads(tensor_parallel_size) if self.heads else 1
        return self.sides * heads * self.size * ITEM_BYTES[self.dtype]

    def shape(self, block_size: int, layout: str, tensor_parallel_size: int) -> tuple[int, ...]:
        """The shape of a block on one rank."""
        if not self.heads:
            return (block_size, self.size)
        heads = self.rank_heads(tensor_parallel_size)
        axes = (block_size, heads) if layout == "NHD" else (heads, block_size)
        return (self.sides,) * (self.sides > 1) + axes + (self.size,) * (self.holds != SCALES_PART)


SCALES_PART = "scales"


@attrs.frozen
class LayerKV:
    """The stored parts of one layer, and its attention kind."""

    attention: AttentionKind
    parts: tuple[LayerPart, ...]


def heads_parts(form: KVFormat, heads: int, key_size: int, value_size: int) -> tuple[LayerPart, ...]:
    """The parts of a layer with keys and values by head. They are one part if both have one size."""
    if form.is_ds_mla:
        problem = "cannot be 'fp8_ds_mla', a format of latents, because the model has keys and values by head"
        raise ConfigError("dtype", problem)
    if key_size == value_size:
        found = [LayerPart("keys and values", key_size, form.element, heads, sides=2)]
    else:
        found = [LayerPart("keys", key_size, form.element, heads), LayerPart("values", value_size, form.element, heads)]
    if form.scales == "per_token_head":
        found.append(LayerPart(SCALES_PART, 1, "float32", heads, sides=2))
    return tuple(found)


def latent_part(form: KVFormat, rank: int, rope_size: int) -> LayerPart:
    """The latent of multi-head latent attention (MLA): `rank` elements and the `rope_size` rotary ones of the key."""
    check_latents(form)
    if not form.is_ds_mla:
        return LayerPart("latent", rank + rope_size, form.element)
    if rank % 128:
        raise ConfigError("dtype", f"is 'fp8_ds_mla', which scales 128 elements at once, but a latent has {rank}")
    return LayerPart("latent", rank + 4 * (rank // 128) + 2 * rope_size, "uint8")


def check_latents(form: KVFormat) -> None:
    if form.dtype == "int8":
        raise ConfigError("dtype", "cannot be 'int8', because its scales are by head and a latent has no heads")
    if form.scales == "per_token_head":
        raise ConfigError("scales", "cannot be 'per_token_head', because a latent has no heads")


def indexer_part(index_size: int) -> LayerPart:
    """The indexer key of DeepSeek's sparse attention: fp8 elements, and a float32 scale for 128 of them."""
    return LayerPart("indexer keys", index_size + 4 * (index_size // 128), "uint8")
