"""The crash model of the disk tier: `aoffload._tiers.disk` on a simulated disk, life after life.

A story is a seed. It opens the slots, stores, loads, resets, and ends each life: closed, killed, or without power, with
faults at any call in between. The laws are in `life.py`.
"""
