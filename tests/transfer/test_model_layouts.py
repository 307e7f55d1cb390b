"""Models in the layouts of engines: the bytes of every block come back from a disk."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from model_tensors import (
    FORMS,
    MODELS,
    ModelTensors,
    blocks_for,
    compute,
    inside,
    layout_of,
    loaded,
    runtime_on,
    unit_tokens,
)

pytest.importorskip("xxhash", reason="the extra `disk` is not installed")

from aoffload import KVCacheGroup, KVRegion
from aoffload._kernel.layout import Layout
from aoffload._transfer.region import identity_of
from aoffload.errors import RegionError

RECURRENT = {
    "Qwen--Qwen3.5-27B", "Qwen--Qwen3.5-397B-A17B", "moonshotai--Kimi-K3",
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
}  # fmt: skip
GEMMA, MIMO, LLAMA = "google--gemma-4-26B-A4B", "XiaomiMiMo--MiMo-V2-Flash", "meta-llama--Meta-Llama-3.1-8B"
V3, V32, V4 = (f"deepseek-ai--DeepSeek-{version}" for version in ("V3", "V3.2", "V4-Pro"))
MINIMAX = "MiniMaxAI--MiniMax-M3"
LATENT = {V3, V32}

FEW_LAYERS: dict[str, Any] = {
    name: {"num_hidden_layers": number} for name, number in [(V4, 3), (V32, 12), (MINIMAX, 8)]
}
"""Blocks of these have megabytes with all layers."""
RANKS = {LLAMA: 4, "Qwen--Qwen3-8B": 4, "meta-llama--Llama-4-Scout-17B-16E-Instruct": 4, MINIMAX: 2, GEMMA: 2}


def cases() -> list[Any]:
    found = []
    for model in sorted({*MODELS} - RECURRENT):
        forms = {V4: ["inside"], MIMO: ["inside", "token rows"]}.get(model, list(FORMS))
        forms = ["inside", "token rows"] if model in LATENT else forms
        for form in forms:
            options = {"layout": "HND"} if form == "heads first view" else {}
            found.append(pytest.param(model, form, options, id=f"{model}, {form}"))
    found += [
        pytest.param(model, "inside", options, id=f"{model}, {'-'.join(options.values())}")
        for model, options in [
            (LLAMA, {"layout": "HND"}),
            (LLAMA, {"dtype": "fp8_e4m3"}),
            (LLAMA, {"dtype": "fp8_e4m3", "scales": "per_token_head"}),
            (GEMMA, {"dtype": "int8"}),
            (MIMO, {"dtype": "int8", "layout": "HND"}),
            (V3, {"dtype": "fp8_ds_mla"}),
            (V32, {"dtype": "fp8_ds_mla"}),
            (V4, {"dtype": "fp8_ds_mla"}),
        ]
    ]
    return found


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
@pytest.mark.parametrize(("model", "form", "options"), cases())
async def test_every_block_comes_back(model: str, form: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Random bytes go from the device to host memory and to the disk. A new runtime over empty tensors loads them, and
    each block that its groups read has the bytes that were written."""
    found = layout_of(model, FEW_LAYERS.get(model), tensor_parallel_size=RANKS.get(model, 1), **options)
    unit = unit_tokens(found)
    prompt = list(range(unit * (1 if model == V4 else 2) + 1))
    before = ModelTensors.of(found, FORMS[form], blocks_for(found, len(prompt)))
    async with runtime_on(before, tmp_path / "disk") as runtime:
        written = await compute(runtime, before, prompt, seed=1)
    after = ModelTensors.of(found, FORMS[form], before.num_blocks)
    async with runtime_on(after, tmp_path / "disk") as runtime:
        assert runtime.lookup(prompt).num_lower_tokens == len(prompt) - 1
        num_tokens, blocks = await loaded(runtime, after, prompt)
    assert num_tokens == len(prompt) - 1
    for ours, theirs in zip(blocks, written, strict=True):
        assert ours
        for position, content in ours.items():
            assert content == theirs[position]
            assert any(any(part) for part in content)


@pytest.mark.parametrize("model", sorted(RECURRENT))
def test_regions_of_layers_with_attention_hold_a_checkpoint(model: str) -> None:
    """The regions of a hybrid model are given as those of any other, and `num_rows` of their blocks hold a checkpoint.
    Without the last block, its end would be lost."""
    found = layout_of(model)
    regions = KVRegion.of_model(found, ModelTensors.of(found, inside, 3).given)
    rows = found.groups[-1].num_rows
    block_bytes = sum(region.block_bytes for region in regions)
    assert block_bytes * (rows - 1) < found.state_bytes <= block_bytes * rows


