"""Schedulers alone: no model, only lengths."""

from __future__ import annotations

from specpaged.drafting.draft import NO_DRAFT, Draft
from specpaged.engine.sequence import Sequence
from specpaged.paging.block_allocator import BlockAllocator
from specpaged.paging.page_table import DRAFT, TARGET, PageTable
from specpaged.sampling_params import SamplingParams
from specpaged.scheduling.continuous import ContinuousScheduler
from specpaged.speculative_config import SpeculativeConfig

BLOCK_SIZE = 4
MAX_MODEL_LEN = 48


def make_scheduler(num_blocks=40, max_num_seqs=4, budget=16, k=3, kind=ContinuousScheduler, **overrides):
    arguments = {
        "block_size": BLOCK_SIZE,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": budget,
        "max_model_len": MAX_MODEL_LEN,
        "speculative_config": SpeculativeConfig(model="draft", num_speculative_tokens=k) if k else None,
        "prefix_cache": None,
    }
    return kind(BlockAllocator(num_blocks), **(arguments | overrides))


def make_sequence(scheduler, name, num_prompt_tokens, max_tokens=8, k=3):
    sequence = Sequence(
        name,
        list(range(1, num_prompt_tokens + 1)),
        SamplingParams(temperature=0, max_tokens=max_tokens),
        seed=0,
        page_table=PageTable(scheduler.allocator, BLOCK_SIZE, 2 if k else 1),
        max_draft_tokens=k,
    )
    scheduler.add(sequence)
    return sequence


def run_step(scheduler, step, accept, draft=lambda k: k):
    """What an engine does with a step: write KV, accept some drafts, roll back, end who is done, draft.

    `accept` says how many of so many drafts stand, `draft` how many are made where so many are asked for.
    """
    going_on = []
    for entry in step.entries:
        sequence, table, k = entry.sequence, entry.sequence.page_table, entry.num_draft_tokens
        table.advance(TARGET, entry.num_new_tokens + k)
        if not entry.samples:
            continue
        num_accepted = min(accept(k), k)
        for token in range(num_accepted + 1):
            sequence.append(token)
        for pool, context_len in enumerate(table.context_lens):
            table.truncate(pool, min(context_len, entry.num_known + num_accepted))
        sequence.draft = NO_DRAFT
        if len(sequence.output_token_ids) >= sequence.params.max_tokens or sequence.num_tokens >= MAX_MODEL_LEN:
            scheduler.finish(sequence)
            continue
        going_on.append(sequence)
    for sequence, asked in zip(going_on, scheduler.reserve_drafts(going_on), strict=True):
        if asked:
            table, k = sequence.page_table, draft(asked)
            table.advance(DRAFT, sequence.num_tokens + max(0, k - 1) - table.context_lens[DRAFT])
            sequence.draft = Draft([0] * k)
