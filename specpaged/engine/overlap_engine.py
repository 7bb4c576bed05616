"""The engine that drafts for one half of a batch while it verifies the other (MineDraft, arXiv 2603.18016)."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from specpaged.engine.engine import Engine
from specpaged.engine.lanes import Lanes
from specpaged.engine.proposal import Proposal, prepare
from specpaged.engine.recovery import score_and_verify
from specpaged.engine.scheduler import ScheduledSequence
from specpaged.engine.sequence import Sequence, SequenceStatus
from specpaged.engine.step import ScoredStep
from specpaged.outputs import RequestOutput
from specpaged.paging.page_table import TARGET
from specpaged.speculation.overlap_choice import OverlapChoice, Stint, expected_ratio
from specpaged.verification.base import VerifyOutput

if TYPE_CHECKING:
    from specpaged.scheduling.halves import HalvesScheduler


class OverlapEngine(Engine):
    """An Engine whose steps are of one half of the batch, beside a proposal for the other half.

    A step costs the longer of a target's pass V and a proposal D, each of half the batch, in place of V + D of all of
    it. The host thread does all but these two: it schedules, reserves slots, commits, truncates, publishes, frees and
    ends, while neither lane runs.

        host      | schedule 0, prepare 1 |              | commit 0, keep 1 | schedule 1, prepare 0 |              | ..
        verify    |                       | V of half 0  |                  |                       | V of half 1  |
        draft     |                       | D of half 1  |                  |                       | D of half 0  |

    Who owns what while lanes run:

        the target's KV of half 0's new slots, logits, hidden states, the step's sampling of half 0     the verify lane
        the draft's KV of half 1's new slots, what the drafter keeps by sequence, half 1's sampling     the draft lane
        the rest of both pools                                                         nobody's: whoever wants reads it
        sequences, page tables, allocator, prefix cache, planner, scheduler                 the host's, which waits
        (but for the error of a sequence whose pass fails when it runs alone, too: the verify lane's)

    Pools of both models are disjoint tensors. Blocks that both halves share hold tokens that both have: no lane writes
    what the other one reads. Heads that read the target follow their own half's verification, which was a step before;
    its hidden states are tensors of their own. Where a lane has nothing to do, the other's work is the host's, on all
    cores. Where fewer than two sequences run, or nobody drafts, steps are those of an Engine, rounds and all; so they
    are with schedule="auto" where they have been measured to be quicker.
    """

    scheduler: HalvesScheduler

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.choice: OverlapChoice | None = None
        if self.config.schedule == "auto":
            self.choice = OverlapChoice(self._expected_ratio)
        self._lanes: Lanes | None = None  # once both are wanted
        self._turn = 0  # the half that is verified next
        self._waiting: ScoredStep | None = None  # of the other half, committed: its drafts are to be made
        self._went_by_halves = self._both_ran = False  # the last step, and both of its lanes
        self._num_ran = 0  # sequences of its target's pass

    @override
    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Run one step, of a half or of all; the outputs of the requests that ended in it: see Engine.step."""
        by_halves = self._goes_by_halves()
        if self.choice is None:
            return self._step_of_half() if by_halves else self._step_of_all()
        running = list(self.scheduler.running)
        nobody_comes = not self.scheduler.waiting or len(running) == self.config.max_num_seqs
        decodes = nobody_comes and all(map(_decodes, running))
        before, begun = self._counted_so_far(), time.perf_counter()
        outputs = self._step_of_half() if by_halves else self._step_of_all()
        seconds = time.perf_counter() - begun
        num_steps, score, propose = (now - then for now, then in zip(self._counted_so_far(), before, strict=True))
        as_before = by_halves == self._went_by_halves
        self._went_by_halves = by_halves
        if decodes and as_before and num_steps > 0 and (self._both_ran or not by_halves):
            num_seqs = self._num_ran if by_halves else len(running)
            self.choice.heard(len(running), Stint(by_halves, num_seqs * num_steps, seconds, score, propose))
        return outputs

    def _goes_by_halves(self) -> bool:
        """Whether the next step is of one half."""
        num_seqs, planner = len(self.scheduler.running), self.speculative_step.planner
        if num_seqs < 2 or self.speculative_step.drafter is None:
            return False
        drafts = planner.drafts if planner is not None else self.config.speculative_config.num_draft_tokens(num_seqs)
        return bool(drafts) and (self.choice is None or self.choice.by_halves(num_seqs))

    def _step_of_all(self) -> list[RequestOutput]:
        """A step of an Engine, behind the drafts that somebody waits for."""
        waiting, self._waiting = self._waiting, None
        self.scheduler.take_turn(None)
        if self.speculative_step.planner is not None:
            self.speculative_step.planner.turn_to(None)
        if waiting is not None:
            with self.recovery:
                proposal = self._prepare(waiting)
                if proposal is not None:
                    proposal.make()
                    self._keep(proposal)
        return super().step()

    def _step_of_half(self) -> list[RequestOutput]:
        """A target's pass over one half, beside a proposal for the other."""
        step, turn = self.speculative_step, self._turn
        waiting, self._waiting = self._waiting, None
        with self.recovery:  # all or nothing; whose drafts were to be made begin anew, too
            self.scheduler.take_turn(turn, () if waiting is None else {entry.sequence for entry in waiting.entries})
            scheduled = self._schedule(may_be_empty=True)
            if step.planner is not None:
                step.planner.turn_to(1 - turn)
            proposal = None if waiting is None else self._prepare(waiting)
            scored = self._run(scheduled.entries, proposal)
            if proposal is not None:
                self._keep(proposal)
            self._finish_who_ended(scheduled)
            outputs = self._outputs()
            self._waiting, self._turn = scored, 1 - turn
            return outputs
        return []

    def _prepare(self, waiting: ScoredStep) -> Proposal | None:
        """What to ask the drafter for, of a step that was committed: for those of it who still run."""
        step = self.speculative_step
        going_on = [entry for entry in waiting.entries if entry.sequence.status is SequenceStatus.RUNNING]
        noise = step.noise  # which the drafts have met that are verified meanwhile
        with self._metrics.stage("propose"):
            proposal = prepare(step, replace(waiting, entries=going_on), self.scheduler.reserve_drafts)
        step.noise = noise
        return proposal

    def _run(self, entries: SequenceOf[ScheduledSequence], proposal: Proposal | None) -> ScoredStep | None:
        """The entries scored, verified and committed, and the proposal made; None without entries."""
        step, metrics = self.speculative_step, self._metrics
        verify = partial(score_and_verify, step, entries, takes_rounds=False)  # these would reserve slots
        self._num_ran, self._both_ran = len(entries), bool(entries) and proposal is not None

        def draft() -> None:
            with metrics.stage("propose"):
                proposal.make()

        if self._both_ran:
            if self._lanes is None:
                self._lanes = Lanes(self.target.model, None if self.draft is None else self.draft.model)
            start = time.perf_counter()
            (scored, verified), _ = self._lanes.run(verify, draft)
            metrics.overlapped_seconds += time.perf_counter() - start
            metrics.overlapped_steps += 1
        elif entries:
            scored, verified = verify()
        else:
            if proposal is not None:
                draft()
            return None
        self._commit(scored, verified)
        return scored

    def _commit(self, scored: ScoredStep, verified: VerifyOutput) -> None:
        self.speculative_step.commit(scored, verified)
        self._fail_who_has_no_token(scored, verified)
        self._realign()

    def _keep(self, proposal: Proposal) -> None:
        """Leave drafts with their sequences, once the other half has been committed: its outcomes are told first."""
        with self._metrics.stage("propose"):
            self.speculative_step.noise = proposal.keep()

    def _counted_so_far(self) -> tuple[int, float, float]:
        """Target passes, and the seconds of verification and of drafting."""
        metrics = self._metrics
        return metrics.steps, metrics.seconds["score"] + metrics.seconds["verify"], metrics.seconds["propose"]

    def _expected_ratio(self, num_seqs: int) -> float | None:
        """How long steps by halves take at the least, over others, as far as the costs of passes are known."""
        planner, metrics = self.speculative_step.planner, self._metrics
        if planner is None or planner.costs is None or not metrics.drafts:
            return None
        context = sum(sequence.num_tokens for sequence in self.scheduler.running) / num_seqs
        return expected_ratio(planner.costs, num_seqs, round(metrics.draft_tokens / metrics.drafts), context)


def _decodes(sequence: Sequence) -> bool:
    """Whether its last known token is the only one without KV."""
    return len(sequence.token_ids) - sequence.page_table.context_lens[TARGET] == 1
