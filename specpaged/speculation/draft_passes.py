"""What the passes of a proposal take, of a draft model or of heads that read the target."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from specpaged.speculation.cold_pass import ColdPass
from specpaged.speculation.pass_seconds import PassSeconds, PassShape
from specpaged.speculation.surprises import Surprises

# Rows of the first pass for each sequence that drafts in every step: of a draft model, one or, where all drafts stood,
# two; of heads as many as tokens came, which is learned.
_ROWS, _FOLLOWED, _NEWEST = 1.25, 2.0, 0.1
_SHIFT = 0.05  # of what drafts within rounds take: less is no news
_ALIKE = 0.5  # of how slow passes were, those of twice or half as many rows
# Rows of a sequence that there may be in any step; those beyond are there to catch up. What these take is believed by
# such a share, within a factor, and is no less than a tenth of what a row takes in a pass of many sequences.
_NEAR, _BELIEVED, _FACTOR, _LEAST = 2, 0.3, 2.0, 0.1


class DraftPasses:
    """Of a draft model, each pass makes a draft, the first one over what has come as well.

    Heads run what the target has run, in a pass that is `following`: of a row for each token that has come. Then there
    is a pass for each draft, of which the first takes `first_share` of the others: its layers have been run by then.

        draft model   [ first: 1.25 B rows ] [ B rows ] ..          K passes for K drafts
        heads         [ following: a B rows, a = tokens of a round ] [ first_share x B rows ] [ B rows ] ..   1 + K

    Where drafts are made within a call's rounds, the first pass of a draft model is `cold`; of a proposal, that is part
    of what it takes beside its passes.

    What a draft model has not run for long is many rows of a few sequences, none of which but the last one is read out:
    each takes `per_row_behind` seconds, by default what the table's last two nodes say.
    """

    def __init__(
        self,
        draft: PassSeconds | None,
        following: PassSeconds | None = None,
        first_share: float = 1.0,
        per_row_behind: float | None = None,
    ):
        self.draft = draft
        self.following = following
        self.first_share = first_share
        self.rows_of_first = _ROWS if following is None else _FOLLOWED
        self.cold = ColdPass()
        self.per_row_behind = 0.0
        if draft is not None:
            next_row = draft.of_rows(draft.num_rows[-1] + 1) - draft.seconds[-1]
            self.per_row_behind = max(next_row if per_row_behind is None else per_row_behind, self._least_behind)
        self._of_rounds = Surprises()
        self._shares: dict[tuple[int, int], list[float]] = {}  # that _alike has said, by nodes

    def of(self, passes: Sequence[PassShape]) -> list[float]:
        """Seconds of each pass of a proposal, in order; 0 where no model drafts."""
        if self.draft is None:
            return [0.0] * len(passes)
        num_behind = self._num_behind(passes[0]) if passes else 0
        if num_behind:
            passes = [passes[0]._replace(num_rows=passes[0].num_rows - num_behind), *passes[1:]]
        seconds = [of.of(shape) for of, shape in zip(self._of_each(passes), passes, strict=True)]
        if num_behind:
            seconds[0] += num_behind * self.per_row_behind
        if self.following is not None and len(seconds) > 1:
            seconds[1] *= self.first_share
        return seconds

    @property
    def _least_behind(self) -> float:
        """Seconds that a row takes at the least that is there to catch up."""
        return _LEAST * self.draft.seconds[-1] / self.draft.num_rows[-1]

    def _num_behind(self, first: PassShape) -> int:
        """Rows of the first pass that are there to catch up."""
        return max(0, first.num_rows - _NEAR * first.num_seqs) if self.following is None else 0

    def caught_up(self, first: PassShape, seconds: float, expected: float) -> bool:
        """Whether a proposal that has taken so long, on a machine as quick as it was probed, was mostly there to catch
        up: then that is learned of it.
        """
        num_behind = self._num_behind(first)
        if self.draft is None or 2 * num_behind <= first.num_rows:
            return False
        thought = self.per_row_behind
        shown = thought + (seconds - expected) / num_behind
        learned = thought + _BELIEVED * (min(max(shown, thought / _FACTOR), _FACTOR * thought) - thought)
        self.per_row_behind = max(learned, self._least_behind)
        return True

    def tables(self, batch_size: int, context: float) -> tuple[list[float], list[float]]:
        """[n] seconds for n sequences, of up to `batch_size`: until there is a draft of each, and for each further one.

        Contexts have so many tokens. A sequence that has not drafted for long catches up once: what counts is what it
        will be from then on.
        """
        draft = self.draft
        num_first = [math.ceil(n * self.rows_of_first) for n in range(batch_size + 1)]
        rows = draft.table(num_first[-1])
        per_row = context * draft.per_row_and_kv_token
        of_sequences = [draft.of_sequences(n, context) + n * per_row for n in range(batch_size + 1)]
        later = [rows[n] + of_sequences[n] for n in range(batch_size + 1)]
        if self.following is None:
            return [rows[num_first[n]] + of_sequences[n] for n in range(batch_size + 1)], later
        follow = [self.following.of(PassShape(num_first[n], n, context)) for n in range(batch_size + 1)]
        return [follow[n] + self.first_share * later[n] for n in range(batch_size + 1)], later

    def learn_of_rounds(self, passes: Sequence[PassShape], seconds: float) -> bool:
        """Drafts that were made within a call's rounds have taken so long, on a machine as quick as it was probed.
        Returns whether something else is expected now: by far, and of all of them.
        """
        if self.following is None:
            first = passes[0]  # some of whose sequences have two rows in it
            num_rows = math.ceil(self.rows_of_first * first.num_seqs)
            of_passes = self.of([first._replace(num_rows=num_rows), *passes[1:]])
            expected = self.cold.seconds + sum(of_passes)
            scale = self.cold.observe(of_passes[0], sum(of_passes), seconds)
            self.draft.move([math.log(scale) * share for share in self._alike(passes[-1].num_rows, num_rows)])
            shifted = abs(self.cold.seconds + scale * sum(of_passes) - expected) > _SHIFT * expected
            if shifted:
                self.draft.expire_table()
            return shifted
        of_passes = self.of(passes)
        expected = sum(of_passes)
        surprise = math.log(seconds / expected)  # heads' first pass has a table of its own
        self._of_rounds.add(surprise)
        shift = self._of_rounds.take_shift()
        self.learn(passes, of_passes, expected, surprise, shift)
        return shift != 1.0

    def learn(
        self,
        passes: Sequence[PassShape],
        of_passes: Sequence[float],
        expected: float,
        surprise: float,
        shift: float,
    ) -> None:
        """A proposal was expected to take so long, `of_passes` of it in its passes; it took exp(surprise) as long.

        Where most of the last ones show a `shift`, all passes take as much longer; else these, slowly.
        """
        if self.draft is None:
            return
        first = passes[0]
        if self.following is not None and first.num_seqs:
            self.rows_of_first += _NEWEST * (first.num_rows / first.num_seqs - self.rows_of_first)
        if shift != 1.0:
            self.draft.scale(shift)
            self.per_row_behind *= shift
            if self.following is not None:
                self.following.scale(shift)
            return
        num_behind = self._num_behind(first)
        rows = [first.num_rows - num_behind, *(shape.num_rows for shape in passes[1:])]
        seconds = [of_passes[0] - num_behind * self.per_row_behind, *of_passes[1:]]
        for of, num_rows, of_pass in zip(self._of_each(passes), rows, seconds, strict=True):
            if num_rows > 0:
                of.learn(num_rows, surprise, of_pass / expected)

    def _alike(self, fewest: int, most: int) -> list[float]:
        """How far each node of the draft's table goes by what passes of so many rows have shown."""
        nodes = self.draft.num_rows
        between = max(0, bisect_right(nodes, fewest) - 1), min(bisect_left(nodes, most), len(nodes) - 1)
        if between not in self._shares:
            below, above = nodes[between[0]], nodes[between[1]]
            shares = [_ALIKE ** max(0.0, math.log2(below / n), math.log2(n / above)) for n in nodes]
            self._shares[between] = shares
        return self._shares[between]

    def _of_each(self, passes: Sequence[PassShape]) -> list[PassSeconds]:
        """Whose passes these are."""
        first = self.draft if self.following is None else self.following
        return [first] + [self.draft] * (len(passes) - 1)
