"""References to verify against: our own plain decoding, and transformers' `generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from typing_extensions import override

from specpaged.comparison.equivalence import Mismatch, TopTwo, compare, is_near_tie
from specpaged.comparison.job import Job, Run
from specpaged.comparison.one_at_a_time import Reference, decode
from specpaged.config import BY_HALVES, EngineConfig
from specpaged.llm import LLM
from specpaged.modeling.rope import freeze_rope
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


def check_verification(job: Job) -> None:
    """Raise ValueError where tokens are drawn anew beside drafts: outputs are not to be the reference's then."""
    speculative = job.llm.config.speculative_config
    temperature = job.params[0].temperature
    if speculative is not None and speculative.verification == "rejection" and temperature > 0:
        raise ValueError(
            f"--temperature={temperature} has no reference under verification='rejection', which draws other tokens of "
            "the same distribution; allowed: --temperature 0, or verification='coupled'"
        )


class PlainReference(Reference):
    """Plain decoding by an engine of ours."""

    def __init__(self, llm: LLM):
        self.llm = llm

    @classmethod
    def of(cls, config: EngineConfig) -> PlainReference:
        """A reference with an engine of its own, which has no draft and holds one sequence."""
        arguments = {name: getattr(config, name) for name in EngineConfig.__dataclass_fields__}
        arguments |= {"speculative_config": None, "max_num_seqs": 1, "kv_cache_memory_bytes": None}
        arguments |= {"device_round": False, "synchronous": False}
        if config.schedule in BY_HALVES:  # which are of who drafts
            arguments["schedule"] = "continuous"
        return cls(LLM(**arguments))

    @override
    def generate(self, token_ids: Sequence[int], params: SamplingParams) -> list[int]:
        plain = replace(params, extra_args={"num_speculative_tokens": 0})
        return self.llm.generate({"prompt_token_ids": token_ids}, plain, use_tqdm=False)[0].outputs[0].token_ids


class TransformersReference(Reference):
    """The target in transformers' own code, greedily."""

    def __init__(self, model: str, dtype: torch.dtype, device: str, max_model_len: int, eos: list[int], trust: bool):
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, attn_implementation="sdpa", use_safetensors=True, trust_remote_code=trust
        ).to(device)
        freeze_rope(self.model, max_model_len)  # as ours: the same function of a position at every length
        self.model.eval()
        # A fresh configuration: the checkpoint's may hold penalties that nobody asked us for. It must be the
        # model's own, too: `generate` fills up what an argument leaves open from there.
        self.model.generation_config = GenerationConfig(
            do_sample=False, eos_token_id=eos or None, pad_token_id=eos[0] if eos else 0
        )

    @override
    @torch.inference_mode()
    def generate(self, token_ids: Sequence[int], params: SamplingParams) -> list[int]:
        input_ids = torch.tensor([list(token_ids)], device=self.model.device)
        output = self.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=params.max_tokens,
        )
        return output[0, len(token_ids) :].tolist()

    @torch.inference_mode()
    def top_two(self, token_ids: Sequence[int]) -> TopTwo:
        """The two most likely next tokens, with their logits."""
        logits = self.model(torch.tensor([list(token_ids)], device=self.model.device)).logits[0, -1].float()
        values, ids = logits.topk(2)
        return TopTwo(tuple(ids.tolist()), tuple(values.tolist()))


def transformers_reference(llm: LLM) -> Callable[[], TransformersReference]:
    """What makes transformers' reference for the target of `llm`, in any process."""
    model, config = llm.engine.target.model, llm.config
    return partial(
        TransformersReference,
        config.model,
        model.dtype,
        config.device,
        model.max_model_len,
        list(model.eos_token_ids),
        config.trust_remote_code,
    )


def run_reference(reference: str, job: Job, processes: int) -> Run:
    """Every prompt of the job by the reference, one at a time, with a progress bar."""
    if reference == "hf":
        make = transformers_reference(job.llm)
    elif processes == 1:
        make = partial(PlainReference, job.llm)
    else:
        make = partial(PlainReference.of, job.llm.config)
    start = time.perf_counter()
    token_ids = decode(make, job.token_ids, job.params, processes)
    return Run(reference_label(reference, processes), token_ids, time.perf_counter() - start)


def reference_label(reference: str, processes: int) -> str:
    """The words by which a report names a way of decoding."""
    label = {"plain": "plain", "hf": "transformers generate"}[reference] + ", one at a time"
    return f"{label} in {processes} processes" if processes > 1 else label


def judge(reference: str, job: Job, runs: Sequence[Run]) -> list[Mismatch]:
    """Where later runs differ from the first. Against our own plain decoding, any difference is a fault."""
    mismatches = [m for run in runs[1:] for m in compare(runs[0].token_ids, run.token_ids)]
    if reference == "plain" or not mismatches:
        return mismatches
    transformers = transformers_reference(job.llm)()
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
    """Our model's two most likely next tokens, with log-probabilities: they differ by as much as logits do."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=2, extra_args={"num_speculative_tokens": 0})
    output = llm.generate({"prompt_token_ids": token_ids}, params, use_tqdm=False)[0]
    row = sorted(output.outputs[0].logprobs[0].items(), key=lambda item: item[1].rank)[:2]
    return TopTwo(tuple(i for i, _ in row), tuple(entry.logprob for _, entry in row))
