"""What drafts of each sequence have shown, and what an acceptance model makes of it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from specpaged.speculation.acceptance import AcceptanceModel, RequestAcceptance
from specpaged.speculation.controller import Candidate

_NEW = RequestAcceptance()  # of whom nothing is known


class Requests:
    """Remembers all that were asked for, until they are forgotten."""

    def __init__(self, acceptance: AcceptanceModel):
        self.acceptance = acceptance
        self._of: dict[Hashable, RequestAcceptance] = {}

    def __len__(self) -> int:
        return len(self._of)

    def of(self, sequence: Hashable) -> RequestAcceptance:
        """What drafts of the sequence have shown."""
        request = self._of.get(sequence)
        if request is None:
            request = self._of[sequence] = RequestAcceptance()
        return request

    def num_seen(self, sequence: Hashable) -> float:
        """Its drafts with an outcome, older ones for less; who has none is not remembered for that."""
        return self._of.get(sequence, _NEW).num_seen

    def expects(self, sequence: Hashable) -> float:
        """The probability that its next draft stands, whatever it will be; neither is it remembered for that."""
        return self.acceptance.expected(self._of.get(sequence, _NEW))

    def forget(self, sequence: Hashable) -> None:
        """It has ended, or given up its KV."""
        self._of.pop(sequence, None)

    def logits(self, candidates: Sequence[Candidate]) -> list[float]:
        """What is expected of the drafts of each, and hoped; rounded, so that requests are alike."""
        requests, model = [self.of(c.sequence) for c in candidates], self.acceptance
        return [round(model.expected_logit(request) + model.hope(request), 1) for request in requests]

    def chances(self, candidates: Sequence[Candidate], logits: Sequence[float]) -> list[Sequence[float]]:
        """Of the drafts of each that are still to be made, with these logits; those of like requests are made once."""
        most = max(c.most for c in candidates)
        known = {logit: self.acceptance.chances(logit, most) for logit in set(logits)}
        return [known[logit][: c.most] for c, logit in zip(candidates, logits, strict=True)]

    def chances_of(self, sequences: Sequence[Hashable], evidence: Sequence[Sequence[float]]) -> list[Sequence[float]]:
        """Of drafts that have been made, with this evidence."""
        return [
            self.acceptance.chances_of(self.of(sequence), of_draft) if of_draft else ()
            for sequence, of_draft in zip(sequences, evidence, strict=True)
        ]
