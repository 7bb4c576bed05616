"""vLLM's structured output: its bitmask over the rows that are verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput


def apply_grammar(
    logits: Tensor,  # [M, V] fp32
    drafts: Sequence[Sequence[int]],
    places: Mapping[str, int],
    num_scheduled: Mapping[str, int],
    grammar: GrammarOutput,
) -> tuple[Tensor, list[list[int]]]:
    """Logits with -inf where a grammar forbids a token, and the drafts whose rows it has ruled over.

    Sequence i owns len(drafts[i]) + 1 rows; `places` says which i a request is, and `num_scheduled` how many drafts
    vLLM scheduled for it: as many rows, and one, its bitmask has. Rows behind drafts that the grammar has not seen are
    dropped. A (drafts 5 6, of which the grammar saw one) and B (none), A alone under a grammar:

        rows       A0 A1 A2 B0         bitmask rows   A0 A1 A2
        rows kept  A0 A1    B0         A's draft      5
    """
    drafts = [list(draft) for draft in drafts]
    starts = [0]
    for draft in drafts:
        starts.append(starts[-1] + len(draft) + 1)
    allowed = torch.ones(logits.shape, dtype=torch.bool, device=logits.device)
    acceptable = grammar.num_acceptable_drafts or [0] * len(grammar.structured_output_request_ids)
    row = 0
    for request_id, num_acceptable in zip(grammar.structured_output_request_ids, acceptable, strict=True):
        num_rows = 1 + num_scheduled.get(request_id, 0)
        i = places.get(request_id)
        if i is not None:
            del drafts[i][num_acceptable:]
            kept = len(drafts[i]) + 1
            words = torch.from_numpy(grammar.grammar_bitmask[row : row + kept]).to(logits.device)
            allowed[starts[i] : starts[i] + kept] = unpacked(words, logits.shape[1])
        row += num_rows
    kept_rows = [row for i, draft in enumerate(drafts) for row in range(starts[i], starts[i] + len(draft) + 1)]
    masked = logits.masked_fill(~allowed, float("-inf"))
    if len(kept_rows) < len(masked):
        masked = masked[torch.tensor(kept_rows, device=logits.device)]
    return masked, drafts


def unpacked(words: Tensor, vocab_size: int) -> Tensor:
    """[rows, words] int32 -> [rows, vocab_size] bool: token j is bit j % 32 of word j // 32."""
    token_ids = torch.arange(vocab_size, device=words.device)
    return (words[:, token_ids // 32] >> (token_ids % 32).to(torch.int32)) & 1 > 0
