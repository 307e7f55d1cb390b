"""Planted defects of the connector for vLLM: versions, refusals before weights are loaded, and tiers that outlive
sleep."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["VLLM_VERSION_MUTANTS"]

INTERNALS, CONNECTOR, REFUSALS = "aoffload._vllm.internals", "aoffload._vllm.connector", "aoffload._vllm.refusals"
DISK, GUARD, WEIGHTS = "aoffload._tiers.disk.files", "aoffload._vllm.guard", "aoffload._vllm.worker_weights"
FOLDER = "tests/integrations/vllm_connector"
VERSIONS, REFUSED = f"{FOLDER}/test_vllm_versions.py::", f"{FOLDER}/test_vllm_refusals.py::"
WEIGHED = f"{FOLDER}/test_vllm_weights.py::"

_NAMED = "a version of vLLM that lacks something is named before weights are loaded"
_SLEEP = "tiers keep KV over sleep only if it is of the weights that the model has afterwards"
_EARLY = "what cannot work is refused before weights are loaded, with a way out"

VLLM_VERSION_MUTANTS = (
    Mutant(
        "vLLM: fields that have moved are met in the middle of serving",
        INTERNALS,
        "                if not has_field(found, field):\n",
        "                if not found:\n",
        _NAMED,
        test=f"{VERSIONS}test_a_field_that_has_moved_is_named",
    ),
    Mutant(
        "vLLM: what a constructor reads is taken for a field",
        INTERNALS,
        'if each.opname == "STORE_ATTR")',
        'if each.opname in ("STORE_ATTR", "LOAD_ATTR"))',
        _NAMED,
        test=f"{VERSIONS}test_fields_are_found_however_a_class_has_them",
    ),
    Mutant(
        "vLLM: any version was tried",
        CONNECTOR,
        "            if about := untried():\n",
        "            if about := untried()[:0]:\n",
        "the log names a version that was not tried",
        test=f"{VERSIONS}test_a_version_that_was_not_tried_is_in_the_log",
    ),
    Mutant(
        "vLLM: one of several connectors fails requests",
        REFUSALS,
        "                    _check_policy(transfer)",
        "                    pass",
        _EARLY,
        test=f"{REFUSED}test_the_policy_of_the_whole_is_the_one_that_counts",
    ),
    Mutant(
        "vLLM: the limit of a container is not looked at",
        REFUSALS,
        "most if limit is None else min(most, limit.limit_bytes)",
        "most",
        _EARLY,
        test=f"{REFUSED}test_more_host_memory_than_the_machine_has_is_refused",
    ),
    Mutant(
        "vLLM: a disk that is full of its own files is refused",
        DISK,
        "found.f_bavail * found.f_frsize + own_bytes\n",
        "found.f_bavail * found.f_frsize\n",
        "an engine starts again on its own disk",
        test=f"{REFUSED}test_space_that_the_directory_has_already_is_there",
    ),
    Mutant(
        "vLLM: a reset beside a sleep is forgotten",
        GUARD,
        "all(answer.num_sleeps == self._num_resets for",
        "all(answer.num_sleeps for",
        _SLEEP,
        test=f"{WEIGHED}test_a_reset_beside_sleep_forgets",
    ),
    Mutant(
        "vLLM: one rank with other weights does not count",
        GUARD,
        "if has_slept and all(answer.is_same",
        "if has_slept and any(answer.is_same",
        _SLEEP,
        test=f"{WEIGHED}test_every_rank_has_to_have_its_weights",
    ),
    Mutant(
        "vLLM: loads while the weights are in doubt",
        GUARD,
        "        if self._num_resets and not self.off_reason:\n",
        "        if self._num_resets > 9 and not self.off_reason:\n",
        _SLEEP,
        test=f"{WEIGHED}test_tiers_forget_what_other_weights_have_computed",
    ),
    Mutant(
        "vLLM: weights that changed before the sleep are those of the KV",
        WEIGHTS,
        "        if self._now() != self._stored:\n",
        "        if not self._now():\n",
        _SLEEP,
        test=f"{WEIGHED}test_weights_that_changed_before_sleep_are_noticed",
    ),
    Mutant(
        "vLLM: the digest of weights is a plain sum",
        WEIGHTS,
        "yield (mixed ^ (mixed >> 29)).sum()",
        "yield numbers.sum()",
        _SLEEP,
        test=f"{WEIGHED}test_changes_that_cancel_each_other_in_a_sum_are_noticed",
    ),
)
