"""One step below every host: score -> verify -> commit -> propose.

A host schedules: it says which sequences run, owns their blocks and their requests, and turns outputs into its own
form. Our `Engine` is one, the vLLM worker's model runner is another.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from operator import is_

import torch
from torch import Tensor

from specpaged.drafting.base import Drafter, DraftOutput
from specpaged.drafting.draft import NO_DRAFT
from specpaged.engine.call_length import CallLength
from specpaged.engine.draft_planner import DraftPlanner
from specpaged.engine.prompt_logprobs import record_prompt_logprobs
from specpaged.engine.proposal import Reserve, propose
from specpaged.engine.rounds import ReserveRounds, commit_rounds, output_of, propose_waiting, run_rounds, unread
from specpaged.engine.scheduler import ScheduledSequence
from specpaged.engine.sequence import Sequence
from specpaged.engine.target_pass import TargetPass, run_target
from specpaged.metrics import EngineMetrics
from specpaged.modeling.forward_output import Argmax, GreedyTokens, HiddenStates
from specpaged.modeling.model_runner import ModelRunner
from specpaged.modeling.rounds import Rounds
from specpaged.paging.block_allocator import IntegrityError
from specpaged.paging.page_table import TARGET
from specpaged.sampling import get_sampling_batch
from specpaged.sampling.batch import Noise, SamplingBatch
from specpaged.sampling.request import SamplingRequest
from specpaged.verification import get_verifier
from specpaged.verification.base import VerifyOutput

logger = logging.getLogger("specpaged")


@dataclass(frozen=True, slots=True)
class ScoredStep:
    """A step that the target has run over: what there is to verify."""

    entries: SequenceOf[ScheduledSequence]
    drafts: DraftOutput  # of the entries that sample, in order; of several rounds, none
    sampling: SamplingBatch  # likewise
    logits: Tensor | Argmax | GreedyTokens | None  # [M, V] fp32; these, until verified, and the rest as of TargetPass
    prompt_logits: dict[Sequence, Tensor]
    hidden_states: dict[Sequence, HiddenStates]
    rounds: Rounds | None = None  # several at once, which are verified

    @property
    def num_rounds(self) -> int:
        """Of the target's passes, one after the other, each over what the one before has left."""
        return 1 if self.rounds is None else self.rounds.num_rounds

    @property
    def sampling_entries(self) -> list[ScheduledSequence]:
        """The entries that sample."""
        return [entry for entry in self.entries if entry.samples]


