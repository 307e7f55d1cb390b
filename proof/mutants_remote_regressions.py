"""Planted defects of remote stores: puts whose outcome is unknown, and connecting."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["REMOTE_REGRESSION_MUTANTS"]

REMOTE = "aoffload._tiers.remote"
LANES, REMOVALS = f"{REMOTE}.lanes", f"{REMOTE}.memory"
TRANSPORT = "tests/transfer/test_remote_transport.py::test_"
INVALIDATION = "tests/shell/test_remote_invalidation.py::test_"
CONNECTING = "tests/shell/test_remote_connecting.py::test_"

_LATE = "what this process has invalidated it never hits again, whenever its put arrives"
_OTHERS = "what arrives after its removal is removed again, for others who share the store"
_FIRST = "the first request of a process hits"

REMOTE_REGRESSION_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "remote late: no number is revoked",
        REMOVALS,
        "        return number < max(self._all_revoked, self._revoked.get(key_of(label), 0))\n",
        "        return False\n",
        _LATE,
        programs=True,
    ),
    Mutant(
        "remote late: objects without a number",
        f"{REMOTE}.cells",
        '        return int.from_bytes(nonce[WRITER_BYTES:], "little") if is_own else None\n',
        "        return None\n",
        _LATE,
        scenarios=("taken_back_in_store",),
    ),
    Mutant(
        "remote late: the failure of a call taken for the end of its put",
        LANES,
        "        if number is not None and self.removals.has_revoked(job.label, number):\n",
        "        if False:\n",
        _LATE,
        test=f"{INVALIDATION}a_put_that_has_failed_and_arrives_late_is_no_hit",
    ),
    Mutant(
        "remote late: what is being written is not revoked",
        REMOVALS,
        "                self._revoked[key] = self._num_stores\n",
        "                self._revoked[key] = self._num_stores - 1\n",
        _LATE,
        test=f"{TRANSPORT}what_is_invalidated_while_it_is_written_is_revoked",
    ),
    Mutant(
        "remote late: more than can be remembered is trusted",
        REMOVALS,
        "                self._all_revoked = self._num_stores\n",
        "",
        _LATE,
        test=f"{TRANSPORT}more_invalidated_cells_than_can_be_remembered_cost_hits_alone",
    ),
    Mutant(
        "remote late: objects without a writer",
        f"{REMOTE}.cells",
        "        is_own = nonce[:WRITER_BYTES] == self.writer\n",
        "        is_own = True\n",
        "a number counts for the objects of its own process",
        test=f"{TRANSPORT}what_another_process_stores_is_loaded_whatever_was_invalidated_here",
    ),
    Mutant(
        "remote late: a removal after a failed put is not repeated",
        LANES,
        "            self.removals.doubt(job.label, self._env.now())\n",
        "            pass\n",
        _OTHERS,
        test=f"{TRANSPORT}a_removal_after_a_failed_put_is_repeated",
    ),
    Mutant(
        "remote late: what is met again stays in the store",
        LANES,
        "            self.removals.add([job.label])  # the put of this object arrived after the removal\n",
        "            pass\n",
        _OTHERS,
        test=f"{TRANSPORT}a_put_that_arrives_after_the_removal_is_never_loaded[sum]",
    ),
    Mutant(
        "remote late: a removal that fails after a reset is not tried again",
        "aoffload._tiers.remote.loop",
        "        is_refused = self.remote.refuses(Direction.STORE)  # removals are tried again with it\n",
        "        is_refused = not self.is_on or self.remote.refuses(Direction.STORE)\n",
        _OTHERS,
        test=f"{INVALIDATION}a_removal_that_fails_after_a_reset_is_tried_again",
    ),
    Mutant(
        "remote: the first question connects",
        "aoffload._tiers.remote.loop",
        "        self.remote.connect(partial(self.worker.call_soon, over.set))\n",
        "        over.set()\n",
        _FIRST,
        test=f"{CONNECTING}the_first_request_of_a_process_hits",
    ),
    Mutant(
        "remote: the first question of a vLLM engine connects",
        "aoffload._vllm.worker",
        "            self._remote.connect()\n",
        "            pass\n",
        _FIRST,
        test="tests/integrations/vllm_connector/test_vllm_remote.py::test_an_engine_has_connected_before_its_first_request",
    ),
    Mutant(
        "remote: opening waits for a store that hangs",
        "aoffload._tiers.remote.loop",
        "        with anyio.move_on_after(tier.load_timeout_s + LATE_S):\n",
        "        with anyio.move_on_after(None):\n",
        "a store that hangs does not keep a runtime from opening",
        test=f"{CONNECTING}a_store_that_hangs_keeps_a_runtime_from_opening_for_a_bounded_time",
    ),
    Mutant(
        "Redis: connecting has the time of a question",
        "aoffload._tiers.remote.clients.redis",
        "        connect_s = max(timeout_s, CONNECT_S)\n",
        "        connect_s = timeout_s\n",
        "a store that was gone is used again",
        test="tests/transfer/test_redis_stores.py::test_connecting_may_take_longer_than_the_command_that_connects",
    ),
)
