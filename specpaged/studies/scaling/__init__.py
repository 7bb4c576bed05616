"""Scaling laws of drafts: acceptance by size, training and batch, and the size that is best on a machine."""
