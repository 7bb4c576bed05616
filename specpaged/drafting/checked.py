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

_LISTS, _NUMBERS = (list, tuple), (float, int)
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
    if type(drafts) not in _LISTS or len(drafts) != num_requests:
        given = f"{len(drafts)} drafts" if type(drafts) in _LISTS else type(drafts).__name__
        raise DraftError("drafts", f"propose() gave {given}; allowed: a list of {num_requests}, one for each request")
    asked = [0] * num_requests
    for row in rows:
        if row.num_draft_tokens > 0:
            asked[row.request_idx] = row.num_draft_tokens
    return [
        _checked(i, draft, most, vocab_size, wants_probs)
        for i, (draft, most) in enumerate(zip(drafts, asked, strict=True))
    ]


def _checked(i: int, draft: Any, most: int, vocab_size: int, wants_probs: bool) -> Draft:
    """Of the i-th request, which asks for so many tokens at most."""
    if not isinstance(draft, Draft):
        given = type(draft).__name__
        raise DraftError("drafts", f"drafts[{i}] is {given}; allowed: a Draft, NO_DRAFT if there is none")
    token_ids, logprobs, num_matched = draft.token_ids, draft.logprobs, draft.num_matched
    if type(token_ids) not in _LISTS:
        raise DraftError("token ids", f"drafts[{i}].token_ids is {type(token_ids).__name__}; allowed: a list of ints")
    if not token_ids:
        return NO_DRAFT
    if len(token_ids) > most:
        given = f"drafts[{i}] has {len(token_ids)} tokens"
        raise DraftError("count", f"{given}; allowed: {most}, as its row asks for, or fewer")
    if set(map(type, token_ids)) != {int} or min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise _wrong_token(f"drafts[{i}].token_ids", token_ids, vocab_size)
    if type(num_matched) is not int or num_matched < 0:
        raise DraftError("evidence", f"drafts[{i}].num_matched={num_matched!r}; allowed: an int >= 0")
    if logprobs is not None:
        logprobs = _checked_logprobs(f"drafts[{i}].logprobs", logprobs, len(token_ids))
    probs = None
    if wants_probs and draft.probs is not None:
        probs = _checked_probs(f"drafts[{i}].probs", draft.probs, token_ids, vocab_size)
    return Draft(list(token_ids), logprobs, probs, num_matched)


def _wrong_token(name: str, token_ids: Sequence[Any], vocab_size: int) -> DraftError:
    """The first one that is no int of the vocabulary."""
    j, token_id = next((j, x) for j, x in enumerate(token_ids) if type(x) is not int or not 0 <= x < vocab_size)
    given = f"{name}[{j}]={token_id!r}" + ("" if type(token_id) is int else f" ({type(token_id).__name__})")
    return DraftError("token ids", f"{given} is no token; allowed: ints in [0, {vocab_size})")


def _checked_logprobs(name: str, logprobs: Any, count: int) -> list[float]:
    if type(logprobs) not in _LISTS or len(logprobs) != count:
        given = f"{len(logprobs)} of them" if type(logprobs) in _LISTS else type(logprobs).__name__
        raise DraftError("evidence", f"{name} is {given}; allowed: None, or a list of {count}, one for each token")
    if all([type(logprob) in _NUMBERS and logprob <= 0 for logprob in logprobs]):
        return list(logprobs)
    wrong = next(j for j, logprob in enumerate(logprobs) if type(logprob) not in _NUMBERS or not logprob <= 0)
    raise DraftError("evidence", f"{name}[{wrong}]={logprobs[wrong]!r}; allowed: a float <= 0")


def _checked_probs(name: str, probs: Any, token_ids: Sequence[int], vocab_size: int) -> Tensor:
    """Those that tokens were drawn from: what is rejected, and what comes instead, depends on them."""
    shape = (len(token_ids), vocab_size)
    if not isinstance(probs, Tensor) or probs.dtype != torch.float32 or probs.shape != shape:
        given = f"{probs.dtype} {list(probs.shape)}" if isinstance(probs, Tensor) else type(probs).__name__
        raise DraftError("probs", f"{name} is {given}; allowed: None, or a float32 tensor {list(shape)}")
    drawn = probs[torch.arange(len(token_ids)), torch.tensor(token_ids)]
    if not bool((probs >= 0).all() & ((probs.sum(dim=-1) - 1).abs() <= _SUM).all() & (drawn > 0).all()):
        raise DraftError("probs", f"{name} are no distributions that these tokens can have been drawn from")
    return probs
