"""Planted defects of the hints of clients."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["HINT_MUTANTS"]

READING, HINTS, PINS = "aoffload._common.hints", "aoffload._extensions.hints", "aoffload._extensions.pins"
SHELL, SERVER = "aoffload._runtime.handles", "aoffload._reference.server.hints"
CONNECTOR, SCHEDULER = "aoffload._vllm.hints", "aoffload._vllm.scheduler"
CORE, PAYLOADS = "tests/core/test_hints.py", "tests/test_hint_payloads.py"
VLLM, HTTP = "tests/integrations/vllm_connector/test_vllm_hints.py", "tests/server/test_client_hints.py"

HINT_MUTANTS = (
    Mutant(
        "hint pins without a share",
        HINTS,
        "                self._check_share(pins, self._ledger.sequence_of(shorter))\n",
        "",
        "clients pin no more than the share of hints",
        test=f"{CORE}::test_a_pin_is_clipped_to_what_fits",
    ),
    Mutant(
        "hint pins as long as a client likes",
        HINTS,
        "        ttl_s = min(hint.ttl_s, self.max_pin_s)\n",
        "        ttl_s = hint.ttl_s\n",
        "clients pin no longer than the operator allows",
        test=f"{CORE}::test_a_pin_is_clipped_to_the_longest_time",
    ),
    Mutant(
        "hint pins without number",
        HINTS,
        "        if len(self._given) - len(earlier) >= MAX_PINS:\n",
        "        if False:\n",
        "clients hold a bounded number of pins",
        test=f"{CORE}::test_there_is_a_bound_on_the_number_of_pins",
    ),
    Mutant(
        "hint ends the pin of a shared prefix",
        HINTS,
        "                if not _is_shared(path, pinned.num_tokens // self._cache.layout.unit_tokens):\n",
        "                if path is not None:\n",
        "a hint of one conversation leaves the pin of a prefix that others share",
        test=f"{CORE}::test_a_pin_of_a_shared_prefix_stays",
    ),
    Mutant(
        "hint keeps the pin that it replaces",
        HINTS,
        "        self._end(earlier)\n        if num_tokens < reach * unit:\n",
        "        if num_tokens < reach * unit:\n",
        "a later pin of a prompt changes the earlier one",
        test=f"{CORE}::test_a_later_pin_replaces_an_earlier_one",
    ),
    Mutant(
        "hint ends pins under other salts",
        HINTS,
        "            elif sequence.agrees(pinned, pinned.num_tokens):\n",
        "            elif sequence.first_bytes(0, pinned.num_tokens) == pinned.first_bytes(0, pinned.num_tokens):\n",
        "a hint is about prompts of its own salt",
        test=f"{CORE}::test_no_hint_touches_another_salt",
    ),
    Mutant(
        "hint pin that does not grow",
        HINTS,
        "                pins.grow(pin)\n",
        "                pass\n",
        "a pin keeps what the stores under way bring",
        test=f"{CORE}::test_a_pin_grows_with_the_stores_under_way",
    ),
    Mutant(
        "hint pin that grows beyond its share",
        HINTS,
        "                self._check_share(pins, pin.sequence)\n                pins.grow(pin)\n",
        "                pins.grow(pin)\n",
        "clients pin no more than the share of hints, whatever lands later",
        test=f"{CORE}::test_a_pin_grows_no_further_than_its_share",
    ),
    Mutant(
        "hint frees host blocks without a copy below",
        HINTS,
        "                reason = HintReason.NO_LOWER_TIER\n                break\n",
        "                reason = HintReason.NO_LOWER_TIER\n",
        "a demotion loses nothing",
        test=f"{CORE}::test_host_blocks_are_freed_where_the_disk_has_them",
    ),
    Mutant(
        "hint frees host blocks of others",
        HINTS,
        "            if agreed < run.stop or run.num_after > (not is_last):\n",
        "            if False:\n",
        "a demotion frees nothing that other prompts continue",
        test=f"{CORE}::test_host_blocks_that_others_use_stay",
    ),
    Mutant(
        "hints of a million actions are read",
        READING,
        "    found = [_read_action(action) for action in actions[:MAX_ACTIONS]]\n",
        "    found = [_read_action(action) for action in actions]\n",
        "reading a payload is bounded work",
        test=f"{PAYLOADS}::test_at_most_sixteen_actions_are_read",
    ),
    Mutant(
        "hint reads an attribute of a hostile object",
        READING,
        "    if type(value) not in (int, float):  # `isinstance` would read an attribute of the value\n",
        "    if not isinstance(value, (int, float)):\n",
        "reading a payload calls nothing of it",
        test=f"{PAYLOADS}::test_a_bad_value_is_one_answer",
    ),
    Mutant(
        "hint repeats any id",
        READING,
        "len(value) <= MAX_ACTION_ID and value.isprintable() else",
        "len(value) <= MAX_ACTION_ID else",
        "an answer can be written to JSON and to a terminal",
        test=f"{PAYLOADS}::test_an_id_that_cannot_be_repeated_is_left_out",
    ),
    Mutant(
        "hint that the runtime does not watch",
        SHELL,
        "        session.worker.watch(session.ledger.next_lapse)\n        return tuple(found)\n",
        "        return tuple(found)\n",
        "the pin of a hint ends in time, whatever the loop waits for",
        test="tests/shell/test_runtime_hints.py::test_a_shorter_pin_ends_first",
    ),
    Mutant(
        "hints of an aborted request count",
        CONNECTOR,
        "                elif is_aborted and not isinstance(action.hint, DoneHint):\n",
        "                elif False:\n",
        "a client that has gone keeps nothing",
        test=f"{VLLM}::test_an_aborted_request_is_only_done",
    ),
    Mutant(
        "hint pins of vLLM never lapse",
        SCHEDULER,
        "        if self.hints.lapses_at < math.inf:\n            self.hints.lapse()\n",
        "",
        "a pin of a request of vLLM ends in time",
        test=f"{VLLM}::test_a_pin_keeps_the_whole_sequence",
    ),
    Mutant(
        "hints of a client that hung up count",
        SERVER,
        "                if isinstance(hint.given.hint, DoneHint):\n",
        "                if hint.given.hint is not None:\n",
        "a client that has gone keeps nothing",
        test=f"{HTTP}::test_a_client_that_hangs_up_pins_nothing",
    ),
)
