"""Object stores for a remote tier, each for one kind of server. `aoffload.stores` has their public names.

What a store needs is imported when one is made.
"""
