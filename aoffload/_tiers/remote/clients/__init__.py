"""Object stores for a remote tier, each for one kind of server. `aoffload.stores` has their public names.

The packages that a store needs are imported when a store is made.
"""
