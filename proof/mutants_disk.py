"""Planted defects of the disk tier. The crash model has to meet each of them: `python -m proof.disk mutants`."""

from __future__ import annotations

from .planting import Mutant, Patch

__all__ = ["DISK_MUTANTS"]

DISK = "aoffload._tiers.disk"
SLOTS, RECORDS, SLAB = f"{DISK}.slots", f"{DISK}.table", f"{DISK}.files"
NEIGHBOURS, RECOVERY = f"{DISK}.files", f"{DISK}.recovery"
STORIES = "tests/proof/test_disk_stories.py::test_no_story_breaks_a_law"


def _mutant(name: str, module: str, old: str, new: str, promise: str, *also: Patch) -> Mutant:
    return Mutant(name, module, old, new, promise, also=also, test=STORIES)


DISK_MUTANTS: tuple[Mutant, ...] = (
    _mutant(
        "disk: data without a sum",
        SLOTS,
        "return [at for at, found in zip(indices, sums, strict=True) if found != expected[at]]",
        "return []",
        "what a crash has torn is a miss",
    ),
    _mutant(
        "disk: records without a sum",
        RECORDS,
        "sums[index] == record_sum(view[index * size + _SUM.size : (index + 1) * size], first_slot + index)",
        "sums[index]",
        "a record that was written in part is not there",
    ),
    _mutant(
        "disk: records of any generation",
        RECORDS,
        '(records["generation"] == generation) & (records["sum"] != 0)',
        'records["sum"] != 0',
        "nothing of before a reset is found",
    ),
    _mutant(
        "disk: record before its data",
        SLOTS,
        "        done, touched, error = self._write(first, to, ",
        "        self._note(to, *records())\n        done, touched, error = self._write(first, to, ",
        "a record names data that is there",
    ),
    _mutant(
        "disk: reset that is not synced",
        SLOTS,
        "        self._table.replace(Superblock(self._fingerprint, generation, self.num_slots))\n",
        "        superblock = Superblock(self._fingerprint, generation, self.num_slots)\n"
        "        self._table._file.write(0, [superblock.encoded()])\n",
        "a reset that has returned outlives a loss of power",
    ),
    _mutant(
        "disk: reset in memory only",
        SLOTS,
        "        self._table.replace(Superblock(self._fingerprint, generation, self.num_slots))\n",
        "",
        "nothing of before a reset is found",
    ),
    _mutant(
        "disk: any fingerprint will do",
        SLOTS,
        "(known.fingerprint, known.num_slots) == (fresh.fingerprint, num_slots)",
        "known.num_slots == num_slots",
        "another model finds nothing",
    ),
    _mutant(
        "disk: other fingerprint, same records",
        SLOTS,
        "attrs.evolve(fresh, generation=_next(known.generation))",
        "attrs.evolve(fresh, generation=known.generation)",
        "another model finds nothing",
        Patch(SLOTS, "        table.drop()\n", ""),
    ),
    _mutant(
        "disk: short write taken for whole",
        SLAB,
        "        return written // self._block_bytes\n",
        "        return stretch.num_blocks\n",
        "a block counts as stored when all of it is",
    ),
    _mutant(
        "disk: short read taken for whole",
        SLAB,
        "        return found // self._block_bytes\n",
        "        return stretch.num_blocks\n",
        "a good block is not forgotten because a read was short",
    ),
    _mutant(
        "disk: failed store leaves the old record",
        SLOTS,
        "            self._erase(to[done:touched])\n",
        "",
        "no restart looks for what was overwritten",
    ),
    _mutant(
        "disk: corrupt slot keeps its record",
        SLOTS,
        "            self._erase(gone)\n",
        "",
        "a corrupt slot is forgotten for good",
    ),
    Mutant(
        "disk: sum taken after the write",
        SLOTS,
        "        sums, encoded = records()\n        if is_given_up():\n",
        "        sums, encoded = self._records(to, source, labels, generation)\n        if False:\n",
        "a store that hung does not label what was written over its source",
        also=(
            Patch(SLOTS, "while not is_given_up():", "while done < len(to):"),
            Patch(SLOTS, "        if done and is_given_up():  # meanwhile", "        if False:  # meanwhile"),
        ),
        test="tests/transfer/test_disk_slots.py::test_a_store_that_is_given_up_meanwhile_records_nothing",
    ),
    _mutant(
        "disk: larger than its size",
        "aoffload._config.tiers",
        "(size_bytes - SUPERBLOCK_BYTES - ROUNDING_BYTES) // (block_bytes + record_bytes(unit_tokens))",
        "size_bytes // block_bytes",
        "the files never take more than their size",
    ),
    _mutant(
        "disk: gaps taken for neighbours",
        NEIGHBOURS,
        "(at := at + 1) < stop and slots[at] == slots[at - 1] + 1:",
        "(at := at + 1) < stop and slots[at] > slots[at - 1]:",
        "a block goes into its own slot",
    ),
    _mutant(
        "disk: two slots for one block",
        RECOVERY,
        "    new_place = new_unit.copy()\n",
        "    new_place = np.ones_like(new_unit)\n",
        "of several slots for a block the newest counts",
    ),
    _mutant(
        "disk: units behind a gap",
        RECOVERY,
        "run.components & (held[run.parent] | ~leading if run.parent >= 0 else run.components)",
        "run.components",
        "a unit counts only behind those before it",
    ),
    _mutant(
        "disk: emptied before the new size is had",
        SLOTS,
        "    if more > 0:\n",
        "    if False:\n",
        "a size without room changes nothing",
    ),
    _mutant(
        "disk: directory stays locked",
        SLOTS,
        "            held.callback(directory.close)\n",
        "",
        "who closes, or fails to open, leaves nothing open",
    ),
)
