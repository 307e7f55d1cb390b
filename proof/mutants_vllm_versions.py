"""Planted defects of the connector for vLLM: versions, refusals before weights are loaded, and tiers that outlive
sleep."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["VLLM_VERSION_MUTANTS"]

INTERNALS, CONNECTOR, REFUSALS = "aoffload._vllm.internals", "aoffload._vllm.connector", "aoffload._vllm.refusals"
DISK = "aoffload._tiers.disk.files"
FOLDER = "tests/integrations/vllm_connector"
VERSIONS, REFUSED = f"{FOLDER}/test_vllm_versions.py::", f"{FOLDER}/test_vllm_refusals.py::"

_NAMED = "a version of vLLM that lacks something is named before weights are loaded"
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
)
