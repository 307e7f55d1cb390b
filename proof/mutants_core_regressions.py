"""Planted defects in the core and the worker: resets between two calls of a request, observers that raise in the middle
of a change, and an event loop that is torn down."""

from __future__ import annotations

from .planting import Mutant, Patch

__all__ = ["CORE_REGRESSION_MUTANTS"]

_BETWEEN = "no request begins with KV from before a reset"

_RESET_TESTS = "tests/core/test_reset_between_calls.py"

_RESETS = (
    Mutant(
        "reset leaves the match of a request without blocks",
        "aoffload._kernel.base",
        "if tier is None or tier in HIT_TIERS:  # matches",
        "if tier in HIT_TIERS:  # matches",
        _BETWEEN,
        test=f"{_RESET_TESTS}::test_a_pinned_hit_behind_an_engines_own_is_dropped_at_once",
    ),
    Mutant(
        "load keeps a device hit from before a reset",
        "aoffload._kernel.loads",
        "(has_holes(request) or (request.published and not is_current)):",
        "has_holes(request):",
        _BETWEEN,
        test=f"{_RESET_TESTS}::test_a_request_has_nothing_from_before_a_reset",
    ),
    Mutant(
        "load under way keeps a device hit from before a reset",
        "aoffload._kernel.loads",
        "if start and not is_current:",
        "if not load.jobs and load.stop == start and not is_current:",
        _BETWEEN,
        test=f"{_RESET_TESTS}::test_a_reset_while_a_step_overlaps_the_load",
    ),
    Mutant(
        "caller is told of a load that a reset has overtaken",
        "aoffload._runtime.loading",
        "while record.is_loading or session.ledger.lost_to_reset(record):",
        "while record.is_loading:",
        _BETWEEN,
        test="tests/shell/test_reset.py::test_a_reset_between_a_landing_and_the_turn_of_the_task",
    ),
    Mutant(
        "step begins on a load that a reset has overtaken",
        "aoffload._runtime.loading",
        "return not self._has_returned and self._request._session.ledger.lost_to_reset(record)",
        "return False",
        _BETWEEN,
        test="tests/shell/test_reset.py::test_a_reset_between_a_landing_and_the_turn_of_the_task",
    ),
    Mutant(
        "load that is over is taken from under a step",
        "aoffload._kernel.loads",
        "            and request.computing is not COMPUTES_ITS_BLOCKS\n",
        "",
        _BETWEEN,
        test=f"{_RESET_TESTS}::test_a_load_that_is_over_and_of_which_nobody_was_told",
    ),
    Mutant(
        "engine's load that is over counts behind a reset",
        "aoffload._host_cache.host_cache",
        "return is_running and request.epoch != self.cache.epoch",
        "return False",
        _BETWEEN,
        test=f"{_RESET_TESTS}::test_an_engines_load_that_is_over_and_of_which_nobody_was_told",
    ),
    Mutant(
        "engine computes behind what a copy brought after a reset",
        "aoffload._host_cache.host_cache",
        "if request.epoch == self.cache.epoch else arrival.start",
        "if request.epoch != -1 else arrival.start",
        _BETWEEN,
        test=f"{_RESET_TESTS}::test_what_a_copy_brings_after_a_reset_does_not_count_for_an_engine",
    ),
)

_FOREIGN = "a change is completed, whatever foreign code does in the middle of it"
_UNDONE = "a call that raises has changed nothing, so it may be repeated"
_MISBEHAVE = "tests/core/test_observers_misbehave.py"
_PLUGINS = "tests/shell/test_plugins_raise.py"
_BEHIND = (
    "tests/core/test_program_regressions.py::"
    "test_a_store_that_has_landed_behind_another_is_found_by_no_restart_once_it_is_wrong"
)

