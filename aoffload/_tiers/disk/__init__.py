"""The disk tier: one file of slots, one file of records, and what a restart finds in them.

Rules: pure, called by the ledger.

    plans       labels of blocks, the payload of a store, and runs that a restart has found
    rules       slots and their labels as the ledger sees them, and what a restart brings back

Loop side: runs in the event loop.

    loop        `DiskWork`: restores, stores within the budget, erasures and resets of one runtime

Byte side: synchronous, called by the threads of `lanes`.

    lanes       `LocalDisk`: threads for loads, stores, erasures, resets and the reading after a restart
    slots       `DiskSlots`: data and records, opened together
    table       the file of records, records and superblock as bytes, and sums
    recovery    the records that prove themselves from their tokens; pure
    files       the file system as the tier needs it, of the operating system, and the file of slots
"""
