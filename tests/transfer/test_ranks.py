"""Several ranks of one transport: the end and the outcome of a job, and fences."""

from __future__ import annotations

import gc
import threading
from array import array
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import TypeAlias

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedFence, ScriptedTransport

from aoffload._common.tiers import Tier
from aoffload._kernel.plans import Completion, TransferPlan
from aoffload._kernel.states import Outcome
from aoffload._transfer.fences import PASSED, Fence
from aoffload._transfer.ranks import transport as rank_transport
from aoffload._transfer.ranks.rank import LocalRank, Rank
from aoffload._transfer.ranks.serving import _Server
from aoffload._transfer.ranks.transport import JobTally, RankTransport
from aoffload._transfer.ranks.wire import Completed
from aoffload._transfer.transport import TransferStatistics, Transport
from aoffload.errors import ConfigError, InvalidArgument, TransferRefused, WrongState
from aoffload.transport import Env

NUM_BLOCKS = 4
"""Of every plan here."""


class MortalRank(LocalRank):
    """A rank of scripted copies that dies when told to."""

    transport: ScriptedTransport

    def open(
        self,
        num_host_blocks: int,
        *,
        verify: bool,
        deliver: Callable[[Completion], None],
        lost: Callable[[str], None],
        env: Env,
    ) -> None:
        super().open(num_host_blocks, verify=verify, deliver=deliver, lost=lost, env=env)
        self.die = lost
        self.report = deliver


class Ranks:
    """An opened transport over `num_ranks` scripted ones."""

    def __init__(self, num_ranks: int = 2, auto: bool = False) -> None:
        self.scripts = [ScriptedTransport(9, block_bytes=10, auto=auto) for _ in range(num_ranks)]
        self.ranks = [MortalRank(script) for script in self.scripts]
        self.transport = RankTransport(self.ranks)
        self.completions: list[Completion] = []
        self.transport.open(8, verify=False, deliver=self.completions.append, env=Env())

    def launch(self, job_id: int = 1, after: Fence | None = None) -> None:
        self.transport.launch(plan(job_id), after)

    def outcomes(self) -> list[Outcome]:
        return [completion.outcome for completion in self.completions]


def plan(job_id: int) -> TransferPlan:
    return TransferPlan(job_id, Tier.HOST, Tier.DEVICE, array("i", range(NUM_BLOCKS)), array("i", [5, 6, 7, 8]))


def test_it_is_a_transport_of_the_least_capacity() -> None:
    """Rows are those that every rank has; a block is the parts of all ranks; each rank opens the same host blocks."""
    scripts = [ScriptedTransport(9, block_bytes=10), ScriptedTransport(7, block_bytes=6)]
    transport: Transport = RankTransport([LocalRank(script) for script in scripts])
    assert (transport.num_device_blocks, transport.block_bytes) == (7, 16)
    transport.open(5, verify=False, deliver=lambda completion: None, env=Env())
    assert [len(script.host_content) for script in scripts] == [5, 5]
    with pytest.raises(WrongState):
        transport.open(5, verify=False, deliver=lambda completion: None, env=Env())
    with pytest.raises(ConfigError, match="ranks: is empty"):
        RankTransport([])


def test_a_job_is_complete_when_every_rank_is() -> None:
    """Nothing is told before the last rank has landed; then it is told once."""
    ranks = Ranks(3)
    ranks.launch()
    for script in (ranks.scripts[2], ranks.scripts[0]):
        script.land(1)
        assert ranks.completions == []
    ranks.scripts[1].land(1)
    assert ranks.completions == [Completion(1, Outcome.LANDED, NUM_BLOCKS, num_bytes=3 * NUM_BLOCKS * 10)]


def test_a_failure_waits_for_the_other_ranks() -> None:
    """The blocks of a failed job stay its own while another rank may still write into them."""
    ranks = Ranks()
    ranks.launch()
    ranks.scripts[1].fail(1, num_landed=3, error="the cable fell out")
    assert ranks.completions == []
    ranks.scripts[0].land(1)
    assert ranks.completions == [Completion(1, Outcome.FAILED, 3, error="rank 1: the cable fell out", num_bytes=40)]


def test_what_is_corrupt_on_any_rank_is_corrupt() -> None:
    """The union is forgotten, and only what is before all of it counts; a failure beside it hides none of it."""
    ranks = Ranks(3)
    ranks.launch()
    ranks.scripts[0].corrupt(1, 3)
    ranks.scripts[1].corrupt(1, 2, 3)
    ranks.scripts[2].fail(1, num_landed=1)
    (found,) = ranks.completions
    assert (found.outcome, found.num_landed, found.corrupt) == (Outcome.CORRUPT, 1, (2, 3))


