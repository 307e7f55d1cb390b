"""Mutants of the connector for vLLM. Their tests run where vLLM is not installed, over stand-ins for its classes."""

from __future__ import annotations

from .mutants_vllm_copies import VLLM_COPY_MUTANTS
from .mutants_vllm_events import VLLM_EVENT_MUTANTS
from .mutants_vllm_frees import VLLM_FREES_MUTANTS
from .mutants_vllm_rest import VLLM_OTHER_MUTANTS
from .mutants_vllm_scheduler import VLLM_SCHEDULER_MUTANTS
from .mutants_vllm_sleep import VLLM_SLEEP_MUTANTS
from .mutants_vllm_versions import VLLM_VERSION_MUTANTS

__all__ = ["VLLM_MUTANTS"]

VLLM_MUTANTS = (
    VLLM_SCHEDULER_MUTANTS + VLLM_COPY_MUTANTS + VLLM_SLEEP_MUTANTS + VLLM_EVENT_MUTANTS + VLLM_FREES_MUTANTS
    + VLLM_VERSION_MUTANTS + VLLM_OTHER_MUTANTS
)  # fmt: skip
