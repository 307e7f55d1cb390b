"""The disk below the host memory: one file of slots, one of records, and what a restart finds in them.

    sums        xxh3 of records and of data
    records     one record a slot, and the superblock, as bytes                     pure
    neighbours  which blocks move in one call                                      pure
    recovery    which records of a table prove themselves, from their tokens       pure
    files       what is needed of a file system: `DiskDirectory`, `DiskFile`
    posix       that of the operating system; a simulated one is in `aoffload.testing`
    slab        the data: blocks between slots and host memory
    table       the records
    slots       `DiskSlots`: both, opened together

All of it is synchronous: lanes call it in threads of theirs.
"""
