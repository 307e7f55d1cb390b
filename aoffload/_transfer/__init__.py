"""Transfers of KV bytes. Apart from `_tiers`, `_vllm`, `_reference` and the tools, only this package imports torch."""
