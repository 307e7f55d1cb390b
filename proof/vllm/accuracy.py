"""vLLM's own `_accuracy_test` with our connector: `python -m proof.vllm.accuracy FOLDER MODEL`, in its own process.

It waits until copies are over by sleeping, so the engine has to run in a process beside this one. It is content when
half of the outputs are right; here all have to be, and every prompt has to come from the host.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from .transfers import OURS

__all__ = ["main"]

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1")
os.environ.update(OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")


class _Recording:
    """vLLM's `LLM`, and what it has answered."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.outputs: list[Any] = []

    def generate(self, *arguments: Any, **options: Any) -> list[Any]:
        found: list[Any] = self._llm.generate(*arguments, **options)
        self.outputs += found
        return found

    def reset_prefix_cache(self) -> bool:
        return bool(self._llm.reset_prefix_cache())


def main(folder: str, model: str) -> None:
    from vllm import LLM
    from vllm.config import KVTransferConfig
    from vllm.platforms import current_platform

    sys.path.insert(0, folder)
    helpers = {"tests.models": mock.Mock(), "tests.models.utils": mock.Mock()}  # only its other tests call them
    is_cuda = mock.patch.object(type(current_platform), "is_cuda_alike", return_value=True)  # else it skips itself
    with is_cuda, mock.patch.dict(sys.modules, helpers):
        import test_integration
    # Copies are over within milliseconds here.
    test_integration.time = SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 10))
    llm = LLM(
        model=model, dtype="float32", enforce_eager=True, block_size=32, num_gpu_blocks_override=100,
        max_model_len=2400, kv_transfer_config=KVTransferConfig(**OURS),
    )  # fmt: skip
    recording = _Recording(llm)
    test_integration._accuracy_test(recording)
    first, *again = recording.outputs
    right = [output for output in again if output.outputs[0].token_ids == first.outputs[0].token_ids]
    cached = [output.num_cached_tokens for output in again]
    about = {"runs": len(again), "right": len(right), "cached": cached, "prompt": len(first.prompt_token_ids)}
    Path(folder, "accuracy.json").write_text(json.dumps(about))


if __name__ == "__main__":
    main(*sys.argv[1:])