def test_doubt_on_one_rank_is_doubt_until_it_is_proven() -> None:
    """UNPROVEN is told once; late proof of that rank is told, too, and ends it."""
    ranks = Ranks()
    ranks.launch()
    ranks.scripts[0].lose(1)
    ranks.scripts[1].land(1)
    assert ranks.outcomes() == [Outcome.UNPROVEN]
    ranks.scripts[0].deliver_again(1)
    assert ranks.outcomes() == [Outcome.UNPROVEN]
    ranks.scripts[0].land(1)
    assert ranks.outcomes() == [Outcome.UNPROVEN, Outcome.LANDED]


def test_death_ends_doubt() -> None:
    """The memory that the copy would write into is gone with its rank."""
    ranks = Ranks()
    ranks.launch()
    ranks.scripts[0].lose(1)
    ranks.scripts[1].land(1)
    ranks.ranks[0].die("killed")
    assert ranks.outcomes() == [Outcome.UNPROVEN, Outcome.FAILED]


def test_a_rank_counts_once() -> None:
    """A second report of one rank does not stand for another rank's, and a late one changes nothing."""
    ranks = Ranks()
    ranks.launch()
    ranks.scripts[0].land(1)
    ranks.scripts[0].deliver_again(1)
    assert ranks.completions == []
    ranks.scripts[1].fail(1)
    ranks.scripts[0].deliver_again(1)
    ranks.ranks[0].die("killed")
    assert ranks.outcomes() == [Outcome.FAILED]


def test_less_than_everything_is_never_landed() -> None:
    """A rank that says LANDED and counts fewer blocks than the plan has is not believed."""
    ranks = Ranks()
    ranks.launch()
    ranks.scripts[0].land(1)
    ranks.ranks[1].report(Completion(1, Outcome.LANDED, NUM_BLOCKS - 1))
    assert [(found.outcome, found.num_landed) for found in ranks.completions] == [(Outcome.FAILED, NUM_BLOCKS - 1)]


def test_a_dead_rank_fails_its_jobs_once_the_others_are_through() -> None:
    """Death is proof for the dead rank only; from then on everything is refused, fences too."""
    ranks = Ranks()
    ranks.launch(1)
    ranks.launch(2)
    ranks.scripts[0].land(1)
    ranks.ranks[1].die("its process ended")
    assert [(found.job_id, found.outcome) for found in ranks.completions] == [(1, Outcome.FAILED)]
    assert ranks.completions[0].num_landed == 0
    for call in (lambda: ranks.launch(3), ranks.transport.record_fence):
        with pytest.raises(TransferRefused, match="rank 1 is gone: its process ended"):
            call()
    ranks.scripts[0].land(2)
    assert [found.job_id for found in ranks.completions] == [1, 2]
    assert [len(script.launched) for script in ranks.scripts] == [2, 2]


def test_what_the_first_rank_refuses_nobody_starts() -> None:
    """A refusal means that nothing was started and nothing will be delivered."""
    ranks = Ranks()
    ranks.scripts[0].refuse_next()
    with pytest.raises(TransferRefused):
        ranks.launch()
    assert (ranks.completions, ranks.scripts[1].launched) == ([], [])
    ranks.launch(2)
    ranks.scripts[0].land(2)
    ranks.scripts[1].land(2)
    for rank in ranks.ranks:
        rank.die("killed")
    assert [(found.job_id, found.outcome) for found in ranks.completions] == [(2, Outcome.LANDED)]


def test_what_a_later_rank_refuses_is_a_failure_of_the_job() -> None:
    """An earlier rank is copying: its end is waited for, and the ranks after are not bothered."""
    ranks = Ranks(3)
    ranks.scripts[1].refuse_next()
    ranks.launch()
    assert (ranks.completions, ranks.scripts[2].launched) == ([], [])
    ranks.scripts[0].land(1)
    assert ranks.outcomes() == [Outcome.FAILED]


def test_a_driver_error_on_one_rank_is_doubt() -> None:
    """Nobody knows what that rank has started; the others are waited for all the same."""

    class BrokenRank(LocalRank):
        def launch(self, plan: TransferPlan, after: int | None) -> None:
            raise RuntimeError("the driver does not know")

    scripts = [ScriptedTransport(9) for _ in range(3)]
    completions: list[Completion] = []
    transport = RankTransport([LocalRank(scripts[0]), BrokenRank(scripts[1]), LocalRank(scripts[2])])
    transport.open(8, verify=False, deliver=completions.append, env=Env())
    transport.launch(plan(1), None)
    assert (completions, scripts[2].launched) == ([], [])
    scripts[0].land(1)
    assert [found.outcome for found in completions] == [Outcome.UNPROVEN]


