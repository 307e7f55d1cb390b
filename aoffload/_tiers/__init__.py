"""The tiers below host memory, each in one folder: its rules, its loop side and its byte side.

disk        slots in a file of this machine
remote      objects in a store that other processes share
fetch       copies from both into host memory, for requests
write_rate  budgets for writes of both
"""
