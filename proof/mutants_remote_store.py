"""Planted defects of cells, of the threads that copy them, and of stores."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["REMOTE_STORE_MUTANTS"]

REMOTE, STORES = "aoffload.transfer.remote", "aoffload.object_stores"
CELLS, JOBS, LANES, NODES = f"{REMOTE}.cells", f"{REMOTE}.jobs", f"{REMOTE}.lanes", f"{REMOTE}.nodes"
QUESTIONS, REMOVALS, MEMORY = f"{REMOTE}.questions", f"{REMOTE}.removals", f"{REMOTE}.memory"
TRANSPORT = "tests/transfer/test_remote_transport.py"
WRONG = "tests/transfer/test_wrong_stores.py"
REDIS, OBSTORE = "tests/transfer/test_redis_stores.py", "tests/transfer/test_obstore_store.py"


def _mutant(name: str, module: str, old: str, new: str, promise: str, test: str) -> Mutant:
    return Mutant(f"remote store: {name}", module, old, new, promise, test=test)


REMOTE_STORE_MUTANTS: tuple[Mutant, ...] = (
    _mutant(
        "a sum that is not compared",
        CELLS,
        "return body[HEADER.size :] if self._sum(body) == found[-SEAL_BYTES:] else None",
        "return body[HEADER.size :]",
        "no flipped bit is ever a hit",
        f"{TRANSPORT}::test_no_flipped_bit_is_ever_a_hit[sum]",
    ),
    _mutant(
        "a header that is not compared",
        CELLS,
        "        if header != self._header(label, self.name(label), header[-NONCE_BYTES:]):\n            return None\n",
        "",
        "an object of another cell is none",
        f"{TRANSPORT}::test_an_object_of_another_cell_is_none[sum]",
    ),
    _mutant(
        "a layout without an identity",
        CELLS,
        "described = repr((FORMAT, identity,",
        "described = repr((FORMAT,",
        "another model is never found",
        f"{TRANSPORT}::test_another_kind_of_kv_is_never_found[model]",
    ),
    _mutant(
        "a load that was given up is copied",
        JOBS,
        "return not self.is_given_up and touch() is not False",
        "return touch() is not False",
        "what was given up never touches host memory",
        f"{TRANSPORT}::test_a_load_that_was_given_up_never_touches_host_memory",
    ),
    _mutant(
        "what is forgotten is copied",
        LANES,
        "            job.give_up()  # a load",
        "            pass  # a load",
        "a load under way does not bring what is forgotten",
        f"{TRANSPORT}::test_a_load_under_way_does_not_bring_what_is_forgotten",
    ),
    _mutant(
        "a corrupt cell is loaded again",
        LANES,
        "            self.memory.note(job.label, Known.CORRUPT, self._env.now())\n",
        "",
        "what is not right is left alone for a minute",
        f"{TRANSPORT}::test_what_is_not_right_is_a_miss",
    ),
    _mutant(
        "a corrupt cell is not removed first",
        LANES,
        "            yield from calls.call(Use.STORE, job.node, lambda: store.remove(job.name, timeout_s))\n",
        "            pass\n",
        "a store that keeps what it has gets the right cell",
        f"{TRANSPORT}::test_what_is_not_right_is_a_miss",
    ),
    _mutant(
        "wrong bytes are sealed",
        JOBS,
        "return sums is None or all(",
        "return sums is None or any(",
        "wrong bytes in host memory never reach the store",
        f"{TRANSPORT}::test_wrong_bytes_in_host_memory_never_reach_the_store",
    ),
    _mutant(
        "what is there is written again",
        LANES,
        "        elif known is Known.PRESENT or (yield",
        "        elif known is Known.PRESENT and (yield",
        "what the store has is not written again",
        f"{TRANSPORT}::test_what_the_store_has_is_not_written_again",
    ),
    _mutant(
        "a node on trial has all threads",
        NODES,
        "return node.breaker.is_open(now) or node.num_running > 0",
        "return node.breaker.is_open(now)",
        "one call at a time finds out whether a node is back",
        f"{TRANSPORT}::test_a_node_on_trial_has_one_call_at_a_time",
    ),
    _mutant(
        "a node has all threads",
        NODES,
        "num_running < self._most - 1",
        "num_running < self._most",
        "a node that hangs leaves a thread to the others",
        f"{TRANSPORT}::test_a_node_that_hangs_leaves_a_thread_to_the_others",
    ),
    _mutant(
        "a failure is not counted",
        f"{REMOTE}.calls",
        "self.nodes[use].failed(node, self._env.now(), error)",
        "None",
        "a node that fails is left alone",
        f"{TRANSPORT}::test_a_node_that_fails_is_left_alone",
    ),
    _mutant(
        "a panic of a store",
        f"{REMOTE}.steps",
        "            except BaseException as error:  # noqa: BLE001 - somebody's store, and",
        "            except Exception as error:  # noqa: BLE001 - somebody's store, and",
        "whatever a store raises, its thread goes on",
        f"{WRONG}::test_whatever_get_does_is_a_miss[Panic]",
    ),
    _mutant(
        "an answer that is none",
        f"{REMOTE}.calls",
        "lambda: _object(self.store.get(name, timeout_s), num_bytes))",
        "lambda: self.store.get(name, timeout_s))  # type: ignore[arg-type, return-value]",
        "whatever a store answers, its node is judged by it",
        f"{WRONG}::test_whatever_get_does_is_a_miss[int]",
    ),
    _mutant(
        "a view of a store's is read twice",
        f"{REMOTE}.calls",
        '    return view.tobytes() if view.nbytes == num_bytes else b""\n',
        "    return view  # type: ignore[return-value]\n",
        "what is loaded is what was proved",
        f"{WRONG}::test_memory_that_a_store_uses_again_is_never_loaded",
    ),
    _mutant(
        "a question that hangs is no failure",
        QUESTIONS,
        "not self._calls.all_are_late()",
        "True",
        "two questions that hang, and the store is left alone",
        f"{WRONG}::test_questions_that_hang_are_failures",
    ),
    _mutant(
        "a late answer is a success",
        f"{REMOTE}.calls",
        "if answers is not None and self._env.now() <= asked.late_s:",
        "if answers is not None:",
        "a store that takes its time is left alone",
        f"{WRONG}::test_answers_that_come_late_are_failures",
    ),
    _mutant(
        "a full store that answers",
        f"{REMOTE}.calls",
        "        if found:\n            self._note_success",
        "        if True:\n            self._note_success",
        "two writes that fail, and the node is left alone",
        f"{WRONG}::test_a_store_says_what_it_may_have_written",
    ),
    _mutant(
        "what would fail is wanted",
        LANES,
        "        return not self._refuses_store(label)  # it would fail at once\n",
        "        return True\n",
        "what is left alone is not planned",
        f"{WRONG}::test_what_would_fail_at_once_is_not_wanted",
    ),
    _mutant(
        "threads that are left",
        LANES,
        "            unless_all_run.callback(self._stores.end)\n",
        "",
        "where one thread cannot be started, none is left",
        f"{WRONG}::test_a_thread_that_cannot_be_started_leaves_none[aoffload-remote-ask-1]",
    ),
    _mutant(
        "a store before the removal",
        REMOVALS,
        "            if self.has_lost_count or key in self._waiting:\n                return False\n",
        "",
        "what is forgotten is removed before it is stored again",
        f"{TRANSPORT}::test_what_is_forgotten_is_removed_and_can_be_stored_again",
    ),
    _mutant(
        "a removal before the end of a store",
        REMOVALS,
        " and not self._written.get(key)",
        "",
        "a store under way does not bring back what is forgotten",
        f"{TRANSPORT}::test_a_store_under_way_does_not_bring_back_what_is_forgotten",
    ),
    _mutant(
        "removals that are lost",
        REMOVALS,
        "self.has_lost_count = self.has_lost_count or len(self._waiting) > MAX_CELLS",
        "self.has_lost_count = False",
        "what cannot be removed is never used",
        f"{TRANSPORT}::test_more_removals_than_can_be_remembered_end_the_use_of_the_store",
    ),
    _mutant(
        "a question without an end",
        QUESTIONS,
        "            if left_s > 0:\n",
        "            if True:\n",
        "a question whose time is over is a miss",
        f"{TRANSPORT}::test_a_question_whose_time_is_over_is_a_miss",
    ),
    _mutant(
        "unknown is a yes",
        QUESTIONS,
        "        found = [False] * len(labels)\n",
        "        found = [True] * len(labels)\n",
        "a node that does not answer has nothing",
        f"{TRANSPORT}::test_a_node_that_does_not_answer_has_nothing",
    ),
    _mutant(
        "an absence for ever",
        MEMORY,
        "if found.until_s > now:",
        "if found.known is Known.ABSENT or found.until_s > now:",
        "an absence is remembered for a second",
        f"{TRANSPORT}::test_an_absence_is_remembered_for_a_second",
    ),
    _mutant(
        "a late job is in doubt",
        "aoffload.transfer.hops",
        "return Outcome.FAILED if Tier.REMOTE in (self.source, self.destination) else Outcome.UNPROVEN",
        "return Outcome.UNPROVEN",
        "a remote store never leaves host memory in doubt",
        f"{TRANSPORT}::test_a_hop_of_a_remote_store_is_never_in_doubt",
    ),
    _mutant(
        "Redis: the time-out of the first call",
        f"{STORES}.redis_node",
        "            connection._sock.settimeout(timeout_s)\n",
        "",
        "a time-out is that of the call",
        f"{REDIS}::test_a_time_out_is_that_of_the_call",
    ),
    _mutant(
        "Redis: a slot that has moved",
        f"{STORES}.redis_cluster",
        "        if moved is not None:\n",
        "        if moved is not None and not key:\n",
        "a slot that moves is followed",
        f"{REDIS}::test_a_slot_that_moves_is_followed",
    ),
    _mutant(
        "obstore: memory of the caller is kept",
        f"{STORES}.obstore_store",
        "self._store.put(self._path(key), bytes(value), use_multipart=False)",
        "self._store.put(self._path(key), value, use_multipart=False)",
        "an object is what it was when it was put",
        f"{OBSTORE}::test_what_is_put_is_got",
    ),
)
