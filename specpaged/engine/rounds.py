"""Several rounds in one call, where nothing is to be decided between them: score, verify and draft, and again.

A step of the engine is then one call into our kernels for all of its rounds. What comes out is the same: a round
depends on its sequences' tokens alone, whoever puts it together.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial
from itertools import compress, zip_longest
from operator import gt
from typing import TYPE_CHECKING, NamedTuple

from specpaged.drafting.draft import NO_DRAFT, Draft
from specpaged.drafting.draft_model import MOST_ROWS
from specpaged.engine.decoding_row import decoding_row, row_of_reader
from specpaged.engine.prompt_logprobs import wants_prompt_logits
from specpaged.engine.scheduler import ScheduledSequence
from specpaged.modeling.rounds import Lookup, Rounds, Together
from specpaged.paging.block_allocator import IntegrityError
from specpaged.paging.page_table import DRAFT
from specpaged.verification.base import VerifyOutput

if TYPE_CHECKING:
    from specpaged.engine.sequence import Sequence
    from specpaged.engine.step import ScoredStep, SpeculativeStep
    from specpaged.modeling.forward_output import HiddenStates
    from specpaged.paging.page_table import PageTable
    from specpaged.speculation.lookup_choice import LookupChoice

_FAR_BEHIND = 16  # tokens that the drafter has not run: who has more catches up in a proposal of its own
_FAR_BEHIND_LOOKUPS = 128  # where it falls behind with every draft of a lookup's that is taken

# For each sequence, over so many rounds: how many drafts each further one is to have, where somebody says what is
# wanted, and how many tokens may come in all; slots for them are reserved.
ReserveRounds = Callable[["SequenceOf[Sequence]", int, "SequenceOf[int] | None"], list[tuple[int, int]]]


def run_rounds(step: SpeculativeStep, entries: SequenceOf[ScheduledSequence]) -> Rounds | None:
    """The entries' next rounds, as many as nobody has to decide anything between; None where that is one, or unknown.

    Every token of theirs is to be its row's most likely one.
    """
    drafter, planner = step.drafter, step.planner
    if step.reserve_rounds is None or step.agree is not None or not step.target.runs_greedy:
        return None
    reads = drafter is not None and drafter.hidden_states is not None
    reads = reads and any([entry.sequence.max_model_draft_tokens for entry in entries])
    sequences = []
    for entry in entries:
        if entry.num_new_tokens != 1 or not entry.samples or wants_prompt_logits(entry):
            return None
        sequences.append(entry.sequence)
    if planner is None:
        num_rounds, wanted, stop_rule = step.call_length.num_rounds(len(sequences)), None, None
        goes_on = drafter is not None
    else:
        num_rounds, wanted, stop_rule, goes_on = planner.rounds(sequences)
    if num_rounds < 2 and not goes_on:
        return None
    choices = () if planner is None else planner.lookups
    most_wanted = wanted
    if any(choices):  # slots are for whoever drafts
        most_wanted = [max(k, choice.num_tokens if choice else 0) for k, choice in zip(wanted, choices, strict=True)]
    may_draft = drafter is not None and (most_wanted is None or any(most_wanted))
    if num_rounds < 2 and not may_draft:
        return None
    in_rounds = drafter.in_rounds if may_draft or reads else None
    if (may_draft or reads) and in_rounds is None:
        return None
    reserved = step.reserve_rounds(sequences, num_rounds + goes_on, most_wanted)
    lookup = in_rounds if isinstance(in_rounds, Lookup) else None
    row_of, far_behind = row_of_reader if reads else partial(decoding_row, lookup=lookup), _FAR_BEHIND
    counts = [k for k, _ in reserved]
    if isinstance(in_rounds, Together):
        counts, choices = _shares(step, sequences, counts, wanted, choices)
        in_rounds, lookups = in_rounds
        row_of, far_behind = partial(row_of, lookups=lookups), _FAR_BEHIND_LOOKUPS
    of_rows = zip_longest(entries, reserved, counts, choices)
    rows = [row_of(entry, k, most, choice=choice) for entry, (_, most), k, choice in of_rows]
    drafting = [row for row in rows if row.num_draft_tokens]
    if stop_rule is not None and len(stop_rule.leads) != len(drafting):
        return None  # somebody has no room: it is not for them
    draft = in_rounds if reads else None
    if drafting and lookup is None:
        draft = in_rounds
        most_tokens = max([len(row.token_ids) for row in drafting])
        if most_tokens > far_behind or not draft.runs_greedy:
            return None
        if sum([len(row.token_ids) for row in drafting]) > max(MOST_ROWS, len(drafting)):
            return None  # a proposal runs them in several passes
    tells_found = planner is not None and planner.looks_at_rounds  # to learn of lookups, whether or not they are taken
    rounds = step.target.rounds(rows, step.vocab_size, num_rounds, draft, stop_rule, goes_on, tells_found)
    rounds.num_wanted = [row.num_draft_tokens for row in rows]
    if planner is None:
        num_found = [0 if row.choice is None else row.choice.num_tokens for row in rows]
        rounds.num_wanted = list(map(max, rounds.num_wanted, num_found))
    if not rounds.num_rounds:
        return None
    step.call_length.took(len(rows), rounds.num_rounds, sum(rounds.seconds))
    return rounds


def _shares(
    step: SpeculativeStep,
    sequences: SequenceOf[Sequence],
    counts: list[int],
    wanted: SequenceOf[int] | None,
    choices: SequenceOf[LookupChoice | None],
) -> tuple[list[int], list[LookupChoice | None]]:
    """The model's drafts, of so many that there is room for, and when each sequence takes a lookup's in their place."""
    if wanted is not None:
        choices = [choice and choice.within(k) for choice, k in zip(choices, counts, strict=bool(choices))]
        return list(map(min, counts, wanted)), choices
    has_model = step.drafter.model is not None
    of_model = [k * (has_model and sequence.model_drafts) for sequence, k in zip(sequences, counts, strict=True)]
    return of_model, [step.drafter.choice(*of) for of in zip(counts, of_model, strict=True)]


def unread(entries: SequenceOf[ScheduledSequence], rounds: Rounds) -> dict[Sequence, HiddenStates]:
    """What rounds have left to a drafter that reads the target."""
    of_entries = zip(entries, rounds.num_unread, rounds.unread, strict=False)
    return {entry.sequence: states for entry, num_rows, states in of_entries if num_rows}


def output_of(rounds: Rounds) -> VerifyOutput:
    """All rounds as one."""
    num_seqs = len(rounds.token_ids)
    num_accepted = [len(token_ids) - rounds.num_rounds for token_ids in rounds.token_ids]
    return VerifyOutput(rounds.token_ids, num_accepted, [False] * num_seqs, [None] * num_seqs)


def commit_rounds(step: SpeculativeStep, scored: ScoredStep) -> None:
    """Append what rounds have brought, and cut every pool behind it: `SpeculativeStep.commit` of several rounds."""
    metrics, rounds = step.metrics, scored.rounds
    metrics.steps += rounds.num_rounds
    metrics.rounds += rounds.num_rounds
    unverified = rounds.num_unverified if any(rounds.num_drafts) else [0]
    metrics.unverified_kv_tokens = unverified[-1]
    metrics.peak_unverified_kv_tokens = max(metrics.peak_unverified_kv_tokens, *unverified)
    metrics.proposed_tokens += sum(rounds.num_drafted)  # those of the first round have been counted
    fared = _Fared([], [], [])
    if step.planner is not None and step.planner.looks_at_rounds and (rounds.drafts or any(rounds.num_found)):
        _tell_outcomes(step, scored)
    for i, entry in enumerate(scored.entries):
        _emit(step, entry.sequence, rounds, i, fared)
    start = time.perf_counter()
    if rounds.drafts_wait and not _still_wanted(step, scored):
        rounds.drop_waiting()
    num_freed = 0
    for i, entry in enumerate(scored.entries):
        sequence = entry.sequence
        table, num_tokens = sequence.page_table, len(sequence.token_ids)
        num_waiting = 0 if sequence.has_ended else rounds.num_waiting[i]
        if len(table.context_lens) > DRAFT:
            draft_context_len = _draft_context_len(table, rounds.draft_context_lens[i], entry.context_len)
            context_lens = num_tokens - 1, min(draft_context_len, num_tokens - 1 + num_waiting)
        else:
            context_lens = (num_tokens - 1,)
        num_freed += table.settle(context_lens, num_tokens + num_waiting if num_waiting else 0)
    if fared.num_drafts:
        metrics.record_drafts(fared.num_drafts, fared.num_accepted)
        metrics.rollback_blocks_freed += num_freed
        metrics.rollbacks += sum(map(gt, fared.num_drafts, fared.num_kept))
        metrics.rolled_back_tokens += sum(fared.num_drafts) - sum(fared.num_kept)
        metrics.rollback_seconds += time.perf_counter() - start


def _tell_outcomes(step: SpeculativeStep, scored: ScoredStep) -> None:
    """Of the drafts that were made within these rounds, and of what lookups have found besides: what is known of them
    has come along.
    """
    in_rounds, nothing = step.drafter.in_rounds, [()] * len(scored.entries)
    for of_round in scored.rounds.rounds[1:]:
        drafters = of_round.drafters or [0] * len(scored.entries)
        for entry, drafts, left_out, evidence, token_ids, drafter, besides in zip(
            scored.entries, of_round.drafts, of_round.left_out, of_round.evidence, of_round.token_ids, drafters,
            of_round.found or nothing, strict=True,
        ):  # fmt: skip
            if not evidence and not besides:
                continue
            draft = _draft(in_rounds, drafts + left_out, evidence, drafter) if evidence else NO_DRAFT
            found = [_draft(in_rounds, of_lookup, known, number) for number, of_lookup, known in besides]
            if drafter:
                draft, found = NO_DRAFT, [draft, *found]
            step.planner.told(entry.sequence, replace(draft, found=found) if found else draft, token_ids)


def _draft(in_rounds: object, token_ids: list[int], evidence: list[float], drafter: int) -> Draft:
    """One that was made in a call, by what is known of it: how likely tokens are, or how long a match they had."""
    maker = in_rounds.lookups[drafter - 1] if drafter else in_rounds
    if isinstance(maker, Lookup) and maker.evidence_is_length:
        return Draft(token_ids, num_matched=int(evidence[0]), drafter=drafter)
    return Draft(token_ids, evidence, drafter=drafter)


class _Fared(NamedTuple):
    """What became of the drafts of all rounds and sequences."""

    num_drafts: list[int]  # 1 at least
    num_accepted: list[int]
    num_kept: list[int]  # those that came before the sequence ended


def _emit(step: SpeculativeStep, sequence: Sequence, rounds: Rounds, i: int, fared: _Fared) -> None:
    """Append the output of the i-th sequence, up to its end. Whose text cannot be read ends with an error."""
    token_ids, num_before = rounds.token_ids[i], len(sequence.output_token_ids)
    sequence.draft = NO_DRAFT
    first, last = i * rounds.num_rounds, (i + 1) * rounds.num_rounds
    if step.planner is not None:
        step.planner.committed(sequence, token_ids[: rounds.num_tokens[first]])
    try:
        sequence.emit(token_ids, None)
    except IntegrityError:
        raise
    except Exception as error:  # a tokenizer's own, of this request alone
        sequence.fail(error)
    num_left = num_emitted = len(sequence.output_token_ids) - num_before
    step.metrics.emitted_tokens += num_emitted
    of_request = sequence.metrics
    num_drafts = rounds.num_drafts[first:last]
    if not any(num_drafts):
        of_request.rounds += num_emitted
        return
    num_accepted = [num_tokens - 1 for num_tokens in rounds.num_tokens[first:last]]
    if step.planner is not None:
        step.planner.fared(sequence, num_drafts, num_accepted)
    num_kept = num_accepted
    if num_emitted < len(token_ids):  # it has ended, and there are no rounds behind that one
        num_kept = []
        for accepted in num_accepted:
            if num_left > 0:
                num_kept.append(min(accepted, num_left))
                num_left -= accepted + 1
        num_drafts, num_accepted = num_drafts[: len(num_kept)], num_accepted[: len(num_kept)]
    of_request.rounds += len(num_kept)
    if 0 in num_drafts:
        num_kept, num_accepted = (list(compress(counts, num_drafts)) for counts in (num_kept, num_accepted))
        num_drafts = [count for count in num_drafts if count]
    of_request.record_drafts(num_drafts, num_accepted)
    fared.num_drafts.extend(num_drafts)
    fared.num_accepted.extend(num_accepted)
    fared.num_kept.extend(num_kept)


def _still_wanted(step: SpeculativeStep, scored: ScoredStep) -> bool:
    """Whether who goes on is to have as many drafts as when the call began, when there may have been more of them."""
    going_on = [not entry.sequence.has_ended for entry in scored.entries]
    if all(going_on) or step.planner is not None:  # whose plan was for each of them
        return True
    sequences = [entry.sequence for entry in compress(scored.entries, going_on)]
    wanted = [k for k, _ in step.reserve_rounds(sequences, 1, None)]
    return wanted == list(compress(scored.rounds.num_wanted, going_on))


def propose_waiting(step: SpeculativeStep, scored: ScoredStep) -> bool:
    """Leave the drafts that wait with their sequences; False where nobody was asked to make any."""
    rounds = scored.rounds
    if rounds is None or not rounds.drafts_wait:
        return False
    if rounds.num_drafted_ahead:
        in_rounds = step.drafter.in_rounds
        of_entries = zip(scored.entries, rounds.waiting(), rounds.waiting_drafters, strict=True)
        for entry, (token_ids, evidence), drafter in of_entries:
            if token_ids and not entry.sequence.has_ended:
                entry.sequence.draft = _draft(in_rounds, token_ids, evidence, drafter)
        step.metrics.proposed_tokens += rounds.num_drafted_ahead
    if step.planner is not None:
        step.planner.went_on(scored.num_rounds)
    return True


def _draft_context_len(table: PageTable, context_len: int, target_context_len: int) -> int:
    """How many tokens the draft's pool holds; where it lay behind the target's, and nothing was drafted, as before."""
    before = table.context_lens[DRAFT]
    lay_behind = max(before, context_len) <= target_context_len and before < target_context_len
    return before if lay_behind else context_len
