"""Planted defects of the weights' epoch."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["WEIGHTS_MUTANTS"]

WEIGHTS, PREFIX, LEDGER = "aoffload._extensions.weights", "aoffload._common.prefix", "aoffload._kernel.ledger"
HOST_CACHE, SCHEDULER, CHANGES = (
    "aoffload._host_cache.host_cache",
    "aoffload._vllm.scheduler",
    "aoffload._observe.kv_events.changes",
)
TESTS = "tests/core/test_weights.py::"
VLLM = "tests/integrations/vllm_connector/test_vllm_weights_epoch.py::"
_UNFINDABLE = "KV of another weights' epoch is unfindable at once"
_NEVER = "a request that has begun at a change of the weights publishes nothing ever again"
_CLEAN = "no request begins to compute with KV of other weights"

WEIGHTS_MUTANTS = (
    Mutant(
        "weights: the epoch is not in the digest",
        PREFIX,
        'b"aoffload weights 1" + base.digest + _utf8("epoch", epoch)',
        'b"aoffload weights 1" + base.digest',
        _UNFINDABLE,
        test=TESTS + "test_the_root_of_an_epoch_is_its_own",
    ),
    Mutant(
        "weights: the roots of the epoch before stay",
        WEIGHTS,
        "        self.epoch, self._roots = epoch, {}\n",
        "        self.epoch = epoch\n",
        _UNFINDABLE,
        test=TESTS + "test_each_epoch_has_its_own_kv",
    ),
    Mutant(
        "weights: a request that computes publishes",
        WEIGHTS,
        "                request.epoch = NoEpoch.ORPHANED\n",
        "                pass\n",
        _NEVER,
        test=TESTS + "test_a_request_that_computes_goes_on_and_publishes_nothing_ever_again",
    ),
    Mutant(
        "weights: a request publishes once its epoch returns",
        WEIGHTS,
        "                request.epoch = NoEpoch.ORPHANED\n",
        "                is_back = request.sequence.root == self.root_of(request.sequence.root)\n"
        "                request.epoch = ledger.cache.epoch if is_back else NoEpoch.ORPHANED\n",
        _NEVER,
        test=TESTS + "test_a_request_that_computes_goes_on_and_publishes_nothing_ever_again",
    ),
    Mutant(
        "weights: a match is not dropped",
        WEIGHTS,
        "        ledger.match_all_again()\n",
        "",
        _CLEAN,
        test=TESTS + "test_a_request_has_nothing_of_another_epoch",
    ),
    Mutant(
        "weights: a load under way publishes under the new root",
        LEDGER,
        "        return not request.may_match_again or request.has_committed or request.has_parent\n",
        "        return request.has_committed or request.has_parent\n",
        _CLEAN,
        test=TESTS + "test_a_request_has_nothing_of_another_epoch",
    ),
    Mutant(
        "weights: pins are kept",
        WEIGHTS,
        "            pins.end_all(PinState.DROPPED)\n",
        "            pass\n",
        "pins end at a change of the weights, because no request finds what they keep",
        test=TESTS + "test_pins_end",
    ),
    Mutant(
        "weights: deferred blocks of ended requests are stored",
        HOST_CACHE,
        "        return (*self.live_requests.values(), *[old.request for old in self.offers.deferred.values()])\n",
        "        return tuple(self.live_requests.values())\n",
        _NEVER,
        test=TESTS + "test_deferred_blocks_of_another_epoch_are_given_up",
    ),
    Mutant(
        "weights: a pinned request of a host cache goes on",
        HOST_CACHE,
        "        return request.state is not MATCHED\n",
        "        return request.state not in (MATCHED, PINNED)\n",
        _NEVER,
        test=TESTS + "test_a_host_cache_finds_nothing_of_another_epoch",
    ),
    Mutant(
        "weights: a request waits for a load of the epoch before",
        WEIGHTS,
        "ledger.end_call(ledger.pending_wakes())",
        "ledger.end_call()",
        "no hang: a change of the weights ends waits for loads of the epoch before",
        test="tests/shell/test_engine_runtime.py::test_a_change_of_weights_ends_the_wait_for_a_load_of_others",
    ),
    Mutant(
        "weights: a request that is matched again keeps its root",
        WEIGHTS,
        "        self._put_under(request)\n        request.epoch = self._ledger.cache.epoch\n",
        "        request.epoch = self._ledger.cache.epoch\n",
        _UNFINDABLE,
        test=TESTS + "test_a_host_cache_finds_nothing_of_another_epoch",
    ),
    Mutant(
        "weights: routers are not told",
        CHANGES,
        "        self._ledger.weights.when_changed.append(self.tell_anew)\n",
        "",
        "KV events say what can be found",
        test=TESTS + "test_routers_hear_of_what_can_be_found",
    ),
    Mutant(
        "weights: routers hear of KV that cannot be found",
        CHANGES,
        " or not self._is_findable(part.run.root):\n",
        ":\n",
        "KV events say what can be found",
        test=TESTS + "test_routers_hear_of_what_can_be_found",
    ),
    Mutant(
        "vLLM weights: vLLM's own cache is not emptied",
        SCHEDULER,
        "        self._pool.forget_cached()\n",
        "",
        _CLEAN,
        test=VLLM + "test_vllms_own_cache_is_emptied_although_requests_run",
    ),
    Mutant(
        "vLLM weights: hits of vLLM's cache are stored while old requests run",
        SCHEDULER,
        "        if self._mixed and self._is_mixed(found, num_local):\n            return 0\n",
        "",
        _NEVER,
        test=VLLM + "test_hits_of_vllms_own_cache_are_not_stored_while_old_requests_run",
    ),
    Mutant(
        "vLLM weights: a hit from before the change counts",
        SCHEDULER,
        "        if self._follow_weights():\n            return None  # `num_local`",
        "        if self._follow_weights() and False:\n            return None  # `num_local`",
        _CLEAN,
        test=VLLM + "test_a_match_before_the_change_is_made_again",
    ),
    Mutant(
        "vLLM weights: the first version is an epoch of its own",
        "aoffload._vllm.weights",
        "        return self._first_epoch if version == self._first else version\n",
        "        return str(version)\n",
        "vLLM's first weight version stands for the first epoch",
        test=VLLM + "test_the_key_names_the_first_epoch",
    ),
)
