"""A small decoder in plain torch: RMSNorm, rotary positions, grouped-query attention, SwiGLU, seeded random weights."""

from __future__ import annotations

import attrs
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from .layers import LayerGroup, LayerPlace
from .paged import PagedBatch, paged_attention


@attrs.frozen(kw_only=True)
class DecoderConfig:
    """Sizes of the decoder. The default has 6.6 million weights and 3 KiB of KV per token."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 6
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    max_positions: int = 8192
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    initializer_range: float = 0.06
    """Standard deviation of the weights. With the usual 0.02 random models degenerate to a few tokens."""
    logit_std: float = 0.4
    """Approximate standard deviation of the logits (the output layer gets vectors of unit mean square)."""
    dtype: torch.dtype = torch.float32
    """Dtype of weights, activations and KV. Logits are always float32."""

    @property
    def num_weights(self) -> int:
        heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (heads + 3 * self.intermediate_size + 2)
        return self.num_layers * layer + self.hidden_size * (2 * self.vocab_size + 1)


ONE_BILLION = DecoderConfig(
    vocab_size=32_768, hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32, num_kv_heads=8,
    head_dim=64, rope_theta=500_000.0, initializer_range=0.02, dtype=torch.bfloat16,
)  # fmt: skip
"""1.1 billion weights, 2.2 GB, and 32 KiB of KV per token: the shape of small models that people serve, for a GPU."""


@attrs.frozen(eq=False)
class DecoderLayer:
    """Weights of one layer, in the layout of `torch.nn.functional.linear`: [out, in]."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Decoder:
    """A `PagedModel` without dropout or biases. Input and output embeddings are not tied.

    On the device `meta`, weights have shapes and no values.
    """

    def __init__(self, config: DecoderConfig, *, seed: int, device: torch.device | str = "cpu") -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        self.end_token_ids: frozenset[int] = frozenset()
        self.groups: tuple[LayerGroup, ...] = (LayerGroup("full", tuple(range(config.num_layers))),)
        self.device = torch.device(device)
        # Drawn on the CPU, so that a seed gives the same weights on every device.
        generator = torch.Generator().manual_seed(seed)

        def draw(num_out: int, num_in: int, std: float = config.initializer_range) -> torch.Tensor:
            if self.device.type == "meta":
                return torch.empty(num_out, num_in, dtype=config.dtype, device=self.device)
            return (torch.randn(num_out, num_in, generator=generator) * std).to(self.device, config.dtype)

        def ones() -> torch.Tensor:
            return torch.ones(config.hidden_size, dtype=config.dtype, device=self.device)

        num_queries, num_keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.embedding = draw(config.vocab_size, config.hidden_size)
        self.layers = [
            DecoderLayer(
                attention_norm=ones(),
                qkv=draw(num_queries + 2 * num_keys, config.hidden_size),
                output=draw(config.hidden_size, num_queries),
                mlp_norm=ones(),
                gate_up=draw(2 * config.intermediate_size, config.hidden_size),
                down=draw(config.hidden_size, config.intermediate_size),
            )
            for _ in range(config.num_layers)
        ]
        self.norm = ones()
        self.head = draw(config.vocab_size, config.hidden_size, config.logit_std / config.hidden_size**0.5)
        self.cos, self.sin = (table.to(self.device, config.dtype) for table in _rotary_tables(config))

    def new_kv_cache(self, num_blocks: int, block_size: int) -> torch.Tensor:
        """See `PagedModel.new_kv_cache`."""
        config = self.config
        shape = (num_blocks, config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim)
        return torch.zeros(shape, dtype=config.dtype, device=self.device)

    def forward(self, batch: PagedBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        """See `PagedModel.forward`. Positions must be below `max_positions`, or torch raises `IndexError`."""
        with torch.inference_mode():
            hidden = self.embedding[batch.input_ids]
            cos, sin = self.cos[batch.positions], self.sin[batch.positions]
            for index, layer in enumerate(self.layers):
                hidden = hidden + self._attention(layer, hidden, cos, sin, kv_cache, batch, LayerPlace(0, index, None))
                both = F.linear(self._normalise(hidden, layer.mlp_norm), layer.gate_up)
                gate, up = torch.split(both, self.config.intermediate_size, dim=-1)
                hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
            return F.linear(self._normalise(hidden[batch.last_rows], self.norm), self.head).float()

    def _attention(
        self,
        layer: DecoderLayer,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: PagedBatch,
        place: LayerPlace,
    ) -> torch.Tensor:
        config = self.config
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        packed = F.linear(self._normalise(hidden, layer.attention_norm), layer.qkv)
        query, key, value = torch.split(packed.view(len(hidden), sum(heads), config.head_dim), heads, dim=1)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        found = paged_attention(query, key, value, kv_cache, batch, place, scaling=config.head_dim**-0.5)
        return F.linear(found.flatten(1), layer.output)

    def _normalise(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, (hidden.shape[-1],), weight, self.config.norm_eps)


def _rotary_tables(config: DecoderConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [max_positions, 1, head_dim]. A table, so that the batch's shape cannot change their bits."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.arange(config.max_positions)[:, None] * config.rope_theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return angles.cos(), angles.sin()


def _rotate(vectors: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = torch.split(vectors, vectors.shape[-1] // 2, dim=-1)
    return vectors * cos + torch.cat((-right, left), dim=-1) * sin
