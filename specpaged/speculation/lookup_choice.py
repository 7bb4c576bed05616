"""Whether a sequence takes what a lookup has found, in place of what a model would draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specpaged.speculation.stop_rule import StopRule

# Evidence at its word, and rows that cost nothing: where nothing is decided while running.
_AT_ITS_WORD = StopRule(1.0, (0.0,), (0.0,), (1.0,), row_tokens=0.0, pass_tokens=0.0)


@dataclass(frozen=True, slots=True, eq=False)
class LookupChoice:
    """Of one sequence: what drafts that lookups have found promise, and how much they have to.

    A draft promises the tokens that are expected of it, less those that its rows cost to verify:

        sum over j of  chance_j - row_tokens        as long as chance_j is at least row_tokens

    chance_j being that its draft j and all before it stand, by the lookup's own rule. Of all lookups' drafts the one
    that promises most is taken, the first of equals, if that is more than `least`: than the model's drafts do, less
    their rows and their share of the model's passes. A lookup costs next to nothing: it is asked first, in every round.
    """

    num_tokens: int  # that a lookup may draft, at most
    least: float = 0.0
    rules: Sequence[StopRule] = ()  # of each lookup; none where evidence is taken at its word
    row: int = 0  # the sequence's, in these

    def within(self, room: int) -> LookupChoice | None:
        """The same for at most so many tokens; None where there may be none."""
        return self if room >= self.num_tokens else replace(self, num_tokens=room) if room > 0 else None

    def choose(self, evidence: Sequence[Sequence[float]]) -> tuple[int, int]:
        """Whose draft is taken, by what each lookup knows of the tokens it has found, and how many of them, or 0."""
        best, num_worth, most = 0, 0, self.least
        for lookup, of_draft in enumerate(evidence):
            count, promised = self._promise(lookup, of_draft)
            if count and promised > most:
                best, num_worth, most = lookup, count, promised
        return best, num_worth

    def rule(self, lookup: int) -> tuple[StopRule, int]:
        """The lookup's, and the sequence's row in it."""
        return (self.rules[lookup], self.row) if self.rules else (_AT_ITS_WORD, 0)

    def _promise(self, lookup: int, evidence: Sequence[float]) -> tuple[int, float]:
        """How many of these drafts are worth their rows, and what they promise."""
        rule, row = self.rule(lookup)
        chance, promised = 1.0, 0.0
        for j, x in enumerate(evidence):
            chance = rule.chance(chance, j, x, row)
            if not chance >= rule.row_tokens:
                return j, promised
            promised += chance - rule.row_tokens
        return len(evidence), promised
