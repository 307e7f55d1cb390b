"""The model for a GPU: what of it can be seen without one, and the demo with a small one in its place."""

from __future__ import annotations

import json
import math
from pathlib import Path

import attrs
import pytest
import torch

from aoffload._reference.engine import models
from aoffload._reference.engine.decoder import ONE_BILLION, Decoder, DecoderConfig
from aoffload.demo.command import main
from aoffload.integrations import load_model


def weights(model: Decoder) -> list[torch.Tensor]:
    layers = [tensor for layer in model.layers for tensor in attrs.asdict(layer, recurse=False).values()]
    return [model.embedding, model.norm, model.head, *layers]


def test_it_has_a_billion_weights_in_bfloat16() -> None:
    """Counted in the tensors themselves, on a device that gives them shapes and no memory."""
    model = load_model("1b", device="meta")
    assert isinstance(model, Decoder)
    assert {tensor.dtype for tensor in weights(model)} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in weights(model)) == ONE_BILLION.num_weights >= 1_000_000_000
    kv_cache = model.new_kv_cache(3, 16)
    assert (kv_cache.dtype, kv_cache[0].nbytes) == (torch.bfloat16, 16 * 32 * 1024)


def test_weights_are_counted_right_for_any_size() -> None:
    """What a configuration says of its size is what its tensors hold."""
    config = DecoderConfig(num_layers=2, vocab_size=100)
    assert sum(tensor.numel() for tensor in weights(Decoder(config, seed=0))) == config.num_weights


SMALL = DecoderConfig(
    vocab_size=512, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    dtype=torch.bfloat16,
)  # fmt: skip


def test_the_demo_gives_equal_bits_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same requests with and without offload; the share of the time to first token stands below the table."""
    monkeypatch.setattr(models, "ONE_BILLION", SMALL)
    found = tmp_path / "found.json"
    assert main(["--model", "1b", "--requests", "16", "--json", str(found)]) == 0
    result = json.loads(found.read_text())
    assert result["outputs_identical"] and result["host_hit_tokens"] > 0
    times = result["ttft_s"]["p50"], result["ttft_s_without_offload"]["p50"]
    assert math.isclose(result["ttft_share"], times[0] / times[1], rel_tol=1e-6)
    assert "p50 with offload over p50 without: " in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a CUDA device")
def test_without_a_device_it_is_not_loaded(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command says so at once, and exits with status 2."""
    monkeypatch.setattr(models, "Decoder", lambda *args, **kwargs: pytest.fail("it was made"))
    with pytest.raises(SystemExit) as left:
        main(["--model", "1b", "--device", "cuda"])
    assert left.value.code == 2
    assert "argument --device: torch does not find a CUDA device" in capsys.readouterr().err
