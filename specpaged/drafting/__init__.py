"""Drafters: who proposes tokens."""
