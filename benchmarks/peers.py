"""transformers' own ways of generating: a padded batch, an assistant model, continuous batching.

All get fp32 weights, sdpa and `eos_token_id=None`: they never stop before max_new_tokens, and no token is forbidden
(min_new_tokens would forbid eos, which our ignore_eos does not).
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.ours import MAX_MODEL_LEN, MAX_NUM_BATCHED_TOKENS, Run
from specpaged.config import EMBEDDED_DRAFT, EMBEDDED_TARGET

PAD = 0
PAGE_SIZE = 256  # generate_batch's default


def load(path: str, output_len: int) -> Any:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa", use_safetensors=True
    ).eval()
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=output_len, pad_token_id=PAD)
    return model


class Generate:
    """`generate` on left-padded batches of B, one after the other; with `assistant`, of one sequence each."""

    def __init__(self, name: str, output_len: int, assistant: dict[str, Any] | None = None):
        self.name = name
        self.model = load(EMBEDDED_TARGET, output_len)
        self.arguments: dict[str, Any] = {}
        if assistant is not None:
            draft = load(EMBEDDED_DRAFT, output_len)
            draft.generation_config.update(**assistant)
            self.arguments["assistant_model"] = draft

    def prepare(self, batch_size: int) -> None:
        """Nothing depends on B."""

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]], batch_size: int) -> Run:
        token_ids: list[list[int]] = []
        start = time.perf_counter()
        for first in range(0, len(prompts), batch_size):
            batch = prompts[first : first + batch_size]
            width = max(map(len, batch))
            padding = [width - len(prompt) for prompt in batch]
            input_ids = torch.tensor([[PAD] * n + list(prompt) for n, prompt in zip(padding, batch, strict=True)])
            mask = torch.tensor([[0] * n + [1] * (width - n) for n in padding])
            output = self.model.generate(input_ids, attention_mask=mask, **self.arguments)
            token_ids += output[:, width:].tolist()
        return Run(token_ids, time.perf_counter() - start)


class GenerateBatch:
    """`generate_batch`: one call for all prompts, at most B at a time. The manager and its cache outlive the call."""

    def __init__(self, name: str, output_len: int):
        self.name = name
        self.model = load(EMBEDDED_TARGET, output_len)
        # -1 says "no eos"; None would be replaced by it with a warning.
        self.generation_config = GenerationConfig(
            do_sample=False, max_new_tokens=output_len, pad_token_id=PAD, eos_token_id=-1
        )
        self.config: ContinuousBatchingConfig | None = None
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)

    def prepare(self, batch_size: int) -> None:
        """A manager for this B: the next run makes it."""
        self.model.destroy_cached_continuous_batching_manager()
        self.config = ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=batch_size * MAX_MODEL_LEN // PAGE_SIZE + 2,
            max_batch_tokens=MAX_NUM_BATCHED_TOKENS,
            max_requests_per_batch=batch_size,
            allow_block_sharing=False,  # the prompts share nothing
        )

    def run(self, prompts: Sequence[Sequence[int]], batch_size: int) -> Run:
        start = time.perf_counter()
        outputs = self.model.generate_batch(
            [list(prompt) for prompt in prompts],
            generation_config=self.generation_config,
            continuous_batching_config=self.config,
            persistent_manager=True,
        )
        seconds = time.perf_counter() - start
        if len(outputs) != len(prompts) or any(output.error for output in outputs.values()):
            raise RuntimeError(f"generate_batch finished {len(outputs)} of {len(prompts)} requests")
        return Run([list(output.generated_tokens) for output in outputs.values()], seconds)


def missing_for_generate_batch() -> str | None:
    """Why generate_batch cannot run here, as a sentence."""
    if importlib.util.find_spec("psutil") is None:
        return "transformers generate_batch is left out: on a CPU it needs psutil (pip install psutil)"
    return None
