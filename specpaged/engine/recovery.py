"""What becomes of a step that fails: one request's error at most, or another try."""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf

from specpaged.drafting.base import DraftOutput
from specpaged.engine.scheduler import ScheduledSequence, Scheduler
from specpaged.engine.step import ScoredStep, SpeculativeStep
from specpaged.paging.block_allocator import IntegrityError
from specpaged.verification.base import VerifyOutput

logger = logging.getLogger("specpaged")


class Recovery:
    """Each sequence has a step's tokens or does not, whatever fails in it; and who has lost KV computes it again.

    A context around a step. Where the step fails, tokens stay as they are, and all KV is computed anew from them; that
    of the prefix cache is from steps before, and stays. A second failure before any token has come is raised: a prefill
    that fails in its second chunk succeeds in its first one every time.
    """

    def __init__(self, scheduler: Scheduler, step: SpeculativeStep):
        self.scheduler = scheduler
        self.step = step
        self._failed_at: int | None = None  # tokens emitted before a failure that was not raised

    def __enter__(self) -> None:
        """Nothing is to be done before a step."""

    def __exit__(self, _kind: type | None, error: BaseException | None, _traceback: object) -> bool:
        if error is None:
            return False
        metrics = self.step.metrics
        for sequence in self.scheduler.preempt_all():
            self.step.forget(sequence)
        for sequence in self.scheduler:
            sequence.fork_source = None  # whose KV is to be copied: it may be what fails
        metrics.failed_steps += 1
        if not isinstance(error, Exception) or isinstance(error, IntegrityError):
            return False
        if self._failed_at == metrics.emitted_tokens:
            self._failed_at = None
            raise RuntimeError(f"a step failed twice: {type(error).__name__}: {error}") from error
        self._failed_at = metrics.emitted_tokens
        logger.warning("a step failed, and is run anew:", exc_info=error)
        return True


def score_and_verify(
    step: SpeculativeStep, entries: SequenceOf[ScheduledSequence], takes_rounds: bool = True
) -> tuple[ScoredStep, VerifyOutput]:
    """The entries scored and verified by `step`; where that raises, each of them alone.

    A pass that failed has left nothing behind: it writes KV into slots that nobody takes for valid, and tokens come in
    `commit`. As no row depends on its mates, who goes on gets the tokens that it would have got. Who fails alone, too,
    has an error, and is not among the entries of what is returned.
    """
    try:
        scored = step.score(entries, takes_rounds=takes_rounds)
        return scored, step.verify(scored)
    except IntegrityError:
        raise
    except Exception:  # of whatever kind: it may be one request's own, and that shows when each runs alone
        logger.warning("a step of %d sequences failed, and is run one by one:", len(entries), exc_info=True)
    done: list[tuple[ScoredStep, VerifyOutput]] = []
    for entry in entries:
        try:
            scored = step.score([entry], takes_rounds=False)
            done.append((scored, step.verify(scored)))
        except IntegrityError:
            raise
        except Exception as error:
            entry.sequence.fail(error)
    return _together(step, done)


def _together(
    step: SpeculativeStep, done: SequenceOf[tuple[ScoredStep, VerifyOutput]]
) -> tuple[ScoredStep, VerifyOutput]:
    """Steps of one sequence each as one step that has been verified: its logits are gone."""
    scored, verified = [part for part, _ in done], [part for _, part in done]
    sampling = step.sampling([request for part in scored for request in part.sampling.requests])
    for part in scored:
        sampling.noise.update(part.sampling.noise)
    together = ScoredStep(
        entries=[entry for part in scored for entry in part.entries],
        drafts=DraftOutput(
            [token_ids for part in scored for token_ids in part.drafts.token_ids],
            [probs for part in scored for probs in part.drafts.probs],
        ),
        sampling=sampling,
        logits=None,
        prompt_logits={sequence: rows for part in scored for sequence, rows in part.prompt_logits.items()},
        hidden_states={sequence: states for part in scored for sequence, states in part.hidden_states.items()},
    )
    sampled = [part for part in verified if part.token_ids]
    output = VerifyOutput(
        token_ids=[token_ids for part in sampled for token_ids in part.token_ids],
        num_accepted=[count for part in sampled for count in part.num_accepted],
        failed=[failed for part in sampled for failed in part.failed],
        logprobs=[logprobs for part in sampled for logprobs in part.logprobs],
        rescored=tuple(i for i, part in enumerate(sampled) if part.rescored),
    )
    return together, output if step.limit is None else step.limit(output)
