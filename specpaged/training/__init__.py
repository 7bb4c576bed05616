"""Trains the small model pair in `specpaged/assets` on the standard library's own source."""
