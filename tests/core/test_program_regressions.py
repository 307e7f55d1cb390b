"""Sequences of calls that random programs found. Each broke a law once."""

from __future__ import annotations

import pytest

from proof.programs import Face, GroupShape, Program, QuotaShape, World, call, check_program

LOADED = [2, 1, 1, 2, 0, 0, 1, 0, 0, 2]


def test_a_load_of_fewer_tokens_keeps_what_it_finds_on_the_device() -> None:
    """Room for the windows of a shorter load is not made of a window that this load would find on the device: a job
    was planned without a source."""
    groups = (GroupShape("chunk", 10, 2), GroupShape("window", 5, 2))
    calls = (
        call("serve", tokens=LOADED),
        call("evict", num_tokens=5, token=11),
        call("admit", who="r2", tokens=LOADED[:-1]),
        call("queue", who="r2"),
        call("accept", who="r2"),
        call("load", who="r2", max_tokens=2),
        call("serve", tokens=[2]),
    )
    check_program(Program("ledger", World(groups, 12, 18, 6, "eager", 1.0, 1.0), calls))


def test_who_can_never_fit_hears_so_though_its_hit_made_it_seem_to() -> None:
    """What a request pins of its hit and what it takes beside that are more than the pool: it waited for nobody."""
    calls = (
        call("admit", who="r2", tokens=[1, 1, 1, 2, 1, 1, 0, 2, 0, 0, 0, 2, 0, 2, 0, 1]),
        call("serve", tokens=[1, 1, 1, 2, 1, 1, 0, 2, 0, 0, 0, 2]),
        call("allocate", who="r2", num_tokens=17),
        call("admit", who="r4", tokens=[1]),
        call("compute", who="r2", stop=16, new=[0, 2]),
        call("compute", who="r2", stop=18),
        call("preempt", who="r2"),
        call("allocate", who="r4", num_tokens=10),
        call("resume", who="r2"),
        call("launch", job="r2:store:0"),
        call("settle", job="r2:store:0", outcome="unproven", at=1),
        call("release", who="r4"),
        call("queue", who="r2", num_tokens=23),
    )
    check_program(Program("ledger", World((GroupShape("window", 11, 4),), 6, 10, 2, "selective:2"), calls))