_OBSERVERS = (
    Mutant(
        "observer's BaseException reaches the ledger",
        "aoffload._kernel.moves",
        "            except BaseException:",
        "            except Exception:",
        _FOREIGN,
        test=f"{_MISBEHAVE}::test_nothing_of_an_observers_goes_through[False-Own]",
    ),
    Mutant(
        "observer's BaseException keeps others from being told",
        "aoffload._observe.observers",
        "                observer.observe(event)\n            except BaseException:",
        "                observer.observe(event)\n            except Exception:",
        _FOREIGN,
        test="tests/shell/test_observers_raise.py::test_nothing_of_an_observers_goes_through[asyncio-Own]",
    ),
    Mutant(
        "events are reported in the middle of a change",
        "aoffload._kernel.moves",
        "            self.unreported.append(moved)\n",
        "            self.unreported.append(moved)\n            self.report()\n",
        _FOREIGN,
        test=f"{_MISBEHAVE}::test_an_event_is_reported_once_its_change_is_complete",
    ),
    Mutant(
        "events of a fork are reported by the next call",
        "aoffload._extensions.forks",
        "            ledger.moves.request(fork.request, state)\n        ledger.moves.report()\n",
        "            ledger.moves.request(fork.request, state)\n",
        _FOREIGN,
        programs=True,
    ),
    Mutant(
        "events of an observer's own calls overtake those before",
        "aoffload._kernel.moves",
        "        if not unreported or observer is None or self._is_reporting:\n",
        "        if not unreported or observer is None:\n",
        _FOREIGN,
        test=f"{_MISBEHAVE}::test_events_of_an_observers_own_calls_come_after_those_before",
    ),
    Mutant(
        "watcher's error reaches the ledger",
        "aoffload._kernel.protocols",
        "            with suppress(BaseException):\n                watcher.part_changed(",
        "            if True:\n                watcher.part_changed(",
        _FOREIGN,
        test=f"{_MISBEHAVE}::test_nothing_of_a_watchers_goes_through[Own]",
        also=(
            Patch(
                "aoffload._kernel.protocols",
                "            with suppress(BaseException):\n                watcher.all_cleared(",
                "            if True:\n                watcher.all_cleared(",
            ),
        ),
    ),
    Mutant(
        "queue's observer is not shielded",
        "aoffload._transfer.copy_queue",
        "            with suppress(BaseException):\n                self.observer.observe(event)\n",
        "            self.observer.observe(event)\n",
        _FOREIGN,
        test="tests/ledger/test_copy_queue.py::test_nothing_of_an_observers_goes_through",
    ),
    Mutant(
        "wake that raises keeps others from being woken",
        "aoffload._kernel.waiting",
        "            call_all(rest)\n",
        "",
        _FOREIGN,
        test=f"{_MISBEHAVE}::test_one_that_is_woken_and_raises_keeps_no_other_from_being_woken",
    ),
    Mutant(
        "policy that raises leaves a request behind",
        "aoffload._kernel.ledger",
        "            ask(request)\n        self.enrol(request)\n",
        "            self.enrol(request)\n            ask(request)\n",
        _FOREIGN,
        test=f"{_MISBEHAVE}::test_a_policy_that_raises_leaves_no_request_behind",
    ),
    Mutant(
        "blocks that the engine did not hold count as held",
        "aoffload._host_cache.matches",
        "self.blocks.hold(block_ids)  # first: if the engine raises, nothing is held\n",
        "self.num_blocks += 1\n        self.blocks.hold(block_ids)\n        self.num_blocks -= 1\n",
        _FOREIGN,
        test=f"{_MISBEHAVE}::test_an_engine_that_refuses_to_hold_blocks_is_not_counted_on",
    ),
    Mutant(
        "commits of a step stay half made if the policy raises",
        "aoffload._kernel.commits",
        "            for request, known in appended:\n                request.sequence.drop_after(known)\n",
        "",
        _UNDONE,
        test=f"{_PLUGINS}::test_a_step_is_committed_whole_or_not_at_all_if_the_policy_raises",
    ),
    Mutant(
        "scope stays entered if the policy raises",
        "aoffload._runtime.request",
        "            self._leave(type(raised), raised, raised.__traceback__)\n",
        "",
        "whatever raises at the end of a block, the block is left",
        test=f"{_PLUGINS}::test_a_policy_that_raises_at_the_end_leaves_the_scopes_of_the_task_whole",
    ),
    Mutant(
        "policy that raises where nobody listens turns the cache off",
        "aoffload._runtime.session",
        "            if not record.is_over:  # the ledger itself has failed\n",
        "            if True:\n",
        "a plug-in of the program harms no other request",
        test=f"{_PLUGINS}::test_a_policy_that_raises_where_nobody_listens_turns_nothing_off",
    ),
    Mutant(
        "pin is released twice",
        "aoffload._runtime.handles",
        " and not self._was_left:",
        ":",
        "a pin that is left twice harms nobody",
        test=f"{_PLUGINS}::test_a_pin_that_is_left_twice_in_a_thread_turns_nothing_off",
    ),
    Mutant(
        "request stays admitted if the load choice raises",
        "aoffload._runtime.session",
        '            self.release(record, f"error: {type(error).__name__}")\n            raise\n',
        "            raise\n",
        "a request that was not entered holds nothing",
        test=f"{_PLUGINS}::test_a_load_choice_that_raises_on_entering_leaves_no_request",
    ),
    Mutant(
        "commit stays half made if the policy raises",
        "aoffload._kernel.commits",
        "            request.sequence.drop_after(known)\n            raise\n        finally:\n",
        "            raise\n        finally:\n",
        _UNDONE,
        test=f"{_MISBEHAVE}::test_a_commit_is_undone_if_the_policy_raises[Own]",
    ),
    Mutant(
        "offer stays half made if foreign code raises",
        "aoffload._host_cache.host_cache",
        "        except BaseException:  # also of the policy or of `find`\n",
        "        except InvalidArgument:\n",
        _UNDONE,
        test=f"{_MISBEHAVE}::test_an_offer_is_undone_if_foreign_code_raises_in_it[Own-find]",
    ),
    Mutant(
        "policy's answer is taken as it is",
        "aoffload._extensions.store_policies",
        'return stop if self._is_known else check_int("store_policy.wanted_stop", stop, 0)\n',
        "return stop\n",
        _UNDONE,
        test=f"{_MISBEHAVE}::test_a_commit_is_undone_if_the_policy_raises[1.5]",
    ),
    Mutant(
        "request stays if the policy raises at its end",
        "aoffload._kernel.ledger",
        "        finally:\n            if request.waiter is not None:\n                self.admission.leave(",
        "        except ZeroDivisionError:\n            pass\n        else:\n"
        "            if request.waiter is not None:\n                self.admission.leave(",
        _FOREIGN,
        also=(
            Patch(
                "aoffload._kernel.ledger",
                "            return self._commits.offer_last(request) if",
                "            plans = self._commits.offer_last(request) if",
            ),
            Patch(
                "aoffload._kernel.ledger",
                "            self.end_call(self.jobs.end_claims(settled) if settled else ())\n",
                "            self.end_call(self.jobs.end_claims(settled) if settled else ())\n        return plans\n",
            ),
        ),
        test=f"{_MISBEHAVE}::test_a_request_ends_even_if_the_policy_raises[seen]",
    ),
    Mutant(
        "stores are lost where `find` raises",
        "aoffload._host_cache.offers",
        "        self._knows_steps, self._computed_blocks = True, 0\n",
        "        self._knows_steps, self._computed_blocks, self._planned = True, 0, []\n",
        "what was planned is launched or discarded",
        test="tests/core/test_engine_deferred.py::test_a_wrong_answer_of_find_loses_no_plan",
    ),
)

