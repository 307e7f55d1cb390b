"""The planted defects: mistakes that a programmer could make here, each breaking a promise of the design.

Many of them restore the bug behind an incident that motivated the project. They measure the checkers: the more of them
a checker finds, the better it is.
"""

from __future__ import annotations

from .mutants_cache import CACHE_MUTANTS
from .mutants_call_sequences import CALL_SEQUENCE_MUTANTS
from .mutants_core_regressions import CORE_REGRESSION_MUTANTS
from .mutants_cuda import CUDA_MUTANTS
from .mutants_device_loss import DEVICE_LOSS_MUTANTS
from .mutants_diagnosis import DIAGNOSIS_MUTANTS
from .mutants_disk import DISK_MUTANTS
from .mutants_disk_core import DISK_CORE_MUTANTS
from .mutants_disk_erasure import DISK_ERASURE_MUTANTS
from .mutants_disk_regressions import DISK_REGRESSION_MUTANTS
from .mutants_disk_shell import DISK_SHELL_MUTANTS
from .mutants_drafts import DRAFT_MUTANTS
from .mutants_engine import ENGINE_MUTANTS
from .mutants_extensions import EXTENSION_MUTANTS
from .mutants_hints import HINT_MUTANTS
from .mutants_in_flight import IN_FLIGHT_MUTANTS
from .mutants_layouts import LAYOUT_MUTANTS
from .mutants_learned_eviction import LEARNED_EVICTION_MUTANTS
from .mutants_load_choice import LOAD_CHOICE_MUTANTS
from .mutants_model_loading import MODEL_LOADING_MUTANTS
from .mutants_overlap import OVERLAP_MUTANTS
from .mutants_pins import PIN_MUTANTS
from .mutants_plan import PLAN_MUTANTS
from .mutants_policies import POLICY_MUTANTS
from .mutants_quotas import QUOTA_MUTANTS
from .mutants_remote import REMOTE_CORE_MUTANTS
from .mutants_remote_regressions import REMOTE_REGRESSION_MUTANTS
from .mutants_remote_shell import REMOTE_SHELL_MUTANTS
from .mutants_remote_store import REMOTE_STORE_MUTANTS
from .mutants_shell import SHELL_MUTANTS
from .mutants_shell_regressions import SHELL_REGRESSION_MUTANTS
from .mutants_states import STATE_MUTANTS
from .mutants_submission import SUBMISSION_MUTANTS
from .mutants_tier_reports import TIER_REPORT_MUTANTS
from .mutants_transfers import TRANSFER_MUTANTS
from .mutants_vllm import VLLM_MUTANTS
from .mutants_vllm_regressions import VLLM_REGRESSION_MUTANTS
from .mutants_wait_queue import WAIT_QUEUE_MUTANTS
from .mutants_weights import WEIGHTS_MUTANTS
from .mutants_windows import WINDOW_MUTANTS
from .planting import Mutant

__all__ = ["MUTANTS"]

MUTANTS: tuple[Mutant, ...] = (
    CACHE_MUTANTS + CALL_SEQUENCE_MUTANTS + LOAD_CHOICE_MUTANTS + CUDA_MUTANTS + DISK_MUTANTS + DISK_CORE_MUTANTS
    + DISK_ERASURE_MUTANTS + DISK_SHELL_MUTANTS + OVERLAP_MUTANTS + ENGINE_MUTANTS + CORE_REGRESSION_MUTANTS
    + DISK_REGRESSION_MUTANTS + MODEL_LOADING_MUTANTS + REMOTE_REGRESSION_MUTANTS + SHELL_REGRESSION_MUTANTS
    + VLLM_REGRESSION_MUTANTS + PIN_MUTANTS + LEARNED_EVICTION_MUTANTS + WAIT_QUEUE_MUTANTS + IN_FLIGHT_MUTANTS
    + DEVICE_LOSS_MUTANTS + POLICY_MUTANTS
    + REMOTE_CORE_MUTANTS + REMOTE_SHELL_MUTANTS + REMOTE_STORE_MUTANTS + EXTENSION_MUTANTS + TIER_REPORT_MUTANTS
    + SHELL_MUTANTS + DIAGNOSIS_MUTANTS + SUBMISSION_MUTANTS + TRANSFER_MUTANTS + VLLM_MUTANTS + WINDOW_MUTANTS
    + LAYOUT_MUTANTS + DRAFT_MUTANTS + WEIGHTS_MUTANTS + QUOTA_MUTANTS + HINT_MUTANTS + PLAN_MUTANTS
    + STATE_MUTANTS
)  # fmt: skip
