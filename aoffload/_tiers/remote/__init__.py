"""The remote tier of a transport: cells of a store of objects, and the threads that copy them.

    cells       what an object is called and made of, and the proof that it is the cell
    memory      what is known of cells without asking        removals  cells whose KV is wrong
    nodes       which nodes are left alone                    calls     calls of the store, failures counted
    threads     threads with one queue                        jobs      one copy, and who may touch its host memory
    questions   how much of a prefix the store has            lanes     loads, stores and removals
    steps       work that yields its calls of the store, which threads make at once and a simulation when they are due
    local       `LocalRemote`: all of it, opened beside the host memory

The stores themselves are in `aoffload.object_stores`.
"""
