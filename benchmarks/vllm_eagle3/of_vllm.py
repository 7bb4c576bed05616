"""The proposals of vLLM's own worker, under its own scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.vllm_eagle3.proposal import AS_IS, COMMON, MAX_TOKENS, PHASES, K, Proposal, prompts_of


def vllm_proposals(target: str, head: str) -> tuple[list[Proposal], dict[str, int]]:
    """Of vLLM's own worker; and how many prompt tokens were cached, by phase."""
    from vllm import LLM, SamplingParams

    speculative = {"method": "eagle3", "model": head, "num_speculative_tokens": K}
    # Blocks of vLLM's CPU attention are multiples of 32.
    llm = LLM(target, skip_tokenizer_init=True, block_size=32, speculative_config=speculative, **COMMON)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    propose = runner.drafter.propose
    seen: list[tuple[str, int, int, list[int]]] = []  # request, known tokens, the newest, drafts
    puts_right = False

    def recorded(**arguments: Any) -> Any:
        newest, indices = arguments["next_token_ids"].clone(), arguments["token_indices_to_sample"]
        if indices is None:
            indices = arguments["common_attn_metadata"].query_start_loc[1:] - 1
        # Features of the last token that stands, at this position, are paired with the newest one, behind it.
        num_known = (arguments["target_positions"][indices] + 2).tolist()
        requests = runner.input_batch.req_ids[: len(num_known)]
        for i, (request, count) in enumerate(zip(requests, num_known, strict=True)):
            if puts_right and count <= runner.requests[request].num_prompt_tokens:
                newest[i] = runner.requests[request].get_token_id(count - 1)
        drafts = propose(**(arguments | {"next_token_ids": newest}))
        seen.extend(zip(requests, num_known, newest.tolist(), drafts.tolist(), strict=True))
        return drafts

    runner.drafter.propose = recorded
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
    proposals: list[Proposal] = []
    cached: dict[str, int] = {}
    for phase in (*PHASES, AS_IS):
        puts_right = phase == "chunks"
        assert llm.reset_prefix_cache()
        for batch in prompts_of("chunks" if phase == AS_IS else phase):
            seen.clear()
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False)
            cached[phase] = cached.get(phase, 0) + sum(output.num_cached_tokens or 0 for output in outputs)
            for output in outputs:
                token_ids = (*output.prompt_token_ids, *output.outputs[0].token_ids)
                # Within vLLM's engine a request's name goes on behind that which it was given.
                of_request = [entry for entry in seen if entry[0].rpartition("-")[0] == output.request_id]
                proposals += _proposals(phase, len(output.prompt_token_ids), token_ids, of_request)
    return proposals, cached


def _proposals(
    phase: str, num_prompt: int, token_ids: tuple[int, ...], seen: Sequence[tuple[str, int, int, list[int]]]
) -> Iterator[Proposal]:
    """Of one request, and behind its outputs alone: what is drafted within a prompt is never verified."""
    paired: dict[int, int] = {}
    for _, num_known, newest, drafts in seen:
        if num_known > len(token_ids):
            continue  # behind a stop
        if newest != token_ids[num_known - 1]:
            if phase != AS_IS or num_known > num_prompt:
                raise RuntimeError(f"vLLM drafts behind {newest}, not {token_ids[num_known - 1]}, in {phase!r}")
            paired[num_known - 2] = newest
        if num_known > num_prompt:
            yield Proposal(phase, token_ids[:num_known], tuple(drafts), tuple(paired.items()))
