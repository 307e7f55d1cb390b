"""Checkpoints of a recurrent state: where they are planned, what makes them findable, and who has their blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from disk_driving import Disk
from driving import BLOCK, Driven, prompt

from aoffload._common.tiers import Tier
from aoffload._config.groups import KVCacheGroup, RecurrentState, SlidingWindow
from aoffload._kernel.plans import TransferPlan
from aoffload._kernel.records import LedgerRequest
from aoffload._kernel.states import Outcome, RequestState
from aoffload.errors import CommitError, ConfigError, OutOfBlocks, WrongState
from proof.programs import explore_programs

ROWS = 3
GROUPS = [KVCacheGroup("full", block_size=BLOCK), KVCacheGroup("state", RecurrentState(), BLOCK, num_rows=ROWS)]
A = prompt(1, 21)
"""Five blocks, and a token that is always computed."""
S = RequestState


class Hybrid(Driven):
    """Names each planned checkpoint that a commit passes, unless `written` says which."""

    def __init__(self, num_device: int = 60, num_host: int = 60, **config: object) -> None:
        config.setdefault("groups", GROUPS)
        super().__init__(num_device, num_host, **config)

    def planned(self, request: LedgerRequest) -> list[int]:
        return [checkpoint.num_tokens for checkpoint in self.ledger.planned_checkpoints(request)]

    def commit(  # type: ignore[override]
        self,
        request: LedgerRequest,
        num_tokens: int | None = None,
        new: Iterable[int] = (),
        written: Iterable[int] | None = None,
    ) -> list[TransferPlan]:
        stop = request.sequence.num_tokens if num_tokens is None else num_tokens
        passed = [at for at in self.planned(request) if at <= stop]
        plans = self.ledger.commit(request, stop, list(new), passed if written is None else written)
        self.ledger.check_integrity()
        return list(plans)

    def resumes_at(self, request: LedgerRequest) -> int:
        found = self.ledger.resume_checkpoint(request)
        return 0 if found is None else found.num_tokens

    def serve_with(self, tokens: list[int], written: Iterable[int]) -> None:
        request = self.running(tokens)
        self.land(self.commit(request, written=written))
        self.land(self.release(request))


# -- where they are planned -------------------------------------------------------------------------------------------


def test_the_end_of_the_prompt_is_planned() -> None:
    """A checkpoint is planned where a repeated prompt can hit: a token is always left to compute."""
    driven = Hybrid()
    assert driven.planned(driven.running(A)) == [20]
    assert driven.planned(driven.running(prompt(2, 20))) == [16]
    assert driven.planned(driven.running(prompt(3, 4))) == []


def test_the_branch_is_planned_where_the_kv_goes_further_than_the_states() -> None:
    """The second prompt with a prefix finds its KV and no checkpoint. It writes one, and the third prompt hits."""
    driven = Hybrid()
    driven.serve(A)
    second, third = A[:12] + prompt(2, 20), A[:12] + prompt(3, 20)
    request = driven.running(second)
    assert request.match.num_tokens == 0 and driven.planned(request) == [12, 28]
    driven.land([*driven.commit(request), *driven.release(request)])
    assert driven.hit(third) == (12, 0)
    driven.evict_device()
    assert driven.hit(third) == (0, 12)


def test_the_end_of_an_answer_is_no_branch() -> None:
    """The next turn of a conversation finds the KV of the answer, and no other prompt leaves the path there."""
    driven = Hybrid()
    request = driven.running(A)
    driven.land(driven.commit(request))
    driven.ledger.extend_nowait(request, 32)
    answer = prompt(8, 11)
    driven.land([*driven.commit(request, 31, answer), *driven.release(request)])
    following = driven.running(A + answer + prompt(9, 9))
    assert (driven.resumes_at(following), driven.planned(following)) == (20, [40])
    other = driven.running(A + answer[:3] + prompt(7, 9))
    assert (driven.resumes_at(other), driven.planned(other)) == (20, [24, 32])


def test_a_hit_plans_no_checkpoint_that_is_there() -> None:
    """A repeated prompt continues from its checkpoint, and plans nothing."""
    driven = Hybrid()
    driven.serve(A)
    request = driven.running(A)
    assert (driven.resumes_at(request), driven.planned(request)) == (20, [])
    assert driven.ledger.block_ids(request)[1] == []


def test_checkpoints_keep_the_alignment_of_hits() -> None:
    """A request whose hits have to be aligned writes checkpoints where such hits end."""
    driven = Hybrid()
    assert driven.planned(driven.running(A, hit_alignment=8)) == [16]


def test_a_checkpoint_has_the_rows_of_all_its_groups() -> None:
    """Several groups with a recurrent state have one checkpoint, whose blocks are in the order of the groups."""
    groups = [*GROUPS, KVCacheGroup("more", RecurrentState(), 2 * BLOCK, num_rows=2)]
    driven = Hybrid(groups=groups)
    (planned,) = driven.ledger.planned_checkpoints(driven.running(A))
    assert planned.num_tokens == 16 and len({*planned.block_ids}) == ROWS + 2


# -- what makes them findable -----------------------------------------------------------------------------------------


def test_only_a_named_checkpoint_is_found() -> None:
    """A prompt computed in one pass, whose checkpoint was not written, is no hit for any request."""
    driven = Hybrid()
    driven.serve_with(A, [])
    assert driven.hit(A) == driven.hit(A[:12] + prompt(2, 9)) == (0, 0)
    driven.serve_with(A, [20])
    assert driven.hit(A) == (20, 0)
    assert driven.hit(A[:20] + prompt(2, 9)) == (20, 0) and driven.hit(A[:12] + prompt(2, 9)) == (0, 0)


@pytest.mark.parametrize(
    ("stop", "written", "says"),
    [
        (21, [16], "checkpoints: names 16, which is not planned: request .* plans 20"),
        (16, [20], "checkpoints: names 20, which does not lie between 1 and 16"),
        (21, ["20"], r"checkpoints: must hold positions in tokens \(`num_tokens`\), got '20'"),
        (21, [True], "checkpoints: must hold positions in tokens .*, got True"),
        (21, 20, "checkpoints: must be a sequence of int, got 20"),
    ],
)
def test_a_commit_of_another_checkpoint_is_refused(stop: int, written: object, says: str) -> None:
    """Only planned checkpoints within the tokens of the commit are accepted; a refused commit changes nothing."""
    driven = Hybrid()
    request = driven.running(A)
    before = driven.picture()
    with pytest.raises(CommitError, match=says):
        driven.ledger.commit(request, stop, [], written)  # type: ignore[arg-type]
    assert driven.picture() == before and driven.planned(request) == [20]
    driven.commit(request)
    assert driven.hit(A) == (20, 0)


def test_an_iterable_that_calls_the_ledger_finds_it_whole() -> None:
    """The positions are read before anything is checked, so a generator that releases the request makes the commit a
    commit of a request that is over."""
    driven = Hybrid()
    request, other = driven.running(A), driven.running(prompt(2, 9))

    def ending() -> Iterator[int]:
        driven.ledger.release(request)
        yield 20

    with pytest.raises(WrongState):
        driven.ledger.commit(request, 21, (), ending())
    driven.ledger.check_integrity()
    request = driven.running(A)
    with pytest.raises(WrongState):
        driven.ledger.commit_all([(request, 21, ()), (other, 9, (), ending())])
    driven.ledger.check_integrity()
    assert other.num_computed_tokens == 0


def test_a_checkpoint_behind_the_computed_tokens_is_refused() -> None:
    """What a later forward computes, it cannot have copied at an earlier token."""
    driven = Hybrid()
    request = driven.running(A)
    with driven.ledger.step([request]):  # the step keeps the blocks of a checkpoint that was passed
        driven.commit(request, 21, written=[])
        with pytest.raises(CommitError, match="names 20, which does not lie between 22 and 21"):
            driven.ledger.commit(request, 21, [], [20])


def test_a_layout_without_states_plans_nothing_and_takes_no_name() -> None:
    """Without a recurrent state there are no checkpoints."""
    driven = Driven(20)
    request = driven.running(A)
    assert driven.ledger.planned_checkpoints(request) == () and driven.ledger.resume_checkpoint(request) is None
    with pytest.raises(CommitError, match=r"names 20, which is not planned: request .* plans none"):
        driven.ledger.commit(request, 21, [], [20])


# -- who has their blocks ---------------------------------------------------------------------------------------------


def test_blocks_of_a_checkpoint_that_was_left_out_are_free() -> None:
    """A request that passes a planned checkpoint without writing it gives the blocks back at that commit."""
    driven = Hybrid()
    request = driven.running(A)
    before = driven.ledger.statistics().device.num_free
    driven.commit(request, 19)
    assert driven.ledger.statistics().device.num_free == before
    driven.commit(request, 20, written=[])
    assert driven.ledger.statistics().device.num_free == before + ROWS and driven.planned(request) == []


def test_a_published_checkpoint_is_cached_and_not_pinned() -> None:
    """A live request pins its KV, and no checkpoint that it has written: its running state is in the engine's slot."""
    driven = Hybrid(num_host=0)
    request = driven.running(A)
    driven.commit(request, 20)
    assert driven.ledger.statistics().device.num_cached == ROWS
    other = driven.admit(prompt(2, 4 * (60 - 6 - ROWS)))
    driven.ledger.allocate_nowait(other)  # takes the room of the checkpoint
    assert driven.hit(A) == (0, 0)