def test_a_copy_may_land_inside_the_launch() -> None:
    """As fast as the call that starts it, on every rank."""
    ranks = Ranks(auto=True)
    ranks.launch()
    assert ranks.outcomes() == [Outcome.LANDED]


def test_whoever_is_told_of_an_end_may_launch_at_once() -> None:
    """`deliver` is called in the middle of a report, and a simulated loop may run the worker right there."""
    ranks = Ranks(auto=True)
    completions = ranks.completions.append
    ranks.transport._deliver = lambda found: ranks.launch(2) if found.job_id == 1 else completions(found)
    ranks.launch(1)
    assert [found.job_id for found in ranks.completions] == [2]


# -- any order ----------------------------------------------------------------------------------------------------

RANKS, JOBS = 3, 3
REPORTS = st.one_of(
    st.just((Outcome.LANDED, NUM_BLOCKS, ())),
    st.integers(0, NUM_BLOCKS - 1).map(lambda landed: (Outcome.FAILED, landed, ())),
    st.sets(st.integers(0, NUM_BLOCKS - 1), min_size=1).map(
        lambda bad: (Outcome.CORRUPT, min(bad), tuple(sorted(bad)))
    ),
    st.just((Outcome.UNPROVEN, 0, ())),
)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, RANKS - 1), st.integers(1, JOBS), REPORTS),
        st.tuples(st.integers(0, RANKS - 1), st.just(0), st.just((Outcome.FAILED, 0, ()))),
    ),
    max_size=60,
)
"""What a rank says of a job, any number of times; job 0 stands for the death of the rank."""
Event: TypeAlias = tuple[int, int, tuple[Outcome, int, tuple[int, ...]]]


def expected(said: dict[int, list[Completion]]) -> Completion | None:
    """The same promise, the slow way: of each rank the first certain word, or else its doubt."""
    if len(said) < RANKS:
        return None
    words = [
        next((word for word in said[rank] if word.outcome is not Outcome.UNPROVEN), said[rank][0]) for rank in said
    ]
    outcomes = {word.outcome for word in words}
    for outcome in (Outcome.UNPROVEN, Outcome.CORRUPT, Outcome.FAILED, Outcome.LANDED):
        if outcome in outcomes:
            bad = sorted({index for word in words for index in word.corrupt})
            return Completion(words[0].job_id, outcome, min(word.num_landed for word in words), tuple(bad))
    raise AssertionError("no outcome")


@given(EVENTS)
def test_any_order_of_reports_ends_as_the_slow_way_says(events: list[Event]) -> None:
    """Whatever is said in whatever order, twice, late, or after a death: each job is told once, and once more if its
    doubt ends."""
    tally = JobTally(RANKS)
    said: dict[int, dict[int, list[Completion]]] = {job_id: defaultdict(list) for job_id in range(1, JOBS + 1)}
    for job_id in said:
        tally.begin(job_id, NUM_BLOCKS)
    for rank, job_id, words in events:
        before = {one: expected(said[one]) for one in said}
        for one in [job_id] if job_id else list(said):
            if not is_certain(before[one]):
                said[one][rank].append(Completion(one, *words))
        found = tally.report(rank, Completion(job_id, *words)) if job_id else None
        completions = [found] if found is not None else [] if job_id else tally.lose(rank, "")
        now = {one: expected(said[one]) for one in said}
        assert completions == [now[one] for one in said if is_news(before[one], now[one])]
    assert len(tally) == sum(not is_certain(expected(said[one])) for one in said)


def is_certain(end: Completion | None) -> bool:
    return end is not None and end.outcome is not Outcome.UNPROVEN


def is_news(before: Completion | None, now: Completion | None) -> bool:
    return (before is None) != (now is None) or is_certain(before) != is_certain(now)


