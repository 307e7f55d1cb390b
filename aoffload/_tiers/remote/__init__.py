"""The remote tier: cells in a store of objects that other processes share, and the threads that copy them.

Rules: pure, called by the ledger.

    plans       the label of a cell, which is the payload of its copies
    rules       which cells are stored, and which have to be removed

Loop side: runs in the event loop.

    loop        `RemoteWork`: questions, stores within the rate, and removals of one runtime

Byte side: synchronous, called by the threads of `lanes`.

    lanes       `LocalRemote`: threads for loads, stores and removals, and the copies from and to host memory
    questions   `Questions`: threads that ask how much of a prefix the store has
    cells       the name and the bytes of an object, and the proof that it is the cell
    memory      recent answers of the store about cells, and cells whose KV is invalid
    calls       threads for calls of the store, the breaker of each node, and failures
    clients     stores: Redis, object storage, Mooncake
"""
