"""Planted defects of the disk in a runtime."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["DISK_SHELL_MUTANTS"]

LANES, WORK = "aoffload._tiers.disk.lanes", "aoffload._tiers.disk.loop"
COPIES, FETCHING = "aoffload._transfer.copy_queue", "aoffload._tiers.fetch.loop"
TRANSPORT, RUNTIME = "tests/transfer/test_disk_transport.py", "tests/shell/test_disk_runtime.py"
SHORT, ROOM = "tests/shell/test_disk_threads.py", "tests/transfer/test_disk_space.py"


def _mutant(name: str, module: str, old: str, new: str, promise: str, test: str) -> Mutant:
    return Mutant(f"disk runtime: {name}", module, old, new, promise, test=test)


DISK_SHELL_MUTANTS: tuple[Mutant, ...] = (
    _mutant(
        "the disk is not told what is given up",
        COPIES,
        "            self._tell_given_up(job_id)\n            given_up = Completion",
        "            given_up = Completion",
        "a store that was given up records nothing: its source is somebody else's",
        "tests/ledger/test_copy_queue.py::test_a_transport_hears_of_what_is_given_up_before_its_source_is_released",
    ),
    _mutant(
        "given up, and recorded all the same",
        LANES,
        "                self._given_up.add(job_id)\n",
        "                pass\n",
        "a store that was given up records nothing: its source is somebody else's",
        f"{TRANSPORT}::test_what_is_given_up_is_not_recorded",
    ),
    _mutant(
        "a direction has all threads",
        LANES,
        "MOST_RUNNING = {Direction.LOAD: 3, Direction.STORE: 2}",
        "MOST_RUNNING = {Direction.LOAD: 4, Direction.STORE: 4}",
        "a direction that hangs leaves the other one alone",
        f"{TRANSPORT}::test_a_direction_that_hangs_leaves_threads_to_the_other",
    ),
    _mutant(
        "idle threads are not told of the end",
        LANES,
        "                    self._turn.notify_all()  # otherwise",
        "                    pass  # otherwise",
        "closing ends all threads",
        f"{TRANSPORT}::test_closing_waits_no_longer_than_it_is_told_to",
    ),
    _mutant(
        "a sum for memory that has changed",
        LANES,
        "                if not self._checksums.matches(host_id, self._host[host_id]):\n",
        "                if False:\n",
        "with verify, wrong bytes get no sum of their own",
        f"{TRANSPORT}::test_a_host_block_that_has_changed_is_not_stored",
    ),
    _mutant(
        "no checksum for what was read back",
        LANES,
        "                self._checksums.record(host_id, self._host[host_id])\n",
        "                pass\n",
        "what comes from the disk passes verification",
        f"{TRANSPORT}::test_blocks_go_down_to_the_disk_and_up_again",
    ),
    _mutant(
        "stores pass what is to be forgotten",
        LANES,
        "                    if direction is Direction.STORE and self._is_forgetting:\n",
        "                    if False:\n",
        "forgetting a slot does not erase what comes later",
        f"{TRANSPORT}::test_what_is_forgotten_is_found_by_nobody",
    ),
    _mutant(
        "a reset takes back a later one",
        LANES,
        "                if num_resets > self._num_resets:\n",
        "                if True:\n",
        "a reset outlives the process",
        f"{TRANSPORT}::test_a_reset_outlives_the_process",
    ),
    _mutant(
        "used after a reset that failed",
        LANES,
        '            self.turn_off(f"a reset did not reach the disk: {error}")\n',
        "",
        "nothing is added to what was to be forgotten",
        f"{TRANSPORT}::test_a_reset_that_fails_ends_the_use_of_the_disk",
    ),
    _mutant(
        "a disk that fails is asked again at once",
        LANES,
        "                move = breaker.failed(now, found.error)\n",
        "                pass\n",
        "a disk that fails is left alone for a while",
        f"{TRANSPORT}::test_a_disk_that_fails_is_left_alone_for_a_while",
    ),
    _mutant(
        "the files stay open behind a hang",
        LANES,
        "        if self._is_closing and not self._threads and self.num_blocks:\n",
        "        if self._is_closing and not self._threads and self.num_blocks and not self._is_abandoned:\n",
        "another process may have the directory once the last thread has ended",
        f"{TRANSPORT}::test_closing_waits_no_longer_than_it_is_told_to",
    ),
    _mutant(
        "stored while it is read",
        WORK,
        "        if self.state is not DiskState.READY or not self.ledger.disk.stores_are_due:\n",
        "        if self.state is DiskState.OFF or not self.ledger.disk.stores_are_due:\n",
        "nothing is stored before the reading is over",
        f"{RUNTIME}::test_nothing_is_stored_while_the_disk_is_read",
    ),
    _mutant(
        "many turns at once",
        WORK,
        "        if not self._is_turn_due:\n",
        "        if True:\n",
        "what was read back takes a short turn of a round of the event loop",
        "tests/shell/test_disk_restore_slices.py::test_no_round_of_the_event_loop_takes_in_more_than_one_turn",
    ),
    _mutant(
        "no cap for a day",
        WORK,
        "        return min(MAX_BLOCKS, min(room, self.budget.left(self.env.now())) // self.block_bytes)\n",
        "        return min(MAX_BLOCKS, room // self.block_bytes)\n",
        "not a block more than the cap is written",
        f"{RUNTIME}::test_the_day_has_a_cap",
    ),
    _mutant(
        "what a failed forward left stays there",
        WORK,
        "            self.disk.forget(slots)\n",
        "            pass\n",
        "no restart finds what a failed forward wrote",
        f"{RUNTIME}::test_what_a_failed_forward_wrote_is_found_by_nobody",
    ),
    _mutant(
        "closing writes nothing",
        WORK,
        "                    await self._flush()\n",
        "",
        "what only host memory had is stored on closing",
        f"{RUNTIME}::test_a_restart_hits_what_was_stored",
    ),
    _mutant(
        "a fetch without a bound",
        FETCHING,
        "    deadline = session.now() + found.bound_s\n",
        "    deadline = session.now() + 1e6\n",
        "a request waits for a fetch no longer than said",
        f"{RUNTIME}::test_a_fetch_that_hangs_is_waited_for_no_longer_than_said",
    ),
    _mutant(
        "a fetch that nobody matches",
        FETCHING,
        "        request._session.ledger.fetches.match_again(record)\n",
        "        pass\n",
        "what was fetched is hit",
        f"{RUNTIME}::test_a_prompt_that_only_the_disk_has_is_hit",
    ),
    _mutant(
        "an opening without a thread keeps the directory",
        LANES,
        "            self._close_after_the_last()  # perhaps none could be started\n",
        "",
        "who fails to open leaves nothing open",
        f"{SHORT}::test_an_opening_that_is_short_of_a_thread_leaves_nothing",
    ),
    _mutant(
        "used after a reset without a thread",
        WORK,
        "            settle(str(error))\n",
        "            problems.append(str(error))\n            ended.set()\n",
        "nothing is added to what was to be forgotten",
        f"{SHORT}::test_a_reset_without_a_thread_ends_the_use_of_the_disk",
    ),
    _mutant(
        "stored before the disk knows of a reset",
        WORK,
        " or self._num_resets < self.ledger.disk.num_resets:\n",
        ":\n",
        "a reset that is late is not passed by what comes after it",
        f"{SHORT}::test_a_reset_that_waits_no_longer_than_it_may_does_not_cost_the_disk",
    ),
    _mutant(
        "a fork keeps the directory",
        "aoffload._tiers.disk.files",
        "                fcntl.flock(lock.descriptor, fcntl.LOCK_UN)\n",
        "                pass\n",
        "who has closed leaves the directory to the next one, whatever was forked",
        f"{ROOM}::test_who_closes_lets_go_whatever_shares_its_file",
    ),
    _mutant(
        "a fork gives the directory away",
        "aoffload._tiers.disk.files",
        "                os.close(lock.descriptor)\n        self._held.clear()",
        "                fcntl.flock(lock.descriptor, fcntl.LOCK_UN)\n        self._held.clear()",
        "one process has a directory",
        f"{ROOM}::test_a_fork_does_not_keep_the_directory",
    ),
    _mutant(
        "a failed start keeps its room",
        "aoffload._tiers.disk.slots",
        "                give_back()\n",
        "                pass\n",
        "who fails to open leaves nothing",
        f"{ROOM}::test_a_start_that_fails_later_keeps_no_room",
    ),
    _mutant(
        "a link that stalls is fetched from",
        WORK,
        "        return not is_off and not self.worker.copies.is_stalled(Tier.DISK, Tier.HOST)\n",
        "        return True\n",
        "nobody waits for a disk that is known to hang",
        f"{RUNTIME}::test_a_disk_that_fails_is_not_fetched_from",
    ),
)
