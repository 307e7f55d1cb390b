"""The remote tier: cells in a store of objects that other processes share, and the threads that copy them.

Rules: pure, called by the ledger.

    plans       the label of a cell, which is the payload of its copies
    rules       which cells are stored, and which have to be removed

Loop side: runs in the event loop.

    loop        `RemoteWork`: questions, stores within the rate, and removals of one runtime

Byte side: synchronous, called by the threads of `lanes`.

    local       `LocalRemote`: the remote tier of a local transport
    lanes       `RemoteLanes`: threads for loads, stores and removals
    questions   `Questions`: threads that ask how much of a prefix the store has
    jobs        one copy, and the lock on its host memory
    cells       the name and the bytes of an object, and the proof that it is the cell
    memory      answers of the store that are remembered for a while
    removals    cells whose KV is invalid, until the store has removed them
    calls       calls of the store, with their failures counted
    nodes       the breaker of each node
    threads     threads with one queue, for work that yields its calls of the store
    clients     stores: Redis, object storage, Mooncake
"""