def test_the_checkpoint_of_a_hit_is_pinned_until_the_request_has_computed() -> None:
    """From the match to the first commit, nobody may take the checkpoint from which the request continues."""
    driven = Hybrid(num_device=14, num_host=0)
    driven.serve(A)
    request = driven.running(A)
    ids = driven.ledger.resume_checkpoint(request).block_ids  # type: ignore[union-attr]
    assert len(ids) == ROWS
    with pytest.raises(OutOfBlocks):
        driven.ledger.allocate_nowait(driven.admit(prompt(2, 4 * 5)))
    with driven.ledger.step([request]):
        driven.commit(request, 21)
        assert driven.resumes_at(request) == 20  # the step may still read it
    assert driven.ledger.resume_checkpoint(request) is None
    driven.ledger.allocate_nowait(driven.admit(prompt(3, 4 * 5)))


def test_a_load_waits_for_the_step_that_has_written_a_checkpoint() -> None:
    """The blocks of a checkpoint remember the last step that wrote or read them, although nothing pins them: a load
    into them waits for its fence. During that step, they are pinned."""
    driven = Hybrid()
    with driven.ledger.step([]):
        pass
    for number in (2, 3):  # it is written, and then read by a repeated prompt
        request = driven.running(A)
        with driven.ledger.step([request]):
            driven.land(driven.commit(request, 21))
            (part,) = (
                part
                for run in request.device_run.path()  # type: ignore[union-attr]
                for part in run.parts_in(Tier.DEVICE)
                if part.component and part.blocks
            )
            assert part.num_references == 1
        assert part.num_references == 0 and driven.ledger.cache.last_uses.latest(part.blocks) == number
        driven.release(request)