_WORKER = (
    Mutant(
        "cancelled worker says that it has failed",
        "aoffload._runtime.worker",
        "            except anyio.get_cancelled_exc_class():\n",
        "            except anyio.get_cancelled_exc_class() as error:\n",
        "cancellation is no failure of the worker",
        also=(Patch("aoffload._runtime.worker", 'self._give_up("the worker was cancelled")', "self._fail(error)"),),
        test="tests/shell/test_worker.py::test_a_loop_that_is_torn_down_is_no_failure_of_the_worker",
    ),
    Mutant(
        "load after a reset ends with what others have published",
        "aoffload._kernel.loads",
        "        if is_current and run is not None:\n",
        "        if run is not None:\n",
        "no request begins with KV from before a reset",
        test="tests/core/test_program_regressions.py::"
        "test_a_load_that_a_reset_ends_brings_nothing_that_others_have_published",
    ),
    Mutant(
        "a wrong store that lands behind another is found by a restart",
        "aoffload._kernel.jobs",
        "            if job.epoch is NoEpoch.INVALIDATED:  # a restart",
        "            if False:  # a restart",
        "what turns out to be wrong is found by no restart",
        test=_BEHIND + "[False]",
    ),
    Mutant(
        "a store that is wrong once it has landed behind another is found by a restart",
        "aoffload._kernel.cache",
        "        if job.parked is not None:  # it has landed",
        "        if False:  # it has landed",
        "what turns out to be wrong is found by no restart",
        test=_BEHIND + "[True]",
    ),
    Mutant(
        "cells of a fork stay in the store",
        "aoffload._extensions.invalidation",
        "        for reader, first in tainted.items() if self.hooks.on_invalidated else ():\n",
        "        for reader, first in ():\n",
        "what turns out to be wrong is removed from the store",
        test="tests/core/test_program_regressions.py::"
        "test_what_a_fork_has_brought_to_a_store_is_removed_with_what_it_copied[False]",
    ),
    Mutant(
        "contradictory report of a rank counts",
        "aoffload._transfer.ranks.transport",
        "        completion = agreeing(completion, job.num_blocks)\n",
        "",
        "a block counts only if its copy was proven on every rank",
        test="tests/transfer/test_ranks.py::test_a_rank_that_contradicts_itself_proves_no_more_than_in_a_ledger",
    ),
    Mutant(
        "eviction orders made in the middle of a reset",
        "aoffload._kernel.base",
        "orders = self.cache.new_orders() if tier is None else []",
        "orders = map(self.cache._new_order, [each.tier for each in self.cache.tiers])",
        "a reset that fails changes nothing",
        test="tests/core/test_extensions.py::test_a_reset_whose_factory_of_orders_fails_changes_nothing",
    ),
    Mutant(
        "age of a planned copy counted from nothing",
        "aoffload._kernel.jobs",
        "now = 0.0 if self.moves.clock is None else self.moves.clock()",
        "now = 0.0",
        "ages say since when",
        test="tests/core/test_diagnosis.py::test_the_age_of_a_copy_counts_from_its_planning",
    ),
)

CORE_REGRESSION_MUTANTS: tuple[Mutant, ...] = _RESETS + _OBSERVERS + _WORKER
