"""The disk tier: one file of slots, one file of records, and the recovery after a restart.

Rules: pure, called by the ledger.

    plans       labels of blocks, the payload of a store, and runs that a restart has found
    rules       slots and their labels in the ledger, and the blocks that a restart restores

Loop side: runs in the event loop.

    loop        `DiskWork`: restores, stores within the budget, erasures and resets of one runtime

Byte side: synchronous, called by the threads of `lanes`.

    lanes       `LocalDisk`: threads for loads, stores, erasures, resets and the reading after a restart
    slots       `DiskSlots`: data and records, opened together
    table       the file of records, records and superblock as bytes, and sums
    recovery    selects the records whose digests match their tokens; pure
    files       the file system calls that the tier needs, their implementation for POSIX, and the file of slots
"""
