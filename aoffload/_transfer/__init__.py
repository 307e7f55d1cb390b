"""Transfers of KV bytes. Besides `integrations` and `demo`, the only package that imports torch."""
