"""`python -m aoffload.trace LOG`: what a log of the runtime's events says, to look at. See docs/tracing.md."""
