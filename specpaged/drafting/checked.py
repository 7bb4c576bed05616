"""Drafters of somebody else's, while they run: what of their drafts is taken."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from specpaged.drafting.base import Drafter, DraftRow
from specpaged.drafting.draft import NO_DRAFT, Draft
from specpaged.sampling.batch import SamplingBatch
from specpaged.speculation.stop_rule import StopRule

_SUM = 1e-3  # by which a row of probabilities may miss 1


class DraftError(ValueError):
    """What a drafter has proposed breaks a rule of its contract: `rule` is the rule's name."""

    def __init__(self, rule: str, message: str):
        super().__init__(message)
        self.rule = rule


class CheckedDrafter(Drafter):
    """A drafter of somebody else's, of which drafts are taken only where all of a proposal can be.

    It has no KV of ours, so that there is nothing to look back at, and nothing stands for it in calls of several
    rounds. Without `wants_probs`, probabilities are dropped. Only to one that `stops`, stop rules are given.
    """

    def __init__(self, drafter: Drafter, vocab_size: int, wants_probs: bool):
        self.drafter = drafter
        self.vocab_size = vocab_size
        self.wants_probs = wants_probs
        self.hidden_states = getattr(drafter, "hidden_states", None)
        self.stops = bool(getattr(drafter, "stops", False))

    @override
    def propose(
        self, rows: Sequence[DraftRow], sampling: SamplingBatch, stop_rule: StopRule | None = None
    ) -> list[Draft]:
        """Raises DraftError, or whatever the drafter does."""
        of_rule = (stop_rule,) if self.stops else ()
        drafts = self.drafter.propose(rows, sampling, *of_rule)
        return checked_drafts(drafts, rows, len(sampling.requests), self.vocab_size, self.wants_probs)

    @override
    def forget(self, sequence: Hashable) -> None:
        self.drafter.forget(sequence)


def checked_drafts(
    drafts: Any, rows: Sequence[DraftRow], num_requests: int, vocab_size: int, wants_probs: bool = False
) -> list[Draft]:
    """Copies of the drafts, one for each request, that these rows were answered with.

    Raises:
        DraftError: naming what is wrong, and what was asked for.
    """
    if not isinstance(drafts, Sequence) or len(drafts) != num_requests:
        given = f"{len(drafts)} drafts" if isinstance(drafts, Sequence) else f"{type(drafts).__name__}"
        raise DraftError("drafts", f"propose() gave {given}; allowed: a list of {num_requests}, one for each request")
    asked = [0] * num_requests
    for row in rows:
        if row.num_draft_tokens > 0:
            asked[row.request_idx] = row.num_draft_tokens
    return [
        _checked(f"drafts[{i}]", draft, most, vocab_size, wants_probs)
        for i, (draft, most) in enumerate(zip(drafts, asked, strict=True))
    ]


def _checked(name: str, draft: Any, most: int, vocab_size: int, wants_probs: bool) -> Draft:
    if not isinstance(draft, Draft):
        raise DraftError("drafts", f"{name} is {type(draft).__name__}; allowed: a Draft, NO_DRAFT if there is none")
    if not isinstance(draft.token_ids, Sequence) or isinstance(draft.token_ids, str | bytes):
        raise DraftError("token ids", f"{name}.token_ids is {type(draft.token_ids).__name__}; allowed: a list of ints")
    token_ids = list(draft.token_ids)
    if len(token_ids) > most:
        raise DraftError("count", f"{name} has {len(token_ids)} tokens; allowed: {most}, as its row asks for, or fewer")
    for j, token_id in enumerate(token_ids):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            of_type = "" if isinstance(token_id, int) else f" ({type(token_id).__name__})"
            allowed = f"allowed: ints in [0, {vocab_size})"
            raise DraftError("token ids", f"{name}.token_ids[{j}]={token_id!r}{of_type} is no token; {allowed}")
    if not token_ids:
        return NO_DRAFT
    if type(draft.num_matched) is not int or draft.num_matched < 0:
        raise DraftError("evidence", f"{name}.num_matched={draft.num_matched!r}; allowed: an int >= 0")
    logprobs = _checked_logprobs(f"{name}.logprobs", draft.logprobs, len(token_ids))
    probs = _checked_probs(f"{name}.probs", draft.probs, token_ids, vocab_size) if wants_probs else None
    return Draft(token_ids, logprobs, probs, draft.num_matched)


def _checked_logprobs(name: str, logprobs: Any, count: int) -> list[float] | None:
    if logprobs is None:
        return None
    if not isinstance(logprobs, Sequence) or len(logprobs) != count:
        given = f"{len(logprobs)} of them" if isinstance(logprobs, Sequence) else type(logprobs).__name__
        raise DraftError("evidence", f"{name} is {given}; allowed: None, or a list of {count}, one for each token")
    for j, logprob in enumerate(logprobs):
        if not isinstance(logprob, float | int) or not logprob <= 0:
            raise DraftError("evidence", f"{name}[{j}]={logprob!r}; allowed: a number <= 0")
    return [float(logprob) for logprob in logprobs]


def _checked_probs(name: str, probs: Any, token_ids: Sequence[int], vocab_size: int) -> Tensor | None:
    """Those that tokens were drawn from: what is rejected, and what comes instead, depends on them."""
    if probs is None:
        return None
    shape = (len(token_ids), vocab_size)
    if not isinstance(probs, Tensor) or probs.dtype != torch.float32 or probs.shape != shape:
        given = f"{probs.dtype} {list(probs.shape)}" if isinstance(probs, Tensor) else type(probs).__name__
        raise DraftError("probs", f"{name} is {given}; allowed: None, or a float32 tensor {list(shape)}")
    drawn = probs[torch.arange(len(token_ids)), torch.tensor(token_ids)]
    if not bool((probs >= 0).all() & ((probs.sum(dim=-1) - 1).abs() <= _SUM).all() & (drawn > 0).all()):
        raise DraftError("probs", f"{name} are no distributions that these tokens can have been drawn from")
    return probs
