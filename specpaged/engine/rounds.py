"""Several rounds in one call, where nothing is to be decided between them: score, verify and draft, and again.

A step of the engine is then one call into our kernels for all of its rounds. What comes out is the same: a round
depends on its sequences' tokens alone, whoever puts it together.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from specpaged.drafting.draft import NO_DRAFT
from specpaged.engine.prompt_logprobs import wants_prompt_logits
from specpaged.engine.scheduler import ScheduledSequence
from specpaged.modeling.rounds import DecodingRow, Lookup, Rounds
from specpaged.paging.block_allocator import IntegrityError
from specpaged.paging.page_table import DRAFT, TARGET

if TYPE_CHECKING:
    from specpaged.engine.sequence import Sequence
    from specpaged.engine.step import ScoredStep, SpeculativeStep
    from specpaged.paging.page_table import PageTable

_FAR_BEHIND = 16  # tokens that the drafter has not run: who has more catches up in a proposal of its own

# For each sequence, over so many rounds: how many drafts each further one is to have, where somebody says what is
# wanted, and how many tokens may come in all; slots for them are reserved.
ReserveRounds = Callable[["SequenceOf[Sequence]", int, "SequenceOf[int] | None"], list[tuple[int, int]]]


def run_rounds(step: SpeculativeStep, entries: SequenceOf[ScheduledSequence]) -> Rounds | None:
    """The entries' next rounds, as many as nobody has to decide anything between; None where that is one, or unknown.

    Every token of theirs is to be its row's most likely one.
    """
    if step.reserve_rounds is None or not all(entry.samples and entry.num_new_tokens == 1 for entry in entries):
        return None
    drafter, planner = step.drafter, step.planner
    if step.agree is not None or any(map(wants_prompt_logits, entries)):
        return None
    if drafter is not None and drafter.hidden_states is not None:
        return None
    sequences = [entry.sequence for entry in entries]
    num_rounds, wanted, stop_rule = step.most_rounds, None, None
    if planner is not None:
        num_rounds, wanted, stop_rule = planner.rounds(sequences)
    if num_rounds < 2:
        return None
    in_rounds = None if drafter is None else drafter.in_rounds
    if drafter is not None and in_rounds is None and wanted is None:
        return None
    reserved = step.reserve_rounds(sequences, num_rounds, wanted)
    rows = [_row(entry, *of_entry, in_rounds) for entry, of_entry in zip(entries, reserved, strict=True)]
    drafting = [row for row in rows if row.num_draft_tokens]
    draft = lookup = None
    if drafting and isinstance(in_rounds, Lookup):
        lookup = in_rounds
    elif drafting:
        draft = in_rounds
        most_tokens = max(len(row.token_ids) for row in drafting)
        if most_tokens > _FAR_BEHIND or not draft.runs_greedy(most_tokens * len(drafting)):
            return None
    if not step.target.runs_greedy(sum(1 + max(len(row.draft), row.num_draft_tokens) for row in rows)):
        return None
    rounds = step.target.rounds(rows, step.vocab_size, num_rounds, draft, stop_rule, lookup)
    return rounds if rounds.rounds else None


def _row(entry: ScheduledSequence, num_draft_tokens: int, most_tokens: int, in_rounds: object) -> DecodingRow:
    sequence, table, start = entry.sequence, entry.sequence.page_table, entry.context_len
    has_draft_kv = len(table.context_lens) > DRAFT
    draft_context_len = max(start, table.context_lens[DRAFT]) if has_draft_kv else start
    if num_draft_tokens and isinstance(in_rounds, Lookup):
        start = draft_context_len = 0  # it looks at all of them
    elif num_draft_tokens and has_draft_kv:
        draft_context_len = table.context_lens[DRAFT]
        start = min(start, draft_context_len)
    return DecodingRow(
        sequence.token_ids[start:] if start else sequence.token_ids,
        start,
        draft_context_len,
        entry.draft.token_ids,
        num_draft_tokens,
        max(most_tokens, len(entry.draft.token_ids) + 1),
        sequence.stop_checker.stop_ids,
        table.entries,
    )


def commit_rounds(step: SpeculativeStep, scored: ScoredStep) -> None:
    """Append what rounds have brought, and cut every pool behind it: `SpeculativeStep.commit` of several rounds."""
    metrics, (rounds, draft_context_lens) = step.metrics, scored.rounds
    metrics.steps += len(rounds)
    metrics.rounds += len(rounds)
    unverified = [sum(map(len, of_round.drafts)) for of_round in rounds]
    metrics.unverified_kv_tokens = unverified[-1]
    metrics.peak_unverified_kv_tokens = max(metrics.peak_unverified_kv_tokens, *unverified)
    metrics.proposed_tokens += sum(of_round.num_drafted for of_round in rounds)  # the first one's have been counted
    num_rejected: list[int] = []
    for i, entry in enumerate(scored.entries):
        try:
            num_rejected += _emit(step, entry.sequence, scored.rounds, i)
        except IntegrityError:
            raise
        except Exception as error:  # a tokenizer's own, of this request alone
            entry.sequence.fail(error)
    start = time.perf_counter()
    for i, entry in enumerate(scored.entries):
        sequence, table = entry.sequence, entry.sequence.page_table
        sequence.draft = NO_DRAFT
        table.advance(TARGET, sum(len(of_round.token_ids[i]) for of_round in rounds))
        if len(table.context_lens) > DRAFT:
            _set_draft_context(table, draft_context_lens[i], entry.context_len)
        num_kept = sequence.num_tokens - 1
        for pool, context_len in enumerate(table.context_lens):
            num_freed = table.truncate(pool, min(context_len, num_kept))
            metrics.rollback_blocks_freed += num_freed if num_rejected else 0
    if num_rejected:
        metrics.rollbacks += sum(count > 0 for count in num_rejected)
        metrics.rolled_back_tokens += sum(num_rejected)
        metrics.rollback_seconds += time.perf_counter() - start


def _emit(step: SpeculativeStep, sequence: Sequence, rounds: Rounds, i: int) -> list[int]:
    """Append the output of the i-th sequence, up to its end; of each round, the drafts that did not come to stay."""
    num_rejected = []
    for of_round in rounds.rounds:
        if sequence.has_ended:
            break
        draft, token_ids = of_round.drafts[i], of_round.token_ids[i]
        sequence.metrics.rounds += 1
        if draft:
            sequence.metrics.record_draft(len(draft), len(token_ids) - 1)
            step.metrics.record_draft(len(draft), len(token_ids) - 1)
        if step.planner is not None:
            step.planner.committed(sequence, token_ids)
        num_emitted = sequence.emit(token_ids, None)
        step.metrics.emitted_tokens += num_emitted
        if draft:
            num_rejected.append(len(draft) - min(len(token_ids) - 1, num_emitted))
    return num_rejected


def _set_draft_context(table: PageTable, context_len: int, target_context_len: int) -> None:
    """The draft's pool holds so many tokens; where it lay behind the target's, and nothing was drafted, as before."""
    before = table.context_lens[DRAFT]
    if max(before, context_len) <= target_context_len and before < target_context_len:
        return
    if context_len > before:
        table.advance(DRAFT, context_len - before)
    else:
        table.truncate(DRAFT, context_len)
