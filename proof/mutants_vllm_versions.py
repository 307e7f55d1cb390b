"""Planted defects of the connector for vLLM: versions, refusals before weights are loaded, and tiers that outlive
sleep."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["VLLM_VERSION_MUTANTS"]

INTERNALS, CONNECTOR = "aoffload._vllm.internals", "aoffload._vllm.connector"
FOLDER = "tests/integrations/vllm_connector"
VERSIONS = f"{FOLDER}/test_vllm_versions.py::"

_NAMED = "a version of vLLM that lacks something is named before weights are loaded"

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
)
