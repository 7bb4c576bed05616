"""How many tokens a round brings, by draft: exact counts under the target's own greedy outputs, with no clock.

As the drafted context is the target's output up to the first mismatch, which of a draft's choices are the target's
tells all rounds at every K, from one pass over the outputs. It depends on no batch, as our outputs do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specpaged.studies.scaling.counts import MOST_DRAFTS, Counts
from specpaged.studies.scaling.drafts import DraftPoint
from specpaged.training.heads.target import FrozenTarget
from specpaged.training.quality import count_accepted
from specpaged.training.scaling.lessons import LAST, continue_prompts


@dataclass(frozen=True)
class Outputs:
    """The target's greedy outputs behind prompts: all that acceptance is measured on."""

    sequences: list[list[int]]  # prompt and output
    prompt_lengths: list[int]

    @classmethod
    def write(cls, llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> Outputs:
        """Up to so many tokens each, by an engine."""
        longest = max(map(len, prompts)) + max_tokens
        requests = [(list(prompt), 0.0, 0) for prompt in prompts]
        return cls(*continue_prompts(llm, requests, longest, cut=lambda tokens: tokens[:max_tokens]))

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"sequences": self.sequences, "prompt_lengths": self.prompt_lengths}


def count(draft: DraftPoint, outputs: Outputs) -> Counts:
    """One pass of a draft over the outputs. ValueError where it is of a family that the flat decoder does not cover."""
    model = FrozenTarget.load(draft.path, max(map(len, outputs.sequences)), "cpu")
    states = model.hidden_states(outputs.sequences, LAST).last
    rounds, accepted = [], []
    for tokens, length, of_output in zip(outputs.sequences, outputs.prompt_lengths, states, strict=True):
        # The output's first token comes with the prompt's pass, undrafted; the row before a token chooses it.
        rows = of_output[length : len(tokens) - 1]
        choices = model.logits(model.final_norm(rows)).argmax(-1)
        matches = (choices == torch.tensor(tokens[length + 1 :])).tolist()
        counted = [count_accepted(matches, k) for k in range(1, MOST_DRAFTS + 1)]
        accepted.append([of_k for of_k, _ in counted])
        rounds.append([drafted // k for k, (_, drafted) in enumerate(counted, start=1)])
    return Counts(draft, np.array(rounds).T, np.array(accepted).T)