def test_a_bad_entry_is_forgotten_after_a_reset_of_the_device() -> None:
    """A load finds its source rotten after the device was reset: what is rotten is a miss for everybody from now on."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    calls = (
        call("serve", tokens=prompt),
        call("evict", num_tokens=16, token=9),
        call("admit", who="r", tokens=prompt),
        call("allocate", who="r"),
        call("load", who="r"),
        call("reset", tier="DEVICE"),
        call("launch", job="r:load:0"),
        call("settle", job="r:load:0", outcome="corrupt", at=0),
    )
    check_program(Program("ledger", World((GroupShape("full", 0, 4),), 5, 8, 1000, "eager"), calls))


def test_a_refused_allocation_leaves_the_order_of_eviction_alone() -> None:
    """A request that pins islands of its windows is refused room: it is not matched again to find that out."""
    calls = (
        call("admit", who="r17", tokens=[0, 2, 0]),
        call("allocate", who="r17"),
        call("compute", who="r17", stop=3),
        call("launch", job="r17:store:0"),
        call("compute", who="r17", stop=3, new=[1, 2]),
        call("begin", step="s18", who=["r17"]),
        call("settle", job="r17:store:0"),
        call("end", step="s18"),
        call("preempt", who="r17"),
        call("resume", who="r17"),
        call("queue", who="r17", num_tokens=6),
        call("admit", who="r20", tokens=[1, 2, 2]),
        call("queue", who="r20", num_tokens=4),
        call("admit", who="r22", tokens=[0, 2, 0]),
        call("allocate", who="r22", num_tokens=4),
    )
    check_program(Program("ledger", World((GroupShape("window", 2, 2),), 5, 8, 1, "eager", 0.5, 0.5), calls))


def test_room_without_its_own_pins_counts_what_a_new_match_would_pin() -> None:
    """While a request holds its match, another one caches more of its prompt on the device: what it would hit now can
    be evicted until it is hit."""
    prompt = [1, 2, 1, 0, 1, 0, 2, 2, 0, 1, 0, 2, 1, 2, 0]
    groups = (GroupShape("full", 0, 2), GroupShape("full", 0, 2), GroupShape("window", 12, 2))
    calls = (
        call("serve", tokens=prompt, new=[0, 2]),
        call("evict", num_tokens=17, token=65),
        call("admit", who="r3", tokens=prompt),
        call("serve", tokens=prompt[:4], new=[0, 0]),
        call("allocate", who="r3", num_tokens=19),
    )
    check_program(Program("ledger", World(groups, 30, 120, 3000, "eager", 0.5, 1.0), calls))


def test_nobody_who_is_matched_again_keeps_what_another_waits_for() -> None:
    """After a reset of the device all who are matched again let go first: one of them kept tombstones alive for which
    the other one, first in the wait queue, waited."""
    calls = (
        call("demote", name="e4", tokens=[0, 1, 0, 0]),
        call("admit", who="r5", tokens=[0]),
        call("allocate", who="r5", num_tokens=2),
        call("compute", who="r5", stop=1, new=[1]),
        call("compute", who="r5", stop=2),
        call("release", who="r5", reason="cancelled"),
        call("launch", job="r5:store:0"),
        call("settle", job="r5:store:0", outcome="unproven", at=2),
        call("demote", name="e8", tokens=[0, 1]),
        call("launch", job="demotion-3:store:0"),
        call("admit", who="r10", tokens=[0, 1, 0, 1, 1, 1, 0], store="prompt"),
        call("settle", job="demotion-3:store:0"),
        call("admit", who="r14", tokens=[0, 1, 0, 0, 0, 0]),
        call("queue", who="r14"),
        call("reset", tier="DEVICE"),
    )
    check_program(Program("ledger", World((GroupShape("chunk", 9, 2),), 4, 7, 2, "eager", 0.5, 1.0), calls))


def test_who_would_have_to_go_back_behind_its_window_publishes_nothing() -> None:
    """It has to be aborted; until then whatever it is asked for breaks no law."""
    calls = (
        call("admit", who="r1", tokens=[0] * 40),
        call("allocate", who="r1"),
        call("compute", who="r1", stop=40, new=[0]),
        call("invalidate", who="r1", from_token=4),
        call("begin", step="s8", who=["r1"]),
        call("end", step="s8", new=[0]),
    )
    check_program(Program("ledger", World((GroupShape("window", 1, 4),), 14, 10, 1, "lazy:5", 0.5, 1.0), calls))


def test_what_a_fork_that_is_over_has_published_goes_with_the_block_it_has_copied() -> None:
    """A fork copies half a block, completes and publishes it, and is done. When what it has copied is invalidated,
    nobody finds its block any more."""
    calls = (
        call("admit", who="r2", tokens=[0, 0, 0, 0, 0, 0]),
        call("allocate", who="r2"),
        call("extend", who="r2", num_tokens=9),
        call("compute", who="r2", stop=7, new=[0, 0]),
        call("fork", who="r2", child="f4"),
        call("compute", who="f4", stop=8),
        call("release", who="f4"),
        call("admit", who="r6", tokens=[0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        call("invalidate", who="r2", from_token=6),
        call("allocate", who="r6"),
        call("load", who="r6"),
    )
    groups = (GroupShape("window", 8, 2), GroupShape("full", 0, 2))
    check_program(Program("ledger", World(groups, 59, 10, 6, "eager"), calls))


def test_what_was_forgotten_by_a_reset_is_not_told_again() -> None:
    """Taking back what was computed before a reset says nothing of what others have cached of the same tokens since."""
    calls = (
        call("admit", who="r4", tokens=[0, 0, 1, 0, 0]),
        call("allocate", who="r4"),
        call("compute", who="r4", stop=5),
        call("reset"),
        call("serve", tokens=[0, 0, 1, 0]),
        call("invalidate", who="r4", from_token=3),
    )
    groups = (GroupShape("full", 0, 2), GroupShape("window", 11, 1))
    check_program(Program("ledger", World(groups, 53, 6, 9, "lazy:9"), calls))


def test_what_a_load_of_nothing_lets_go_of_is_room() -> None:
    """A window block that was pinned for a hit goes back from who takes nothing of it: the first in the wait queue is
    served."""
    calls = (
        call("serve", tokens=[3, 3]),
        call("reset", tier="DEVICE"),
        call("admit", who="b", tokens=[3, 3, 3]),
        call("admit", who="c", tokens=[3, 3, 3, 1, 2, 2, 1]),
        call("allocate", who="b"),
        call("load", who="b"),
        call("land"),
        call("release", who="b"),
        call("admit", who="a", tokens=[1, 1, 1]),
        call("allocate", who="c", num_tokens=1),
        call("queue", who="a"),
        call("load", who="c", max_tokens=0),
        call("accept", who="a"),
    )
    check_program(Program("ledger", World((GroupShape("window", 9, 2),), 4, 100, 1000, "eager"), calls))


def test_half_a_block_that_others_read_stays_whole_in_every_group() -> None:
    """A request goes back into the middle of a unit of which others read the blocks of one group only, since what it
    has of the other group is its own: it cannot compute the half that was wrong again in another block."""
    calls = (
        call("serve", tokens=[1, 0, 0, 0, 0, 0, 0, 0]),
        call("evict", num_tokens=53, token=28),
        call("admit", who="r1", tokens=[1, 0, 0]),
        call("admit", who="t2", tokens=[1, 0, 0, 1, 1, 0]),
        call("allocate", who="t2"),
        call("compute", who="t2", stop=6),
        call("fork", who="t2", child="f4"),
        call("invalidate", who="t2", from_token=1),
    )
    groups = (GroupShape("chunk", 8, 2), GroupShape("full", 0, 2))
    check_program(Program("ledger", World(groups, 59, 100, 1000, "eager"), calls))


def test_a_load_that_a_reset_ends_brings_nothing_that_others_have_published() -> None:
    """Another request has computed the same prompt and published it on the device while the load was under way: after a
    reset, that is KV of before, too."""
    calls = (
        call("serve", tokens=[2, 2, 1, 1, 0, 2]),
        call("reset", tier="DEVICE"),
        call("admit", who="r1", tokens=[2, 2, 1, 1, 0, 2, 2]),
        call("allocate", who="r1"),
        call("admit", who="t3", tokens=[2, 2, 1, 1]),
        call("allocate", who="t3"),
        call("compute", who="t3", stop=4),
        call("load", who="r1"),
        call("reset"),
        call("land"),
    )
    check_program(Program("ledger", World((GroupShape("window", 7, 2),), 7, 100, 1000, "eager", 1.0, 1.0), calls))


@pytest.mark.parametrize("lands_first", [False, True])
def test_a_store_that_has_landed_behind_another_is_found_by_no_restart_once_it_is_wrong(lands_first: bool) -> None:
    """The second of two stores on the disk lands while the first is under way, before or after its KV turns out to be
    wrong. The process is killed before the first store ends: a restart found the second."""
    lands = call("settle", job="watermark:store:1")
    wrong = call("invalidate", who="w9", from_token=8)
    tokens = [2, 0, 2, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1, 0, 2, 0, 1, 1]
    calls = (
        call("admit", who="w9", tokens=tokens),
        call("allocate", who="w9"),
        call("compute", who="w9", stop=19),
        call("land"),
        call("disk_flush", most=1000),
        call("launch", job="watermark:store:0"),
        call("launch", job="watermark:store:1"),
        *((lands, wrong) if lands_first else (wrong, lands)),
        call("restart", at=1000, most=1000),
    )
    groups = (GroupShape("full", 0, 2), GroupShape("full", 0, 4), GroupShape("chunk", 4, 4))
    check_program(Program("ledger", World(groups, 21, 160, 8, "eager", 0.5, 0.5, 640, 0.25), calls))


def test_a_part_of_a_cell_that_fits_is_loaded() -> None:
    """The host has room for the first unit of a cell only, since the fetch pins what it takes to be room: this is no
    fault, but `check_integrity` raised."""
    calls = (
        call("serve", tokens=[0, 0]),
        call("pin", name="p3", tokens=[0, 0]),
        call("serve", tokens=[0, 0], salt="other"),
        call("fetch", name="fetch11", tokens=[0] * 9, salt="other", told=99),
        call("land"),
    )
    groups = (GroupShape("full", 0, 2), GroupShape("full", 0, 1))
    check_program(Program("engine", World(groups, 4, 12, 1000, "eager", 0.25, 0.5, 0, 1.0, 2, max_in_flight=1), calls))


@pytest.mark.parametrize("is_over", [False, True])
def test_what_a_fork_has_brought_to_a_store_is_removed_with_what_it_copied(is_over: bool) -> None:
    """A request computes one token, a fork goes on from it, and a whole cell of the fork is stored. Then that token
    turns out to be wrong: the cell stayed in the store, because the request itself has published nothing."""
    tokens = [0, 0, 1, 1, 0, 1, 2, 1, 0, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1, 2, 2]
    calls = (
        call("admit", who="c7", tokens=tokens),
        call("allocate", who="c7"),
        call("compute", who="c7", stop=1),
        call("fork", who="c7", child="f11"),
        call("compute", who="f11", stop=22, new=[1]),
        *([call("release", who="f11")] if is_over else []),
        call("land"),
        call("serve", tokens=[0, 0, 1, 1]),
        call("remote_stores", most=1),
        call("land"),
        call("invalidate", who="c7", from_token=0),
    )
    check_program(Program("ledger", World((GroupShape("full", 0, 4),), 13, 100, 1000, "eager", cell_units=1), calls))


def test_turns_of_stores_keep_the_order_of_the_scan() -> None:
    """Each store to the disk changes the eviction orders of the host, in which accounts alternate. When the next call
    went on with another run, its store evicted a block from the disk, and that block was written a second time."""
    groups = (GroupShape("window", 5, 4), GroupShape("full", 0, 4), GroupShape("window", 6, 2))
    quotas = (
        QuotaShape(host_floor=3, host_ceiling=7, daily_writes=0),
        QuotaShape(host_floor=2, disk_floor=0, disk_ceiling=3, pinned=5),
        QuotaShape(host_floor=2, disk_floor=3, disk_ceiling=3),
    )
    calls = (
        call("serve", tokens=[0, 1, 1, 0]),
        call("serve", tokens=[0, 0, 0, 1, 1, 0, 1, 0], salt="third", new=[0, 1]),
        call("idle", most=1),
    )
    world = World(groups, 13, 7, 1000, "eager", num_disk_blocks=3, eviction="learned:device", quotas=quotas)
    check_program(Program("ledger", world, calls))


def test_no_run_is_split_where_its_tail_would_have_no_blocks() -> None:
    """The bucket of a prompt changes within a run that has blocks only before that position. The run was split there,
    and the empty tail stayed in the index."""
    groups = (GroupShape("full", 0, 4), GroupShape("full", 0, 1), GroupShape("window", 2, 1))
    longer = [1, 0, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 0, 1, 0, 0, 1]
    calls = (
        call("admit", who="r3", tokens=[1, 0, 1, 0]),
        call("allocate", who="r3", num_tokens=9),
        call("compute", who="r3", stop=5, new=[0]),
        call("serve", tokens=longer[:24]),
        call("serve", tokens=[1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 0, 1, 0, 1]),
        call("fork", who="r3", child="f10"),
        call("preempt", who="f10"),
        call("land"),
        call("invalidate", who="r3", from_token=2),
        call("release", who="r3"),
        call("release", who="f10"),
        call("serve", tokens=longer),
        call("watermark"),
        call("land"),
        call("evict", num_tokens=47, token=25),
        call("admit", who="r12", tokens=longer[:28]),
    )
    world = World(groups, 119, 54, 1000, "lazy", num_disk_blocks=1, eviction="learned:device")
    check_program(Program("ledger", world, calls))


@pytest.mark.parametrize("face", ["asyncio", "trio"])
def test_a_store_that_hangs_over_a_reset_is_found_by_no_restart(face: Face) -> None:
    """The store was planned before the reset, and the process is killed while the store still hangs. What the store has
    written has the generation of its plan, so no restart finds it. (The simulated disk gave it the present one.)"""
    calls = (
        call("fault", kind="disk_hang"),
        call("serve", who="b", tokens=(3, 1, 3)),
        call("serve", who="b", tokens=(3,)),
        call("reset", who="b"),
        call("restart", how="killed"),
        call("restored", who="b"),
        call("fetch", who="b", tokens=(3, 1)),
        call("request", who="a", tokens=(3, 1)),
    )
    world = World((GroupShape("full", 0, 1),), 4, 100, 1000, "eager", 0.5, 1.0, 160)
    check_program(Program(face, world, calls, 559))


def test_an_idle_host_stores_no_checkpoint_for_which_the_disk_evicts() -> None:
    """Broke: an idle ledger writes no block to the disk twice. Each checkpoint that it stored evicted another one."""
    program = Program(
        "engine-states",
        World(
            groups=(GroupShape(kind="chunk", reach=8, block_size=2), GroupShape(kind="state", reach=5, block_size=2)),
            num_device_blocks=20,
            num_host_blocks=100,
            max_job_bytes=1000,
            store_policy="eager",
            max_pinned_share=0.5,
            max_prefetch_share=1.0,
            num_disk_blocks=8,
            max_fetch_share=1.0,
            cell_units=0,
            eviction="lru",
            max_in_flight=2,
            window_interval=0,
            quotas=(),
        ),
        (
            call("serve", tokens=[0, 1, 1, 0, 1, 0, 2, 0, 2, 1, 0, 0, 1, 2, 0, 2, 2, 0, 2, 2, 2, 2, 1, 2, 1, 0, 0, 1]),
            call(
                "serve", tokens=[0, 1, 1, 0, 1, 0, 2, 0, 2, 1, 0, 0, 1, 2, 0, 2, 2, 0, 2, 2, 2, 2, 1, 2, 1, 0, 0, 1, 1]
            ),
            call("idle", most=3),
        ),
        2853,
    )
    check_program(program)
