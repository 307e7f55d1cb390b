"""Copies between GPU tensors and page-locked host memory."""
