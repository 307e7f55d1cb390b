"""vLLM's configurations, as far as the connector reads them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from engine_doubles import BLOCK, kv_tensor
from vllm_doubles import interface

MODEL = "m"
HEADS = {"num_kv_heads": 1, "head_size": 8, "block_size": BLOCK}


def eagle(num_drafts: int = 3, *, num_ahead: int = 1, drops_block: bool = True) -> Any:
    """A speculative configuration whose draft layers read `num_ahead` tokens ahead."""
    return SimpleNamespace(
        method="eagle",
        num_speculative_tokens=num_drafts,
        num_ahead=num_ahead,
        use_eagle=lambda: True,
        use_eagle_block_drop=lambda: drops_block,
        draft_model_config=SimpleNamespace(model=MODEL, compute_hash=lambda: "draft"),
    )


def vllm_config(
    num_ranks: int = 1,
    rank: int = 0,
    *,
    most_step_tokens: int = 1,
    drafts: Any = None,
    has_events: bool = False,
    **extra: Any,
) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector="AoffloadConnector",
            kv_load_failure_policy="recompute",
            kv_role="kv_both",
            is_kv_producer=True,
            kv_connector_extra_config={"num_host_blocks": 64, **extra},
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True, cache_dtype="auto", mamba_cache_mode="none"),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            world_size=num_ranks,
            tensor_parallel_size=num_ranks,
            distributed_executor_backend="mp" if num_ranks > 1 else "uni",
            nnodes=1,
            rank=rank,
            pipeline_parallel_size=1,
            data_parallel_size=1,
        ),
        model_config=SimpleNamespace(
            model=MODEL,
            revision=None,
            dtype="float32",
            compute_hash=lambda: "model",
            is_hybrid=False,
            enable_sleep_mode=False,
            multimodal_config=None,
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=most_step_tokens),
        attention_config=SimpleNamespace(compute_hash=lambda: "attention"),
        speculative_config=drafts,
        num_prefill_lookahead_tokens=drafts.num_ahead if drafts else 0,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True) if has_events else None,
        lora_config=SimpleNamespace(max_cpu_loras=2),
    )


def kv_cache_config(
    num_blocks: int, windows: tuple[int, ...] = (0,), *, has_latents: bool = False, **fields: Any
) -> Any:
    """A group of full attention for each 0 of `windows`, and one with a window for each other number. `has_latents`:
    full attention is that of MLA."""
    full = interface.MLAAttentionSpec if has_latents else interface.FullAttentionSpec

    def spec(window: int) -> Any:
        if window:
            return interface.SlidingWindowSpec(**HEADS, dtype=torch.uint8, sliding_window=window)
        return full(**HEADS, dtype=torch.uint8)

    found = {
        "num_blocks": num_blocks,
        "kv_cache_tensors": [kv_tensor(num_blocks)[1]],
        "kv_cache_groups": [SimpleNamespace(kv_cache_spec=spec(window)) for window in windows],
        "prefix_cacheable_group_ids": tuple(range(len(windows))),
    }
    return SimpleNamespace(**found | fields)
