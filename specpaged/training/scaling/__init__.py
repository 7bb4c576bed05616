"""Drafts of several sizes for one target, each kept after every so many tokens: what scaling laws are fitted to."""
