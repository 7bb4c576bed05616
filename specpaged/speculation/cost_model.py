"""What a step takes on this machine: passes by rows and by KV tokens read, measured, and refined while running."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from specpaged.speculation.draft_passes import DraftPasses
from specpaged.speculation.octave import octave_of
from specpaged.speculation.pass_errors import PassErrors
from specpaged.speculation.pass_seconds import SHOWN, PassSeconds, PassShape, believed
from specpaged.speculation.surprises import FEW, FEWEST, NUM_RECENT, Surprises

_WAIT, _MOST_WAITS = 10, 16  # times as long as expected; and so often one after another, which is no wait any more
_NEWTON = 4  # steps, which double the digits that are right
# Of what a step takes beside its passes, for each further round; beyond so many, what is there once grows no more.
_FURTHER_ROUND, _FEW_ROUNDS = 0.25, 4
_UNHEARD = 0.4  # the standard deviation, in logarithms, of a plain step's rest that is known of steps that draft
_LEAST_LEFT = 0.5  # of what a proposal takes beside its passes, at once
_BESIDES = ("seconds_per_proposal", "seconds_per_step", "seconds_per_drafting", "seconds_per_sequence")
_BESIDES += ("seconds_saved", "first_share")
_PASSES = ("target", "draft", "following")


class CostModel:
    """The target's passes, the drafter's if a model drafts, and what a step and a proposal take besides, in seconds.

    Beside the passes, a step of B sequences takes `rest(B)`. A proposal for n of them takes `proposal(n)`: whatever is
    added to a step that drafts, and is no pass. `seconds_saved` is what a target's pass of one row takes less where no
    drafter has run since the last one: of the target's weights more are in the caches.

    Decisions compare. A neighbour on the machine slows everything alike: what the target's last passes have in common
    is a `drift`, which changes no comparison. What proposals, or the rest of a step, depart from that is learned: at
    once, where most of the last ones show it; else slowly, and hardly from a single one that stands out.

    The rest of a step that drafts takes `drafting_rest(B)` times as long, and what that is more is part of the
    proposal. As long as plain steps of about as many sequences have not been heard, it is taken for what all steps have
    in common: a host's own work; what plain ones take is in doubt then. That, too, is no straight line in B: what an
    octave of it has shown says nothing of others that are known.

    A host that makes one step of several rounds takes hardly more for all of them: each further round adds a share of
    what there is for each sequence, and the first few of what is there once: `plain_rounds` where nothing is drafted,
    else `drafting_rounds`, which may make drafts themselves: of a round, `proposals_per_round` have their own proposal.
    """

    def __init__(
        self,
        target: PassSeconds,
        draft: PassSeconds | None = None,
        seconds_per_proposal: float = 0.0,
        seconds_per_step: float = 0.0,
        *,
        seconds_per_drafting: float = 0.0,  # sequence
        seconds_per_sequence: float = 0.0,  # and step
        seconds_saved: float = 0.0,
        following: PassSeconds | None = None,
        first_share: float = 1.0,
        per_row_behind: float | None = None,  # see DraftPasses
    ):
        self.target = target
        self.draft = draft
        self.following = following  # of heads: see DraftPasses
        self.first_share = first_share
        self.drafting = DraftPasses(draft, following, first_share, per_row_behind)
        self.seconds_per_proposal = seconds_per_proposal
        self.seconds_per_step = seconds_per_step
        self.seconds_per_drafting = seconds_per_drafting
        self.seconds_per_sequence = seconds_per_sequence
        self.seconds_saved = seconds_saved
        self.plain_rounds = self.drafting_rounds = 1
        self.overlaps = False  # drafts are made while others are verified: a step takes as long as the longer of both
        self.proposals_per_round = 1.0
        self.hides_host = False  # while a device runs a round, its host does what there is to do beside another one
        self.errors = PassErrors(target)
        self._of_target, self._of_proposals = Surprises(), Surprises()
        self._num_unheard = NUM_RECENT  # proposals since then, of which the first ones tell nothing of passes
        # By the octave of the number of sequences: surprises; steps that were heard, plain ones and all; and factors
        # of the rest over a straight line, and of the rest that drafts over it.
        self._of_rest: dict[int, Surprises] = defaultdict(Surprises)
        self._of_drafting_rest: dict[int, Surprises] = defaultdict(Surprises)
        # In the last steps, one after another; by the octave, and whether drafts are made.
        self._num_waits: Counter[tuple[int, bool]] = Counter()
        self._num_plain: Counter[int] = Counter()
        self._num_heard: Counter[int] = Counter()
        self._rest_factors: dict[int, float] = {}
        self._drafting_rests: dict[int, float] = {}

    def __str__(self) -> str:
        """A line, as the costs are known now."""
        draft = "" if self.draft is None else f"; of the draft {self.draft}"
        draft += "" if self.following is None else f"; to follow the target {self.following}"
        return (
            f"passes of {' '.join(map(str, SHOWN))} rows {self.target}{draft}; "
            f"besides, {1e3 * self.proposal(1):.2g} to {1e3 * self.proposal(SHOWN[-1]):.2g} ms a proposal, "
            f"{1e3 * self.rest(1):.2g} to {1e3 * self.rest(SHOWN[-1]):.2g} a step"
        )

    @property
    def way(self) -> tuple[int, int, bool, bool]:
        """In which steps are run: what they take differs by it."""
        return self.plain_rounds, self.drafting_rounds, self.overlaps, self.hides_host

    def rest(self, num_seqs: int, num_rounds: int = 1) -> float:
        """Of a step of so many rounds, beside its passes."""
        return self._rest_factors.get(octave_of(num_seqs), 1.0) * sum(self._rest_parts(num_seqs, num_rounds))

    def _rest_parts(self, num_seqs: int, num_rounds: int) -> tuple[float, float]:
        """What is there once in a step, and what each sequence takes."""
        once = 1.0 + _FURTHER_ROUND * (min(num_rounds, _FEW_ROUNDS) - 1)
        of_each = 1.0 + _FURTHER_ROUND * (num_rounds - 1)
        return once * self.seconds_per_step, of_each * num_seqs * self.seconds_per_sequence

    def drafting_rest(self, num_seqs: int) -> float:
        """How many times as long the rest takes where drafts are made; in octaves of which that is not known, longer
        by no more than in any that is: who drafts finds out, and who is put off does not.
        """
        known, octave = self._drafting_rests, octave_of(num_seqs)
        if octave in known or not known:
            return known.get(octave, 1.0)
        more = min((factor - 1.0) * self.rest(1 << other) for other, factor in known.items())
        return 1.0 + max(0.0, more) / self.rest(num_seqs)

    def rest_doubt(self, num_seqs: int) -> float:
        """The standard deviation, in logarithms, of plain steps' rest; 0 but where only steps that draft were heard."""
        octave = octave_of(num_seqs)
        return _UNHEARD if self._num_plain[octave] < FEW and self._is_of_drafting(octave) else 0.0

    def _is_of_drafting(self, octave: int) -> bool:
        """Whether what is known of its rest may be what steps that draft have shown."""
        return self._num_plain[octave] < FEWEST <= self._num_heard[octave] - self._num_plain[octave]

    def proposal(self, num_seqs: int) -> float:
        """Of a proposal for so many, beside its passes, with what the rest of its step takes more than of others."""
        return self._own_proposal(num_seqs) + max(0.0, self.drafting_rest(num_seqs) - 1.0) * self.rest(num_seqs)

    def proposal_of_round(self, batch_size: int) -> float:
        """What falls to each round of so many sequences, whoever of them drafts."""
        if self.hides_host:
            return 0.0
        more_rest = max(0.0, self.drafting_rest(batch_size) - 1.0) * self.rest(batch_size)
        # What each sequence adds to a model's proposal, the tables of its passes have: see StepTimes.
        own = self._own_proposal(batch_size) if self.draft is None else self.seconds_per_proposal
        return self.proposals_per_round * own + more_rest / self.drafting_rounds

    def saved(self, num_rows: int) -> float:
        """Of a pass that no drafter's is before: the less, the more it has to compute beside reading the weights."""
        return self.seconds_saved * self.target.of_rows(1) / self.target.of_rows(num_rows)

    def target_seconds(self, shape: PassShape, is_alone: bool = False) -> float:
        """Of a target's pass, in a run of others like it: behind a drafter's, if it has drafts and `is_alone` does not
        say that these are nobody's.
        """
        seconds, is_alone = self.target.of(shape), is_alone or shape.num_rows == shape.num_seqs
        return max(0.5 * seconds, seconds - self.saved(shape.num_rows)) if is_alone else seconds

    def observe_target(self, shape: PassShape, seconds: float, is_alone: bool = False) -> None:
        """A target pass has taken so long; see `target_seconds`."""
        if shape.num_rows > 0 and seconds > 0:
            expected = self.target_seconds(shape, is_alone)
            surprise = math.log(seconds / expected)
            self._of_target.add(surprise)
            of_rows, of_sequences = self.target.of_rows(shape.num_rows), self.target.of_sequences(*shape[1:])
            self.errors.observe(shape.num_rows, surprise, min(1.0, of_rows / expected), of_sequences / expected)

    def observe_proposal(
        self,
        passes: Sequence[PassShape],
        seconds: float,
        num_seqs: int = 0,
        rest_seconds: float = 0.0,
        num_rounds: int = 1,
    ) -> None:
        """A proposal of such passes has taken so long, and the rest of the step, of so many sequences, so long.

        Without passes there was none: drafts were made in the rounds themselves.
        """
        self._observe_drafting_rest(rest_seconds, num_seqs, num_rounds)
        if not passes:
            return
        of_passes = self.drafting.of(passes)
        besides = self._own_proposal(passes[0].num_seqs)
        expected = besides + sum(of_passes)
        paced = seconds * math.exp(-self._of_target.newest)
        if not (seconds > 0 and expected > 0) or self.drafting.caught_up(passes[0], paced, expected):
            return
        surprise = math.log(paced / expected)
        self._num_unheard += 1
        hears_drafting = self._num_unheard < NUM_RECENT
        self._of_proposals.add(surprise)
        factor = self._of_proposals.take_shift()
        shifted = factor != 1.0
        if not shifted:
            factor = math.exp(besides / expected * believed(surprise))
        elif hears_drafting and besides > 0:
            factor = max(_LEAST_LEFT, 1.0 + (factor - 1.0) * expected / besides)
        self.seconds_per_proposal *= factor
        self.seconds_per_drafting *= factor
        if not hears_drafting:
            self.drafting.learn(passes, of_passes, expected, surprise, factor if shifted else 1.0)

    def observe_drafting(self, passes: Sequence[PassShape], seconds: float) -> None:
        """Such passes of the draft model, within a call of several rounds, have taken so long."""
        if self.draft is None or seconds <= 0:
            return
        self._num_unheard = 0
        if self.drafting.learn_of_rounds(passes, seconds * math.exp(-self._of_target.newest)):
            self._of_proposals = Surprises()  # that explains what they departed from

    def observe_rest(self, seconds: float, num_seqs: int = 0, num_rounds: int = 1) -> None:
        """A step without drafts, of so many sequences and rounds, has taken so long beside its passes.

        What is ten times as long as expected was a wait, if it is not so in every step.
        """
        octave, expected = octave_of(num_seqs), self.rest(num_seqs, num_rounds)
        if self._is_heard(seconds, expected, (octave, False)):
            self._num_plain[octave] += 1
            self._num_heard[octave] += 1
            self._of_rest[octave].add(math.log(seconds / expected) - self._of_target.newest)
            is_of_drafting = self._is_of_drafting(octave)
            factor = self._of_rest[octave].take_shift(FEW if is_of_drafting else FEWEST)
            if factor != 1.0 and (is_of_drafting or octave in self._drafting_rests):
                self._drafting_rests[octave] = self.drafting_rest(num_seqs) / factor  # of them it is known as before
            self._scale_rest(factor, num_seqs, num_rounds)

    def expect_rest(self, seconds_per_step: float, seconds_per_sequence: float) -> None:
        """What a step takes beside its passes under this host, until it has been heard."""
        self.seconds_per_step, self.seconds_per_sequence = seconds_per_step, seconds_per_sequence

    def _observe_drafting_rest(self, seconds: float, num_seqs: int, num_rounds: int) -> None:
        octave, before = octave_of(num_seqs), self.drafting_rest(num_seqs)
        expected = before * self.rest(num_seqs, num_rounds)
        if self._is_heard(seconds, expected, (octave, True)):
            self._num_heard[octave] += 1
            self._of_drafting_rest[octave].add(math.log(seconds / expected) - self._of_target.newest)
            factor = self._of_drafting_rest[octave].take_shift()
            if factor == 1.0:
                return
            over_rest = factor * before  # of what was thought of steps without drafts
            after = self._drafting_rests[octave] = max(1.0, over_rest if self._num_plain[octave] >= FEW else before)
            self._scale_rest(over_rest / after, num_seqs, num_rounds)  # who drafts does all that others do

    def _is_heard(self, seconds: float, expected: float, kind: tuple[int, bool]) -> bool:
        """Whether what a step of this kind took beside its passes says anything of others."""
        if not (seconds > 0 and expected > 0):
            return False
        is_wait = seconds >= _WAIT * expected
        self._num_waits[kind] = self._num_waits[kind] + 1 if is_wait else 0
        return not is_wait or self._num_waits[kind] > _MOST_WAITS

    def _scale_rest(self, factor: float, num_seqs: int, num_rounds: int) -> None:
        """The rest of a step of so many sequences and rounds takes `factor` times as long as was thought.

        Hosts differ in how much of it is there for one sequence as for many. What has the larger part in it is moved by
        as much more, in the logarithm, as its part is larger: by the least that will do, one as uncertain as the other.
        What is known of other octaves stays as it is.
        """
        if factor == 1.0:
            return
        octave = octave_of(num_seqs)
        others = [other for other, num in self._num_heard.items() if other != octave and num >= FEWEST]
        unknown = {octave, *self._num_heard} - {*others}
        for moved in unknown:  # what was surprising is expected by now, or something else is
            self._of_rest.pop(moved, None)
            self._num_plain[moved] *= self._num_plain[moved] >= FEW  # fewer are to be heard anew
            self._of_drafting_rest.pop(moved, None)
        if others and octave in self._rest_factors:
            self._rest_factors[octave] *= factor
            return
        self._rest_factors[octave] = self._rest_factors.get(octave, 1.0)  # the line has been moved for it
        before = [self.rest(1 << other) for other in others]
        once, of_sequences = self._rest_parts(num_seqs, num_rounds)
        rest = once + of_sequences
        parts = once / rest, of_sequences / rest
        move = math.log(factor) / sum(part * part for part in parts)
        for _ in range(_NEWTON):
            moved = [part * math.exp(part * move) for part in parts]
            move -= (sum(moved) - factor) / sum(part * of_moved for part, of_moved in zip(parts, moved, strict=True))
        self.seconds_per_step *= math.exp(parts[0] * move)
        self.seconds_per_sequence *= math.exp(parts[1] * move)
        for other, seconds in zip(others, before, strict=True):
            self._rest_factors[other] = self._rest_factors.get(other, 1.0) * seconds / self.rest(1 << other)

    def _own_proposal(self, num_seqs: int) -> float:
        return self.seconds_per_proposal + num_seqs * self.seconds_per_drafting

    def as_dict(self) -> dict:
        """Plain data, as `of_dict` reads it."""
        passes = {name: getattr(self, name) for name in _PASSES}
        besides = {name: getattr(self, name) for name in _BESIDES} | {"per_row_behind": self.drafting.per_row_behind}
        return {name: None if of_name is None else of_name.as_list() for name, of_name in passes.items()} | besides

    @classmethod
    def of_dict(cls, values: Mapping) -> CostModel:
        """The reverse of `as_dict`. ValueError, KeyError or TypeError if it is none."""
        passes = {name: None if values[name] is None else PassSeconds(*values[name]) for name in _PASSES}
        besides = {name: float(values[name]) for name in (*_BESIDES, "per_row_behind")}
        if passes["target"] is None or not all(0 <= seconds < math.inf for seconds in besides.values()):
            raise ValueError(f"target and {', '.join(besides)} must be there, and finite ones >= 0")
        return cls(**passes, **besides)
