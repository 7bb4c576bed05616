"""What steps take, told to a controller."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import Any

from specpaged.drafting.base import DraftRow
from specpaged.drafting.draft import Draft
from specpaged.engine.chore import Chore
from specpaged.engine.scheduler import ScheduledSequence
from specpaged.modeling.rounds import Rounds
from specpaged.speculation.controller import Controller
from specpaged.speculation.octave import octave_of
from specpaged.speculation.pass_seconds import PassShape

logger = logging.getLogger("specpaged")

# The first steps, which are all heard; and of one kind, in batches of an octave and with drafts or without, so many are
# heard soon one behind the other.
OFTEN, _SOON = 32, 4
_MOST_CHANGED = 4  # steps heard, one after another, whose sequences changed: where it is so in each, that is a step
# Seconds that it takes to listen to a step; what of the time may go into that; and the steps from one to the next.
_LISTENING = 2.4e-4, 0.0013, 1, 64
_RECENT, _STANDS_OUT = 0.2, 2.0  # of what steps take on average, the last one; and how many times that it may count for


class StepClock:
    """Times the steps of which a controller hears.

    Those with a prefill tell nothing: their passes are of another kind. To listen takes time; all of the first steps
    are heard, and then as many as a share of the time allows, of longer ones more. That time is no part of what they
    take, nor is what it takes to plan and to select: of both, steps that are heard have more than their share. Nor is
    what it takes a host that a request has ended and another one has come, as that has nothing to do with drafts.

    A proposal is told as its passes. A drafter that `follows` the target has one over what that has just run, and then
    one for each draft; else the first of these is over what has come.
    """

    def __init__(self, controller: Controller, follows: bool = False):
        self.controller = controller
        self.follows = follows
        self._listening = Chore(*_LISTENING)
        self._heard_seconds = 0.0  # that it has taken to hear this step
        self.num_steps = 0
        self.is_deaf = False  # steps are of another kind, of which the controller is told nothing
        self.tells = False  # whether the controller hears what this step takes
        self._tells_rest = False  # and of the last one, what it took beside its passes
        self._num_changed = 0  # steps heard, one after another, whose sequences had changed by the next one
        self._is_trial = self._finds_caches = False  # as a drafter that goes on no longer has left them
        self._told_next = 0  # the step that will be, at the latest
        self._num_heard: Counter[tuple[int, bool]] = Counter()  # by the octave of its sequences, and whether it drafts
        self._step_seconds = 0.0  # that the last steps took which were told
        self._began = 0.0  # when the target's pass did
        self._num_seqs, self._num_rounds = 0, 1
        self._mean_context = 0.0
        self._passes: list[PassShape] = []  # of the proposal
        self._drafts = False  # whether the step does, in its rounds or behind them
        self._proposal_seconds = 0.0
        self._pass_seconds = 0.0  # of the target's, and of all between them
        self._left_out = 0.0  # seconds since they ended

    @contextmanager
    def of_device(self, is_late: bool) -> Iterator[None]:
        """A device runs this round by itself: nobody hears what it takes, and a host who `is_late` is waited for no
        more.
        """
        costs, is_deaf = getattr(self.controller, "costs", None), self.is_deaf
        self.is_deaf = True
        if costs is not None:
            costs.hides_host = is_late
        try:
            yield
        finally:
            self.is_deaf = is_deaf
            if costs is not None:
                costs.hides_host = False

    def begin(
        self,
        is_trial: bool = False,
        age: int = 0,
        tries_rows: bool = False,
        entries: SequenceOf[ScheduledSequence] | None = None,
    ) -> None:
        """The target's pass begins over these, and the step before has ended; so many followed the same plan before."""
        if self.is_deaf:
            self.num_steps += 1
            self.tells = self._tells_rest = False
            return
        if self._tells_rest:
            self._tell_rest(entries is not None and self._have_changed(entries))
        self.num_steps += 1
        self._is_trial, self._finds_caches = is_trial, is_trial and not (age or tries_rows)
        self.tells = self.num_steps < OFTEN or self.num_steps >= self._told_next or is_trial
        self._tells_rest = False
        if self.tells:
            self._began = time.perf_counter()

    def scored(self, entries: SequenceOf[ScheduledSequence]) -> None:
        """It has ended, over these entries. To be called if the step `tells`, as all that follows."""
        seconds = time.perf_counter() - self._began
        self.tells = self._tells_rest = not self._finds_caches and all(entry.num_new_tokens == 1 for entry in entries)
        if self.tells:  # else the next step is to
            num_rows = len(entries) + sum(len(entry.draft) for entry in entries)
            self._hears_next(seconds, len(entries), num_rows > len(entries))
            self._num_seqs, self._num_rounds = len(entries), 1
            self._passes, self._drafts, self._proposal_seconds = [], False, 0.0
            self._pass_seconds = seconds
            self._mean_context = sum(entry.context_len for entry in entries) / len(entries)
            ask(self.controller.observe_target, self._shape(num_rows), seconds)
            self._go_on_from(seconds)

    def ran(self, entries: SequenceOf[ScheduledSequence], found: Rounds) -> None:
        """Several rounds have ended, in place of `scored`. The last one is heard, and of a trial all but the first."""
        seconds = time.perf_counter() - self._began
        self._tells_rest = True
        self._hears_next(seconds, len(entries), found.drafts)
        self._num_seqs, self._num_rounds = len(entries), found.num_rounds
        self._passes, self._drafts, self._proposal_seconds = [], found.drafts, 0.0
        self._pass_seconds = sum(found.verify_seconds) + found.draft_seconds
        num_tokens = sum(entry.context_len for entry in entries)
        of_rounds = zip(found.verify_seconds, found.num_unverified, found.num_emitted, strict=True)
        for i, (verify_seconds, num_drafts, num_emitted) in enumerate(of_rounds, 1):
            if i == found.num_rounds or (self._is_trial and i > 1):
                self._mean_context = num_tokens / len(entries)
                ask(self.controller.observe_target, self._shape(len(entries) + num_drafts), verify_seconds)
            num_tokens += num_emitted
        num_made, num_followed, draft_seconds = found.last_drafting
        observe_drafting = getattr(self.controller, "observe_drafting", None)
        if num_made and observe_drafting is not None:
            passes = self._passes_of(num_made, [count for count in found.num_wanted if count])
            if self.follows:
                passes.insert(0, self._shape(num_followed))
            ask(observe_drafting, passes, draft_seconds)
        self._go_on_from(seconds)

    def _go_on_from(self, seconds: float) -> None:
        """What was told between now and then, the step did not take."""
        began = time.perf_counter() - seconds
        self._heard_seconds = began - self._began
        self._began = began
        self._left_out = 0.0

    def leave_out(self, chore: Chore, decide: Callable[..., Any], *arguments: Any) -> Any:
        """What is decided, which is such a chore. How long that takes is no part of the step."""
        start = time.perf_counter()
        decided = decide(*arguments)
        seconds = time.perf_counter() - start
        self._began += seconds
        self._left_out += seconds
        chore.took(seconds)
        return decided

    def proposed(self, rows: SequenceOf[DraftRow], drafts: SequenceOf[Draft]) -> None:
        """A proposal over these rows came to these drafts. A lookup's, beside a model, are no passes. Where somebody is
        looked back at, the first pass reads out rows that are there to catch up: of that nothing is told.
        """
        rows = [row for row in rows if row.token_ids or row.num_draft_tokens]
        if not rows:
            self._passes, self._drafts = [], any(drafts)
            return
        if any(row.num_looked_back for row in rows):
            self._tells_rest = False
        drafted = [drafts[row.request_idx] for row in rows if row.num_draft_tokens > 0]
        num_drafted = [0 if draft.drafter else len(draft) for draft in drafted]
        num_rows = sum(len(row.token_ids) - self.follows for row in rows)  # of a newest token there is no hidden state
        self._passes = [PassShape(num_rows, len(rows), self._mean_context), *self._behind_first(num_drafted)]

    def proposed_for(self, seconds: float) -> None:
        """So long it took to propose, or not to; what was left out since the target's pass is part of that."""
        self._proposal_seconds = seconds - self._left_out

    def _shape(self, num_rows: int) -> PassShape:
        return PassShape(num_rows, self._num_seqs, self._mean_context)

    def _passes_of(self, num_made: int, num_wanted: SequenceOf[int]) -> list[PassShape]:
        """Those that have made so many drafts in all, of sequences that wanted so many: as deep as it takes.

        Seldom one had less room than it wanted, or has ended: then this is a guess.
        """
        widths: list[int] = []
        while num_made > sum(widths) and len(widths) < max(num_wanted):
            widths.append(sum(count > len(widths) for count in num_wanted))
        return [PassShape(width, width, self._mean_context) for width in widths]

    def _behind_first(self, num_drafted: SequenceOf[int]) -> list[PassShape]:
        """The passes of a proposal behind its first one."""
        depths = range(0 if self.follows else 1, max(num_drafted, default=0))
        widths = [sum(count > depth for count in num_drafted) for depth in depths]
        return [PassShape(width, width, self._mean_context) for width in widths]

    def _hears_next(self, seconds: float, num_seqs: int, drafts: bool) -> None:
        self._step_seconds = self._step_seconds or seconds
        kind = octave_of(num_seqs), drafts
        self._num_heard[kind] += 1
        most = _SOON if self._num_heard[kind] < OFTEN else math.inf
        self._told_next = self.num_steps + min(most, self.every(self._listening))

    def _have_changed(self, entries: SequenceOf[ScheduledSequence]) -> bool:
        """Whether others than before have come by now, or some have gone."""
        has_changed = len(entries) != self._num_seqs or any(entry.num_new_tokens > 1 for entry in entries)
        self._num_changed = self._num_changed + 1 if has_changed else 0
        return has_changed and self._num_changed <= _MOST_CHANGED

    def _tell_rest(self, have_changed: bool) -> None:
        """What the step took beside its passes, however many rounds it had; of the rest nothing, if there is more in it
        as sequences have changed.
        """
        now = time.perf_counter()
        seconds = now - self._began
        self._step_seconds += _RECENT * (min(seconds, _STANDS_OUT * self._step_seconds) - self._step_seconds)
        rest_seconds = seconds - self._pass_seconds
        if self._passes or self._drafts:
            rest_seconds = 0.0 if have_changed else rest_seconds - (self._proposal_seconds if self._passes else 0.0)
            arguments = (self._passes, self._proposal_seconds, self._num_seqs, rest_seconds, self._num_rounds)
            ask(self.controller.observe_proposal, *arguments)
        elif not have_changed:
            ask(self.controller.observe_rest, rest_seconds, self._num_seqs, self._num_rounds)
        self._listening.took(self._heard_seconds + time.perf_counter() - now)

    def idle(self) -> None:
        """Nobody is left, or the host turns to something else: what time goes by now is no part of the last step."""
        self._tells_rest = False

    def every(self, chore: Chore) -> int:
        """Steps from one time to the next that it is done."""
        return chore.every(self._step_seconds)


def ask(question: Callable[..., Any], *arguments: Any, otherwise: Any = None) -> Any:
    """The controller's answer. Whatever it decides, outputs are the same: nobody fails for it."""
    try:
        return question(*arguments)
    except Exception:  # of any kind: a controller may be somebody else's
        logger.warning("the controller of drafts failed:", exc_info=True)
        return otherwise
