"""The planted defects: mistakes that a programmer could make here, each breaking a promise of the design.

Many put back an incident that motivated the project. A checker is worth as much as it finds of these.
"""

from __future__ import annotations

from .mutants_cache import CACHE_MUTANTS
from .mutants_calls import CALL_MUTANTS
from .mutants_choice import CHOICE_MUTANTS
from .mutants_cuda import CUDA_MUTANTS
from .mutants_disk import DISK_MUTANTS
from .mutants_disk_core import DISK_CORE_MUTANTS
from .mutants_disk_proof import DISK_PROOF_MUTANTS
from .mutants_disk_shell import DISK_SHELL_MUTANTS
from .mutants_early import EARLY_MUTANTS
from .mutants_engine import ENGINE_MUTANTS
from .mutants_found_core import FOUND_CORE_MUTANTS
from .mutants_found_disk import FOUND_DISK_MUTANTS
from .mutants_found_models import FOUND_MODEL_MUTANTS
from .mutants_found_remote import FOUND_REMOTE_MUTANTS
from .mutants_found_shell import FOUND_SHELL_MUTANTS
from .mutants_found_vllm import FOUND_VLLM_MUTANTS
from .mutants_keeping import KEEPING_MUTANTS
from .mutants_learned import LEARNED_MUTANTS
from .mutants_line import LINE_MUTANTS
from .mutants_links import LINK_MUTANTS
from .mutants_loss import LOSS_MUTANTS
from .mutants_policies import POLICY_MUTANTS
from .mutants_remote import REMOTE_CORE_MUTANTS
from .mutants_remote_shell import REMOTE_SHELL_MUTANTS
from .mutants_remote_store import REMOTE_STORE_MUTANTS
from .mutants_seam import SEAM_MUTANTS
from .mutants_seen import SEEN_MUTANTS
from .mutants_shell import SHELL_MUTANTS
from .mutants_stuck import STUCK_MUTANTS
from .mutants_submission import SUBMISSION_MUTANTS
from .mutants_transfers import TRANSFER_MUTANTS
from .mutants_vllm import VLLM_MUTANTS
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
