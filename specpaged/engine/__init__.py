"""The engine: what runs in a step, and the state of what runs."""
