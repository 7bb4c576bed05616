"""The target's pass over a step: known tokens and drafts, packed; logits where a token is decided."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import torch
from torch import Tensor

from specpaged.engine.prompt_logprobs import prompt_rows, wants_prompt_logits
from specpaged.engine.scheduler import ScheduledSequence
from specpaged.engine.sequence import Sequence
from specpaged.modeling.forward_output import Argmax, ForwardOutput, GreedyTokens, HiddenStates, HiddenStatesRequest
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.ragged_batch import RaggedRow, pack


class TargetPass(NamedTuple):
    """What the target's pass over a step computes."""

    logits: (
        Tensor | Argmax | GreedyTokens
    )  # [M, V] fp32: for each entry that samples, a row behind its known tokens and each draft
    prompt_logits: dict[Sequence, Tensor]  # [rows, V] fp32, of prompts whose log-probabilities are asked for
    hidden_states: dict[Sequence, HiddenStates]  # of all tokens that an entry ran, where a drafter reads them


def run_target(
    target: ModelRunner,
    entries: SequenceOf[ScheduledSequence],
    vocab_size: int,
    *,
    argmax: bool,
    hidden: HiddenStatesRequest | None,
    hidden_of_all: bool = False,
) -> TargetPass:
    """Run the target over the entries.

    With `argmax` the rows' most likely tokens will do, and logits are made only where a prompt's log-probabilities are
    asked for. Hidden states are those of sequences that may draft, or `hidden_of_all` but the outputs of those whom the
    drafter has given up.
    """
    rows, of_prompts = [], False
    for entry in entries:
        sequence = entry.sequence
        follows = hidden_of_all and (entry.in_prefill or sequence.model_drafts)
        reads = hidden is not None and (follows or sequence.max_model_draft_tokens > 0)
        of_prompt = wants_prompt_logits(entry)
        rows.append(_ragged_row(entry, reads, of_prompt))
        of_prompts |= of_prompt
    if hidden is not None and not any(row.num_hidden for row in rows):
        hidden = None
    if argmax and hidden is None and not of_prompts and target.runs_greedy:
        return TargetPass(target.greedy(rows, vocab_size)[0], {}, {})
    cache = target.kv_cache
    batch = pack(rows, cache.block_size, target.model.device, cache.block_stride)
    output = target.forward(batch, argmax_of=vocab_size if argmax and not of_prompts else None, hidden=hidden)
    hidden_states = _by_sequence(entries, rows, output)
    if output.argmax is not None:
        return TargetPass(output.argmax, {}, hidden_states)
    logits = output.logits[:, :vocab_size]
    if not of_prompts:
        return TargetPass(logits, {}, hidden_states)
    verify_logits, prompt_logits = [], {}
    for entry, of_entry in zip(entries, logits.split([row.num_logits for row in rows]), strict=True):
        num_verify = entry.num_draft_tokens + 1 if entry.samples else 0
        verify_logits.append(of_entry[len(of_entry) - num_verify :])
        if wants_prompt_logits(entry):
            prompt_logits[entry.sequence] = of_entry[prompt_rows(entry)]
    return TargetPass(torch.cat(verify_logits), prompt_logits, hidden_states)


def _ragged_row(entry: ScheduledSequence, reads_hidden: bool, of_prompt: bool) -> RaggedRow:
    sequence, start = entry.sequence, entry.context_len
    token_ids = [*sequence.token_ids[start : entry.num_known], *entry.draft.token_ids]
    num_logits = len(entry.draft.token_ids) + 1 if entry.samples else 0
    if of_prompt:
        num_logits = len(token_ids)
    return RaggedRow(token_ids, start, sequence.page_table.entries, num_logits, len(token_ids) if reads_hidden else 0)


def _by_sequence(
    entries: SequenceOf[ScheduledSequence], rows: SequenceOf[RaggedRow], output: ForwardOutput
) -> dict[Sequence, HiddenStates]:
    if output.hidden_states is None:
        return {}
    counts = [row.num_hidden for row in rows]
    split = output.hidden_states.split(counts)
    return {entry.sequence: states for entry, states, count in zip(entries, split, counts, strict=True) if count}
