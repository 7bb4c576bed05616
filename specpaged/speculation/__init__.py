"""How much to draft and what to verify, decided from measured cost and acceptance (ints and floats only)."""
