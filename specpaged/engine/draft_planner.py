"""Between a step and its controller: sequences as candidates, drafts as evidence, what came of them, and seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

from specpaged.drafting.base import DraftRow
from specpaged.drafting.draft import NO_DRAFT, Draft
from specpaged.engine.scheduler import ScheduledSequence
from specpaged.engine.sequence import Sequence
from specpaged.paging.page_table import DRAFT
from specpaged.speculation.acceptance import logits_of
from specpaged.speculation.controller import Candidate, Controller, Plan
from specpaged.speculation.cost_model import PassShape

logger = logging.getLogger("specpaged")

_NOTHING: tuple[Draft, list[float]] = (NO_DRAFT, [])
_OFTEN, _SELDOM = 100, 8  # steps
_LONGEST_MATCH = 6  # of prompt lookup: longer ones say no more


class DraftPlanner:
    """Asks a controller on behalf of a step, and tells it what drafts and passes came to.

    Steps with a prefill tell nothing about time: their passes are of another kind. Of the others, after the first
    hundred, every eighth one does: to listen takes time, too.
    """

    def __init__(self, controller: Controller):
        self.controller = controller
        self._candidates: list[Candidate] = []  # of the last plan
        # With their evidence; of which nobody knows yet what came of them.
        self._proposals: dict[Sequence, tuple[Draft, list[float]]] = {}
        self._num_steps = 0
        self._tells = False  # whether the controller hears what this step takes
        self._mean_context = 0.0
        self._rest_seconds = 0.0  # of this step, beside its passes
        self._ended: float | None = None  # when the last pass did

    def plan(self, sequences: SequenceOf[Sequence]) -> Plan:
        """How much to draft for each of the sequences, which go on, and at whose tokens to look back."""
        self._candidates = [
            Candidate(sequence, sequence.max_draft_tokens, _lag(sequence), sequence.num_tokens)
            for sequence in sequences
        ]
        return self._ask(self.controller.plan, self._candidates, otherwise=Plan([0] * len(sequences)))

    def select(self, sequences: SequenceOf[Sequence], drafts: SequenceOf[Draft]) -> list[Draft]:
        """As much of each sequence's draft as is to be verified. The whole of it waits for its outcome."""
        proposals = {sequence: (draft, evidence_of(draft)) for sequence, draft in zip(sequences, drafts, strict=True)}
        self._proposals = proposals
        evidence = [proposals.get(candidate.sequence, _NOTHING)[1] for candidate in self._candidates]
        selected = self._ask(self.controller.select, self._candidates, evidence, otherwise=[*map(len, evidence)])
        counts = {candidate.sequence: count for candidate, count in zip(self._candidates, selected, strict=True)}
        return [draft.cut(counts[sequence]) for sequence, draft in zip(sequences, drafts, strict=True)]

    def look_back(self, sequence: Sequence, proposed: SequenceOf[int]) -> None:
        """What would have been drafted in place of the sequence's last tokens, up to the newest one."""
        came = sequence.token_ids[sequence.num_tokens - len(proposed) :]
        for token_id, came_id in zip(proposed, came, strict=True):
            self._ask(self.controller.observe_drafts, sequence, [token_id == came_id])

    def committed(self, sequence: Sequence, token_ids: SequenceOf[int]) -> None:
        """These tokens stand behind what was proposed: the outcome of as many drafts, verified or not."""
        proposal = self._proposals.pop(sequence, None)
        if proposal is not None:
            draft, evidence = proposal
            outcomes = []
            for drafted, came in zip(draft.token_ids, token_ids, strict=False):
                outcomes.append(drafted == came)
                if drafted != came:
                    break
            self._ask(self.controller.observe_drafts, sequence, outcomes, evidence)

    def begin(self) -> None:
        """The target's pass begins."""
        now = time.perf_counter()
        self._rest_seconds = 0.0 if self._ended is None else now - self._ended
        self._ended = now

    def scored(self, entries: SequenceOf[ScheduledSequence]) -> None:
        """It has ended, over these entries."""
        now = time.perf_counter()
        self._num_steps += 1
        self._tells = self._num_steps % (1 if self._num_steps < _OFTEN else _SELDOM) == 0
        self._tells = self._tells and all(entry.num_new_tokens == 1 for entry in entries)
        if self._tells and self._ended is not None:
            num_rows = len(entries) + sum(len(entry.draft) for entry in entries)
            self._mean_context = sum(entry.context_len for entry in entries) / len(entries)
            shape = PassShape(num_rows, len(entries), self._mean_context)
            self._ask(self.controller.observe_target, shape, now - self._ended)
        self._ended = now

    def proposed(self, rows: SequenceOf[DraftRow], drafts: SequenceOf[Draft], seconds: float) -> None:
        """A proposal over these rows came to these drafts, and took so long."""
        if not self._tells:
            return
        num_drafted = [len(drafts[row.request_idx]) for row in rows if row.num_draft_tokens > 0]
        widths = [sum(count > depth for count in num_drafted) for depth in range(1, max(num_drafted, default=0))]
        passes = [PassShape(sum(len(row.token_ids) for row in rows), len(rows), self._mean_context)]
        passes += [PassShape(width, width, self._mean_context) for width in widths]
        self._ask(self.controller.observe_proposal, passes, seconds)

    def end(self, proposal_seconds: float) -> None:
        """The step has proposed, or not, and nothing follows it that is not the next one's."""
        now = time.perf_counter()
        if self._ended is not None and self._tells:
            self._ask(self.controller.observe_rest, self._rest_seconds + now - self._ended - proposal_seconds)
        self._ended = now

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended, or given up its KV."""
        self._proposals.pop(sequence, None)
        self._ask(self.controller.forget, sequence)

    @staticmethod
    def _ask(question: Callable[..., Any], *arguments: Any, otherwise: Any = None) -> Any:
        """The controller's answer. Whatever it decides, outputs are the same: nobody fails for it."""
        try:
            return question(*arguments)
        except Exception:
            logger.warning("the controller of drafts failed:", exc_info=True)
            return otherwise


def evidence_of(draft: Draft) -> list[float]:
    """What a drafter knows of each of its tokens, as the controller takes it.

    That is how likely a token is to a model, in logits, and for prompt lookup the length of what matched.
    """
    if draft.logprobs is not None:
        return logits_of(draft.logprobs)
    return [min(draft.num_matched, _LONGEST_MATCH) - _LONGEST_MATCH / 2] * len(draft)


def _lag(sequence: Sequence) -> int:
    """Known tokens that the drafter has not run; 1 of one that keeps no KV."""
    context_lens = sequence.page_table.context_lens
    return sequence.num_tokens - context_lens[DRAFT] if len(context_lens) > DRAFT else 1
