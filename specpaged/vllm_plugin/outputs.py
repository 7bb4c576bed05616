"""What a step gives back to vLLM, in its forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from vllm.v1.outputs import DraftTokenIds, LogprobsLists, LogprobsTensors, ModelRunnerOutput

from specpaged.sampling.logprobs import TokenLogprobs


@dataclass
class StepOutput(ModelRunnerOutput):
    """With the drafts for the next step, for an executor that need not ask for them."""

    drafts: DraftTokenIds | None = None


def logprobs_lists(
    token_ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[TokenLogprobs] | None]
) -> LogprobsLists | None:
    """One row for each output token of the batch: the token itself, then its most likely competitors.

    Rows have the width of the longest. vLLM reads those of requests that asked; None if nobody did.
    """
    if all(of_request is None for of_request in logprobs):
        return None
    rows = [row for of_request in logprobs for row in of_request or ()]
    width = 1 + max((len(row.top) for row in rows), default=0)
    num_rows = sum(map(len, token_ids))
    ids = np.zeros((num_rows, width), np.int32)
    values = np.full((num_rows, width), -np.inf, np.float32)
    ranks = np.ones(num_rows, np.int32)
    bounds = [0]
    for output, of_request in zip(token_ids, logprobs, strict=True):
        for i, row in enumerate(of_request or (), bounds[-1]):
            _fill(ids[i], values[i], row)
            ranks[i] = row.rank
        bounds.append(bounds[-1] + len(output))
    return LogprobsLists(ids, values, ranks, bounds)


def prompt_logprobs_tensors(rows: Sequence[TokenLogprobs]) -> LogprobsTensors:
    """The log-probabilities of a prompt's tokens, all but the first."""
    width = 1 + max((len(row.top) for row in rows), default=0)
    ids = np.zeros((len(rows), width), np.int32)
    values = np.full((len(rows), width), -np.inf, np.float32)
    for i, row in enumerate(rows):
        _fill(ids[i], values[i], row)
    ranks = np.array([row.rank for row in rows], np.int32)
    return LogprobsTensors(torch.from_numpy(ids), torch.from_numpy(values), torch.from_numpy(ranks))


def _fill(ids: np.ndarray, values: np.ndarray, row: TokenLogprobs) -> None:
    pairs = [(row.token_id, row.logprob), *row.top]
    ids[: len(pairs)], values[: len(pairs)] = zip(*pairs, strict=True)
