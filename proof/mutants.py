"""The planted defects: mistakes that a programmer could make here, each breaking a promise of the design.

Many put back an incident that motivated the project. A checker is worth as much as it finds of these.
"""

from __future__ import annotations

from .mutants_cache import CACHE_MUTANTS
from .mutants_call_sequences import CALL_MUTANTS
from .mutants_core_regressions import FOUND_CORE_MUTANTS
from .mutants_cuda import CUDA_MUTANTS
from .mutants_device_loss import LOSS_MUTANTS
from .mutants_diagnosis import STUCK_MUTANTS
from .mutants_disk import DISK_MUTANTS
from .mutants_disk_core import DISK_CORE_MUTANTS
from .mutants_disk_erasure import DISK_PROOF_MUTANTS
from .mutants_disk_regressions import FOUND_DISK_MUTANTS
from .mutants_disk_shell import DISK_SHELL_MUTANTS
from .mutants_engine import ENGINE_MUTANTS
from .mutants_extensions import SEAM_MUTANTS
from .mutants_in_flight import LINK_MUTANTS
from .mutants_learned_eviction import LEARNED_MUTANTS
from .mutants_load_choice import CHOICE_MUTANTS
from .mutants_model_loading import FOUND_MODEL_MUTANTS
from .mutants_overlap import EARLY_MUTANTS
from .mutants_pins import KEEPING_MUTANTS
from .mutants_policies import POLICY_MUTANTS
from .mutants_remote import REMOTE_CORE_MUTANTS
from .mutants_remote_regressions import FOUND_REMOTE_MUTANTS
from .mutants_remote_shell import REMOTE_SHELL_MUTANTS
from .mutants_remote_store import REMOTE_STORE_MUTANTS
from .mutants_shell import SHELL_MUTANTS
from .mutants_shell_regressions import FOUND_SHELL_MUTANTS
from .mutants_submission import SUBMISSION_MUTANTS
from .mutants_tier_reports import SEEN_MUTANTS
from .mutants_transfers import TRANSFER_MUTANTS
from .mutants_vllm import VLLM_MUTANTS
from .mutants_vllm_regressions import FOUND_VLLM_MUTANTS
from .mutants_wait_queue import LINE_MUTANTS
from .mutants_windows import WINDOW_MUTANTS
from .planting import Mutant

__all__ = ["MUTANTS"]

MUTANTS: tuple[Mutant, ...] = (
    CACHE_MUTANTS + CALL_MUTANTS + CHOICE_MUTANTS + CUDA_MUTANTS + DISK_MUTANTS + DISK_CORE_MUTANTS
    + DISK_PROOF_MUTANTS + DISK_SHELL_MUTANTS + EARLY_MUTANTS + ENGINE_MUTANTS + FOUND_CORE_MUTANTS
    + FOUND_DISK_MUTANTS + FOUND_MODEL_MUTANTS + FOUND_REMOTE_MUTANTS + FOUND_SHELL_MUTANTS + FOUND_VLLM_MUTANTS
    + KEEPING_MUTANTS + LEARNED_MUTANTS + LINE_MUTANTS + LINK_MUTANTS + LOSS_MUTANTS + POLICY_MUTANTS
    + REMOTE_CORE_MUTANTS + REMOTE_SHELL_MUTANTS + REMOTE_STORE_MUTANTS + SEAM_MUTANTS + SEEN_MUTANTS
    + SHELL_MUTANTS + STUCK_MUTANTS + SUBMISSION_MUTANTS + TRANSFER_MUTANTS + VLLM_MUTANTS + WINDOW_MUTANTS
)  # fmt: skip
