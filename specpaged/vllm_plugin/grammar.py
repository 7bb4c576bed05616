"""vLLM's structured output: its bitmask as token masks of the rows that are verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specpaged.sampling.request import SamplingRequest

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput


def apply_grammar(
    logits: Tensor,  # [M, V] fp32
    drafts: Sequence[Sequence[int]],
    requests: Sequence[SamplingRequest],
    request_idx: Mapping[str, int],
    num_scheduled: Mapping[str, int],
    max_rows: int,
    grammar: GrammarOutput,
) -> tuple[Tensor, list[list[int]], list[SamplingRequest]]:
    """The rows that the grammars have ruled over with the drafts between them, and requests with their token masks.

    Sequence i owns len(drafts[i]) + 1 rows; `request_idx` says which i a request is, and `num_scheduled` how many
    drafts vLLM scheduled for it: as many rows, and one, its bitmask has (since vLLM 0.33 `max_rows`, used or not). Rows
    behind drafts that the grammar has not seen are dropped. A (drafts 5 6, of which the grammar saw one) and B (none),
    A alone under a grammar:

        rows       A0 A1 A2 B0         bitmask rows   A0 A1 A2
        row_idx    A0 A1    B0         A's draft      5            A's token mask   A0 A1
    """
    ruled_drafts, ruled_requests = [list(draft) for draft in drafts], list(requests)
    acceptable = grammar.num_acceptable_drafts or [0] * len(grammar.structured_output_request_ids)
    has_strides = len(grammar.grammar_bitmask) == max_rows * len(acceptable)
    row = 0
    for request_id, num_acceptable in zip(grammar.structured_output_request_ids, acceptable, strict=True):
        i = request_idx.get(request_id)
        if i is not None:
            del ruled_drafts[i][num_acceptable:]
            words = torch.from_numpy(grammar.grammar_bitmask[row : row + len(ruled_drafts[i]) + 1]).to(logits.device)
            ruled_requests[i] = replace(requests[i], token_mask=unpacked(words, logits.shape[1]))
        row += max_rows if has_strides else 1 + num_scheduled.get(request_id, 0)
    row_idx, start = [], 0
    for draft, ruled_draft in zip(drafts, ruled_drafts, strict=True):
        row_idx += range(start, start + len(ruled_draft) + 1)
        start += len(draft) + 1
    if len(row_idx) < len(logits):
        logits = logits[torch.tensor(row_idx, device=logits.device)]
    return logits, ruled_drafts, ruled_requests


def unpacked(words: Tensor, vocab_size: int) -> Tensor:
    """[rows, words] int32 -> [rows, vocab_size] bool: token j is bit j % 32 of word j // 32."""
    token_ids = torch.arange(vocab_size, device=words.device)
    return (words[:, token_ids // 32] >> (token_ids % 32).to(torch.int32)) & 1 > 0
