"""Ours as one of the decoders."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import specpaged
from benchmarks.cpu_peers.worker import Job
from specpaged import LLM, SamplingParams


class Ours:
    def __init__(self, job: Job):
        self.version = f"specpaged {specpaged.__version__}, torch {torch.__version__}"
        speculative = None
        if job.draft is not None:
            num_drafts = "auto" if job.num_drafts is None else job.num_drafts
            speculative = {"model": job.draft, "num_speculative_tokens": num_drafts}
        self.llm = LLM(
            job.target,
            speculative_config=speculative or {"num_speculative_tokens": 0},
            dtype="float32",
            kv_cache_dtype=job.kv,
            max_model_len=job.max_model_len,
            max_num_seqs=job.max_num_seqs,
            enable_prefix_caching=False,  # rounds repeat prompts
        )

    def decode(self, prompts: Sequence[Sequence[int]], output_len: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def load(job: Job) -> Ours:
    """With the job's threads."""
    torch.set_num_threads(job.threads)
    return Ours(job)
