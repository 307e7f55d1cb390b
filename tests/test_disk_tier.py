"""The settings of a disk tier: they are checked before anything is created."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aoffload import ConfigError, DiskTier, KVCacheGroup, OffloadConfig

SIZES = [0, -1, "", "8 gigs", "0.5", "0.0001KB", 1.5, True, None, 2**70]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("path", value) for value in ["", b"x", None, 7, "a\0b", "a\ud800"]),
        *(("size", value) for value in SIZES),
        *(("daily_writes", value) for value in SIZES if value is not None),
        *(
            (name, value)
            for name in ("close_flush_s", "open_timeout_s")
            for value in [-1, float("nan"), float("inf"), "3", None, True]
        ),
    ],
    ids=repr,
)
def test_a_bad_value_is_named(name: str, value: Any) -> None:
    """Of any type."""
    with pytest.raises(ConfigError) as refusal:
        DiskTier(**{"path": "x", "size": 1 << 20, name: value})
    assert refusal.value.argument == name


def test_a_disk_needs_a_namespace() -> None:
    """Nobody finds the KV of another model after a restart."""
    group = [KVCacheGroup("full")]
    tier = DiskTier(Path("x"), "1MiB")
    with pytest.raises(ConfigError) as refusal:
        OffloadConfig(groups=group, num_host_blocks=4, disk=tier)
    assert refusal.value.argument == "namespace"
    assert OffloadConfig(groups=group, num_host_blocks=4, disk=tier, namespace="m").disk == tier
    with pytest.raises(ConfigError, match="disk"):
        OffloadConfig(groups=group, num_host_blocks=4, disk="/var/kv", namespace="m")


@pytest.mark.parametrize(("block_bytes", "unit_tokens"), [(4096, 16), (1 << 20, 256), (1, 1), (100_000, 48)])
def test_what_is_counted_is_what_fits(block_bytes: int, unit_tokens: int, tmp_path: Path) -> None:
    """As many slots as the files have; without room for one, the size is refused by name."""
    pytest.importorskip("xxhash", reason="the extra `disk` is not installed")
    from aoffload._tiers.disk.files import PosixDirectory
    from aoffload._tiers.disk.slots import DiskSlots
    from aoffload._tiers.disk.table import SlotLayout
    from aoffload._transfer.backends.base import anonymous_memory

    tier = DiskTier(tmp_path / "disk", "4MiB")
    slots = DiskSlots.open(
        PosixDirectory(tier.path), SlotLayout(unit_tokens, block_bytes, (1,), (True,)),
        anonymous_memory(1, block_bytes), size_bytes=tier.size_bytes, fingerprint=b"", draw_generation=lambda: 1,
    )  # fmt: skip
    assert slots.num_slots == tier.num_slots(block_bytes, unit_tokens) > 0
    slots.close()
    with pytest.raises(ConfigError) as refusal:
        tier.num_slots(4 << 20, unit_tokens)
    assert refusal.value.argument == "size"


def test_a_day_writes_the_size_once() -> None:
    """Unless something else is said."""
    assert DiskTier("x", "1GiB").daily_bytes == 1 << 30
    assert DiskTier("x", "1GiB", "10MB").daily_bytes == 10**7
