"""`python -m aoffload.demo`: a real model served over a device pool that is too small for its prompts."""
