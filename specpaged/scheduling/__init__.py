"""Which sequences run in a step (ints only)."""