@pytest.mark.parametrize(
    ("reports", "outcome", "num_landed"),
    [
        ([(Outcome.LANDED, 0, ()), (Outcome.LANDED, 0, ())], Outcome.LANDED, 4),
        ([(Outcome.LANDED, 9, ()), (Outcome.LANDED, 4, ())], Outcome.FAILED, 0),
        ([(Outcome.FAILED, 9, ()), (Outcome.LANDED, 4, ())], Outcome.FAILED, 0),
        ([(Outcome.CORRUPT, 9, ()), (Outcome.LANDED, 4, ())], Outcome.CORRUPT, 0),
        ([(Outcome.LANDED, 4, (1,)), (Outcome.LANDED, 4, ())], Outcome.CORRUPT, 1),
        ([(Outcome.FAILED, 3, ()), (Outcome.LANDED, 0, ())], Outcome.FAILED, 3),
    ],
)
def test_a_rank_that_contradicts_itself_proves_no_more_than_in_a_ledger(
    reports: list[tuple[Outcome, int, tuple[int, ...]]], outcome: Outcome, num_landed: int
) -> None:
    """The rule of a ledger for a completion holds for the report of each rank."""
    for ranks in (reports, reports[:1] if reports[1] == (Outcome.LANDED, 4, ()) else reports):
        tally = JobTally(len(ranks))
        tally.begin(1, 4)
        *_, found = [tally.report(rank, Completion(1, *report)) for rank, report in enumerate(ranks)]
        assert found is not None and (found.outcome, found.num_landed or 4 * (outcome is Outcome.LANDED)) == (
            outcome, num_landed,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("num_ranks", lambda _: JobTally(0)),
        ("num_ranks", lambda _: JobTally("x")),  # type: ignore[arg-type]
        ("job_id", lambda tally: tally.begin([], 1)),
        ("job_id", lambda tally: [tally.begin(1, 1) for _ in range(2)]),
        ("job_id", lambda tally: tally.forget([])),
        ("rank", lambda tally: tally.lose(2, "died")),
        ("reason", lambda tally: tally.lose(0, 7)),
        ("num_blocks", lambda tally: tally.begin(1, 0)),
        ("rank", lambda tally: tally.report(-1, Completion(1, Outcome.LANDED))),
        ("rank", lambda tally: tally.report(2, Completion(1, Outcome.LANDED))),
        ("completion", lambda tally: tally.report(0, 7)),
    ],
)
def test_wrong_arguments_of_a_tally_are_named(name: str, call: Callable[[JobTally], object]) -> None:
    """A wrong argument is refused by name, and no report is booked."""
    with pytest.raises(InvalidArgument) as refusal:
        call(JobTally(2))
    assert refusal.value.argument == name


# -- fences -------------------------------------------------------------------------------------------------------


def test_a_fence_is_one_on_every_rank() -> None:
    """A store named after it starts on each rank when that rank's own compute is through."""
    ranks = Ranks()
    compute = [ScriptedFence(), ScriptedFence()]
    for script, fence in zip(ranks.scripts, compute, strict=True):
        script.fence = fence
    recorded = ranks.transport.record_fence()
    for script in ranks.scripts:
        script.fence = ScriptedFence()  # a later forward
    store = TransferPlan(1, Tier.DEVICE, Tier.HOST, array("i", [1]), array("i", [0]))
    ranks.transport.launch(store, recorded)
    assert [script.launched[0].after for script in ranks.scripts] == compute
    assert not recorded.query()
    with pytest.raises(WrongState, match="only a rank can wait for it"):
        recorded.synchronize()


def test_fences_that_nobody_names_any_more_are_forgotten() -> None:
    """Their number is bounded by the jobs that wait for them, however many forwards there were."""
    ranks = Ranks()
    kept = ranks.transport.record_fence()
    for _ in range(100):
        ranks.transport.record_fence()
    gc.collect()
    assert [repr(rank).split()[-1] for rank in ranks.ranks] == ["fences=1>"] * 2
    del kept
    gc.collect()
    assert [repr(rank).split()[-1] for rank in ranks.ranks] == ["fences=0>"] * 2