def test_fewer_checkpoints_are_planned_where_all_do_not_fit() -> None:
    """A request that fits without its checkpoints is admitted without them."""
    driven = Hybrid(num_device=8)
    assert driven.planned(driven.allocated(prompt(2, 21))) == []
    driven = Hybrid(num_device=9)
    assert driven.planned(driven.allocated(prompt(2, 21))) == [20]


def test_a_hit_is_kept_where_a_new_checkpoint_does_not_fit() -> None:
    """Of a hit and a checkpoint to write, the hit counts more."""
    driven = Hybrid(num_device=9)
    driven.serve(prompt(1, 13))
    request = driven.allocated(prompt(1, 22))
    assert (request.num_computed_tokens, driven.planned(request)) == (12, [])


def test_a_request_does_without_a_hit_whose_checkpoint_takes_its_room() -> None:
    """If tables and the checkpoint of the hit can never fit together, the prompt is computed."""
    driven = Hybrid(num_device=9)
    driven.serve(A)
    assert driven.hit(A) == (20, 0)
    request = driven.admit(A)
    driven.ledger.allocate_nowait(request, 36)
    assert request.num_units == 9 and request.num_computed_tokens == 0


# -- loads, preemption, forks, invalidation ---------------------------------------------------------------------------


def test_a_load_brings_the_checkpoint_at_its_end_alone() -> None:
    """A hit in the host is the KV and one checkpoint. A load that is limited ends at an earlier checkpoint."""
    driven = Hybrid()
    driven.serve(A)
    longer = A + prompt(2, 20)
    driven.serve(longer)
    driven.evict_device()
    request = driven.allocated(longer)
    plans = driven.ledger.plan_load(request)
    assert sum(plan.num_blocks for plan in plans) == 40 // BLOCK + ROWS
    driven.land(plans)
    assert (request.num_computed_tokens, driven.resumes_at(request)) == (40, 40)
    driven.release(request)
    driven.evict_device()
    request = driven.allocated(longer)
    driven.land(driven.ledger.plan_load(request, 32))
    assert (request.num_computed_tokens, driven.resumes_at(request)) == (20, 20)


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.UNPROVEN, Outcome.CORRUPT])
def test_a_load_without_its_checkpoint_counts_for_nothing(outcome: Outcome) -> None:
    """KV that arrives without its checkpoint is no use: the request computes from the last checkpoint that it has."""
    driven = Hybrid()
    driven.serve(A)
    driven.evict_device()
    request = driven.allocated(A)
    for plan in driven.ledger.plan_load(request):
        driven.ledger.launch(plan.job_id)
        is_state = plan.num_blocks == ROWS
        driven.end(
            plan, outcome if is_state else Outcome.LANDED, 0, [1] if is_state and outcome is Outcome.CORRUPT else ()
        )
    assert (request.state, request.num_computed_tokens, driven.resumes_at(request)) == (S.RUNNING, 0, 0)
    assert request.num_lost_tokens == 20


