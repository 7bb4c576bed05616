"""Engines whose target is one of six layers, which heads read: fixtures `target` and `heads` are in conftest.py."""

from __future__ import annotations

from specpaged import LLM


def heads_llm(target, method, path, k=4, **arguments) -> LLM:
    """An engine that drafts by these heads."""
    speculative = {"method": method, "model": path, "num_speculative_tokens": k, "numerics": "exact"}
    speculative |= arguments.pop("speculative", {})
    defaults = {"max_model_len": 104, "max_num_seqs": 8, "numerics": "exact", "block_size": 4}
    return LLM(target[0], speculative_config=speculative, **(defaults | arguments))


def plain_llm(target, **arguments) -> LLM:
    """One that does not draft."""
    return LLM(target[0], max_model_len=104, numerics="exact", **arguments)
