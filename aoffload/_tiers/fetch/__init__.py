"""Fetches: KV of the lower tiers is copied into host memory for a request, before the request is matched again.

    rules       `Fetches`: plans the copies of a fetch from the disk and from a remote store; pure, called by the ledger
    loop        when a request fetches, and how long it waits; runs in the event loop

A fetch has no byte side: its copies are loads of the disk and of the remote store.
"""