class SpeculativeStep:
    """What a round does to the sequences that a host has scheduled.

    The four calls come in their order; sequences change in `commit` and `propose` alone. A proposal runs no more than
    `max_num_batched_tokens` tokens of those who are far behind in the drafter's KV. `follows_target` says that
    the drafter runs those who do not draft, too, and the prompts of whom it has given up, as its KV depends on hidden
    states, and blocks are shared by a host who does not ask; else it catches up when they draft. `planner` decides
    how much is drafted and verified; without one it is as much as the host reserves. `agree` makes ranks that verify
    together take one rank's drafts. With `reserve_rounds`, up to `most_rounds` (see CallLength) are one step where that
    is one call, in which the drafts behind them are made as well.
    """

    def __init__(
        self,
        target: ModelRunner,
        drafter: Drafter | None,
        verification: str,
        vocab_size: int,
        metrics: EngineMetrics,
        *,
        max_num_batched_tokens: int = 1 << 30,
        follows_target: bool = False,
        planner: DraftPlanner | None = None,
        limit: Callable[[VerifyOutput], VerifyOutput] | None = None,
        agree: Callable[[list[list[int]]], list[list[int]]] | None = None,
        reserve_rounds: ReserveRounds | None = None,
        most_rounds: int = 1,
    ):
        self.target = target
        self.drafter = drafter
        self.vocab_size = vocab_size
        self.metrics = metrics
        self.max_num_batched_tokens = max_num_batched_tokens
        self.follows_target = follows_target
        self.planner = planner
        self.limit = limit  # of a rollback method that does not keep all that is verified
        self.agree = agree
        self.reserve_rounds = reserve_rounds
        self.call_length = CallLength(most_rounds)
        if planner is not None and reserve_rounds is not None and target.runs_greedy:
            planner.expect_calls(self.call_length, drafter is not None and drafter.in_rounds is not None)
        self.verifier = get_verifier(verification, target.model.backend)
        self._sampling_batch = get_sampling_batch(target.model.backend)
        self.noise: Noise = {}  # what the last proposal drew, for the step that verifies it
        self._argmax: SamplingBatch | None = None  # the last batch, where each row's most likely token is all it asks

    def score(
        self, entries: SequenceOf[ScheduledSequence], takes_argmax: bool = True, takes_rounds: bool = True
    ) -> ScoredStep:
        """Run the target over known tokens and drafts, packed.

        Where every token that the step decides is its row's most likely one, and nobody asks for more, logits are never
        made, and rounds that follow may be run at once (`takes_rounds`); not so without `takes_argmax`, for a host who
        changes them.
        """
        if self.planner is not None:
            self.planner.begin(entries)
        with self.metrics.stage("score"):
            sampling = self.sampling([entry.sequence.sampling_request for entry in entries if entry.samples])
            argmax = takes_argmax and sampling is self._argmax
            rounds = run_rounds(self, entries) if argmax and takes_rounds else None
            target_pass = self._run_target(entries, argmax) if rounds is None else None
        if rounds is not None:
            draft_seconds = rounds.draft_seconds
            self.metrics.seconds["score"] -= draft_seconds
            self.metrics.seconds["propose"] += draft_seconds
            if self.planner is not None and self.planner.clock.tells:
                self.planner.clock.ran(entries, rounds)
            return ScoredStep(entries, DraftOutput([], []), sampling, None, {}, unread(entries, rounds), rounds)
        drafts = DraftOutput.of([entry.draft for entry in entries if entry.samples])
        if self.planner is not None and self.planner.clock.tells:
            if self.target.model.device.type == "cuda":  # what follows waits for it anyway
                torch.cuda.synchronize(self.target.model.device)
            self.planner.clock.scored(entries)
        return ScoredStep(entries, drafts, sampling, *target_pass)

    def verify(self, scored: ScoredStep) -> VerifyOutput:
        """Decide which drafts stand, and the token that follows them.

        NaN in a draft's own KV spoils the rows before it, though they may not read it, and plain decoding would not
        have run it. So who fails with drafts in the pass is scored once more without them, and drafts no more; what
        fails then, fails.
        """
        if scored.rounds is not None:
            return output_of(scored.rounds)
        with self.metrics.stage("verify"):
            verified = self.verifier.verify(scored.logits, scored.drafts, scored.sampling)
            if any(verified.failed):
                verified = self._rescored(scored, verified)
            return verified if self.limit is None else self.limit(verified)

    def commit(self, scored: ScoredStep, verified: VerifyOutput) -> None:
        """Append what was verified, and truncate every pool behind it. Whose text cannot be read ends with an error.

        With T known tokens and K drafts, of which a stand and are emitted, the target's pool holds T + K tokens and the
        draft's T + K - 1 at most, as the last draft was never run. Both keep T + a: the bonus token has no KV yet.
        """
        with self.metrics.stage("commit"):
            if scored.rounds is not None:
                commit_rounds(self, scored)
                return
            metrics = self.metrics
            metrics.steps += 1
            metrics.rounds += len(scored.drafts.token_ids) > 0
            metrics.unverified_kv_tokens = sum(entry.num_draft_tokens for entry in scored.entries)
            metrics.peak_unverified_kv_tokens = max(metrics.peak_unverified_kv_tokens, metrics.unverified_kv_tokens)
            results = zip(verified.token_ids, verified.num_accepted, verified.logprobs, strict=True)
            rollbacks: list[tuple[ScheduledSequence, int]] = []
            fared: list[tuple[int, int]] = []
            for entry in scored.entries:
                sequence, num_kept = entry.sequence, 0
                result = next(results) if entry.samples else None
                try:  # tokens first: a host has them already
                    if result is not None:
                        if entry.draft and not entry.draft.is_trial:
                            fared.append((entry.num_draft_tokens, result[1]))
                        num_kept = self._emit(entry, *result)
                    if sequence in scored.prompt_logits:
                        record_prompt_logprobs(sequence, scored.prompt_logits[sequence])
                except IntegrityError:
                    raise
                except Exception as error:  # a tokenizer's own, of this request alone
                    sequence.fail(error)
                sequence.page_table.advance(TARGET, entry.num_new_tokens + entry.num_draft_tokens)
                if sequence.draft or entry.draft:  # a host may bring a draft that is not the sequence's own
                    rollbacks.append((entry, entry.num_known + num_kept))
                    sequence.draft = NO_DRAFT
            if fared:
                metrics.record_drafts(*zip(*fared, strict=True))
            for i in verified.rescored:
                sequence = scored.sampling_entries[i].sequence
                sequence.max_draft_tokens = 0
                metrics.requests_without_drafts += 1
                logger.warning("request %r drafts no more: NaN beside its drafts", sequence.request_id)
            self._roll_back(rollbacks)

    def propose(self, scored: ScoredStep, reserve: Reserve) -> None:
        """Draft what the sequences' next steps may verify."""
        if self.drafter is None:
            return
        before = self.metrics.seconds["propose"]
        with self.metrics.stage("propose"):
            self.noise = {} if propose_waiting(self, scored) else propose(self, scored, reserve)
        if self.planner is not None and self.planner.clock.tells:
            self.planner.clock.proposed_for(self.metrics.seconds["propose"] - before)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended, or given up its KV."""
        sequence.draft = NO_DRAFT
        if self.planner is not None:
            self.planner.forget(sequence)
        try:
            if self.drafter is not None:
                self.drafter.forget(sequence)
        except Exception:  # it keeps what nobody will ask for
            logger.warning("request %r is not forgotten by its drafter:", sequence.request_id, exc_info=True)

    def sampling(self, requests: SequenceOf[SamplingRequest]) -> SamplingBatch:
        """The requests as a batch whose tokens are to be decided; it meets the noise that their drafts have met.

        Where each token is its row's most likely one, there is no noise, and so it stays: the same batch serves again.
        """
        last = self._argmax
        if last is not None and len(last.requests) == len(requests) and all(map(is_, last.requests, requests)):
            return last
        sampling = self._sampling_batch(requests, self.vocab_size, self.target.model.device, self.noise)
        self._argmax = sampling if sampling.takes_argmax and not sampling.wants_logprobs else None
        return sampling

    def check_integrity(self) -> None:
        """IntegrityError where the tensors of a pool are not as its layout has them."""
        self.target.kv_cache.check_integrity()

    def _run_target(self, entries: SequenceOf[ScheduledSequence], argmax: bool) -> TargetPass:
        return run_target(
            self.target,
            entries,
            self.vocab_size,
            argmax=argmax,
            hidden=self.drafter.hidden_states if self.drafter is not None else None,
            hidden_of_all=self.follows_target,
        )

    def _rescored(self, scored: ScoredStep, verified: VerifyOutput) -> VerifyOutput:
        """The output with those who failed beside their drafts verified anew, without them."""
        sampled = scored.sampling_entries
        again = [
            i
            for i, failed in enumerate(verified.failed)
            if failed and sampled[i].draft and sampled[i].sequence not in scored.prompt_logits
        ]
        if not again:
            return verified
        entries = [sampled[i]._replace(draft=NO_DRAFT) for i in again]
        rescored = self._run_target(entries, argmax=False)
        scored.hidden_states.update(rescored.hidden_states)  # the spoiled ones are nobody's
        drafts = DraftOutput.of([NO_DRAFT] * len(again))
        alone = self.verifier.verify(
            rescored.logits, drafts, self.sampling([scored.sampling.requests[i] for i in again])
        )
        token_ids, num_accepted = list(verified.token_ids), list(verified.num_accepted)
        failed, logprobs = list(verified.failed), list(verified.logprobs)
        for j, i in enumerate(again):
            token_ids[i], num_accepted[i] = alone.token_ids[j], 0
            failed[i], logprobs[i] = alone.failed[j], alone.logprobs[j]
        return VerifyOutput(token_ids, num_accepted, failed, logprobs, tuple(again))

    def _emit(
        self, entry: ScheduledSequence, token_ids: SequenceOf[int], num_accepted: int, logprobs: SequenceOf | None
    ) -> int:
        """Append the output of an entry that samples; how many of its drafts stand and were emitted."""
        sequence, k = entry.sequence, 0 if entry.draft.is_trial else entry.num_draft_tokens
        sequence.metrics.rounds += 1
        if k:
            sequence.metrics.record_draft(k, num_accepted)
        if self.planner is not None:
            self.planner.committed(sequence, token_ids)
            if k:
                self.planner.fared(sequence, (k,), (num_accepted,))
        num_emitted = sequence.emit(token_ids, logprobs)
        self.metrics.emitted_tokens += num_emitted
        return min(num_accepted, num_emitted)

    def _roll_back(self, rollbacks: SequenceOf[tuple[ScheduledSequence, int]]) -> None:
        """Truncate every pool of each entry's sequence to so many tokens, where it holds more."""
        start, metrics = time.perf_counter(), self.metrics
        for entry, num_tokens in rollbacks:
            table = entry.sequence.page_table
            num_rejected = entry.num_known + entry.num_draft_tokens - num_tokens
            metrics.rollbacks += num_rejected > 0
            metrics.rolled_back_tokens += num_rejected
            for pool, context_len in enumerate(table.context_lens):
                metrics.rollback_blocks_freed += table.truncate(pool, min(context_len, num_tokens))
        metrics.rollback_seconds += time.perf_counter() - start