def test_a_load_that_falls_short_plans_what_it_has_lost() -> None:
    """A corrupt checkpoint is a miss. The request that finds it computes its prompt and writes the checkpoint again."""
    driven = Hybrid()
    driven.serve(A)
    driven.evict_device()
    request = driven.allocated(A)
    assert driven.planned(request) == []
    for plan in driven.ledger.plan_load(request):
        driven.ledger.launch(plan.job_id)
        is_state = plan.num_blocks == ROWS
        driven.end(plan, Outcome.CORRUPT if is_state else Outcome.LANDED, 0, [0] if is_state else ())
    assert driven.planned(request) == [20]
    driven.land([*driven.commit(request), *driven.release(request)])
    driven.evict_device()
    assert driven.hit(A) == (0, 20)


def test_two_requests_share_the_load_of_a_checkpoint() -> None:
    """The second request waits for the copies of the first, and both continue from the same checkpoint."""
    driven = Hybrid()
    driven.serve(A)
    driven.evict_device()
    first, second = driven.allocated(A), driven.allocated(A)
    plans = driven.ledger.plan_load(first)
    assert not driven.ledger.plan_load(second)
    driven.land(plans)
    assert driven.resumes_at(first) == driven.resumes_at(second) == 20
    assert driven.ledger.resume_checkpoint(first) == driven.ledger.resume_checkpoint(second)


def test_a_preempted_request_continues_from_its_last_checkpoint() -> None:
    """What was computed after the last checkpoint is computed again; the host keeps that checkpoint meanwhile."""
    driven = Hybrid()
    request = driven.running(A)
    driven.land(driven.commit(request))
    driven.ledger.extend_nowait(request, 40)
    driven.land(driven.commit(request, 30, prompt(8, 10)))
    driven.land(driven.ledger.preemption.preempt(request).plans)
    driven.evict_device()
    assert driven.ledger.statistics().host.num_pinned >= 5 + ROWS
    driven.ledger.preemption.resume(request)
    driven.ledger.allocate_nowait(request)
    driven.land(driven.ledger.plan_load(request))
    assert (request.num_computed_tokens, driven.resumes_at(request)) == (20, 20)
    assert driven.planned(request) == [28]  # its own KV is a branch, too: the next preemption costs less


def test_a_fork_continues_where_its_parent_does() -> None:
    """A fork of a request that has not computed yet has the same checkpoint; a later one has none, but a copy of the
    engine's slot."""
    driven = Hybrid()
    driven.serve(A)
    parent = driven.running(A)
    early = driven.ledger.forks.fork(parent).request
    driven.commit(parent, 21)
    late = driven.ledger.forks.fork(parent).request
    assert (driven.resumes_at(early), driven.resumes_at(late)) == (20, 0)
    driven.release(parent)
    assert driven.resumes_at(early) == 20


