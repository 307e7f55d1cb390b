"""Planted defects of the connector for vLLM: LoRA adapters whose weights change, refusals that come late or mislead,
and a disk that outlives the weights of its engine."""

from __future__ import annotations

from .planting import Mutant, Patch

__all__ = ["VLLM_REGRESSION_MUTANTS"]

OURS = "aoffload._vllm"
KEYS, SCHEDULER, ADAPTERS = f"{OURS}.requests", f"{OURS}.scheduler", f"{OURS}.adapters"
WORKER, LOADED, REFUSALS, CONNECTOR = (
    f"{OURS}.worker",
    f"{OURS}.worker_adapters",
    f"{OURS}.refusals",
    f"{OURS}.connector",
)
FOLDER = "tests/integrations/vllm_connector"
TESTS, PLUGIN = f"{FOLDER}/test_vllm_adapters.py::", f"{FOLDER}/test_vllm_plugin.py::"

_CONTENT = "KV of an adapter is filed under the weights that were loaded"
_COPIES = "a copy is made only while the adapter has the weights that it was planned under"
_FORWARD = "a forward over what other weights have computed does not count"
_EARLY = "what cannot work is refused before weights are loaded, with a way out"

VLLM_REGRESSION_MUTANTS = (
    Mutant(
        "vLLM: a salt does not count with an adapter",
        KEYS,
        '.of(request.cache_salt or None, f"lora {adapter_key}")',
        '.of(None, f"lora {adapter_key}")',
        "what belongs to one tenant is never found by another",
        test=f"{FOLDER}/test_vllm_keys.py::test_an_adapter_says_nothing_about_its_weights",
    ),
    Mutant(
        "vLLM: an adapter does not count",
        KEYS,
        '.of(request.cache_salt or None, f"lora {adapter_key}")',
        ".of(request.cache_salt or None, None)",
        "KV of an adapter is never found without it",
        test=f"{TESTS}test_a_prompt_of_an_adapter_hits",
    ),
    Mutant(
        "vLLM: an adapter goes by its name",
        SCHEDULER,
        "found.use, found.prefix = use, self._keys.under(found.prefix, found.engine, use.key)",
        "found.use, found.prefix = use, self._keys.under(found.prefix, found.engine, "
        "found.engine.lora_request.lora_name)",
        _CONTENT,
        test=f"{TESTS}test_an_adapter_that_was_trained_again_hits_nothing_of_before",
    ),
    Mutant(
        "vLLM: every name of an adapter is in use after a reset",
        ADAPTERS,
        "                    if place in self._in_place:  #",
        "                    if True:  #",
        "new weights of an adapter after a reset do not turn the cache off",
        test=f"{TESTS}test_new_weights_right_after_a_reset_are_taken",
    ),
    Mutant(
        "vLLM: an adapter that nobody has told of goes by its path",
        KEYS,
        "None if request.lora_request is None else _unknown()",
        "None if request.lora_request is None else request.lora_request.lora_path",
        "an adapter of which nobody knows the weights shares nothing",
        test=f"{FOLDER}/test_vllm_keys.py::test_an_adapter_says_nothing_about_its_weights",
    ),
    Mutant(
        "vLLM: a load is made whatever the adapter is now",
        WORKER,
        "        if not self._has_weights(use):\n",
        "        if plan.destination is not Tier.DEVICE and not self._has_weights(use):\n",
        _COPIES,
        test=f"{TESTS}test_an_adapter_that_is_loaded_in_place_hits_nothing_of_before",
    ),
    Mutant(
        "vLLM: a store is made whatever the adapter is now",
        WORKER,
        "        if not self._has_weights(use):\n",
        "        if plan.destination is Tier.DEVICE and not self._has_weights(use):\n",
        _COPIES,
        test=f"{TESTS}test_weights_that_change_between_plan_and_copy_are_not_stored",
    ),
    Mutant(
        "vLLM: last offers do not say which weights they are of",
        SCHEDULER,
        "            self._note(found, plans)\n            self._queue.submit(plans)\n",
        "            self._queue.submit(plans)\n",
        _COPIES,
        test=f"{TESTS}test_every_copy_of_an_adapter_says_which_weights_it_is_of",
    ),
    Mutant(
        "vLLM: a forward under other weights counts",
        WORKER,
        "for each in commands.forwards if not self._has_weights(each.use))",
        "for each in ())",
        _FORWARD,
        test=f"{TESTS}test_an_adapter_that_was_evicted_and_is_read_again_hits_nothing_of_before",
    ),
    Mutant(
        "vLLM: a step that only compares weights is not sent",
        SCHEDULER,
        "        if not (self._reports or self._forwards) and self._outbox.is_empty:\n",
        "        if not self._reports and self._outbox.is_empty:\n",
        _FORWARD,
        test=f"{TESTS}test_a_step_without_copies_compares_weights_too",
    ),
    Mutant(
        "vLLM: loads that cannot be taken back, of adapters that may be evicted",
        SCHEDULER,
        "found.use is not None and len(self._groups.ids) > 1 and self.adapters.may_evict",
        "found.use is not None and len(self._groups.ids) > 99 and self.adapters.may_evict",
        _FORWARD,
        test=f"{TESTS}test_with_several_groups_nothing_is_loaded_that_could_not_be_taken_back",
    ),
    Mutant(
        "vLLM: loads that cannot be taken back, of adapters that are evicted",
        WORKER,
        "        if is_load and self._num_groups > 1 and adapters",
        "        if is_load and self._num_groups > 99 and adapters",
        _FORWARD,
        test=f"{TESTS}test_with_several_groups_nothing_is_loaded_that_could_not_be_taken_back",
    ),
    Mutant(
        "vLLM: weights that change back are the same",
        SCHEDULER,
        "                elif found.use != use:\n",
        "                elif found.use.key != use.key and False:\n",
        "a request whose KV is of two weights is not cached",
        also=(Patch(LOADED, "seen.serial == use.serials.get(self.rank)", "seen.digest == use.key"),),
        test=f"{TESTS}test_weights_that_change_and_change_back_are_not_the_same",
    ),
    Mutant(
        "vLLM: a load that landed under other weights counts",
        SCHEDULER,
        "        return has_all and not found.is_barred\n",
        "        return has_all\n",
        _FORWARD,
        test=f"{TESTS}test_a_load_that_has_landed_under_other_weights_is_lost",
    ),
    Mutant(
        "vLLM: what is behind a hit of unknown weights is cached",
        ADAPTERS,
        "(lora.lora_name, lora.lora_path), ())) > 1",
        "(lora.lora_name, lora.lora_path), ())) > 99",
        "what may be of other weights in vLLM's own cache is not stored",
        test=f"{TESTS}test_what_vllm_has_kept_of_other_weights_is_not_stored",
    ),
    Mutant(
        "vLLM: an adapter is known when one rank has told",
        ADAPTERS,
        "            if len(by_rank) == self.num_ranks:\n",
        "            if by_rank:\n",
        _CONTENT,
        test=f"{TESTS}test_an_adapter_is_known_once_every_rank_has_told",
    ),
    Mutant(
        "vLLM: the first rank speaks for all",
        ADAPTERS,
        "    return digests[0] if len(set(digests)) == 1 else",
        "    return digests[0] if digests else",
        _CONTENT,
        test=f"{TESTS}test_ranks_that_have_read_other_weights_share_nothing",
    ),
    Mutant(
        "vLLM: what cannot be read is all the same",
        LOADED,
        'return f"unreadable {uuid.uuid4().hex}"',
        'return "unreadable"',
        "what cannot be read is unique to one load",
        test=f"{TESTS}test_an_adapter_that_cannot_be_read_hits_as_long_as_it_stays",
    ),
    Mutant(
        "vLLM: the id of an adapter enters its digest",
        LOADED,
        'if name != "id"}',
        'if name != ""}',
        "the same weights hit under another id, and after a restart",
        test=f"{TESTS}test_a_digest_is_of_everything_but_the_id",
    ),
    Mutant(
        "vLLM: an adapter that is read again is another one",
        LOADED,
        "        if seen is None or seen.digest != digest:\n",
        "        if seen is None or digest:\n",
        "vLLM may evict an adapter and read it again",
        test=f"{TESTS}test_an_adapter_that_was_evicted_and_has_not_changed_hits",
    ),
    Mutant(
        "vLLM: adapters of another engine of the process",
        LOADED,
        '        if getattr(manager, "lora_config", None) is self.lora_config:\n',
        "        if manager is not None:\n",
        _CONTENT,
        test=f"{TESTS}test_only_the_manager_of_this_engine_is_looked_at",
    ),
    Mutant(
        "vLLM: refused once the weights are loaded",
        REFUSALS,
        "                    _check_each(found)\n",
        "                    pass\n",
        _EARLY,
        test=f"{PLUGIN}test_it_is_refused_before_weights_are_loaded",
    ),
    Mutant(
        "vLLM: sleeps under copies",
        REFUSALS,
        "enable_sleep_mode and not tells_of_sleep()",
        "enable_sleep_mode and tells_of_sleep()",
        _EARLY,
        test=f"{PLUGIN}test_sleep_mode_takes_a_vllm_that_tells_of_it",
    ),
    Mutant(
        "another version is taken for none",
        "aoffload._common.extras",
        "        if error.name == module or not _is_installed(module):\n",
        "        if error.name:\n",
        "an error of a version that does not fit names it",
        test="tests/test_cli.py::test_a_part_that_an_installed_package_lacks_is_no_missing_extra",
    ),
    Mutant(
        "vLLM: a restart finds what other weights have stored after a reset",
        f"{OURS}.worker",
        "                self._disk.disown()",
        "                pass  #",
        "a restart begins with the weights of the model's files",
        test=f"{FOLDER}/test_vllm_disk.py::test_a_reset_reaches_the_disk",
    ),
    Mutant(
        "vLLM: images are the same whatever is made of them",
        CONNECTOR,
        "*([processors] if any(processors) else ())",
        "*([processors] if processors is None else ())",
        "whatever changes KV enters the identity of what outlives an engine",
        test=f"{PLUGIN}test_what_inputs_are_made_of_enters_the_identity_of_a_disk",
    ),
    Mutant(
        "vLLM: connectors of any kind",
        f"{OURS}.refusals",
        "    is_list = isinstance(found, list | tuple)\n",
        "    is_list = True\n",
        _EARLY,
        test=f"{FOLDER}/test_vllm_refusals.py::test_connectors_that_are_no_list_of_configurations_are_refused",
    ),
    Mutant(
        "vLLM: a lazy policy is refused late",
        f"{OURS}.settings",
        '    if options.get("store_policy") == "lazy":\n',
        "    if False:\n",
        _EARLY,
        test=f"{FOLDER}/test_vllm_refusals.py::test_a_policy_that_vllm_cannot_follow_is_refused_early",
    ),
    Mutant(
        "vLLM: layers with unequal pages are unknown to workers",
        f"{OURS}.groups",
        'next(iter(spec.kv_cache_specs.values())) if hasattr(spec, "kv_cache_specs") else spec',
        "spec",
        "workers and scheduler know the same groups",
        test=f"{FOLDER}/test_vllm_groups.py::test_layers_with_unequal_pages_are_one_group",
    ),
    Mutant(
        "vLLM: an error in a reset of the engine ends the engine",
        f"{OURS}.guard",
        "    def reset(self) -> None:\n        self.engine_reset()\n",
        "    def reset(self) -> None:\n        self.half.engine_reset()\n",
        "a cache never takes the engine down",
        test=f"{FOLDER}/test_vllm_guard.py::test_an_error_in_a_reset_turns_the_cache_off",
    ),
)
