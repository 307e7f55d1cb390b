"""A live view of a running process, in plain text, from its metrics: `aoffload top URL`."""
