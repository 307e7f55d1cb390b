"""Transfers of KV bytes. Apart from `_tiers`, `_vllm`, `_reference` and the tools, no other package imports torch."""
