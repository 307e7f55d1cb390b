"""Mutants of the connector for vLLM: keys, metrics, errors, and settings that are refused at the start."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["VLLM_OTHER_MUTANTS"]

OURS = "aoffload._vllm"
SCHEDULER, CONNECTOR, GUARD = f"{OURS}.scheduler", f"{OURS}.connector", f"{OURS}.guard"
KEYS, COUNTS, STATISTICS = f"{OURS}.requests", f"{OURS}.counts", f"{OURS}.statistics"
SETTINGS = f"{OURS}.settings"
TESTS = "tests/integrations/vllm_connector/test_vllm"
ERRORS, WHOLE, OF_KEYS = f"{TESTS}_guard.py::", f"{TESTS}_connector.py::", f"{TESTS}_keys.py::"
METRICS, STARTS, EXTRA = f"{TESTS}_metrics.py::", f"{TESTS}_plugin.py::", f"{TESTS}_settings.py::"

KEYED = (
    Mutant(
        "vLLM: salts share",
        KEYS,
        "self._roots_of(request).of(request.cache_salt or None, adapter_key)",
        "self._roots_of(request).of(None, adapter_key)",
        "what belongs to one tenant is never found by another",
        test=f"{WHOLE}test_two_salts_share_nothing",
    ),
    Mutant(
        "vLLM: images do not count",
        KEYS,
        "np.frombuffer(tokens, INT32), _spans(features, num_ahead))",
        "np.frombuffer(tokens, INT32), ())",
        "another image in the same place never hits",
        test=f"{OF_KEYS}test_values_are_told_apart",
    ),
    Mutant(
        "vLLM: sound for a picture",
        KEYS,
        "f\"{feature.modality}{min(start, 0) or ''}:{feature.identifier}\".encode()",
        "str(feature.identifier).encode()",
        "inputs of two kinds never hit each other",
        test=f"{OF_KEYS}test_values_are_told_apart",
    ),
    Mutant(
        "vLLM: embeddings cached",
        KEYS,
        "        if request.prompt_embeds is not None or request.resumable or request.num_tokens <= num_ahead:\n",
        "        if request.resumable or request.num_tokens <= num_ahead:\n",
        "what is computed of embeddings has no key",
        test=f"{OF_KEYS}test_what_has_no_key_is_not_cached",
    ),
    Mutant(
        "vLLM: sessions cached",
        KEYS,
        "        if request.prompt_embeds is not None or request.resumable or request.num_tokens <= num_ahead:\n",
        "        if request.prompt_embeds is not None or request.num_tokens <= num_ahead:\n",
        "a session takes tokens back",
        test=f"{OF_KEYS}test_what_has_no_key_is_not_cached",
    ),
    Mutant(
        "vLLM: types of KV share",
        CONNECTOR,
        "/{model.dtype}/{vllm_config.cache_config.cache_dtype}",
        "/{model.dtype}",
        "KV of another type is never loaded",
        test=f"{STARTS}test_what_the_model_is_enters_every_key",
    ),
)

COUNTED = (
    Mutant(
        "vLLM: counts of all intervals in each",
        COUNTS,
        "        self.counted.clear()\n",
        "",
        "a counter grows by what has happened since",
        test=f"{METRICS}test_copies_are_counted_by_direction_and_end",
    ),
    Mutant(
        "vLLM: gauges summed",
        STATISTICS,
        "value if is_gauge else self.data.get(name, 0) + value\n",
        "self.data.get(name, 0) + value\n",
        "of a gauge the last value counts",
        test=f"{METRICS}test_statistics_add_up",
    ),
    Mutant(
        "vLLM: gauges that only grow",
        STATISTICS,
        "                metric.set(value)\n",
        "                metric.inc(value)\n",
        "a gauge follows its value",
        test=f"{METRICS}test_vllms_endpoint_shows_all_that_is_counted",
    ),
    Mutant(
        "vLLM: one engine's counts for all",
        STATISTICS,
        "labels(*self.per_engine_labelvalues[engine_idx], ",
        "labels(*self.per_engine_labelvalues[0], ",
        "each engine has counts of its own",
        test=f"{METRICS}test_vllms_endpoint_shows_all_that_is_counted",
    ),
    Mutant(
        "vLLM: lost tokens not counted",
        SCHEDULER,
        "        self.counts.lost(found.promised - ready)\n",
        "",
        "what is computed because a load was lost is counted",
        test=f"{METRICS}test_lost_loads_are_counted",
    ),
    Mutant(
        "vLLM: stalls not said",
        COUNTS,
        'f"overdue_jobs|{_link(event.source, event.destination)}"',
        'f"overdue_jobs|{_link(event.destination, event.source)}"',
        "a copy that takes too long is counted where it hangs",
        test=f"{METRICS}test_copies_that_take_too_long_are_counted",
    ),
)

GUARDED = (
    Mutant(
        "vLLM: an error ends the scheduler",
        GUARD,
        "                return self.half.match(request, num_local)\n            except Exception as error:",
        "                return self.half.match(request, num_local)\n            except OSError as error:",
        "a cache never takes the engine down",
        test=f"{ERRORS}test_an_error_in_any_hook_turns_the_cache_off[match]",
    ),
    Mutant(
        "vLLM: an error at the end of a request ends the scheduler",
        GUARD,
        "                answers = self.half.finished(request, block_ids)\n            except Exception as error:",
        "                answers = self.half.finished(request, block_ids)\n            except OSError as error:",
        "a cache never takes the engine down",
        test=f"{ERRORS}test_an_error_in_any_hook_turns_the_cache_off[finished]",
    ),
    Mutant(
        "vLLM: an error in a reset ends the scheduler",
        GUARD,
        "                self.half.reset()\n            except Exception as error:",
        "                self.half.reset()\n            except OSError as error:",
        "a cache never takes the engine down",
        test=f"{ERRORS}test_an_error_in_a_reset_turns_the_cache_off",
    ),
    Mutant(
        "vLLM: off, and blocks of copies under way held",
        GUARD,
        "        self.half.settle(reports)\n",
        "",
        "vLLM gets its blocks back, whatever the connector has run into",
        test=f"{ERRORS}test_who_waits_for_a_load_computes_behind_an_error",
    ),
    Mutant(
        "vLLM: off, and blocks of the last report held",
        SCHEDULER,
        "        joined, self._joined = [*self._joined, *self._outbox.joined(reports)], []\n",
        "        joined = self._outbox.joined(reports)\n",
        "vLLM gets its blocks back, whatever the connector has run into",
        test=f"{ERRORS}test_an_error_in_the_ledger_turns_the_cache_off",
    ),
    Mutant(
        "vLLM: off, and blocks of queued copies held",
        GUARD,
        "        self.half.turn_off(self.off_reason)\n",
        "",
        "vLLM gets its blocks back, whatever the connector has run into",
        test=f"{ERRORS}test_copies_that_wait_for_room_give_their_blocks_back_behind_an_error",
    ),
    Mutant(
        "vLLM: off, and who waits for a load waits on",
        SCHEDULER,
        "                self._reports.append(LoadReport(found.request_id, is_lost=True))\n",
        "                pass\n",
        "no hang: whoever waits for a load computes",
        test=f"{ERRORS}test_who_waits_for_a_load_computes_behind_an_error",
    ),
    Mutant(
        "vLLM: off, and a promise kept by nobody",
        GUARD,
        "            self.half.refuse(request, num_external)\n",
        "            pass\n",
        "no hang: a load that was promised before the error is lost",
        test=f"{ERRORS}test_a_load_that_was_promised_before_an_error_is_lost",
    ),
    Mutant(
        "vLLM: off, and reports not carried",
        GUARD,
        "        return self.half.is_ending if self.off_reason else self.half.is_busy\n",
        "        return not self.off_reason and self.half.is_busy\n",
        "vLLM frees the blocks of an aborted load when it hears of its end",
        test=f"{ERRORS}test_an_aborted_load_is_over_behind_an_error",
    ),
    Mutant(
        "vLLM: off, and a store that hangs holds its blocks for ever",
        SCHEDULER,
        "        with suppress(Exception):\n            self._queue.give_up_late()\n",
        "",
        "a store that hangs gives back what it reads when its time is over, also behind an error",
        test=f"{ERRORS}test_a_store_that_hangs_gives_its_blocks_back_behind_an_error",
    ),
    Mutant(
        "vLLM: off, and nobody steps on for copies",
        SCHEDULER,
        "        return bool(self._reports or self._queue.num_in_flight)\n",
        "        return bool(self._reports)\n",
        "the engine hears of the end of every copy that began before the error",
        test=f"{ERRORS}test_a_store_that_hangs_gives_its_blocks_back_behind_an_error",
    ),
    Mutant(
        "vLLM: off, and copies that have ended are late",
        SCHEDULER,
        "                self._queue.deliver(completion)\n        with suppress",
        "                self.ledger.settle(completion)\n        with suppress",
        "only copies that take too long are given up",
        test=f"{ERRORS}test_copies_that_end_behind_an_error_are_not_late",
    ),
)

STARTED = (
    Mutant(
        "vLLM: a load that fails may fail its request",
        f"{OURS}.refusals",
        '    if transfer.kv_load_failure_policy != "recompute":\n',
        "    if not transfer.kv_load_failure_policy:\n",
        "a cache does not fail a request",
        test=f"{STARTS}test_what_cannot_work_is_refused",
    ),
    Mutant(
        "vLLM: an unknown key means its default",
        SETTINGS,
        "        if key not in KEYS:\n",
        "        if not key:\n",
        "an unknown key is an error that names it",
        test=f"{EXTRA}test_an_unknown_key_is_named",
    ),
    Mutant(
        "vLLM: host memory of the server on every rank",
        SETTINGS,
        " // num_ranks)\n",
        ")\n",
        "the ranks of a server share the host memory that it was given",
        test=f"{EXTRA}test_bytes_are_those_of_the_server",
    ),
)

VLLM_OTHER_MUTANTS = KEYED + COUNTED + GUARDED + STARTED
