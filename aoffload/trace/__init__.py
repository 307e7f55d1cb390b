"""`python -m aoffload.trace LOG`: reports on a log of the runtime's events. See docs/tracing.md."""
