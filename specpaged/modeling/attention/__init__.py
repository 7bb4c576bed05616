"""Attention over paged KV: the contract of a pass, and its backends."""
