"""The disk tier: one file of slots, one of records, and what a restart finds in them.

    rules       what the ledger stores and restores                                pure
    sums        xxh3 of records and of data
    records     one record a slot, and the superblock, as bytes                     pure
    recovery    which records of a table prove themselves, from their tokens       pure
    files       the file system as the tier needs it, and the data: blocks between slots and host memory
    posix       the file system of the operating system; a simulated one is in `aoffload.testing`
    table       the records on disk
    slots       `DiskSlots`: data and records, opened together
    forgetting  how a failed erasure is made good
    lanes       threads for loads, stores and erasures
    local       `LocalDisk`: the disk of a local transport
    loop        the event loop's side: restores, stores, budget

Everything but `loop` is synchronous: lanes call it in their threads.
"""
