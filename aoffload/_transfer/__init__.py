"""Transfers of KV bytes. Besides `_tiers`, `_vllm`, `_reference` and the tools, the only package that imports torch."""
