"""References to verify against: our own plain decoding, and transformers' `generate`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GenerationConfig

from specpaged.equivalence import Mismatch, TopTwo, compare, is_near_tie
from specpaged.job import Job, Run
from specpaged.llm import LLM
from specpaged.metrics import RequestMetrics
from specpaged.modeling.rope import freeze_rope
from specpaged.outputs import CompletionOutput, RequestOutput
from specpaged.sampling_params import SamplingParams

REFERENCES = ("plain", "hf")


def check_reference(reference: str, temperature: float) -> None:
    """Raise ValueError for a reference that does not exist or cannot do what is asked."""
    if reference not in REFERENCES:
        raise ValueError(f"--reference={reference!r} is not known; allowed: {', '.join(REFERENCES)}")
    if reference == "hf" and temperature > 0:
        raise ValueError(
            f"--temperature={temperature} has no --reference hf: transformers draws other random numbers; "
            "allowed: --temperature 0, or --reference plain"
        )


class TransformersReference:
    """The target in transformers' own code, greedily, one prompt at a time."""

    def __init__(self, llm: LLM):
        model = llm.engine.target.model
        self.model = AutoModelForCausalLM.from_pretrained(
            llm.config.model,
            dtype=model.dtype,
            attn_implementation="sdpa",
            use_safetensors=True,
            trust_remote_code=llm.config.trust_remote_code,
        ).to(model.device)
        freeze_rope(self.model, model.max_model_len)  # as ours: the same function of a position at every length
        self.model.eval()
        # A fresh configuration: the checkpoint's may hold penalties that nobody asked us for. It must be the
        # model's own, too: `generate` fills up what an argument leaves open from there.
        eos = list(model.eos_token_ids)
        self.model.generation_config = GenerationConfig(
            do_sample=False, eos_token_id=eos or None, pad_token_id=eos[0] if eos else 0
        )

    @torch.inference_mode()
    def generate(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Greedy continuation of one prompt."""
        input_ids = torch.tensor([list(token_ids)], device=self.model.device)
        output = self.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_tokens,
        )
        return output[0, len(token_ids) :].tolist()

    @torch.inference_mode()
    def top_two(self, token_ids: Sequence[int]) -> TopTwo:
        """The two most likely next tokens, with their logits."""
        logits = self.model(torch.tensor([list(token_ids)], device=self.model.device)).logits[0, -1].float()
        values, ids = logits.topk(2)
        return TopTwo(tuple(ids.tolist()), tuple(values.tolist()))


def run_transformers(job: Job, reference: TransformersReference) -> Run:
    """Every prompt of the job through transformers' `generate`, with a progress bar."""
    start = time.perf_counter()
    outputs = []
    for i, (token_ids, params) in enumerate(zip(tqdm(job.token_ids, unit="prompt"), job.params, strict=True)):
        completion = CompletionOutput(0, "", reference.generate(token_ids, params.max_tokens), None, None, "stop")
        outputs.append(RequestOutput(str(i), None, token_ids, None, [completion], True, RequestMetrics()))
    return Run("transformers generate, one at a time", outputs, time.perf_counter() - start)


def judge(job: Job, runs: Sequence[Run], transformers: TransformersReference | None) -> list[Mismatch]:
    """Where later runs differ from the first. Against our own plain decoding (None), any difference is a fault."""
    mismatches = [m for run in runs[1:] for m in compare(runs[0].token_ids, run.token_ids)]
    if transformers is None:
        return mismatches
    dtype = str(transformers.model.dtype).removeprefix("torch.")
    judged = []
    for mismatch in mismatches:
        if None in mismatch.token_ids:
            judged.append(mismatch)
            continue
        common = job.token_ids[mismatch.prompt_idx] + runs[0].token_ids[mismatch.prompt_idx][: mismatch.position]
        theirs, ours = transformers.top_two(common), _our_top_two(job.llm, common)
        near = is_near_tie(mismatch, theirs, ours, dtype)
        judged.append(replace(mismatch, margin=theirs.margin, label="near-tie" if near else "fault"))
    return judged


def _our_top_two(llm: LLM, token_ids: list[int]) -> TopTwo:
    """As TransformersReference.top_two; log-probabilities, whose difference is that of the logits."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=2, extra_args={"num_speculative_tokens": 0})
    output = llm.generate({"prompt_token_ids": token_ids}, params, use_tqdm=False)[0]
    row = sorted(output.outputs[0].logprobs[0].items(), key=lambda item: item[1].rank)[:2]
    return TopTwo(tuple(i for i, _ in row), tuple(entry.logprob for _, entry in row))
