"""The crash model of the disk tier: its stories depend only on their seeds."""

from __future__ import annotations

import random
from collections import Counter

import pytest

pytest.importorskip("xxhash", reason="the extra `disk` is not installed")

from proof.disk.simulated_disk import Crash, DiskFault, SimulatedDisk
from proof.disk.story import every_call, run_story


@pytest.mark.slow
def test_no_story_breaks_a_law() -> None:
    """Torn, lost and reordered writes, errors, short calls, hangs, kills and lost power: right bytes or none."""
    for seed in range(700):
        _, broken = run_story(seed)
        assert broken is None, (seed, broken)


def test_no_story_in_which_erasures_fail_breaks_a_law() -> None:
    """Each erasure of invalidated KV fails or is cut short, or each second, third or fourth one: no restart finds it,
    whether the process was closed or killed or power was lost."""
    counts = Counter[str]()
    for seed in range(120):
        story, broken = run_story(seed, erases=1 + seed % 4)
        assert broken is None, (seed, broken)
        counts += story.counts
    assert min(counts[name] for name in ("taken back", "erasures failed", "not erased", "turned off", "power")) > 10


def test_every_call_may_fail_in_every_way() -> None:
    """Whichever call of a story it is; `make tiers` does it for more of them."""
    num_stories, broken = every_call(5)
    assert broken is None and num_stories > 8 * 20


def test_a_seed_is_one_story() -> None:
    """With its threads and its faults."""
    for seed in range(20):
        assert run_story(seed)[0].counts == run_story(seed)[0].counts


def test_power_leaves_any_version_of_what_was_not_synced() -> None:
    """Each page on its own, so a write of several is torn and two are reordered; a synced one stays."""
    seen = set()
    for seed in range(200):
        disk = SimulatedDisk(random.Random(seed), 4096)
        file = disk.directory().open("file")
        file.allocate(128)
        file.write(0, [b"a" * 128])
        file.sync()
        file.write(0, [b"b" * 128])
        file.write(0, [b"c" * 128])
        disk.lose_power()
        seen.add(bytes(disk.files["file"].now[::64]))
        with pytest.raises(Crash):
            file.write(0, [b"d"])
    assert seen == {bytes(pair) for pair in [(one, two) for one in b"abc" for two in b"abc"]}


def test_a_kill_leaves_every_write() -> None:
    """And lets the next process have the directory."""
    disk = SimulatedDisk(random.Random(0), 4096)
    file = disk.directory().open("file")
    file.write(0, [b"a" * 100])
    disk.fault = lambda call: DiskFault.KILL
    with pytest.raises(Crash):
        file.write(0, [b"b" * 100])
    content = bytes(disk.files["file"].now)
    assert content == content.replace(b"a", b"") + content.replace(b"b", b"") and len(content) == 100
    assert not disk.is_locked and disk.directory()