def test_a_fork_is_refused_while_a_lost_checkpoint_is_to_be_read() -> None:
    """After a reset of the device, only the parent may read its checkpoint: a fork would read blocks of others."""
    driven = Hybrid()
    driven.serve(A)
    parent = driven.running(A)
    driven.ledger.reset(Tier.DEVICE)
    with pytest.raises(WrongState, match=r"fork: the checkpoint of request .* is no longer cached"):
        driven.ledger.forks.fork(parent)
    assert driven.resumes_at(parent) == 20
    driven.commit(parent, 21)
    assert driven.resumes_at(driven.ledger.forks.fork(parent).request) == 0


def test_an_invalidation_finds_a_checkpoint_beside_kv_of_another_request() -> None:
    """A checkpoint of a failed forward is withdrawn although the KV under it is another request's, which stays.
    Requests that continued from it are told."""
    driven = Hybrid()
    keeper, failed = driven.running(A), driven.running(A)
    driven.land(driven.commit(keeper, 21, written=[]))
    (store,) = driven.launch(driven.commit(failed, 20))
    reader, other, waiting = driven.running(A), driven.running(prompt(5, 9)), driven.admit(A)
    assert driven.resumes_at(reader) == waiting.match.num_tokens == 20
    told = driven.ledger.invalidation.invalidate(failed, 16)
    assert {*told} == {failed, reader}
    assert driven.hit(A) == (0, 0) and waiting.match.num_tokens == 0
    driven.end(store)  # it has copied the wrong bytes
    assert driven.hit(A) == (0, 0)
    for request in (keeper, failed, reader, other, waiting):
        driven.release(request)
    driven.serve_with(A, [20])
    assert driven.hit(A) == (20, 0)


def test_a_request_cannot_go_back_behind_its_running_state() -> None:
    """The request that invalidates its own tokens is to be aborted, because its state is that of a later token."""
    driven = Hybrid()
    request = driven.running(A)
    driven.commit(request)
    assert driven.ledger.invalidation.invalidate(request, 21) == ()
    assert driven.ledger.invalidation.invalidate(request, 20) == (request,)


# -- the disk ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_goes_to_the_disk_before_its_kv() -> None:
    """The checkpoint that the host evicts next is stored as a whole, also above the limit of a call: its KV would be of
    no use without it."""
    disk = Disk(num_device=40, num_host=9, groups=GROUPS)
    request = disk.running(A)
    disk.land(disk.ledger.commit(request, 21, (), [20]))
    disk.land(disk.release(request))
    first = disk.write_behind(2)
    assert [plan.num_blocks for plan in first] == [ROWS]
    disk.land(first)
    disk.flush()
    disk.forget_host()
    assert disk.on_disk(A) == 20


# -- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, -1, True, 1.5, "2", 2**21])
def test_wrong_numbers_of_rows_are_refused(number: object) -> None:
    """A checkpoint has a whole number of blocks."""
    with pytest.raises(ConfigError, match=r"groups\.num_rows"):
        KVCacheGroup("state", RecurrentState(), num_rows=number)  # type: ignore[arg-type]


def test_only_a_recurrent_state_has_rows() -> None:
    """Blocks of attention belong to tokens."""
    with pytest.raises(ConfigError, match=r"groups\.num_rows: is 2 in group 'w', which has no RecurrentState"):
        KVCacheGroup("w", SlidingWindow(8), num_rows=2)


def test_a_remote_store_is_refused_with_the_reason() -> None:
    """Cells of a remote store hold full attention only."""
    from aoffload import RemoteTier

    class Nowhere:
        def exist(self, keys: object, timeout_s: float) -> list[bool]:
            return []

        def node_of(self, key: bytes) -> str:
            return ""

        def get(self, key: bytes, timeout_s: float) -> None: ...
        def put(self, key: bytes, value: object, timeout_s: float) -> None: ...
        def remove(self, key: bytes, timeout_s: float) -> None: ...
        def close(self) -> None: ...

    with pytest.raises(ConfigError, match="remote: supports full attention only: these groups have a recurrent state"):
        Hybrid(remote=RemoteTier(Nowhere()), namespace="m")


# -- random programs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("face", ["states", "engine-states"])
def test_random_programs_with_states(face: str) -> None:
    """Random programs with states break no law, and meet every way in which a checkpoint comes and goes."""
    found = explore_programs(face, 0, 60, 48)  # type: ignore[arg-type]
    assert not found.broken, found.broken[0].violation
    met = {one for one, other in found.pairs if one == other}
    assert {"checkpoint", "preempt" if face == "states" else "checkpoint loaded", "invalidate", "disk"} <= met
