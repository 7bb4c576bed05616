"""The proposals of this project's engine, in each way that it runs."""

from __future__ import annotations

from typing import Any

from benchmarks.vllm_eagle3.proposal import COMMON, MAX_TOKENS, PHASES, K, Proposal, prompts_of

# Of our engine: several rounds in one call where it can, one in a call, and Python around torch's kernels.
WAYS: tuple[dict[str, Any], ...] = ({}, {"num_scheduler_steps": 1}, {"attention_backend": "torch"})


def our_proposals(target: str, head: str) -> tuple[list[Proposal], dict[str, int]]:
    """Of this project's engine, which runs the same batches in each way that it has."""
    from specpaged import LLM, SamplingParams

    speculative = {"method": "eagle3", "model": head, "num_speculative_tokens": K}
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    proposals: list[Proposal] = []
    cached: dict[str, int] = {}
    for way in WAYS:
        engine = LLM(target, block_size=16, speculative_config=speculative, **(COMMON | way)).engine
        for phase in PHASES:
            cached[phase] = 0
            for batch in prompts_of(phase):
                for i, ids in enumerate(batch):
                    engine.add_request(str(i), ids, params)
                pending: dict[tuple[int, ...], tuple[int, ...]] = {}
                while engine.has_unfinished_requests:
                    for output in engine.step():
                        if output.error is not None:
                            raise RuntimeError(output.error)
                        cached[phase] += output.metrics.cached_prompt_tokens
                    sequences = (sequence for request in engine.requests.values() for sequence in request.sequences)
                    # What the next step verifies, whoever has drafted it.
                    pending |= {tuple(s.token_ids): tuple(s.draft.token_ids) for s in sequences if s.draft}
                proposals += [Proposal(phase, known, drafts) for known, drafts in pending.items()]
        if engine.metrics.failed_proposals:
            raise RuntimeError("a proposal of ours failed")
    return proposals, cached
