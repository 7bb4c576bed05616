"""The figures of a pair: held-out loss, greedy acceptance at K drafted tokens, share of cycling outputs."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

K = 5
NEW_TOKENS = 64
PROMPT_TOKENS = 128
MAX_PERIOD = 32


def cycle_period(tokens: list[int], max_period: int = MAX_PERIOD, repeats: int = 3) -> int:
    """The shortest period of at most `max_period` tokens repeated `repeats` times at the end; 0 if there is none."""
    for period in range(1, min(max_period, len(tokens) // repeats) + 1):
        if tokens[-period * (repeats - 1) :] == tokens[-period * repeats : -period]:
            return period
    return 0


def length_before_cycle(tokens: list[int]) -> int:
    """How many tokens come before the second copy of the cycle at the end; all of them if there is no cycle."""
    period, end = cycle_period(tokens), len(tokens)
    while period and end > period and tokens[end - 1] == tokens[end - 1 - period]:
        end -= 1
    return end


def decode(
    model, prefix: Tensor, new_tokens: int, generator: torch.Generator | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """After int64 [rows, length], yields (logits [rows, vocabulary], token [rows, 1]) for each new position.

    Greedy, or sampled at temperature 1 if `generator` is given; no padding, no stopping.
    """
    from transformers import DynamicCache

    cache, step = DynamicCache(), prefix
    for _ in range(new_tokens):
        with torch.no_grad():
            logits = model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        if generator is None:
            step = logits.argmax(-1, keepdim=True)
        else:
            step = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        yield logits, step


def continue_greedily(model, prefix: Tensor, new_tokens: int) -> Tensor:
    """int64 [rows, length] -> [rows, length + new_tokens]."""
    return torch.cat([prefix, *(token for _, token in decode(model, prefix, new_tokens))], 1)


def count_accepted(matches: list[bool], k: int = K) -> tuple[int, int]:
    """(accepted, drafted) over the rounds of one output; `matches[i]`: the draft's choice is the target's.

    A round drafts `k` tokens, the target accepts the leading matches and adds one of its own. As the drafted
    context equals the target's output up to the first mismatch, the matches under the target's own output tell
    the whole story. Rounds that would draft past the end are not counted.

    [T T F T T T T T] with k = 3: the round at 0 accepts 2, that at 3 all 3, one at 7 does not fit: (5, 6).
    """
    accepted = drafted = start = 0
    while start + k <= len(matches):
        run = next((i for i, match in enumerate(matches[start : start + k]) if not match), k)
        accepted, drafted, start = accepted + run, drafted + k, start + run + 1
    return accepted, drafted


@dataclass(frozen=True)
class Acceptance:
    """Greedy acceptance of a pair over outputs that do not end in a cycle, and over all of them."""

    prompts: int
    acceptance_rate: float
    acceptance_rate_all: float
    cycling_share: float
    mean_acceptance_length: float


def held_out_prompts(documents: dict[str, list[int]], count: int, length: int = PROMPT_TOKENS, seed: int = 0) -> Tensor:
    """int64 [count, length]: distinct random windows, so that a document counts by its length."""
    rng = np.random.default_rng(seed)
    windows = []
    for ids in documents.values():
        windows += [ids[i : i + length] for i in range(0, len(ids) - length - NEW_TOKENS, 64)]
    return torch.tensor([windows[i] for i in rng.choice(len(windows), count, replace=False)])


@torch.no_grad()
def measure_acceptance(target, draft, prompts: Tensor, eos: int, rows: int = 64) -> Acceptance:
    """Greedy outputs of NEW_TOKENS tokens, cut at EOS, for int64 [prompts, length], and their rounds."""
    counts, cycling = [], []
    for part in prompts.split(rows):
        output = continue_greedily(target, part, NEW_TOKENS)
        written = output[:, part.shape[1] :]
        choices = draft(input_ids=output[:, :-1], use_cache=False).logits[:, part.shape[1] - 1 :].argmax(-1)
        for tokens, matches in zip(written.tolist(), (choices == written).tolist(), strict=True):
            end = tokens.index(eos) + 1 if eos in tokens else len(tokens)
            counts.append(count_accepted(matches[:end]))
            cycling.append(cycle_period(tokens[:end]) > 0)
    counts, cycling = np.array(counts), np.array(cycling)
    accepted, drafted = counts[~cycling].sum(0)
    accepted_all, drafted_all = counts.sum(0)
    return Acceptance(
        prompts=len(cycling), acceptance_rate=float(accepted / drafted),
        acceptance_rate_all=float(accepted_all / drafted_all), cycling_share=float(cycling.mean()),
        mean_acceptance_length=float(K * accepted / drafted + 1),
    )  # fmt: skip
