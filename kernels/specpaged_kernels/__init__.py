"""Kernels for paged KV, one operation per file with its reference beside it. Imports nothing of specpaged."""