SMALL = {"num_hidden_layers": 2}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dtype": ({}, {"dtype": "float16"}),
    "fp8": ({}, {"dtype": "fp8_e4m3"}),
    "fp8 of another kind": ({}, {"dtype": "fp8_e5m2"}),
    "scale mode": ({}, {"dtype": "fp8_e4m3", "scales": "per_token_head"}),
    "block size": ({}, {"block_size": 32}),
    "layout": ({}, {"layout": "HND"}),
    "tensor parallel size": ({}, {"tensor_parallel_size": 2}),
    "head size": ({"head_dim": 64}, {}),
    "KV heads": ({"num_key_value_heads": 4}, {}),
    "windows": (SLIDING, {}),
    "another window": ({**SLIDING, "sliding_window": 48}, {}),
}


def test_every_change_of_the_bytes_changes_the_fingerprint() -> None:
    """No two of these layouts have one fingerprint, so a namespace with it never mixes them. The same arguments give
    the same text in every process, because directories outlive processes."""
    found = {name: layout_of(LLAMA, SMALL | fields, **options) for name, (fields, options) in CHANGES.items()}
    found["none"] = layout_of(LLAMA, SMALL)
    assert len({each.fingerprint for each in found.values()}) == len(CHANGES) + 1
    assert found["none"].fingerprint == layout_of(LLAMA, SMALL).fingerprint
    assert found["none"].fingerprint == FINGERPRINT
    latents = [layout_of(V3, SMALL, dtype=dtype) for dtype in ("auto", "fp8_e4m3", "fp8_ds_mla")]
    assert len({each.fingerprint for each in latents}) == 3


FINGERPRINT = "llama kv=bfloat16 scales=none layout=NHD tp=1 1dbba6461b6ddd6cb6332f2e2ccd199c"


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
@pytest.mark.parametrize("change", CHANGES)
async def test_a_disk_of_another_layout_is_a_miss(change: str, tmp_path: Path) -> None:
    """A disk that was written with one layout has no hit for another one."""
    fields, options = CHANGES[change]
    first, other = layout_of(LLAMA, SMALL), layout_of(LLAMA, SMALL | fields, **options)
    prompt = list(range(65))
    before = ModelTensors.of(first, inside, blocks_for(first, 65))
    async with runtime_on(before, tmp_path / "disk") as runtime:
        await compute(runtime, before, prompt, seed=1)
    async with runtime_on(ModelTensors.of(first, inside, before.num_blocks), tmp_path / "disk") as runtime:
        assert runtime.lookup(prompt).num_lower_tokens == 64
    async with runtime_on(ModelTensors.of(other, inside, blocks_for(other, 65)), tmp_path / "disk") as runtime:
        assert runtime.lookup(prompt).num_lower_tokens == 0


@pytest.mark.anyio
async def test_a_view_of_another_layout_is_a_miss(tmp_path: Path) -> None:
    """Tensors of one shape whose heads and tokens are swapped in memory have other bytes in a block. The disk tells
    them apart even if the namespace does not."""
    nhd, hnd = layout_of(LLAMA, SMALL), layout_of(LLAMA, SMALL, layout="HND")
    prompt = list(range(65))
    before = ModelTensors.of(nhd, inside, blocks_for(nhd, 65))
    async with runtime_on(before, tmp_path / "disk", "one name") as runtime:
        await compute(runtime, before, prompt, seed=1)
    after = ModelTensors.of(hnd, FORMS["heads first view"], before.num_blocks)
    assert [region.block_shape for region in after.regions()] == [region.block_shape for region in before.regions()]
    async with runtime_on(after, tmp_path / "disk", "one name") as runtime:
        assert runtime.lookup(prompt).num_lower_tokens == 0


