"""The target's pass over a step: known tokens and drafts, packed; logits where a token is decided."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from specpaged.engine.prompt_logprobs import prompt_rows, wants_prompt_logits
from specpaged.engine.scheduler import ScheduledSequence
from specpaged.engine.sequence import Sequence
from specpaged.modeling.forward_output import Argmax
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.ragged_batch import RaggedRow, pack


def score(
    target: ModelRunner,
    entries: SequenceOf[ScheduledSequence],
    drafts: SequenceOf[SequenceOf[int]],
    vocab_size: int,
    argmax: bool,
) -> tuple[Tensor | Argmax, dict[Sequence, Tensor]]:
    """Logits [M, V] of the rows to verify, and of the prompt tokens that asked for them; `drafts` are those of the
    entries that sample, in order.

    With `argmax` only that of the former, unless a prompt asks.
    """
    rows, drafts_left = [], iter(drafts)
    for entry in entries:
        sequence, start = entry.sequence, entry.context_len
        token_ids = sequence.token_ids[start : start + entry.num_new_tokens]
        num_logits = 0
        if entry.samples:
            draft_token_ids = next(drafts_left)
            token_ids += draft_token_ids
            num_logits = len(draft_token_ids) + 1
        if wants_prompt_logits(entry):
            num_logits = len(token_ids)
        rows.append(RaggedRow(token_ids, start, sequence.page_table.entries, num_logits))
    cache = target.kv_cache
    batch = pack(rows, cache.block_size, target.model.device, cache.block_stride)
    of_prompts = any(map(wants_prompt_logits, entries))
    if argmax and not of_prompts:
        return target.forward(batch, argmax_of=vocab_size).argmax, {}
    logits = target.forward(batch).logits[:, :vocab_size]
    if not of_prompts:
        return logits, {}
    verify_logits, prompt_logits, drafts_left = [], {}, iter(drafts)
    for entry, part in zip(entries, logits.split([row.num_logits for row in rows]), strict=True):
        num_verify = len(next(drafts_left)) + 1 if entry.samples else 0
        verify_logits.append(part[len(part) - num_verify :])
        if wants_prompt_logits(entry):
            prompt_logits[entry.sequence] = part[prompt_rows(entry)]
    return torch.cat(verify_logits), prompt_logits