def test_no_more_fences_are_kept_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is far behind gets no more of them: what is committed then is not stored."""
    monkeypatch.setattr(rank_transport, "MAX_FENCES", 3)
    ranks = Ranks()
    kept = [ranks.transport.record_fence() for _ in range(3)]
    with pytest.raises(TransferRefused, match="3 fences are still needed"):
        ranks.transport.record_fence()
    kept.clear()
    gc.collect()
    assert ranks.transport.record_fence() is not None


def test_a_fence_that_one_rank_cannot_record_is_none() -> None:
    """The caller is refused, and the ranks that had recorded it forget it."""

    class FencelessTransport(ScriptedTransport):
        def record_fence(self) -> Fence:
            raise TransferRefused("no fence")

    first = LocalRank(ScriptedTransport(9))
    transport = RankTransport([first, LocalRank(FencelessTransport(9))])
    transport.open(8, verify=False, deliver=lambda completion: None, env=Env())
    with pytest.raises(TransferRefused, match="no fence"):
        transport.record_fence()
    gc.collect()
    assert repr(first).endswith("fences=0>")


def test_a_rank_copies_nothing_without_the_fence_it_was_told() -> None:
    """One that it does not have is refused, never left out."""
    rank = LocalRank(ScriptedTransport(9))
    rank.open(8, verify=False, deliver=lambda completion: None, lost=lambda reason: None, env=Env())
    with pytest.raises(TransferRefused, match="job 1: there is no fence 5"):
        rank.launch(plan(1), 5)
    assert rank.transport.launched == []  # type: ignore[attr-defined]


def test_only_fences_of_this_transport_can_be_named() -> None:
    """Another's would be another point in another device's work; what has passed needs no name."""
    ranks, others = Ranks(), Ranks()
    for foreign in (others.transport.record_fence(), ScriptedFence()):
        with pytest.raises(TransferRefused, match="after: ranks know only"):
            ranks.launch(after=foreign)
    ranks.launch(after=PASSED)
    assert [script.launched[0].after for script in ranks.scripts] == [None, None]


# -- open, close, count -------------------------------------------------------------------------------------------


def test_memory_that_one_rank_cannot_have_names_rank_and_size() -> None:
    """The error is typed, and the other ranks are closed again."""

    class PoorTransport(ScriptedTransport):
        def open(self, *args: object, **kwargs: object) -> None:
            raise MemoryError

    rich = ScriptedTransport(9, block_bytes=2**30)
    transport = RankTransport([LocalRank(rich), LocalRank(PoorTransport(9, block_bytes=2**30))])
    with pytest.raises(ConfigError, match=r"num_host_blocks: rank 1: 8.0 GiB of host memory"):
        transport.open(8, verify=False, deliver=lambda completion: None, env=Env())
    assert rich.is_closed


def test_closing_closes_every_rank() -> None:
    """Whether no copy is in doubt is asked of each of them; afterwards everything is refused."""
    ranks = Ranks()
    ranks.launch()
    ranks.scripts[0].land(1)
    assert not ranks.transport.close(0)
    with pytest.raises(TransferRefused, match="closed"):
        ranks.launch(2)
    ranks.scripts[1].land(1)
    assert ranks.transport.close(0)
    assert ranks.outcomes() == [Outcome.LANDED]


def test_nothing_is_launched_before_it_is_open() -> None:
    """As with every transport."""
    transport = RankTransport([LocalRank(ScriptedTransport(9))])
    with pytest.raises(TransferRefused, match="not open"):
        transport.launch(plan(1), None)


def test_statistics_say_what_all_ranks_have_done() -> None:
    """Jobs and blocks: the least; corrupt ones: the most; bytes: the sum; seconds: the longest."""
    one = TransferStatistics(3, 2, 30, 20, 28, 2, 300, 200, 1.5, 0.5)
    other = TransferStatistics(2, 2, 20, 21, 20, 0, 100, 210, 1.0, 2.5)

    @attrs.define
    class CountingTransport(ScriptedTransport):
        counts: TransferStatistics
        num_device_blocks: int = 9
        block_bytes: int = 1

        def statistics(self) -> TransferStatistics:
            return self.counts

    ranks: list[Rank] = [LocalRank(CountingTransport(counts)) for counts in (one, other)]
    expected = TransferStatistics(2, 2, 20, 20, 20, 2, 400, 410, 1.5, 2.5)
    assert RankTransport(ranks).statistics() == expected


def test_the_last_counts_that_a_rank_reports_are_its_newest() -> None:
    """A load and a store end at once, in two threads: what is sent last counts both."""
    sent: list[Completed] = []
    ended = [Completion(job_id, Outcome.LANDED) for job_id in (1, 2)]

    class Counting:
        """The first to ask is kept until the other thread has asked and sent, or waits."""

        num_asked = 0

        def statistics(self) -> TransferStatistics:
            self.num_asked += 1
            found = TransferStatistics(num_loads=self.num_asked)
            if self.num_asked == 1:
                other.start()
                other.join(0.05)
            return found

    server = _Server(SimpleNamespace(send=sent.append), Counting(), rank=0)  # type: ignore[arg-type]
    other = threading.Thread(target=server._deliver, args=(ended[1],))
    server._deliver(ended[0])
    other.join()
    assert [one.statistics.num_loads for one in sent] == [1, 2]
