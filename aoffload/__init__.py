"""aoffload: a KV cache offload runtime for async LLM serving."""
