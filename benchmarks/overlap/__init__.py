"""Drafting hidden behind verification, beside drafting behind it."""
