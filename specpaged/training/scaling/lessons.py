"""What drafts learn from: the target's own continuations, and how likely it thought each of their tokens.

Written once, a file of some continuations at a time, and shared by drafts of all sizes. A file is a function of its
number. What a file holds, n continuations of T_1 .. T_n tokens, prompts included, end to end:

    token_ids [T] int32, lengths [n] int32, prompt_lengths [n] int32, and for each of the N tokens behind the prompts
    top_ids [N, TOP] int32, most likely first, and top_probs [N, TOP] float16.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specpaged.llm import LLM
from specpaged.modeling.forward_output import HiddenStatesRequest
from specpaged.sampling_params import SamplingParams
from specpaged.training.heads.continuations import MIN_TOKENS, before_repetition
from specpaged.training.heads.target import FrozenTarget

TOP = 16  # tokens of the target's distribution that are kept
UNIT = 64  # continuations of a file
SHORTEST_PREFIX = 4
LAST = HiddenStatesRequest(last=True)


@dataclass(frozen=True)
class Lesson:
    """One continuation, with what the target thought of each token behind the prompt."""

    token_ids: Tensor  # [T] int64
    prompt_length: int
    top_ids: Tensor  # [T - prompt_length, TOP] int64, most likely first
    top_probs: Tensor  # [T - prompt_length, TOP] float32

    @property
    def num_tokens(self) -> int:
        """Tokens that are learned from."""
        return len(self.top_ids)


def request_of(prompts: Sequence[Sequence[int]], index: int, seed: int) -> tuple[list[int], float, int]:
    """(prompt, temperature, seed) of continuation `index`, a function of its arguments.

    By turns greedy, behind a prompt of which at least half is left, and sampled as the target would say it, behind a
    few tokens or more: a short prompt leaves it to the target what to speak of.
    """
    rng = np.random.default_rng((seed, 3, index))
    prompt = list(prompts[int(rng.integers(len(prompts)))])
    greedy = index % 2 == 0
    fewest = max(1, len(prompt) // 2) if greedy else min(SHORTEST_PREFIX, len(prompt))
    length = int(rng.integers(fewest, len(prompt) + 1))
    return prompt[:length], 0.0 if greedy else 1.0, int(rng.integers(2**63))


class LessonFiles:
    """The files in a folder, of `count` continuations behind the prompts in all."""

    def __init__(self, folder: Path, prompts: Sequence[Sequence[int]], count: int, seed: int):
        self.folder, self.prompts, self.count, self.seed = folder, prompts, count, seed

    @property
    def missing(self) -> list[int]:
        """The numbers of files that are still to be written."""
        return [number for number in range(-(-self.count // UNIT)) if not self._path(number).is_file()]

    def write(self, number: int, llm: LLM, target: FrozenTarget, sequence_length: int) -> None:
        """One file: continuations from an engine, and what the same target thinks of them, from one more pass."""
        indices = range(number * UNIT, min(self.count, (number + 1) * UNIT))
        requests = [request_of(self.prompts, index, self.seed) for index in indices]
        sequences, prompt_lengths = continue_prompts(llm, requests, sequence_length)
        tops = _top(target, sequences, prompt_lengths)
        tensors = {
            "token_ids": torch.tensor([token for tokens in sequences for token in tokens], dtype=torch.int32),
            "lengths": torch.tensor(list(map(len, sequences)), dtype=torch.int32),
            "prompt_lengths": torch.tensor(prompt_lengths, dtype=torch.int32),
            "top_ids": torch.cat([ids for ids, _ in tops]).to(torch.int32),
            "top_probs": torch.cat([probs for _, probs in tops]).half(),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self._path(number).with_suffix(".partial")
        save_file(tensors, partial)
        os.replace(partial, self._path(number))

    def read(self) -> list[Lesson]:
        """All lessons, in the order of their numbers."""
        lessons: list[Lesson] = []
        for number in range(-(-self.count // UNIT)):
            tensors = load_file(self._path(number))
            lengths, prompt_lengths = tensors["lengths"].tolist(), tensors["prompt_lengths"].tolist()
            counts = [length - prompt for length, prompt in zip(lengths, prompt_lengths, strict=True)]
            lessons += map(
                Lesson,
                tensors["token_ids"].long().split(lengths),
                prompt_lengths,
                tensors["top_ids"].long().split(counts),
                tensors["top_probs"].float().split(counts),
            )
        return lessons

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:05d}.safetensors"


def continue_prompts(
    llm: LLM,
    requests: Sequence[tuple[Sequence[int], float, int]],
    sequence_length: int,
    cut: Callable[[list[int]], list[int]] = before_repetition,
) -> tuple[list[list[int]], list[int]]:
    """Sequences of prompt and continuation, up to `sequence_length` tokens, and their prompts' lengths.

    `cut` takes from a continuation what is of use; those of which less than a token or two is left are left out.
    """
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=sequence_length - len(ids), detokenize=False)
        for ids, temperature, seed in requests
    ]
    prompts = [{"prompt_token_ids": list(ids)} for ids, _, _ in requests]
    sequences, prompt_lengths = [], []
    for (ids, _, _), output in zip(requests, llm.generate(prompts, params, use_tqdm=False), strict=True):
        if output.error:
            raise RuntimeError(f"a prompt of {len(ids)} tokens: {output.error}")
        tokens = cut(list(output.outputs[0].token_ids))
        if len(tokens) >= MIN_TOKENS:
            sequences.append([*ids, *tokens])
            prompt_lengths.append(len(ids))
    if not sequences:
        raise ValueError(f"the target writes next to nothing behind {len(requests)} prompts; allowed: other --prompts")
    return sequences, prompt_lengths


@torch.no_grad()
def _top(
    target: FrozenTarget, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """(token ids [n, TOP], probabilities [n, TOP]) for the n tokens of each sequence behind its prompt."""
    states = target.hidden_states(sequences, LAST).last
    tops = []
    for tokens, prompt_length, of_sequence in zip(sequences, prompt_lengths, states, strict=True):
        # What stands at a place was chosen where the place before it had been read.
        rows = of_sequence[prompt_length - 1 : len(tokens) - 1]
        top = target.logits(target.final_norm(rows)).softmax(-1).topk(min(TOP, target.config.vocab_size))
        tops.append((top.indices, top.values))
    return tops
