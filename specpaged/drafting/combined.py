"""Several drafters together: lookups, which cost next to nothing, and a model for whom they find too little."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cached_property

from typing_extensions import override

from specpaged.drafting.base import Drafter, DraftRow
from specpaged.drafting.draft import NO_DRAFT, Draft, evidence_of
from specpaged.drafting.draft_model import DraftModelDrafter
from specpaged.drafting.heads import HeadsDrafter
from specpaged.drafting.lookup import LookupDrafter
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.rounds import Together
from specpaged.sampling.batch import SamplingBatch
from specpaged.speculation.lookup_choice import LookupChoice
from specpaged.speculation.stop_rule import StopRule


class CombinedDrafter(Drafter):
    """Asks the lookups for each sequence, and the model for those that take nothing of what these have found.

    Three sequences of which the plan is that each may have 3 drafts:

                  lookups find     the choice     a draft model runs          heads run
        A         5 6              taken          nothing: it falls behind    what the target has run
        B         9                too little     what it lacks, and drafts   what the target has run, and draft
        C         nothing                         likewise                    likewise

    A draft model that falls behind catches up in the first pass of the next proposal in which it drafts. What a lookup
    finds is a function of the known tokens alone, so that no verification is biased by whether it is taken.
    """

    def __init__(self, lookups: Sequence[LookupDrafter], model: DraftModelDrafter | HeadsDrafter | None):
        self.lookups = lookups
        self.model = model
        self.hidden_states = None if model is None else model.hidden_states
        self.looks_back = model is not None and model.looks_back

    @property
    @override
    def stops(self) -> bool:
        return self.model is not None and self.model.stops

    @cached_property
    @override
    def in_rounds(self) -> Together | None:
        """All of them, where each may be part of a call."""
        lookups, model = [lookup.in_rounds for lookup in self.lookups], self.model and self.model.in_rounds
        may_be = None not in lookups and (model is not None or self.model is None)
        return Together(model, lookups) if may_be else None

    @property
    def runner(self) -> ModelRunner | None:
        """The model's."""
        return None if self.model is None else self.model.runner

    def choice(self, num_tokens: int, num_of_model: int) -> LookupChoice | None:
        """When a sequence takes a lookup's draft where nobody decides: if half as many tokens stand, by what the lookup
        itself knows of them, as the model would draft. None where there may be no tokens.
        """
        return LookupChoice(num_tokens, num_of_model / 2) if num_tokens else None

    @override
    def propose(
        self, rows: Sequence[DraftRow], sampling: SamplingBatch, stop_rule: StopRule | None = None
    ) -> list[Draft]:
        found = {row.request_idx: self._find(row, sampling) for row in rows if row.lookup is not None}
        left = [row for row in rows if row.lookup is None or not found[row.request_idx]]
        taken = [row for row in rows if row.lookup is not None and found[row.request_idx]]
        of_model = [row for row in (*left, *_following(taken)) if row.token_ids]
        drafts = [NO_DRAFT] * len(sampling.requests)
        if self.model is not None and of_model:
            drafts = self.model.propose(of_model, sampling, _rule_of(stop_rule, rows, left))
        for i, draft in found.items():
            if draft:
                drafts[i] = draft
            elif draft.found:
                drafts[i] = replace(drafts[i], found=draft.found)
        return drafts

    @override
    def forget(self, sequence: Hashable) -> None:
        for lookup in self.lookups:
            lookup.forget(sequence)
        if self.model is not None:
            self.model.forget(sequence)

    def _find(self, row: DraftRow, sampling: SamplingBatch) -> Draft:
        """What the row takes of what lookups find, if anything, and all that they have found."""
        request = sampling.requests[row.request_idx]
        known = request.prompt_token_ids, request.output_token_ids
        drafts = [lookup.find(row.sequence, *known, row.lookup.num_tokens) for lookup in self.lookups]
        drafts = [replace(draft, drafter=number) for number, draft in enumerate(drafts, 1)]
        if not any(drafts):
            return NO_DRAFT
        taken, num_tokens = row.lookup.choose([evidence_of(draft) for draft in drafts])
        return replace(drafts[taken].cut(num_tokens), found=[draft for draft in drafts if draft])


def _following(taken: Sequence[DraftRow]) -> list[DraftRow]:
    """What the model still does for these, who have a lookup's draft: heads follow the target, and others go on to
    catch up where they are far behind.
    """
    following = [row for row in taken if row.hidden_states is not None or not row.num_draft_tokens]
    return [replace(row, num_draft_tokens=0) for row in following]


def _rule_of(rule: StopRule | None, rows: Sequence[DraftRow], left: Sequence[DraftRow]) -> StopRule | None:
    """The rule for those alone whom the model still drafts for; None where it was not made for all that were to."""
    if rule is None:
        return None
    drafting = [row.request_idx for row in rows if row.num_draft_tokens]
    if len(rule.leads) != len(drafting):
        return None
    still = {row.request_idx for row in left if row.num_draft_tokens}
    return rule.of_rows([i for i, request_idx in enumerate(drafting) if request_idx in still]) if still else None
