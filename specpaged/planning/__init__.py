"""What speculation takes and brings under a budget of memory, before any weight is read (ints and floats, no torch)."""
