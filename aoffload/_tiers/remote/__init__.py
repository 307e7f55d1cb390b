"""The remote tier: cells in a store of objects that other processes share, and the threads that copy them.

rules       which cells the ledger stores, and which have to be removed         pure
cells       the name and content of an object, and the proof that it is the cell
memory      what is known of cells without a call        removals  cells whose KV is invalid
nodes       nodes with an open breaker                   calls     calls of the store, failures counted
threads     threads with one queue, and work that yields its calls of the store
jobs        one copy, and who may touch its host memory
questions   how much of a prefix the store has           lanes     loads, stores and removals
local       `LocalRemote`: all of it, opened beside the host memory
loop        the event loop's side: questions, stores, rate
clients     the stores: Redis, object storage, Mooncake
"""
