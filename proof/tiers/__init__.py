"""The tiers below host memory, in long runs: the crash model, real kills under load, each call of the disk failed, and
late puts to a remote store."""
