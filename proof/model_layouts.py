"""Known models in an engine of your own, in the reference engine, and under vLLM.

    python -m proof.model_layouts   writes the tables of tests/model_layouts.md

The first column of answers is that of `groups_of` for the configurations in tests/model_configs. The second one is read
from the table of types in tests/model_types.md, which `python -m proof.model_types` makes. The column of vLLM runs the
connector's check on the kinds of KV cache group that vLLM makes for such layers. A second table has the sizes of
recurrent states.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from aoffload import ChunkedLocal, ConfigError, FullAttention, ModelLayout, SlidingWindow, groups_of

__all__ = ["BEGIN", "END", "PAGE", "page_with_table", "rows", "state_rows", "types_served"]

ROOT = Path(__file__).parents[1]
PAGE, TYPES, CONFIGS = (ROOT / "tests" / name for name in ("model_layouts.md", "model_types.md", "model_configs"))
BEGIN, END = "<!-- layouts: python -m proof.model_layouts -->\n", "<!-- end of layouts -->\n"
STATES_BEGIN, STATES_END = "<!-- states: python -m proof.model_layouts -->\n", "<!-- end of states -->\n"
STATES_HEAD = (
    "Model | Layers with a state; with attention | A checkpoint | KV of a token "
    "| Tokens whose KV weighs as much as a checkpoint | Blocks of a checkpoint\n---|---|---|---|---|---\n"
)
HEAD = "Model | Your engine: `groups_of` | Reference engine: `load_model` | vLLM connector\n---|---|---|---\n"
LATENTS = ("latent", "compressed latent", "compressor state", "indexer state")
KINDS = {
    FullAttention: "full_attention", SlidingWindow: "sliding_window", ChunkedLocal: "chunked_local_attention",
}  # fmt: skip


def rows() -> list[str]:
    """A row for each configuration."""
    served = types_served(TYPES.read_text())
    return [row_of(path, served) for path in sorted(CONFIGS.glob("*.json"), key=lambda path: path.name.lower())]


def row_of(path: Path, served: dict[str, str]) -> str:
    config = json.loads(path.read_text())
    model_types = [part["model_type"] for part in (config.get("text_config", config), config)]
    name = path.stem.partition("--")[2]
    reference = next((served[each] for each in model_types if each in served), "not in transformers")
    try:
        model = groups_of(config)
    except ConfigError as error:
        is_recurrent = "recurrent state" in error.problem
        ours = f"refused: {error.problem.partition(' has ')[2].partition(':')[0]}" if is_recurrent else error.problem
        return f"{name} | {ours} | {reference} | {under_vllm([], has_mamba_layers=is_recurrent)}\n"
    answer = under_vllm(specs_of(model))
    return f"{name} | {described(model)} | {reference} | {answer}\n"


def state_rows() -> list[str]:
    """A row for each configuration with recurrent layers."""
    found = []
    for path in sorted(CONFIGS.glob("*.json"), key=lambda path: path.name.lower()):
        with suppress(ConfigError):
            model = groups_of(path)
            if model.states:
                found.append(state_row(path.stem.partition("--")[2], model))
    return found


def state_row(name: str, model: ModelLayout) -> str:
    (attention, recurrent), (_, group) = model.layers, model.groups
    cells = (
        name,
        f"{len(recurrent)}; {len(attention)}",
        f"{model.state_bytes / 2**20:.1f} MiB",
        f"{model.bytes_per_token / 1024:.0f} KiB",
        f"{model.state_bytes / model.bytes_per_token:,.0f}",
        f"{group.num_rows:,} of {group.block_size} tokens",
    )
    return " | ".join(cells) + "\n"


def described(model: ModelLayout) -> str:
    """The groups by kind, and what their layers store."""
    found = [(group.name.rpartition("-")[0] or group.name, group) for group in model.groups if not group.is_recurrent]
    kinds = []
    for _, members in groupby(found, key=lambda each: (repr(each[1].attention), each[1].block_size)):
        same = [group for _, group in members]
        number = "1 group" if len(same) == 1 else f"{len(same)} groups"
        kinds.append(f"{_attention(same[0].attention)}: {number}, blocks of {same[0].block_size}")
    holds = dict.fromkeys(view.holds for region in model.regions for view in region.views)
    states = f"; state: {len(model.layers[-1])} layers, {model.groups[-1].num_rows:,} blocks" if model.states else ""
    return f"{'; '.join(kinds)} ({', '.join(holds)}){states}"


def _attention(attention: Any) -> str:
    if isinstance(attention, SlidingWindow):
        return f"window {attention.window}"
    return f"chunk {attention.chunk}" if isinstance(attention, ChunkedLocal) else "full"


def types_served(page: str) -> dict[str, str]:
    """ "served" or "refused" for each type, from the table of types."""
    table = page.partition("<!-- types:")[2].partition("<!-- end of types -->")[0]
    cells = [line.split(" | ") for line in table.splitlines() if line.count(" | ") == 2]
    return {kind: verdict for kind, verdict, _ in cells[1:]}


# -- the connector ---------------------------------------------------------------------------------------------------


def specs_of(model: ModelLayout) -> list[Any]:
    """A KV cache group of vLLM for each group, by the kind that vLLM gives to such layers."""
    found = []
    for group in model.groups:
        views = [view for region in model.regions for view in region.views if view.group == group.name]
        if group.is_recurrent:
            spec = SimpleNamespace(kind="mamba", mamba_cache_mode="align", num_speculative_blocks=0)
            found.append(SimpleNamespace(**vars(spec), block_size=group.block_size, dcp_sharded=False))
            continue
        kind = KINDS[type(group.attention)]
        if any(view.holds in LATENTS for view in views):
            kind = {"full_attention": "mla_attention", "sliding_window": "sliding_window_mla"}[kind]
        reach = getattr(group.attention, "window", getattr(group.attention, "chunk", None))
        found.append(
            SimpleNamespace(
                kind=kind,
                block_size=group.block_size,
                dcp_sharded=False,
                window=reach,
                attention_chunk_size=reach,
                extra_retained_tokens=0,
            )
        )
    return found


def under_vllm(specs: list[Any]) -> str:
    """The answer of the connector's own check of vLLM's groups."""
    from aoffload._vllm.groups import CachedGroups

    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    config = SimpleNamespace(
        kv_cache_groups=groups,
        prefix_cacheable_group_ids=list(range(len(groups))),
    )
    with _vllm_interface():
        try:
            found = CachedGroups.of(config, 1)
        except ConfigError as error:
            return f"refused: {error.problem}"
    assert len(found.groups) == len(specs)
    return f"served: {', '.join(dict.fromkeys(spec.kind for spec in specs))}"


@contextmanager
def _vllm_interface() -> Iterator[None]:
    """A stand-in for the two functions of vLLM that tell the kind and the window of a group, where vLLM is missing."""
    interface = ModuleType("vllm.v1.kv_cache_interface")
    interface.get_kv_cache_spec_kind = lambda spec: SimpleNamespace(value=spec.kind)  # type: ignore[attr-defined]
    interface.get_kv_cache_spec_sliding_window = lambda spec: spec.window  # type: ignore[attr-defined]
    modules = {"vllm": ModuleType("vllm"), "vllm.v1": ModuleType("vllm.v1"), interface.__name__: interface}
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def page_with_table() -> str:
    """The text of tests/model_layouts.md with these tables in place of the old ones."""
    text = PAGE.read_text()
    states = f"{STATES_BEGIN}\n{STATES_HEAD}{''.join(state_rows())}{STATES_END}"
    text = f"{text.split(STATES_BEGIN)[0]}{states}{text.split(STATES_END)[1]}"
    return f"{text.split(BEGIN)[0]}{BEGIN}\n{HEAD}{''.join(rows())}{END}{text.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page_with_table())
