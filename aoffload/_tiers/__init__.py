"""The tiers below host memory, each in one folder: its rules, its loop side and its byte side.

lower       code that such tiers share, and a tier of the program's own
disk        slots in a file of this machine
remote      objects in a store that other processes share
fetch       copies from these tiers into host memory, for requests
write_rate  budgets for the writes of disk and remote store
"""
