"""The tiers below host memory, in long: the crash model, real kills under load, and each call of the disk failed."""
