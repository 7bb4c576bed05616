"""Heads: small models that draft from a target's hidden states."""
