"""The disk tier: one file of slots, one file of records, and what a restart finds in them.

Rules: pure, called by the ledger.

    plans       the payload of a store, labels of blocks, and runs that a restart has found
    blocks      slots and their labels, as the ledger sees them
    rules       what is stored on the disk, and what a restart brings back

Loop side: runs in the event loop.

    loop        `DiskWork`: restores, stores within the budget, erasures and resets of one runtime

Byte side: synchronous, called by the threads of `lanes`.

    local       `LocalDisk`: the disk of a local transport
    lanes       `DiskLanes`: threads for loads, stores, erasures, resets and the reading after a restart
    slots       `DiskSlots`: data and records, opened together
    table       the file of records
    records     records and superblock as bytes; pure
    recovery    the records that prove themselves from their tokens; pure
    sums        xxh3 of records and of data, and threads that take sums
    forgetting  what is done if records cannot be erased
    files       the file system as the tier needs it, and the file of slots
    posix       the file system of the operating system
"""
