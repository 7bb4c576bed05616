"""Several rounds of greedy decoding in one call: what is asked, and what comes of it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class DecodingRow(NamedTuple):
    """A sequence that decodes by the most likely tokens. Of its known tokens the target has run all but the last."""

    token_ids: Sequence[int]  # the known ones from `start` on, which the target or the drafter has not run
    start: int
    draft_context_len: int  # tokens that the draft model has run, pending drafts among them; `start` without one
    draft: Sequence[int]  # pending, for the first round
    num_draft_tokens: int  # to be drafted for each further round
    most_tokens: int  # that may come: 1 at least, and more than are pending; slots reach up to the last but one
    stop_ids: Sequence[int]  # that end it
    blocks: Sequence[int]


class Round(NamedTuple):
    """What a round comes to, by sequence: the drafts that it verified, and the tokens that stand."""

    drafts: list[list[int]]
    evidence: list[list[float]]  # of drafts made in the same call: log-probabilities, or how long a match each had
    token_ids: list[list[int]]  # the drafts that stand, and the token behind them
    num_drafted: int  # in the same call, of all sequences: what a rule has left out is no draft above
    verify_seconds: float  # of the target's pass
    draft_seconds: float  # of all that made its drafts, in the same call


class Rounds(NamedTuple):
    """Rounds one after the other: none, where in the first one a row has no most likely token."""

    rounds: list[Round]
    draft_context_lens: list[int]  # of each sequence: tokens that the draft model has run, and that stand


class Lookup(NamedTuple):
    """Drafting without a model, by what followed the last n tokens before: see drafting.ngram."""

    shortest: int
    longest: int