def test_the_identity_of_contiguous_tensors_is_frozen() -> None:
    """The identity of a directory or a store names the order of axes only where it is not the usual one. It is frozen
    for contiguous tensors, because directories outlive versions."""
    layout = Layout.of([KVCacheGroup("all", block_size=4)])

    def identity(tensor: torch.Tensor, axis: int = 0) -> str:
        return identity_of(layout, "name", KVRegion.all_of(tensor, axis)).replace(sys.byteorder, "order")

    plain = torch.zeros(3, 2, 4, 5, 6)
    assert identity(plain) == (
        "('name', ['aoffload._config.groups.FullAttention FullAttention()'], [(0, 0)], "
        "[('torch.float32', (2, 4, 5, 6), 960)], 'order')"
    )
    assert identity(plain[:, :, :, :1]) != identity(plain)
    assert identity(torch.zeros(2, 3, 4, 5, 6), 1) == (
        "('name', ['aoffload._config.groups.FullAttention FullAttention()'], [(0, 0)], "
        "[('torch.float32', (4, 5, 6), 480), ('torch.float32', (4, 5, 6), 480)], 'order')"
    )
    swapped = torch.zeros(3, 2, 5, 4, 6).transpose(2, 3)
    assert swapped.shape == plain.shape and identity(swapped) != identity(plain)
    one_head = torch.zeros(3, 2, 1, 4, 6)
    assert identity(one_head.transpose(2, 3)) == identity(one_head.reshape(3, 2, 4, 1, 6))


# -- regions by name -------------------------------------------------------------------------------------------------


def given_for(model: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    found = layout_of(model, SMALL, **options)
    return found, dict(ModelTensors.of(found, inside, 3).given)


def test_a_forgotten_region_is_named() -> None:
    """Indexer keys and scales travel with the block id of what they belong to: without them a hit would be wrong."""
    for model, options, name in [
        (V32, {}, "layer 1 indexer keys"),
        (LLAMA, {"dtype": "int8"}, "layer 0 scales"),
        (LLAMA, {}, "layer 1 keys and values"),
    ]:
        found, given = given_for(model, **options)
        assert len(KVRegion.of_model(found, given)) == len(found.regions)
        del given[name]
        with pytest.raises(
            RegionError, match=rf"^kv_caches\['{name}'\]: is missing: \w+ stores it with the same block"
        ):
            KVRegion.of_model(found, given)


def test_a_superfluous_region_is_named() -> None:
    """A tensor that the model does not have would be copied for nothing, or its name is misspelled."""
    found, given = given_for(LLAMA)
    problem = r"^kv_caches\['layer 2'\]: llama has no region of this name; it has layer 0 keys and values, layer 1"
    with pytest.raises(RegionError, match=problem):
        KVRegion.of_model(found, given | {"layer 2": torch.zeros(3, 4)})
    with pytest.raises(RegionError, match=r"^kv_caches: must be a mapping"):
        KVRegion.of_model(found, list(given.values()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("member", "problem"),
    [
        (torch.zeros(3, 2, 16, 8, 64, dtype=torch.bfloat16), "blocks of 32768 bytes; those of the model have 65536"),
        (torch.zeros(3, 2, 16, 8, 128, dtype=torch.float16), "has dtype float16, but the model stores bfloat16"),
        (torch.zeros(3, 2, 8, 16, 128, dtype=torch.bfloat16), r"in the order \[2, 8, 16, 128\].*\[2, 16, 8, 128\]"),
        (torch.zeros(3, 2, 8, 16, 128, dtype=torch.bfloat16).transpose(2, 3), r"in the order \[2, 8, 16, 128\]"),
        (torch.zeros(4, 2, 16, 8, 128, dtype=torch.bfloat16), "has 3 blocks, .* has 4: they must be equal"),
        ([torch.zeros(3, 16, 8, 128, dtype=torch.bfloat16)], "blocks of 32768 bytes"),
        ([], "blocks of 0 bytes"),
        ("keys", "must be a torch tensor, got str"),
        (None, "must be a torch tensor, got NoneType"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(getattr(value, "shape", value))[:30],
)
def test_a_region_that_differs_from_its_spec_is_named(member: Any, problem: str) -> None:
    """In the bytes of a block, the dtype, the order of axes, or the number of blocks."""
    found, given = given_for(LLAMA)
    with pytest.raises(RegionError, match=rf"^kv_caches\['layer [01] keys and values'\](\[0\])?: .*{problem}"):
        KVRegion.of_model(found, {**given, "layer 0 keys and values": member})


def test_bytes_serve_for_each_dtype_of_eight_bits() -> None:
    """Engines keep fp8 in tensors of `uint8`."""
    found, given = given_for(LLAMA, dtype="fp8_e4m3")
    assert given["layer 0 keys and values"].dtype == torch.float8_e4m3fn
    given["layer 0 keys and values"] = given["layer 0 keys and values"].view(torch.uint8)
    assert len(KVRegion.of_model(found, given)) == 2
    given["layer 0 keys and values"] = given["layer 0 keys and values"].view(torch.float8_e5m2)
    with pytest.raises(RegionError, match="has dtype float8_e5m2"):
        KVRegion.of_model(found, given)
